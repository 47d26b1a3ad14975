"""The model's shapes and constants, read from config.json and checked against the tensors.

Source: spec volundr-model.md section 1. Nothing is hard-coded: what the config leaves out (indexer sizes, gate rank,
stream count, Engram sizes) is derived from tensor shapes, and a contradiction names both numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agens_engine.core import NUM_VERIFY_ROWS
from agens_engine.errors import ConfigError

log = logging.getLogger(__name__)

MIXER_KINDS = ("kda", "bcsa", "attn")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of the softmax layers (spec 7.1 and 10). `rotary_dims` of the head's dims are rotated."""

    theta: float
    rotary_dims: int
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False


@dataclass(frozen=True)
class KdaConfig:
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    gate_rank: int

    @property
    def key_dim(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True)
class BcsaConfig:
    window: int
    compress: int
    topk: int
    indexer_heads: int
    indexer_dim: int


@dataclass(frozen=True)
class EngramConfig:
    layers: tuple[int, ...]
    orders: tuple[int, ...]
    rows: int
    dim: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything a forward needs to know about one text model. Dimensions in elements, positions in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    mixers: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_positions: int
    rope: RopeConfig
    kda: KdaConfig | None
    bcsa: BcsaConfig | None
    engram: EngramConfig | None
    num_streams: int
    sinkhorn_iters: int
    tie_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    def layers_of(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, mixer in enumerate(self.mixers) if mixer == kind)


_KNOWN_KEYS = frozenset(
    """model_type architectures dtype torch_dtype vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act attn_output_gate attention_bias attention_dropout
    max_position_embeddings rms_norm_eps tie_word_embeddings use_cache rope_parameters rope_scaling rope_theta
    partial_rotary_factor mixer_types layer_types full_attention_interval linear_num_key_heads linear_num_value_heads
    linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim kda_gate_rank output_gate_type mamba_ssm_dtype
    bcsa_window bcsa_compress bcsa_topk engram_layers engram_orders engram_rows engram_dim mhc_streams
    mhc_sinkhorn_iters text_config vision_config auto_map quantization_config bos_token_id eos_token_id pad_token_id
    initializer_range transformers_version""".split()
)
_MISSING = object()


