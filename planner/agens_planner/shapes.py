"""What a model is made of, as the planner sees it: dimensions from its config, weights grouped by kind and shape.

Both a checkpoint (checkpoint.py) and a shape card (card.py) arrive here as a config and a list of TensorSpec, so what
is tested on one holds for the other. Names and shapes: spec volundr-model.md sections 1 and 2, volundr-weights.md
section 6.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from agens_planner.errors import PlannerInputError

_PREFIXES = (("model.language_model.", "model."), ("language_model.", "model."), ("model.model.", "model."))
# First match wins; the order puts special members before the family they live in.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("vision", r"(model\.)?visual\."),
        ("ignored", r"(model\.)?mtp\."),
        ("embedding", r"model\.embed_tokens\.weight$"),
        ("head", r"lm_head\.weight$"),
        ("engram_table", r"model\.layers\.\d+\.engram\.tables\.\d+\.weight$"),
        ("small", r".*(norm|A_log|dt_bias|conv1d|_static|engram\.gate)(\.weight|\.bias)?$"),
        ("mhc", r"model\.mhc\.\d+\.dyn\.weight$"),
        ("engram", r"model\.layers\.\d+\.engram\."),
        ("mlp", r"model\.layers\.\d+\.mlp\."),
        ("indexer", r"model\.layers\.\d+\.self_attn\.idx_"),
        ("attention", r"model\.layers\.\d+\.self_attn\."),
        ("kda", r"model\.layers\.\d+\.linear_attn\."),
    )
)
TEXT_KINDS = ("mlp", "attention", "kda", "indexer", "engram", "mhc", "small")


@dataclass(frozen=True)
class TensorSpec:
    """One logical tensor. bits None: stored unquantised; else bits per weight, with one scale per `group` columns."""

    name: str
    shape: tuple[int, ...]
    bits: Fraction | None = None
    group: int = 0
    zero_points: bool = False


@dataclass(frozen=True)
class WeightGroup:
    """`count` tensors of one kind, shape and storage."""

    kind: str
    shape: tuple[int, ...]
    count: int
    bits: Fraction | None = None
    group: int = 0
    zero_points: bool = False

    @property
    def parameters(self) -> int:
        return self.count * math.prod(self.shape)


@dataclass(frozen=True)
class Dims:
    """The text tower's sizes. Zero where the model has no such part."""

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    max_context: int
    kda_layers: int
    bcsa_layers: int
    attn_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    kda_key_heads: int = 0
    kda_value_heads: int = 0
    kda_key_dim: int = 0
    kda_value_dim: int = 0
    kda_conv: int = 0
    window: int = 0
    compress: int = 0
    topk: int = 0
    index_heads: int = 0
    index_dim: int = 0
    engram_layers: int = 0
    engram_orders: int = 0
    engram_history: int = 0
    engram_dim: int = 0
    streams: int = 1

    @property
    def softmax_layers(self) -> int:
        return self.bcsa_layers + self.attn_layers

    @property
    def kv_width(self) -> int:
        """Values of K and V together, per position and layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.kda_key_heads * self.kda_key_dim + self.kda_value_heads * self.kda_value_dim

    @property
    def kda_gate_width(self) -> int:
        return self.kda_value_heads * self.kda_key_dim

    @property
    def kda_out_width(self) -> int:
        return self.kda_value_heads * self.kda_value_dim


@dataclass(frozen=True)
class VisionShapes:
    depth: int
    hidden: int
    heads: int
    intermediate: int
    patch_values: int
    merge: int
    out_hidden: int
    patch: int
    groups: tuple[WeightGroup, ...]

    @cached_property
    def parameters(self) -> int:
        return sum(g.parameters for g in self.groups)

    @cached_property
    def largest_piece(self) -> int:
        """Weights of one block, or of the largest single matrix outside the blocks: what one staging slot must hold."""
        h = self.hidden
        block = 4 * h * h + 2 * h * self.intermediate + 9 * h + self.intermediate
        return max(block, *(math.prod(g.shape) for g in self.groups))


@dataclass(frozen=True)
class DrafterShapes:
    """The DFlash2 block drafter; codebooks are apart because they stay on the host."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    full_layers: int
    taps: int
    block: int
    groups: tuple[WeightGroup, ...]
    codebooks: tuple[WeightGroup, ...]


@dataclass(frozen=True)
class MtpShapes:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    groups: tuple[WeightGroup, ...]


@dataclass(frozen=True)
class ModelShapes:
    """A model's shapes, complete: the input of every plan. `source` is a folder or `shape card`."""

    name: str
    source: str
    dims: Dims
    groups: tuple[WeightGroup, ...]
    vision: VisionShapes | None = None
    drafter: DrafterShapes | None = None
    mtp: MtpShapes | None = None
    hypothetical: bool = False
    bits_known: bool = True
    notes: tuple[str, ...] = ()

    def kind(self, *kinds: str) -> tuple[WeightGroup, ...]:
        return tuple(g for g in self.groups if g.kind in kinds)

    @property
    def parameters(self) -> int:
        """All parameters of the target, vision included, drafters not."""
        return sum(g.parameters for g in self.groups) + (self.vision.parameters if self.vision else 0)


