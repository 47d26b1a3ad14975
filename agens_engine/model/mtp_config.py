"""Shapes of an MTP head, read from its config.json, its tensors and the target.

Source: spec drafters.md B. The key names of the published file are not known, so every size may come from the tensors;
a key that is there must agree with them (the loader compares shapes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agens_engine.model.config import ModelConfig, RopeConfig
from agens_engine.model.drafter_keys import DrafterKeys, Shapes, merge_sections, target_misfits

DEFAULT_DRAFT_STEPS = 4


@dataclass(frozen=True)
class MtpOptions:
    """Conventions that a head's files do not state; the defaults are spec B.2. A wrong one only lowers acceptance.

    concat       which half of fc's input comes first
    norm_form    "gemma": the seven norms multiply by 1 + w; "plain": by w
    chain_state  what a chained row gets as its hidden input: the row before it after mtp.norm, or before it
    """

    concat: Literal["embedding_first", "hidden_first"] = "embedding_first"
    norm_form: Literal["gemma", "plain"] = "gemma"
    chain_state: Literal["post_norm", "pre_norm"] = "post_norm"


@dataclass(frozen=True)
class MtpConfig:
    """The head's one decoder layer in the terms of a gated softmax layer, and the chain length it was trained for."""

    block: ModelConfig
    num_draft_steps: int = DEFAULT_DRAFT_STEPS
    options: MtpOptions = MtpOptions()


def parse_mtp_config(
    raw: Mapping[str, Any],
    shapes: Shapes,
    target: ModelConfig,
    *,
    options: MtpOptions | None = None,
    where: str = "MTP config.json",
) -> MtpConfig:
    """Build the config and check it against the target.

    raw      parsed config.json of the head, or of the model that carries it (text_config wins over the top level)
    shapes   tensor name without prefix -> shape; may be empty
    raises   ConfigError naming the key; sizes that do not fit the target are listed with both numbers
    """
    keys = DrafterKeys(merge_sections(raw, ("text_config", "mtp_config"), where), where, shapes)
    keys.choice("hidden_act", ("silu",))
    if keys.flag("attention_bias"):
        raise keys.fail("attention_bias true is not supported; an MTP head has no biases")
    if keys.flag("attn_output_gate") is False:
        raise keys.fail("attn_output_gate false is not supported; an MTP head gates its attention")
    attention = "layers.0.self_attn."
    hidden = keys.integer("hidden_size", keys.from_shape("norm.weight", 0) or target.hidden_size)
    vocab = keys.integer("vocab_size", target.vocab_size)
    head_dim = keys.integer("head_dim", keys.from_shape(attention + "q_norm.weight", 0) or target.head_dim)
    heads = keys.integer(
        "num_attention_heads", keys.from_shape(attention + "q_proj.weight", 0, 2 * head_dim) or target.num_heads
    )
    kv_heads = keys.integer(
        "num_key_value_heads", keys.from_shape(attention + "k_proj.weight", 0, head_dim) or target.num_kv_heads
    )
    if heads % kv_heads:
        raise keys.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    width = keys.integer(
        "intermediate_size", keys.from_shape("layers.0.mlp.gate_proj.weight", 0) or target.intermediate_size
    )
    problems = target_misfits({"hidden_size": (hidden, target.hidden_size), "vocab_size": (vocab, target.vocab_size)})
    if problems:
        raise keys.fail(
            f"this MTP head does not fit the target model: {'; '.join(problems)}; use the target's own head"
        )
    return MtpConfig(
        block=ModelConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=width,
            mixers=("attn",),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_eps=keys.number("rms_norm_eps", target.rms_eps),
            max_positions=keys.integer("max_position_embeddings", target.max_positions),
            rope=_rope(keys, head_dim, target),
            kda=None,
            bcsa=None,
            engram=None,
            num_streams=1,
            sinkhorn_iters=0,
        ),
        num_draft_steps=_draft_steps(keys),
        options=options or MtpOptions(),
    )


def _rope(keys: DrafterKeys, head_dim: int, target: ModelConfig) -> RopeConfig:
    theta, factor, section = keys.rope(target.rope.theta, target.rope.rotary_dims / target.head_dim)
    dims = int(head_dim * factor)
    if dims < 2 or dims % 2 or dims > head_dim:
        raise keys.fail(f"partial_rotary_factor {factor} of head_dim {head_dim} gives {dims} rotary dims")
    return RopeConfig(theta=theta, rotary_dims=dims, mrope_section=section)


def _draft_steps(keys: DrafterKeys) -> int:
    """The trained chain length: the first integer key whose name speaks of drafts or steps."""
    for name, value in keys.values.items():
        named = "draft" in name or "steps" in name
        if named and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return DEFAULT_DRAFT_STEPS