class _Keys:
    """Typed access to the text keys; every failure names the key and what was found."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        text = raw.get("text_config", raw)
        if not isinstance(text, Mapping):
            raise ConfigError("config.json: text_config must be an object")
        # the text keys may sit at top level; the nested ones win
        self.values: dict[str, Any] = {**raw, **text}

    def log_unknown(self) -> None:
        """Say which keys of the checkpoint have no effect here."""
        unknown = sorted(self.values.keys() - _KNOWN_KEYS)
        if unknown:
            log.info("config.json: keys this engine does not use: %s", ", ".join(unknown))

    def integer(self, key: str, default: Any = _MISSING, *, at_least: int = 1) -> int:
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise ConfigError(f"config.json lacks {key}; it is needed to build the model")
            return int(default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ConfigError(f"config.json: {key} must be an integer of at least {at_least}, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"config.json: {key} must be a positive number, not {value!r}")
        return float(value)

    def int_list(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise ConfigError(f"config.json: {key} must be a list of integers, not {value!r}")
        return tuple(value)


def parse_config(raw: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
    """Build the ModelConfig from a parsed config.json and the checkpoint's tensor shapes.

    raw      the JSON object of config.json; text keys nested under text_config or at top level
    shapes   normalised tensor name -> shape; fills in what the config does not say
    raises   ConfigError naming the key, or both numbers of a contradiction
    """
    keys = _Keys(raw)
    keys.log_unknown()
    mixers = _mixers(keys)
    hidden = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = keys.integer("head_dim", hidden // heads)
    if keys.values.get("attention_bias"):
        raise ConfigError("config.json: attention_bias true is not supported (Volundr has no attention bias)")
    if keys.values.get("attn_output_gate") is False:
        raise ConfigError("config.json: attn_output_gate false is not supported (Volundr gates every softmax layer)")
    if keys.values.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act {keys.values['hidden_act']!r} is not supported; silu is")
    if keys.values.get("output_gate_type", "swish") not in ("swish", "silu"):
        raise ConfigError(
            f"config.json: output_gate_type {keys.values['output_gate_type']!r} is not supported; swish is"
        )
    streams = _stream_count(keys, shapes)
    config = ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        mixers=mixers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=keys.number("rms_norm_eps", 1e-6),
        max_positions=keys.integer("max_position_embeddings"),
        rope=_rope(keys, head_dim),
        kda=_kda(keys, shapes, mixers) if "kda" in mixers else None,
        bcsa=_bcsa(keys, shapes, mixers) if "bcsa" in mixers else None,
        engram=_engram(keys, shapes, len(mixers)),
        num_streams=streams,
        sinkhorn_iters=keys.integer("mhc_sinkhorn_iters", 10),
        tie_embeddings=bool(keys.values.get("tie_word_embeddings", False)),
    )
    return config


def _mixers(keys: _Keys) -> tuple[str, ...]:
    count = keys.integer("num_hidden_layers")
    kinds = keys.values.get("mixer_types")
    if kinds is None:
        layer_types = keys.values.get("layer_types")
        if layer_types is None:
            raise ConfigError("config.json lacks mixer_types (and layer_types): the kind of each layer is unknown")
        kinds = ["kda" if kind == "linear_attention" else "bcsa" for kind in layer_types]
    unknown = sorted({str(kind) for kind in kinds} - set(MIXER_KINDS))
    if unknown:
        raise ConfigError(f"config.json: unknown mixer_types {', '.join(unknown)}; known: {', '.join(MIXER_KINDS)}")
    if len(kinds) != count:
        raise ConfigError(f"config.json: mixer_types lists {len(kinds)} layers, num_hidden_layers says {count}")
    return tuple(kinds)


def _rope(keys: _Keys, head_dim: int) -> RopeConfig:
    nested: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(keys.values.get(name), Mapping):
            nested = dict(keys.values[name])
            break
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind not in ("default", None):
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported; default is")
    flat: dict[str, Any] = {k: keys.values[k] for k in ("rope_theta", "partial_rotary_factor") if k in keys.values}
    merged = _Keys({**flat, **nested})
    factor = merged.number("partial_rotary_factor", 1.0)
    dims = int(head_dim * factor)
    if dims < 2 or dims % 2 or dims > head_dim:
        raise ConfigError(
            f"config.json: partial_rotary_factor {factor} of head_dim {head_dim} gives {dims} rotary dims"
        )
    section = nested.get("mrope_section") or ()
    if section and sum(section) != dims // 2:
        raise ConfigError(
            f"config.json: mrope_section {section} sums to {sum(section)}, the rope has {dims // 2} frequencies"
        )
    return RopeConfig(
        theta=merged.number("rope_theta", 1e7),
        rotary_dims=dims,
        mrope_section=tuple(section),
        mrope_interleaved=bool(nested.get("mrope_interleaved", False)),
    )


def _kda(keys: _Keys, shapes: Shapes, mixers: tuple[str, ...]) -> KdaConfig:
    first = f"model.layers.{mixers.index('kda')}.linear_attn."
    rank = _from_shape(keys, "kda_gate_rank", shapes, first + "f_down.weight", 0, default=128)
    config = KdaConfig(
        num_key_heads=keys.integer("linear_num_key_heads"),
        num_value_heads=keys.integer("linear_num_value_heads"),
        key_head_dim=keys.integer("linear_key_head_dim"),
        value_head_dim=keys.integer("linear_value_head_dim"),
        conv_kernel=keys.integer("linear_conv_kernel_dim", 4, at_least=2),
        gate_rank=rank,
    )
    if config.num_value_heads % config.num_key_heads:
        raise ConfigError(
            f"config.json: linear_num_value_heads {config.num_value_heads} is not a multiple of "
            f"linear_num_key_heads {config.num_key_heads}"
        )
    return config


def _bcsa(keys: _Keys, shapes: Shapes, mixers: tuple[str, ...]) -> BcsaConfig:
    first = f"model.layers.{mixers.index('bcsa')}.self_attn."
    dim = _from_shape(keys, "bcsa_indexer_dim", shapes, first + "idx_k.weight", 0, default=128)
    rows = shapes.get(first + "idx_q.weight", (4 * dim,))[0]
    if rows % dim:
        raise ConfigError(f"{first}idx_q.weight has {rows} rows, not a multiple of the indexer dim {dim} of idx_k")
    window, compress = keys.integer("bcsa_window"), keys.integer("bcsa_compress")
    if window < compress:
        raise ConfigError(f"config.json: bcsa_window {window} is smaller than bcsa_compress {compress}")
    if window < NUM_VERIFY_ROWS:
        raise ConfigError(
            f"config.json: bcsa_window {window} is smaller than a verify step of {NUM_VERIFY_ROWS} rows, so far blocks "
            "could hold tokens that are still drafts"
        )
    return BcsaConfig(window, compress, keys.integer("bcsa_topk"), rows // dim, dim)


def _engram(keys: _Keys, shapes: Shapes, num_layers: int) -> EngramConfig | None:
    layers = keys.int_list("engram_layers", ())
    if not layers:
        return None
    if min(layers) < 0 or max(layers) >= num_layers:
        raise ConfigError(f"config.json: engram_layers {list(layers)} names a layer outside 0..{num_layers - 1}")
    orders = keys.int_list("engram_orders", (2, 3))
    if not orders or min(orders) < 1:
        raise ConfigError(f"config.json: engram_orders {list(orders)} must be positive n-gram lengths")
    table = f"model.layers.{layers[0]}.engram.tables.0.weight"
    rows = _from_shape(keys, "engram_rows", shapes, table, 0)
    dim = _from_shape(keys, "engram_dim", shapes, table, 1)
    return EngramConfig(layers, orders, rows, dim)


def _stream_count(keys: _Keys, shapes: Shapes) -> int:
    declared = keys.integer("mhc_streams", 0, at_least=0)
    static = shapes.get("model.mhc.0.pre_static")
    found = static[0] if static else None
    if "mhc_streams" in keys.values and found is not None and declared != found:
        raise ConfigError(f"config.json: mhc_streams is {declared}, model.mhc.0.pre_static has {found} streams")
    count = found if found is not None else declared
    return max(1, count)


def _from_shape(keys: _Keys, key: str, shapes: Shapes, tensor: str, axis: int, default: Any = _MISSING) -> int:
    """The config's value, or the tensor's when the config is silent; both present must agree."""
    shape = shapes.get(tensor)
    if keys.values.get(key) is None:
        return shape[axis] if shape is not None else keys.integer(key, default)
    declared = keys.integer(key)
    if shape is not None and shape[axis] != declared:
        raise ConfigError(f"config.json: {key} is {declared}, {tensor} has {shape[axis]} in axis {axis}")
    return declared


def expected_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the text tower needs, by normalised name (spec section 2)."""
    d, width = c.hidden_size, c.intermediate_size
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, d),
        "model.norm.weight": (d,),
    }
    if not c.tie_embeddings:
        out["lm_head.weight"] = (c.vocab_size, d)
    for i, kind in enumerate(c.mixers):
        layer = f"model.layers.{i}."
        out[layer + "input_layernorm.weight"] = (d,)
        out[layer + "post_attention_layernorm.weight"] = (d,)
        out[layer + "mlp.gate_proj.weight"] = (width, d)
        out[layer + "mlp.up_proj.weight"] = (width, d)
        out[layer + "mlp.down_proj.weight"] = (d, width)
        if c.num_streams > 1:
            s = c.num_streams
            mhc = f"model.mhc.{i}."
            out |= {mhc + "dyn.weight": (2 * s + s * s, d), mhc + "norm.weight": (d,)}
            out |= {mhc + "pre_static": (s,), mhc + "post_static": (s,), mhc + "res_static": (s, s)}
        out |= {layer + name: shape for name, shape in _mixer_shapes(c, kind).items()}
        if c.engram is not None and i in c.engram.layers:
            e, total = c.engram, c.engram.dim * len(c.engram.orders)
            out |= {layer + f"engram.tables.{j}.weight": (e.rows, e.dim) for j in range(len(e.orders))}
            out |= {layer + "engram.norm.weight": (total,), layer + "engram.value.weight": (d, total)}
            out |= {layer + "engram.gate.weight": (1, d), layer + "engram.gate.bias": (1,)}
    return out


