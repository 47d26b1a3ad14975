"""Shapes and constants of a DFlash2 (or plain DFlash) block drafter, read from its config.json.

Source: spec drafters.md A.1. Every key may sit at top level or under dflash_config, which wins. What the file leaves
out is derived from tensor shapes where they tell it, else set to the default of A.1.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agens_engine.model.config import ModelConfig
from agens_engine.model.drafter_keys import DrafterKeys, Shapes, merge_sections, target_misfits

log = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MASK_TOKEN = "<|MASK|>"
DEFAULT_TOP_K = 16
TokenResolver = Callable[[str], int | None]


@dataclass(frozen=True)
class BlockLayer:
    """How one drafter layer attends. window: positions, None for a full_attention layer."""

    window: int | None
    causal: bool


@dataclass(frozen=True)
class DFlash2Config:
    """Everything the drafter's forward needs. Sizes in elements, positions in tokens.

    block_size              rows of a block: the anchor and block_size - 1 masks
    target_layer_ids        tapped target layers, in the order their streams are concatenated
    conv_kernel, conv_group both 0: no convolution
    selector_rank, _top_k   both 0: no selector (plain DFlash)
    output_multiplier       factor on candidate scores, before the soft cap
    softcap                 s of s * tanh(x / s), None for off
    embedding_scale         factor on the embeddings of the block
    """

    hidden_size: int
    intermediate_size: int
    layers: tuple[BlockLayer, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float
    rope_theta: float
    max_positions: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    conv_kernel: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    output_multiplier: float = 1.0
    softcap: float | None = None
    embedding_scale: float = 1.0
    attention_bias: bool = False

    @property
    def num_slots(self) -> int:
        return self.block_size - 1

    @property
    def max_window(self) -> int | None:
        """Context positions that can matter to any layer; None when a layer needs all."""
        windows = [layer.window for layer in self.layers]
        return None if None in windows else max(w for w in windows if w is not None)


def parse_dflash2_config(
    raw: Mapping[str, Any],
    shapes: Shapes,
    target: ModelConfig,
    *,
    resolve_token: TokenResolver | None = None,
    where: str = "drafter config.json",
) -> DFlash2Config:
    """Build the config from the parsed config.json and check it against the target.

    shapes          canonical tensor name (spec A.2) -> shape, for what the file leaves out; may be empty
    resolve_token   text of a special token -> id or None; needed when the mask is given by its text
    raises          ConfigError naming the key; sizes that do not fit the target are listed with both numbers
    """
    keys = DrafterKeys(merge_sections(raw, ("dflash_config",), where), where, shapes)
    keys.choice("hidden_act", ("silu",))
    hidden = keys.integer("hidden_size", keys.from_shape("norm.weight", 0))
    heads, kv_heads, head_dim = _heads(keys)
    taps = _taps(keys, hidden)
    selector_rank, top_k = _pair(keys, "selector_rank", "selector_top_k", _derived_selector(keys))
    conv_kernel, conv_group = _pair(keys, "conv_kernel_size", "conv_group_size", _derived_conv(keys, hidden))
    if conv_group and hidden % conv_group:
        raise keys.fail(f"hidden_size {hidden} is not a multiple of conv_group_size {conv_group}")
    vocab = keys.integer("vocab_size", keys.from_shape("candidate_selector.successor_codebook", 0) or target.vocab_size)
    softcap = keys.number("final_logit_softcapping", 0.0, positive=False)
    theta, rotated, _ = keys.rope(1e7)
    if rotated != 1.0:
        raise keys.fail(f"partial_rotary_factor {rotated} is not supported; a DFlash2 drafter rotates the whole head")
    config = DFlash2Config(
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size", keys.from_shape("layers.0.mlp.gate_proj.weight", 0)),
        layers=_layers(keys),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        rms_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_positions=keys.integer("max_position_embeddings", 262144),
        block_size=keys.integer("block_size", DEFAULT_BLOCK_SIZE, at_least=2),
        target_layer_ids=taps,
        num_target_layers=keys.integer("num_target_layers", max(taps) + 1),
        mask_token_id=_mask_id(keys, resolve_token),
        conv_kernel=conv_kernel,
        conv_group=conv_group,
        selector_rank=selector_rank,
        selector_top_k=top_k,
        output_multiplier=keys.number("output_multiplier", 1.0),
        softcap=softcap if softcap > 0 else None,
        embedding_scale=keys.number("input_embedding_scale", 1.0),
        attention_bias=bool(keys.flag("attention_bias")),
    )
    _check_target(keys, config, target)
    return config


def _check_target(keys: DrafterKeys, config: DFlash2Config, target: ModelConfig) -> None:
    problems = target_misfits(
        {
            "hidden_size": (config.hidden_size, target.hidden_size),
            "vocab_size": (config.vocab_size, target.vocab_size),
        }
    )
    too_deep = [i for i in config.target_layer_ids if i >= target.num_layers]
    if too_deep:
        problems.append(
            f"target_layer_ids names layer {max(too_deep)}, the target model has {target.num_layers} layers"
        )
    if config.mask_token_id >= target.vocab_size:
        problems.append(f"mask_token_id is {config.mask_token_id}, the target model has {target.vocab_size} tokens")
    if problems:
        raise keys.fail(
            f"this drafter does not fit the target model: {'; '.join(problems)}; use the target's own drafter"
        )
    if "num_target_layers" in keys.values and config.num_target_layers != target.num_layers:
        log.warning(
            "%s: num_target_layers is %d, the target model has %d layers; is this the target's own drafter?",
            keys.where, config.num_target_layers, target.num_layers,
        )  # fmt: skip


def _heads(keys: DrafterKeys) -> tuple[int, int, int]:
    attention = "layers.0.self_attn."
    head_dim = keys.integer("head_dim", keys.from_shape(attention + "q_norm.weight", 0))
    heads = keys.integer("num_attention_heads", keys.from_shape(attention + "q_proj.weight", 0, head_dim))
    kv_heads = keys.integer("num_key_value_heads", keys.from_shape(attention + "k_proj.weight", 0, head_dim) or heads)
    if heads % kv_heads:
        raise keys.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise keys.fail(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    return heads, kv_heads, head_dim


def _layers(keys: DrafterKeys) -> tuple[BlockLayer, ...]:
    """Window and direction of each layer.

    is_causal given: it holds for every layer. Absent: sliding layers are causal, full layers see both ways.
    """
    stored = {m[1] for m in (re.match(r"layers\.(\d+)\.", name) for name in keys.shapes) if m}
    count = keys.integer("num_hidden_layers", len(stored) or None)
    use_window = keys.flag("use_sliding_window") is True
    window = keys.integer("sliding_window") if use_window and keys.get("sliding_window") is not None else None
    kinds = keys.get("layer_types")
    if kinds is None:
        first = keys.integer("max_window_layers", 0, at_least=0)
        kinds = ["sliding_attention" if window and i >= first else "full_attention" for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        found = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise keys.fail(f"layer_types must list {count} layers (num_hidden_layers), not {found}")
    unknown = sorted({str(k) for k in kinds} - {"sliding_attention", "full_attention"})
    if unknown:
        raise keys.fail(f"unknown layer_types {', '.join(unknown)}; known: sliding_attention, full_attention")
    if "sliding_attention" in kinds and window is None:
        have = (
            f"sliding_window {keys.get('sliding_window')!r} with use_sliding_window {keys.get('use_sliding_window')!r}"
        )
        raise keys.fail(f"layer_types has sliding_attention but no window ({have}); it needs a number and true")
    causal = keys.flag("is_causal")

    def layer(sliding: bool) -> BlockLayer:
        return BlockLayer(window if sliding else None, sliding if causal is None else causal)

    return tuple(layer(kind == "sliding_attention") for kind in kinds)


def _taps(keys: DrafterKeys, hidden: int) -> tuple[int, ...]:
    taps = keys.get("target_layer_ids")
    if taps is None:
        columns = keys.from_shape("fc.weight", 1, hidden)
        hint = f"; fc.weight wants {columns} of them" if columns else ""
        raise keys.fail(f"target_layer_ids is missing{hint}")
    whole = isinstance(taps, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in taps)
    if not whole or not taps or len(set(taps)) != len(taps):
        raise keys.fail(f"target_layer_ids must list different layer numbers, not {taps!r}")
    return tuple(taps)


def _mask_id(keys: DrafterKeys, resolve_token: TokenResolver | None) -> int:
    """The mask as an id, or as the text of a token; with neither, the text <|MASK|>."""
    given = keys.get("mask_token_id")
    if given is not None and not isinstance(given, str):
        return keys.integer("mask_token_id", at_least=0)
    text = given if given is not None else keys.get("mask_token")
    text = DEFAULT_MASK_TOKEN if text is None else text
    if not isinstance(text, str):
        raise keys.fail(f"mask_token must be the text of a token, not {text!r}")
    found = resolve_token(text) if resolve_token is not None else None
    if found is None:
        why = "the tokenizer does not have it" if resolve_token is not None else "no tokenizer was given to look it up"
        raise keys.fail(f"no mask_token_id, and the mask token {text!r} is unknown ({why}); set mask_token_id")
    return found


def _pair(keys: DrafterKeys, first: str, second: str, derived: tuple[int, int]) -> tuple[int, int]:
    """Two keys that switch a feature on together; both absent means what the tensors say."""
    if keys.get(first) is None and keys.get(second) is None:
        return derived
    a, b = keys.integer(first, 0, at_least=0), keys.integer(second, 0, at_least=0)
    if (a > 0) != (b > 0):
        raise keys.fail(f"{first} is {a} and {second} is {b}; they are given together or not at all")
    return a, b


def _derived_selector(keys: DrafterKeys) -> tuple[int, int]:
    rank = keys.from_shape("candidate_selector.predecessor_codebook", 1)
    return (rank, DEFAULT_TOP_K) if rank else (0, 0)


def _derived_conv(keys: DrafterKeys, hidden: int) -> tuple[int, int]:
    kernel = keys.from_shape("layers.0.attention_conv.base_kernel", 1)
    if not kernel:
        return 0, 0
    groups = keys.from_shape("layers.0.attention_conv.kernel_projection.weight", 0, 2 * kernel)
    if not groups or hidden % groups:
        return 0, 0
    return kernel, hidden // groups
