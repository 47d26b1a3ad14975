"""What was loaded, as a short table: kind of module, how the file stores it, how the engine holds it, bytes of both.

Kinds are those of the plan's lines (agens_planner.classify).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agens_planner import classify, format_size


@dataclass(frozen=True)
class WeightRow:
    """`num_tensors` tensors of one kind, stored alike and held alike."""

    kind: str
    stored: str
    held: str
    num_tensors: int
    stored_bytes: int
    held_bytes: int


def weight_rows(tensors: Iterable[tuple[str, str, int, str, int]]) -> list[WeightRow]:
    """Rows in order of kind. tensors: (name, stored format, stored bytes, held format, held bytes)."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for name, stored, stored_bytes, held, held_bytes in tensors:
        total = sums.setdefault((classify(name) or "other", stored, held), [0, 0, 0])
        for i, value in enumerate((1, stored_bytes, held_bytes)):
            total[i] += value
    return [WeightRow(*key, *sums[key]) for key in sorted(sums)]


def table_lines(rows: Iterable[WeightRow]) -> list[str]:
    """Aligned lines, a heading first."""
    cells = [("weights", "tensors", "in the file", "", "in memory", "")]
    cells += [
        (r.kind, str(r.num_tensors), r.stored, format_size(r.stored_bytes), r.held, format_size(r.held_bytes))
        for r in rows
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(6)]
    right = (1, 3, 5)
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