def _mixer_shapes(c: ModelConfig, kind: str) -> dict[str, tuple[int, ...]]:
    d = c.hidden_size
    if kind == "kda":
        assert c.kda is not None
        k, p = c.kda, "linear_attn."
        gates = k.num_value_heads * k.key_head_dim
        return {
            p + "in_proj_qkv.weight": (k.conv_channels, d),
            p + "in_proj_z.weight": (k.value_dim, d),
            p + "in_proj_b.weight": (k.num_value_heads, d),
            p + "f_down.weight": (k.gate_rank, d),
            p + "f_up.weight": (gates, k.gate_rank),
            p + "conv1d.weight": (k.conv_channels, 1, k.conv_kernel),
            p + "A_log": (k.num_value_heads,),
            p + "dt_bias": (gates,),
            p + "norm.weight": (k.value_head_dim,),
            p + "out_proj.weight": (d, k.value_dim),
        }
    p = "self_attn."
    out = {
        p + "q_proj.weight": (2 * c.num_heads * c.head_dim, d),
        p + "k_proj.weight": (c.num_kv_heads * c.head_dim, d),
        p + "v_proj.weight": (c.num_kv_heads * c.head_dim, d),
        p + "o_proj.weight": (d, c.num_heads * c.head_dim),
        p + "q_norm.weight": (c.head_dim,),
        p + "k_norm.weight": (c.head_dim,),
    }
    if kind == "bcsa":
        assert c.bcsa is not None
        b = c.bcsa
        out[p + "idx_q.weight"] = (b.indexer_heads * b.indexer_dim, d)
        out[p + "idx_k.weight"] = (b.indexer_dim, d)
        out[p + "idx_norm.weight"] = (b.indexer_dim,)
    return out
