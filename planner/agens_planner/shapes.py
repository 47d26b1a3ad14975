"""What a model is made of, as the planner sees it: dimensions (read by dims.py), weights grouped by kind and shape.

Both a checkpoint (checkpoint.py) and a shape card (card.py) arrive here as a config and a list of TensorSpec, so what
is tested on one holds for the other. Names and shapes: spec volundr-model.md sections 1 and 2, volundr-weights.md
section 6.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

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
TABLE_KINDS = ("embedding", "engram_table")  # gathered by row from the host
TEXT_KINDS = ("mlp", "attention", "kda", "indexer", "engram", "mhc", "small")


@dataclass(frozen=True)
class TensorSpec:
    """One logical tensor. bits None: stored unquantised; else bits per weight, with one scale per `group` columns.

    packed_bytes   its size in the device layout when its codes were looked at; 0: follows from the other fields
    table_bytes    bytes per value of a host table, which stays as it is stored; 0: not one, or not known
    """

    name: str
    shape: tuple[int, ...]
    bits: Fraction | None = None
    group: int = 0
    zero_points: bool = False
    packed_bytes: int = 0
    table_bytes: int = 0


@dataclass(frozen=True)
class WeightGroup:
    """`count` tensors of one kind, shape and storage."""

    kind: str
    shape: tuple[int, ...]
    count: int
    bits: Fraction | None = None
    group: int = 0
    zero_points: bool = False
    packed_bytes: int = 0  # of one tensor, see TensorSpec
    table_bytes: int = 0

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
    counts = Counter(
        (kind, s.shape, s.bits, s.group, s.zero_points, s.packed_bytes, s.table_bytes) for kind, s in specs
    )
    keys = sorted(counts, key=lambda k: (k[0], k[1], k[2] or 0, *k[3:]))
    return tuple(
        WeightGroup(kind, shape, counts[key], bits, group, zero, packed, table)
        for key in keys
        for kind, shape, bits, group, zero, packed, table in [key]
    )


def with_packed(shapes: ModelShapes, packed: Iterable[TensorSpec] = ()) -> ModelShapes:
    """The shapes with these tensors of the target packed as they say, and all others, the drafters' too, unpacked."""
    specs = [(str(classify(s.name)), s) for s in packed]
    taken = Counter((kind, s.shape) for kind, s in specs)
    totals: Counter[tuple[str, tuple[int, ...]]] = Counter()
    tables = tuple(group for group in shapes.groups if group.table_bytes)
    for group in shapes.groups:
        if not group.table_bytes:
            totals[group.kind, group.shape] += group.count
    rest = tuple(WeightGroup(*key, count - taken[key]) for key, count in sorted(totals.items()) if count > taken[key])
    rest += tables
    return replace(
        shapes,
        groups=rest + group_specs(specs),
        drafter=shapes.drafter and replace(shapes.drafter, groups=_unpacked(shapes.drafter.groups)),
        mtp=shapes.mtp and replace(shapes.mtp, groups=_unpacked(shapes.mtp.groups)),
    )


def _unpacked(groups: Iterable[WeightGroup]) -> tuple[WeightGroup, ...]:
    return tuple(WeightGroup(g.kind, g.shape, g.count) for g in groups)
