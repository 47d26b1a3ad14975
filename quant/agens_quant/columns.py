"""Where the columns and groups of a container go in the device layout: groups of any size, any order of columns.

group divides 128, 64 or 32, or is the whole row    columns stay, scales are repeated: no map is stored
any other size, or columns of mixed groups (g_idx)  groups one after another, each padded to a device group: a map
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agens_quant.format import GROUP_SIZES, TILE_COLUMNS, padded


@dataclass(frozen=True)
class ColumnPlan:
    """Where columns and groups go.

    group_size   of the device, 128, 64 or 32
    group_of     [Kp / group_size] source group of each device group, -1 for pure padding
    sources      [Kp] source column of each padded column, or None when the order is unchanged
    """

    group_size: int
    padded_columns: int
    group_of: np.ndarray
    sources: np.ndarray | None


def plan_columns(columns: int, group_size: int, group_of_column: np.ndarray) -> ColumnPlan:
    """Fit source groups of any size onto device groups: one that does not divide is padded, its columns stay in order.

    group_of_column  [K] source group of each column
    """
    num_groups = int(group_of_column.max()) + 1
    in_order = bool(np.all(np.diff(group_of_column) >= 0))
    for size in GROUP_SIZES:
        if in_order and (group_size % size == 0 or num_groups == 1):
            kp = padded(columns, TILE_COLUMNS)
            group_of = np.full(kp // size, -1, np.int64)
            first = group_of_column[::size]
            group_of[: first.size] = first
            return ColumnPlan(size, kp, group_of, None)
    order = np.argsort(group_of_column, kind="stable")
    counts = np.bincount(group_of_column, minlength=num_groups)
    size = min(GROUP_SIZES, key=lambda s: (int(np.sum(-(-counts // s) * s)), -s))
    device_groups = -(-counts // size)
    kp = padded(int(device_groups.sum()) * size, TILE_COLUMNS)
    sources = np.full(kp, -1, np.int32)
    group_of = np.full(kp // size, -1, np.int64)
    group_of[: int(device_groups.sum())] = np.repeat(np.arange(num_groups), device_groups)
    starts = np.concatenate(([0], np.cumsum(device_groups)[:-1])) * size
    rank = np.arange(columns) - np.repeat(np.cumsum(counts) - counts, counts)
    sources[starts[group_of_column[order]] + rank] = order
    return ColumnPlan(size, kp, group_of, sources)
