"""Low-bit linear for any number of rows: the one place that chooses between the verify and the prefill matmul.

Up to MAX_ROWS rows (a verify step) the packed bytes are the limit and lowbit_matmul.py reads them once for all rows;
above that (a prefill chunk) the tensor cores are, and lowbit_prefill.py tiles the rows. Both bring the activations
into slot order in scratch memory first. Nothing is allocated here and nothing waits: a CUDA graph can hold it.
Unknown  where the two really cross, and the best number of splits: neither has been measured on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agens_kernels.lowbit_matmul import (
    MAX_ROWS,
    SLAB,
    SLOT,
    TILE_ROWS,
    PreparedRows,
    Weights,
    lowbit_matmul,
    padded_rows,
    prepare_rows,
)
from agens_kernels.lowbit_prefill import lowbit_prefill, order_rows

ALIGNMENT = 256
PROGRAMS_PER_MULTIPROCESSOR = 4  # resident at the registers the compile gate prints; not measured
MIN_TILES_PER_SPLIT = 4  # a program must run long enough to fill its pipeline; not measured


def splits_for(weights: Weights, multiprocessors: int) -> int:
    """How many programs share a row of tiles at 1 to 16 rows, so that a matrix with few rows still fills the chip."""
    programs = -(-weights.out_features // TILE_ROWS)
    k_tiles = weights.codes.shape[1]
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // programs)
    splits = max(1, min(wanted, k_tiles // MIN_TILES_PER_SPLIT))
    per_split = -(-k_tiles // splits)
    return -(-k_tiles // per_split)  # none without tiles


def scratch_bytes(weights: Weights, rows: int, splits: int = 1) -> int:
    """Bytes of scratch `linear` needs for this many rows; a larger buffer serves too."""
    return sum(_piece_sizes(weights, rows, splits))


def _piece_sizes(weights: Weights, rows: int, splits: int) -> list[int]:
    """parts, scale, sums and partial results; or the ordered rows."""
    kp = weights.padded_columns
    if rows > MAX_ROWS:
        return [rows * kp * 2]
    bm = padded_rows(rows)
    partial = splits * rows * weights.out_features * 4 if splits > 1 else 0
    sizes = [2 * bm * kp, kp // SLAB * bm * 4, kp // weights.group_size * bm * 4, partial]
    return [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]


def linear(x: Tensor, weights: Weights, *, out: Tensor, scratch: Tensor, splits: int = 1) -> Tensor:
    """y = x W^T.

    x        [rows, K], last axis contiguous; fp16, bf16 or fp32 up to MAX_ROWS rows, fp16 or bf16 above
    out      [rows, N] any float type, contiguous
    scratch  uint8 [at least scratch_bytes(weights, rows, splits)], 16-byte aligned; overwritten
    splits   programs that share a row of tiles (splits_for); ignored above MAX_ROWS rows
    raises   ValueError for shapes and types that do not fit
    """
    rows, kp, n = x.shape[0], weights.padded_columns, weights.out_features
    if scratch.dtype != torch.uint8 or scratch.dim() != 1 or scratch.numel() < scratch_bytes(weights, rows, splits):
        raise ValueError(
            f"scratch is {scratch.dtype} {list(scratch.shape)}; expected uint8 [{scratch_bytes(weights, rows, splits)}]"
        )
    pieces = []
    for size in _piece_sizes(weights, rows, splits):
        pieces.append(scratch[:size])
        scratch = scratch[size:]
    if rows > MAX_ROWS:
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"x is {x.dtype} at {rows} rows; above {MAX_ROWS} rows give bfloat16 or float16")
        return lowbit_prefill(order_rows(x, weights, pieces[0].view(x.dtype).view(rows, kp)), weights, out=out)
    bm = padded_rows(rows)

    def carve(piece: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return piece[: count * dtype.itemsize].view(dtype).view(shape)

    into = PreparedRows(
        rows,
        carve(pieces[0], torch.int8, kp // SLOT, 2 * bm, SLOT),
        carve(pieces[1], torch.float32, kp // SLAB, bm),
        carve(pieces[2], torch.int32, kp // weights.group_size, bm),
    )
    workspace = carve(pieces[3], torch.float32, splits, rows, n) if splits > 1 else None
    return lowbit_matmul(prepare_rows(x, weights, into), weights, out=out, workspace=workspace)
