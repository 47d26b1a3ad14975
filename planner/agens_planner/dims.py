"""From config.json to dimensions: checked access to its keys, the fallbacks, and the shapes that follow from them.

Keys: spec volundr-model.md section 1. What the config leaves out is read from the tensors, as the engine does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agens_planner.errors import PlannerInputError
from agens_planner.shapes import Dims, TensorSpec

_WORDS: dict[type, str] = {int: "whole numbers", str: "words"}


class Config:
    """Checked access to config.json: every complaint names the file and the key. A null value counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def section(self, key: str) -> Config | None:
        inner = self.values.get(key)
        if inner is None:
            return None
        if not isinstance(inner, Mapping):
            raise PlannerInputError(f"{self.where}: {key} must be an object, not {inner!r}")
        return Config(inner, f"{self.where} [{key}]")

    def text(self) -> Config:
        """The text keys: those under text_config, and behind them those at top level, as the engine reads them."""
        inner = self.section("text_config")
        return self if inner is None else Config({**self.values, **inner.values}, inner.where)

    def whole(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise PlannerInputError(f"{self.where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**40:
            raise PlannerInputError(f"{self.where}: {key} must be a whole number of at least {low}, not {value!r}")
        return value

    def list(self, key: str, kind: type, default: Sequence[Any] = ()) -> list[Any]:
        """A list whose elements are all of one kind, int or str."""
        value = self.values.get(key)
        if value is None:
            return list(default)
        if not isinstance(value, list) or not all(isinstance(v, kind) and not isinstance(v, bool) for v in value):
            raise PlannerInputError(f"{self.where}: {key} must be a list of {_WORDS[kind]}, not {value!r}")
        return value

    def sized(
        self, key: str, specs: Mapping[str, TensorSpec], tensor: str, axis: int, default: int | None = None
    ) -> int:
        """The config's value, or the tensor's size where the config is silent; where both speak they must agree."""
        spec = specs.get(tensor)
        if spec is None:
            return self.whole(key, default)
        if len(spec.shape) <= axis:
            raise PlannerInputError(f"{self.where}: {tensor} has shape {list(spec.shape)}, which has no axis {axis}")
        found = spec.shape[axis]
        declared = self.whole(key, found)
        if declared != found:
            raise PlannerInputError(f"{self.where}: {key} is {declared}, {tensor} has {found} in axis {axis}")
        return found


def mixer_kinds(text: Config) -> list[str]:
    """The mixer of every layer: mixer_types, else layer_types (spec section 1)."""
    layers = text.whole("num_hidden_layers")
    mixers = text.list("mixer_types", str)
    if not mixers:
        mixers = ["kda" if kind == "linear_attention" else "bcsa" for kind in text.list("layer_types", str)]
    if len(mixers) != layers:
        raise PlannerInputError(
            f"{text.where}: mixer_types names {len(mixers)} layers, num_hidden_layers says {layers}"
        )
    unknown = sorted(set(mixers) - {"kda", "bcsa", "attn"})
    if unknown:
        raise PlannerInputError(f"{text.where}: unknown mixer {unknown[0]!r}; known: attn, bcsa, kda")
    return mixers


def read_dims(text: Config, specs: Mapping[str, TensorSpec]) -> Dims:
    """Dimensions from the text config; what it leaves out comes from the tensors or the engine's defaults.

    The fallbacks are those of agens_engine/model/config.py, so that what loads is what was planned.
    raises  PlannerInputError: a missing, absurd or contradictory value
    """
    mixers = mixer_kinds(text)
    kda, bcsa = mixers.count("kda"), mixers.count("bcsa")
    softmax = len(mixers) - kda
    heads = text.whole("num_attention_heads")
    kv_heads = text.whole("num_key_value_heads", heads)
    if softmax and heads % kv_heads:
        raise PlannerInputError(
            f"{text.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    hidden = text.whole("hidden_size")
    head_dim = text.whole("head_dim", hidden // heads)
    index_heads, index_dim = _indexer(text, specs, mixers.index("bcsa")) if bcsa else (0, 0)
    window, compress = (text.whole("bcsa_window"), text.whole("bcsa_compress")) if bcsa else (0, 0)
    if window < compress:
        raise PlannerInputError(f"{text.where}: bcsa_window {window} is smaller than bcsa_compress {compress}")
    if kda:  # no line needs it by itself, but a contradiction would stop the engine
        text.sized("kda_gate_rank", specs, f"model.layers.{mixers.index('kda')}.linear_attn.f_down.weight", 0, 128)
    engram_layers, orders, engram_dim = _engram(text, specs, len(mixers))
    return Dims(
        hidden=hidden,
        intermediate=text.whole("intermediate_size"),
        layers=len(mixers),
        vocab=text.whole("vocab_size"),
        max_context=text.whole("max_position_embeddings"),
        kda_layers=kda,
        bcsa_layers=bcsa,
        attn_layers=softmax - bcsa,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        gated=bool(text.values.get("attn_output_gate", True)),
        kda_key_heads=text.whole("linear_num_key_heads") if kda else 0,
        kda_value_heads=text.whole("linear_num_value_heads") if kda else 0,
        kda_key_dim=text.whole("linear_key_head_dim") if kda else 0,
        kda_value_dim=text.whole("linear_value_head_dim") if kda else 0,
        kda_conv=text.whole("linear_conv_kernel_dim", 4, low=2) if kda else 0,
        window=window,
        compress=compress,
        topk=text.whole("bcsa_topk") if bcsa else 0,
        index_heads=index_heads,
        index_dim=index_dim,
        engram_layers=engram_layers,
        engram_orders=len(orders),
        engram_history=max(orders, default=1) - 1,
        engram_dim=engram_dim,
        streams=_streams(text, specs),
    )


def _indexer(text: Config, specs: Mapping[str, TensorSpec], layer: int) -> tuple[int, int]:
    """(heads, dim) of the block indexer, from the first sparse layer's tensors."""
    query, key = (f"model.layers.{layer}.self_attn.idx_{part}.weight" for part in "qk")
    for name in (key, query):
        if name not in specs:
            raise PlannerInputError(f"{text.where}: tensor {name} is missing; a bcsa layer needs it")
    dim = text.sized("bcsa_indexer_dim", specs, key, 0)
    heads, rest = divmod(specs[query].shape[0], dim)
    if rest:
        raise PlannerInputError(f"{text.where}: rows of idx_q in layer {layer} are not a multiple of idx_k's {dim}")
    return heads, dim


def _engram(text: Config, specs: Mapping[str, TensorSpec], num_layers: int) -> tuple[int, list[int], int]:
    """(layers, orders, width of a table row); (0, [], 0) without Engram layers."""
    layers = text.list("engram_layers", int)
    if not layers:
        return 0, [], 0
    if min(layers) < 0 or max(layers) >= num_layers:
        raise PlannerInputError(f"{text.where}: engram_layers {layers} names a layer outside 0..{num_layers - 1}")
    orders = text.list("engram_orders", int, (2, 3))
    if not orders or min(orders) < 1:
        raise PlannerInputError(f"{text.where}: engram_orders must be positive n-gram lengths, not {orders}")
    table = f"model.layers.{layers[0]}.engram.tables.0.weight"
    text.sized("engram_rows", specs, table, 0)
    return len(layers), orders, text.sized("engram_dim", specs, table, 1)


def _streams(text: Config, specs: Mapping[str, TensorSpec]) -> int:
    """Hyper-connection streams: mhc_streams, else the length of the first layer's pre_static, else one."""
    declared = text.whole("mhc_streams", 0, low=0)
    static = specs.get("model.mhc.0.pre_static")
    if static is None:
        return max(1, declared)
    found = static.shape[0]
    if text.values.get("mhc_streams") is not None and declared != found:
        raise PlannerInputError(f"{text.where}: mhc_streams is {declared}, model.mhc.0.pre_static has {found} streams")
    return max(1, found)


def expected_shapes(text: Config, dims: Dims) -> dict[str, tuple[int, ...]]:
    """Matrices whose shape follows from the config alone; a checkpoint is checked against them."""
    d, width = dims.hidden, dims.heads * dims.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (dims.vocab, d)}
    for i, mixer in enumerate(mixer_kinds(text)):
        layer = f"model.layers.{i}."
        shapes[layer + "mlp.gate_proj.weight"] = shapes[layer + "mlp.up_proj.weight"] = (dims.intermediate, d)
        shapes[layer + "mlp.down_proj.weight"] = (d, dims.intermediate)
        if mixer == "kda":
            shapes[layer + "linear_attn.in_proj_qkv.weight"] = (dims.conv_channels, d)
            shapes[layer + "linear_attn.out_proj.weight"] = (d, dims.kda_out_width)
        else:
            shapes[layer + "self_attn.q_proj.weight"] = (width * (2 if dims.gated else 1), d)
            shapes[layer + "self_attn.k_proj.weight"] = (dims.kv_heads * dims.head_dim, d)
            shapes[layer + "self_attn.o_proj.weight"] = (d, width)
    return shapes


def check_shapes(specs: Mapping[str, TensorSpec], text: Config, dims: Dims, where: str) -> None:
    """raises PlannerInputError naming the first tensor that is missing or contradicts the config."""
    for name, shape in expected_shapes(text, dims).items():
        if name not in specs:
            raise PlannerInputError(f"{where}: tensor {name} is missing; the config asks for it")
        if specs[name].shape != shape:
            raise PlannerInputError(
                f"{where}: {name} has shape {list(specs[name].shape)}, the config asks for {list(shape)}"
            )
