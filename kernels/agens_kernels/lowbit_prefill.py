"""Low-bit matmul for many rows (prefill chunks), dequantising in the main loop, from the same packed layout.

Math    y[m, n] = sum_g scale[n, g] * 2**exponent * sum_{k in g} x[m, k] * (value(code[n, k]) - zero[n, g])
Layout  weights: agens_quant/format.py; activations x [rows, Kp] bf16 or fp16 in slot order (order_rows), zero where a
        padded column has no source; y [rows, N] any float type
Why     with many rows the tensor cores are the limit. value - zero is an integer below 256, exact in bfloat16, so the
        products of a group are exact up to float32 accumulation, and the scale comes in once per group and output
        instead of rounding every weight. Weights are the A operand, as in lowbit_matmul.py, whose unpacking is shared.
Ref     ref/lowbit_matmul.py     Test  tests/parity/test_lowbit_matmul.py     Compile gate  scripts/compile_kernels.py
Unknown nothing here has run on a GPU yet; the block sizes are chosen from compiled code alone.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from agens_kernels.lowbit_matmul import TABLE_NONE, TILE_COLUMNS, Weights, _slot

# group -> (BN, BM, warps, stages). Not measured on a GPU: chosen from compiled code (scripts/compile_kernels.py). Small
# groups keep more in registers at once; 64 rows in groups of 32 spill 84 .. 1116 bytes on sm_120.
BLOCKS = {128: (128, 64, 8, 3), 64: (128, 64, 8, 2), 32: (128, 32, 8, 3)}


@triton.jit
def _prefill_kernel(
    x, codes, w_scales, zeros, tables, group_tables, out,
    rows, N, k_tiles, factor,
    BITS: tl.constexpr, GROUP: tl.constexpr, TABLE: tl.constexpr, ZERO: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: BN output rows by BM tokens, over all of K. Grid (ceil(rows / BM), ceil(N / BN))."""
    PLANE: tl.constexpr = 128 * 32
    PLANES: tl.constexpr = 4 if BITS == 4 else BITS
    GROUPS: tl.constexpr = 256 // GROUP
    PER_SLAB: tl.constexpr = 128 // GROUP
    SLOTS: tl.constexpr = GROUP // 32
    UNIT: tl.constexpr = 16 if (BITS == 4 and TABLE == 0) else 1

    first_token = tl.program_id(0) * BM
    first_row = tl.program_id(1) * BN
    tile_row = (first_row // 128).to(tl.int64)
    lane_row = first_row % 128 + tl.arange(0, BN)
    byte = tl.arange(0, 32)
    token = first_token + tl.arange(0, BM)
    in_tile = lane_row[:, None] * 32 + byte[None, :]
    # Rows past the last are read as the last one and never stored: no mask in the loop.
    in_x = tl.minimum(token, rows - 1)[None, :].to(tl.int64) * (k_tiles * 256) + byte[:, None]

    one = tl.arange(0, 1)[:, None]  # [1, 1], not a scalar: see lowbit_matmul.py
    t0, t1, t2, t3 = 0, 0, 0, 0
    if TABLE == 1:
        t0 = tl.load(tables + one)
        if BITS > 2:
            t1 = tl.load(tables + 1 + one)
        if BITS > 3:
            t2 = tl.load(tables + 2 + one)
            t3 = tl.load(tables + 3 + one)

    acc = tl.zeros((BN, BM), dtype=tl.float32)
    for k_tile in range(0, k_tiles):
        tile = tile_row * k_tiles + k_tile
        base = codes + tile * (PLANE * PLANES)
        group_base = tile * (GROUPS * 128)
        high = tl.load(base + 2 * PLANE + in_tile) if BITS == 3 else 0
        for slab in tl.static_range(2):
            if BITS == 4:
                low_a = tl.load(base + (2 * slab) * PLANE + in_tile)
                low_b = tl.load(base + (2 * slab + 1) * PLANE + in_tile)
            else:
                low_a = tl.load(base + slab * PLANE + in_tile)
                low_b = low_a
            for part in tl.static_range(PER_SLAB):
                group = slab * PER_SLAB + part
                ws = tl.load(w_scales + group_base + group * 128 + lane_row)
                zero, table = ws, ws  # placeholders of the branches not taken
                if ZERO:
                    zero = tl.load(zeros + group_base + group * 128 + lane_row)
                if TABLE == 2:
                    table = tl.load(group_tables + group_base + group * 128 + lane_row).to(tl.int32)[:, None]
                sums = tl.zeros((BN, BM), dtype=tl.float32)
                for inner in tl.static_range(SLOTS):
                    xs = tl.load(x + k_tile * 256 + (slab * 128 + (part * SLOTS + inner) * 32) + in_x)
                    if part * SLOTS + inner < 2:
                        low = low_a
                    else:
                        low = low_b
                    w = _slot(low, high, t0, t1, t2, t3, table, part * SLOTS + inner, slab, BITS, TABLE, FAST)
                    if ZERO:
                        w = (w.to(tl.int16) - (zero.to(tl.int16) * UNIT)[:, None]).to(tl.int16)
                    if FAST:
                        sums = tl.dot(w.to(xs.dtype), xs, sums)
                    else:  # the interpreter multiplies bfloat16's bit patterns; float32 products are the same numbers
                        sums = tl.dot(w.to(tl.float32), xs.to(tl.float32), sums, input_precision="ieee")
                acc += sums * ws.to(tl.float32)[:, None]

    n = first_row + tl.arange(0, BN)
    y = tl.trans(acc * factor)
    target = out + token[:, None].to(tl.int64) * N + n[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=(token < rows)[:, None] & (n < N)[None, :])


@triton.jit
def _order_rows_kernel(
    x, columns, ordered, K, row_stride, slabs,
    GROUP: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """One program: one slab of 128 columns of one row. Grid (rows, Kp / 128)."""
    row = tl.program_id(0).to(tl.int64)
    slab = tl.program_id(1)
    place = tl.arange(0, 128)
    if GROUP == 32:
        column = slab * 128 + place
    else:
        column = slab * 128 + 64 * (place // 64) + 2 * (place % 32) + place // 32 % 2
    source = tl.load(columns + column) if MAPPED else column
    real = (source >= 0) & (source < K)
    value = tl.load(x + row * row_stride + source, mask=real, other=0.0)
    tl.store(ordered + (row * slabs + slab) * 128 + place, value)


def order_rows(x: Tensor, weights: Weights, into: Tensor) -> Tensor:
    """Copy x [rows, K] (last axis contiguous) to into [rows, Kp], same type, in the weights' slot order."""
    wanted = (x.shape[0], weights.padded_columns)
    if x.dim() != 2 or x.shape[1] != weights.in_features or x.stride(1) != 1:
        raise ValueError(f"x is {list(x.shape)}; expected [rows, {weights.in_features}], rows contiguous")
    if tuple(into.shape) != wanted or into.dtype != x.dtype or not into.is_contiguous():
        raise ValueError(f"into is {into.dtype} {list(into.shape)}; expected {x.dtype} {list(wanted)}, contiguous")
    mapped = weights.columns is not None
    slabs = weights.padded_columns // 128
    _order_rows_kernel[(x.shape[0], slabs)](
        x,
        weights.columns if mapped else into,
        into,
        weights.in_features,
        x.stride(0),
        slabs,
        GROUP=weights.group_size,
        MAPPED=mapped,
        num_warps=1,
    )
    return into


def lowbit_prefill(x: Tensor, weights: Weights, *, out: Tensor) -> Tensor:
    """y = x W^T for any number of rows, one launch; no allocation and no sync.

    x    [rows, Kp] bf16 or fp16 of order_rows
    out  [rows, N], any float type, contiguous
    """
    n, rows = weights.out_features, x.shape[0]
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}; the prefill matmul takes bfloat16 or float16")
    if x.dim() != 2 or x.shape[1] != weights.padded_columns or not x.is_contiguous():
        raise ValueError(f"x is {list(x.shape)}; expected [rows, {weights.padded_columns}] of order_rows, contiguous")
    if rows < 1 or tuple(out.shape) != (rows, n) or not out.is_contiguous():
        raise ValueError(f"out is {list(out.shape)}; expected [{rows}, {n}], contiguous")
    block_n, block_m, warps, stages = BLOCKS[weights.group_size]
    kind = weights.table_kind
    unit = 16.0 if weights.bits == 4 and kind == TABLE_NONE else 1.0
    _prefill_kernel[(triton.cdiv(rows, block_m), triton.cdiv(n, block_n))](
        x,
        weights.codes,
        weights.scales,
        weights.scales if weights.zeros is None else weights.zeros,
        weights.scales if weights.table is None else weights.table.view(torch.int32),
        weights.scales if weights.group_tables is None else weights.group_tables,
        out,
        rows,
        n,
        weights.padded_columns // TILE_COLUMNS,
        2.0**weights.exponent / unit,
        BITS=weights.bits,
        GROUP=weights.group_size,
        TABLE=kind,
        ZERO=weights.zeros is not None,
        FAST=os.environ.get("TRITON_INTERPRET") != "1",
        BM=block_m,
        BN=block_n,
        num_warps=warps,
        num_stages=stages,
    )
    return out