def normalise(name: str) -> str:
    """A published tensor name to the short form of the spec (section 2)."""
    for prefix, short in _PREFIXES:
        if name.startswith(prefix):
            name = short + name.removeprefix(prefix)
    return name


def classify(name: str) -> str | None:
    """The kind of a normalised tensor name, or None for one no Volundr model has."""
    for kind, pattern in _KINDS:
        if pattern.match(name):
            return kind
    return None


def group_specs(specs: Iterable[tuple[str, TensorSpec]]) -> tuple[WeightGroup, ...]:
    """Equal (kind, shape, storage) counted together, in an order that does not depend on the input's."""
    counts = Counter((kind, s.shape, s.bits, s.group, s.zero_points) for kind, s in specs)
    keys = sorted(counts, key=lambda k: (k[0], k[1], k[2] or 0, k[3], k[4]))
    return tuple(
        WeightGroup(kind, shape, counts[key], bits, group, zero)
        for key in keys
        for kind, shape, bits, group, zero in [key]
    )


class Config:
    """Checked access to config.json: every complaint names the file and the key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def section(self, key: str) -> Config | None:
        inner = self.values.get(key)
        return Config(inner, f"{self.where} [{key}]") if isinstance(inner, Mapping) else None

    def whole(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.values.get(key, default)
        if value is None:
            raise PlannerInputError(f"{self.where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**40:
            raise PlannerInputError(f"{self.where}: {key} must be a whole number of at least {low}, not {value!r}")
        return value

    def list(self, key: str) -> list[Any]:
        value = self.values.get(key) or []
        if not isinstance(value, list):
            raise PlannerInputError(f"{self.where}: {key} must be a list, not {value!r}")
        return value


def mixer_kinds(text: Config) -> list[str]:
    """The mixer of every layer: mixer_types, else layer_types (spec section 1)."""
    layers = text.whole("num_hidden_layers")
    mixers = text.list("mixer_types")
    if not mixers:
        mixers = ["kda" if kind == "linear_attention" else "bcsa" for kind in text.list("layer_types")]
    if len(mixers) != layers:
        raise PlannerInputError(
            f"{text.where}: mixer_types names {len(mixers)} layers, num_hidden_layers says {layers}"
        )
    unknown = sorted({str(m) for m in mixers} - {"kda", "bcsa", "attn"})
    if unknown:
        raise PlannerInputError(f"{text.where}: unknown mixer {unknown[0]!r}; known: attn, bcsa, kda")
    return mixers


def read_dims(text: Config, specs: Mapping[str, TensorSpec]) -> Dims:
    """Dimensions from the text config, indexer sizes from the tensors (they are not in the config).

    raises  PlannerInputError: a missing, absurd or contradictory value
    """
    mixers = mixer_kinds(text)
    kda, bcsa = mixers.count("kda"), mixers.count("bcsa")
    softmax = len(mixers) - kda
    heads, kv_heads = text.whole("num_attention_heads"), text.whole("num_key_value_heads")
    if softmax and heads % kv_heads:
        raise PlannerInputError(
            f"{text.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    hidden = text.whole("hidden_size")
    head_dim = text.whole("head_dim", hidden // heads)
    index_dim = index_heads = 0
    if bcsa:
        first = mixers.index("bcsa")
        index_dim = _rows(specs, f"model.layers.{first}.self_attn.idx_k.weight")
        index_heads, rest = divmod(_rows(specs, f"model.layers.{first}.self_attn.idx_q.weight"), index_dim)
        if rest:
            raise PlannerInputError(
                f"{text.where}: rows of idx_q in layer {first} are not a multiple of idx_k's {index_dim}"
            )
    orders = text.list("engram_orders")
    engram_layers = len(text.list("engram_layers"))
    if engram_layers and not orders:
        raise PlannerInputError(f"{text.where}: engram_layers without engram_orders")
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
        kda_conv=text.whole("linear_conv_kernel_dim") if kda else 0,
        window=text.whole("bcsa_window") if bcsa else 0,
        compress=text.whole("bcsa_compress") if bcsa else 0,
        topk=text.whole("bcsa_topk") if bcsa else 0,
        index_heads=index_heads,
        index_dim=index_dim,
        engram_layers=engram_layers,
        engram_orders=len(orders) if engram_layers else 0,
        engram_history=max(orders) - 1 if engram_layers else 0,
        engram_dim=text.whole("engram_dim") if engram_layers else 0,
        streams=max(1, text.whole("mhc_streams", 0, low=0)),
    )


def _rows(specs: Mapping[str, TensorSpec], name: str) -> int:
    if name not in specs:
        raise PlannerInputError(f"tensor {name} is missing; a bcsa layer needs it")
    return specs[name].shape[0]


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
