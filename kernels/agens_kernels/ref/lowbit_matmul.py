"""Low-bit matmul from the formula: decode the device layout to float32, multiply in float32.

Math    y = x W^T,   W[n, k] = (value(code) - zero) * scale * 2**exponent       (layout: agens_quant/format.py)
Written from the layout's text with torch alone, independently of agens_quant.pack; the two are compared in the tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS, PLANE = 128, 256, 128 * 32


def decode(
    codes: Tensor,
    scales: Tensor,
    *,
    shape: tuple[int, int],
    bits: int,
    exponent: int = 0,
    zeros: Tensor | None = None,
    table: Tensor | None = None,
    group_tables: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """[N, K] float32 weights. Arguments as in agens_kernels.lowbit_matmul.Weights; table may also be fp16."""
    row_tiles, column_tiles = codes.shape[:2]
    groups = scales.shape[2]  # a tile; 8 means groups of 32, whose slots hold plain runs of columns
    planes = codes.view(row_tiles, column_tiles, -1, TILE_ROWS, 32).int()
    whole = torch.empty(row_tiles, TILE_ROWS, column_tiles, TILE_COLUMNS, dtype=torch.int32, device=codes.device)
    for slab in range(2):
        for slot in range(4):
            if bits == 4:
                code = (planes[:, :, 2 * slab + slot // 2] >> (4 * (slot % 2))) & 15
            else:
                code = (planes[:, :, slab] >> (2 * slot)) & 3
            if bits == 3:
                code = code | ((planes[:, :, 2] >> (slot % 2 + 2 * slab + 4 * (slot // 2))) & 1) << 2
            if groups == 8:
                whole[:, :, :, 128 * slab + 32 * slot :][..., :32] = code.permute(0, 2, 1, 3)
            else:
                start = 128 * slab + 64 * (slot // 2) + slot % 2
                whole[:, :, :, start : start + 64 : 2] = code.permute(0, 2, 1, 3)

    def by_column(per_group: Tensor) -> Tensor:
        """[tiles, tiles, groups, 128] -> [row tile, row, column tile, column] of the same values."""
        return per_group.permute(0, 3, 1, 2).repeat_interleave(TILE_COLUMNS // groups, -1)

    if group_tables is not None:
        words = by_column(group_tables.long() & (0xFFFF if bits == 2 else 0xFFFFFFFF))
        value = (((words >> (4 * whole.long())) & 15) ^ 8).float() - 8
    elif table is not None:
        value = table.float()[whole.long()]
    else:
        value = (whole ^ 8).float() - 8
    if zeros is not None:
        value = value - by_column(zeros).float()
    weights = (value * (by_column(scales).float() * 2.0**exponent)).flatten(2).flatten(0, 1)[: shape[0]]
    if columns is None:
        return weights[:, : shape[1]].contiguous()
    out = torch.zeros(shape, dtype=torch.float32, device=codes.device)
    real = columns >= 0
    out[:, columns[real].long()] = weights[:, real]
    return out


def lowbit_matmul(x: Tensor, weights: Tensor) -> Tensor:
    """x [rows, K] any float, weights [N, K] float32 of decode() -> [rows, N] float32."""
    return x.float() @ weights.T
