"""Lines that do not depend on context, sequences or policies: weights, head, drafter, MTP head, host tables."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from agens_planner.constants import (
    DEFAULT_GROUP,
    PACK_TILE_COLUMNS,
    PACK_TILE_ROWS,
    REFERENCE_UNPACK_BYTES,
    REFERENCE_UNPACK_VALUES,
    SCALE_BYTES,
)
from agens_planner.formula import Factor, Formula
from agens_planner.lines import DEVICE, HOST_PINNED, weight_line
from agens_planner.plan import MemoryLine
from agens_planner.profile import Profile
from agens_planner.shapes import TABLE_KINDS, TEXT_KINDS, DrafterShapes, ModelShapes, MtpShapes, WeightGroup


def weight_lines(shapes: ModelShapes, profile: Profile, *, drafter: bool, mtp: bool) -> list[MemoryLine]:
    """Device lines of everything read once per step, then the host tables.

    Lines of one kind split by storage: quantised and unquantised members of a layer are told apart per tensor.
    """
    element = profile.element_bytes
    lines = []
    for kind in TEXT_KINDS:
        by_storage: dict[str, Formula] = {}
        for group in shapes.kind(kind):
            bits = stored_bits(group, profile)
            name = weight_line(kind, bits, profile.dtype)
            by_storage[name] = by_storage.get(name, Formula()) + group_formula(
                group, bits, 4 if kind == "small" else element
            )
        lines += [MemoryLine.make(name, DEVICE, by_storage[name]) for name in sorted(by_storage)]
    for group in shapes.kind("head"):
        bits = head_bits(group, profile)
        lines.append(
            MemoryLine.make(weight_line("head", bits, profile.dtype), DEVICE, group_formula(group, bits, element))
        )
    if drafter and shapes.drafter:
        lines.append(
            MemoryLine.make("drafter.weights", DEVICE, _drafted(shapes.drafter, profile.drafter_bits, element))
        )
    if mtp and shapes.mtp:
        lines.append(MemoryLine.make("mtp.weights", DEVICE, _drafted(shapes.mtp, profile.mtp_bits, element)))
    for name, kind in (("host.embedding", "embedding"), ("host.engram_tables", "engram_table")):
        tables = [g for g in shapes.kind(kind) if profile.tables == "ram" or not g.table_bytes]
        if tables:
            lines.append(MemoryLine.make(name, HOST_PINNED, _sum(tables, element)))
    if drafter and shapes.drafter and shapes.drafter.codebooks:
        lines.append(MemoryLine.make("host.codebooks", HOST_PINNED, _sum(shapes.drafter.codebooks, element)))
    return lines


def stored_bits(group: WeightGroup, profile: Profile) -> Fraction | None:
    """Bits per weight on the device, or None for unpacked; the profile may know better what a container holds."""
    if group.bits is not None and profile.weight_bits != "auto" and not group.packed_bytes:
        return Fraction(profile.weight_bits)
    return group.bits


def head_bits(group: WeightGroup, profile: Profile) -> Fraction | None:
    """An unpacked head is quantised at load when the profile says so; a packed one keeps its width."""
    if group.bits is not None:
        return group.bits
    return Fraction(profile.head_bits) if profile.head_bits < 16 else None


def group_formula(group: WeightGroup, bits: Fraction | None, element: int) -> Formula:
    """Device bytes of a group: plain matrices, or codes padded to whole tiles plus one fp16 scale per scale group."""
    if bits is None or len(group.shape) != 2:
        return Formula.of(_count(group), (group.shape[0], ""), *_rest(group.shape), (element, "bytes"))
    if group.packed_bytes:
        return Formula.of(_count(group), (group.packed_bytes, "bytes in the device layout"))
    rows = _round_up(group.shape[0], PACK_TILE_ROWS)
    columns = _round_up(group.shape[1], PACK_TILE_COLUMNS)
    scale_columns = -(-columns // (group.group or DEFAULT_GROUP))
    codes: list[Factor] = [_count(group), (rows, ""), (columns, "weights"), (bits, "bits"), (Fraction(1, 8), "byte")]
    scales: list[Factor] = [_count(group), (rows, ""), (scale_columns, "scales"), (SCALE_BYTES, "bytes")]
    formula = Formula.of(*codes) + Formula.of(*scales)
    if group.zero_points:
        formula += Formula.of(_count(group), (rows, ""), (scale_columns, "zero points"), (1, "byte"))
    return formula


def unpack_formula(shapes: ModelShapes, profile: Profile, rows: int) -> Formula:
    """What multiplying with packed matrices takes beside them on a CPU: a decoded piece and its columns of the rows."""
    groups = [g for g in shapes.kind(*TEXT_KINDS) if len(g.shape) == 2 and stored_bits(g, profile) is not None]
    groups += [g for g in shapes.kind("head") if head_bits(g, profile) is not None]
    sizes = [(_round_up(g.shape[0], PACK_TILE_ROWS), _round_up(g.shape[1], PACK_TILE_COLUMNS)) for g in groups]
    if not sizes:
        return Formula()
    # reordered columns are padded group by group, so that a matrix can grow to whole tiles of its own
    piece = min(REFERENCE_UNPACK_VALUES, max(n * 2 * k for n, k in sizes))
    columns = min(REFERENCE_UNPACK_VALUES // PACK_TILE_ROWS, max(2 * k for _, k in sizes))
    formula = Formula.of((piece, "weights decoded at once"), (REFERENCE_UNPACK_BYTES, "bytes"))
    return formula + Formula.of((rows, "rows"), (columns, "of their columns"), (4, "bytes (fp32)"))


def tensor_count(shapes: ModelShapes, *, drafter: bool, mtp: bool, images: bool) -> int:
    """Tensors that lie on the device one by one; each may lose a little to alignment."""
    groups = list(shapes.kind(*TEXT_KINDS, "head"))
    groups += shapes.drafter.groups if drafter and shapes.drafter else ()
    groups += shapes.mtp.groups if mtp and shapes.mtp else ()
    groups += shapes.vision.groups if images and shapes.vision else ()
    return sum(g.count for g in groups)


def _drafted(part: DrafterShapes | MtpShapes, bits: int, element: int) -> Formula:
    formula = Formula()
    for group in part.groups:
        if group.kind == "linear":
            stored = group.bits if group.bits is not None else (Fraction(bits) if bits < 16 else None)
            formula += group_formula(group, stored, element)
        else:
            formula += group_formula(group, None, 4)
    return formula


def _sum(groups: Iterable[WeightGroup], element: int) -> Formula:
    formula = Formula()
    for group in groups:
        formula += group_formula(group, None, group.table_bytes or element)
    return formula


def mapped_bytes(shapes: ModelShapes, profile: Profile) -> int:
    """Bytes of the tables that are read from the mapped checkpoint and stand in no line."""
    if profile.tables == "ram":
        return 0
    return sum(g.parameters * g.table_bytes for g in shapes.kind(*TABLE_KINDS))


def _count(group: WeightGroup) -> Factor:
    return (group.count, "tensors" if group.count > 1 else "tensor")


def _rest(shape: tuple[int, ...]) -> list[Factor]:
    return [(n, "") for n in shape[1:]]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
