"""Low-bit matmul for the 1 to 16 rows of a verify step, straight from the packed device layout.

Math    y[m, n] = sum_k x[m, k] * (value(code[n, k]) - zero[n, g]) * scale[n, g] * 2**exponent
Layout  weights: agens_quant/format.py, bit by bit. Activations: in slot order, as two int8 parts (prepare_rows),

            x = (254 * high + low) * x_scale,    x_scale = max |x| of the row's slab of 128 / (254 * 127)
            x_parts [Kp/32, 2 BM, 32] int8, row 2 m high, 2 m + 1 low; x_scale [Kp/128, BM] fp32; x_sum [Kp/G, BM] int32

        The rest is at most max |x| / 64516 of its slab, 2**-16; bfloat16 keeps 2**-9 of each value.
Why     at these row counts every packed byte is read once, for all rows together. Below 4 bits the instructions per
        weight are the limit, not the bytes; so weights are the A operand of int8 tensor-core products, both parts of
        the rows are the columns of one B operand, and floats appear once per group. Integer sums are exact, so a
        group's result does not depend on any order; groups, then splits, are added in float32 in rising order.
Ref     ref/lowbit_matmul.py     Test  tests/parity/test_lowbit_matmul.py     Compile gate  scripts/compile_kernels.py
Unknown nothing here has run on a GPU yet. The interpreter executes the plain unpacking (_plain); compiled kernels use
        the inline one (_fast), which means the same byte by byte: a test evaluates its PTX. Tables per group compile to
        _plain: correct, slower. fp16 tables are refused. At most 16 rows: lowbit_prefill.py takes more,
        and lowbit.py chooses.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# The constants of the layout; the parity test compares them with agens_quant.format.
TILE_ROWS = 128
TILE_COLUMNS = 256
SLAB = 128
SLOT = 32
MAX_ROWS = 16
TABLE_NONE, TABLE_TENSOR, TABLE_GROUP = 0, 1, 2

# (bits, BM) -> (BN, warps, stages). Not measured on a GPU: chosen from compiled code (scripts/compile_kernels.py);
# three stages spill 24 bytes at 2 bits and 16 rows on sm_86.
BLOCKS = {
    (2, 8): (128, 4, 3),
    (2, 16): (128, 4, 2),
    (3, 8): (128, 4, 3),
    (3, 16): (128, 4, 3),
    (4, 8): (128, 4, 3),
    (4, 16): (128, 4, 3),
}


def block_sizes(bits: int, padded_rows: int, group_size: int) -> tuple[int, int, int]:
    """(BN, warps, stages) of a launch. Smaller groups hold more in registers: one stage less."""
    block_n, warps, stages = BLOCKS[bits, padded_rows]
    return block_n, warps, stages if group_size == SLAB else 2


@triton.jit
def _byte_of(words_0, words_1, words_2, words_3, index, NUM: tl.constexpr):
    """Byte `index` (0 .. 4 NUM - 1) of a table kept in NUM int32 words, sign-extended by the cast."""
    word = words_0
    if NUM > 1:
        word = tl.where(index >= 4, words_1, word)
    if NUM > 2:
        word = tl.where(index >= 8, words_2, word)
        word = tl.where(index >= 12, words_3, word)
    return ((word >> ((index & 3) * 8)) & 255).to(tl.int8)


@triton.jit
def _code(low, high, SLOT_IDX: tl.constexpr, SLAB_IDX: tl.constexpr, BITS: tl.constexpr):
    """Code of one slot from the byte of the low plane (and of the 1-bit plane at 3 bits) as int32."""
    if BITS == 4:
        return (low.to(tl.int32) >> (4 * (SLOT_IDX % 2))) & 15
    code = (low.to(tl.int32) >> (2 * SLOT_IDX)) & 3
    if BITS == 3:
        bit: tl.constexpr = SLOT_IDX % 2 + 2 * SLAB_IDX + 4 * (SLOT_IDX // 2)
        code = code | (((high.to(tl.int32) >> bit) & 1) << 2)
    return code


@triton.jit
def _plain(low, high, t0, t1, t2, t3, group_table, SLOT_IDX: tl.constexpr, SLAB_IDX: tl.constexpr, BITS: tl.constexpr,
           TABLE: tl.constexpr):  # fmt: skip
    """int8 weights of one slot in ordinary Triton: what the interpreter runs, and the path of per-group tables."""
    code = _code(low, high, SLOT_IDX, SLAB_IDX, BITS)
    if TABLE == 2:  # signed nibbles, entry i at bits 4 i
        return ((((group_table >> (code * 4)) & 15) ^ 8) - 8).to(tl.int8)
    if TABLE == 1:
        return _byte_of(t0, t1, t2, t3, code, 4 if BITS == 4 else BITS - 1)
    return ((code ^ 8) - 8).to(tl.int8) * 16  # 4 bits, two's complement; 16 is taken out with the scale


@triton.constexpr_function
def _slot_asm(bits: int, slot: int, slab: int, table: int) -> str:
    """PTX that turns four bytes of the low plane into the four int8 weights of one slot, byte by byte.

    With a table, the codes of slots s and s + 2 (or s and s + 1 at 4 bits) become PRMT selectors, four a half-word; a
    last PRMT keeps one of the two slots. The blocks of a pair share all but that instruction, which ptxas merges.
    Operands: $0 result, $1 low plane, then at 3 bits $2 the 1-bit plane, then the table words, each present four times.
    """
    pick = "0x7531" if (slot // 2 if bits < 4 else slot % 2) else "0x6420"
    if bits == 4 and table == TABLE_NONE:
        shift = "shl.b32 $0, $1, 4; and.b32 $0, $0, 0xF0F0F0F0;" if slot % 2 == 0 else "and.b32 $0, $1, 0xF0F0F0F0;"
        return "{ " + shift + " }"
    if bits == 4:
        return (
            "{ .reg .b32 q, p, u, v, a, b; and.b32 q, $1, 0x77777777; and.b32 p, $1, 0x88888888; shr.u32 p, p, 1; "
            "or.b32 p, p, 0x32103210; prmt.b32 u, $2, $6, q; prmt.b32 v, $10, $14, q; prmt.b32 a, u, v, p; "
            "shr.u32 q, q, 16; shr.u32 p, p, 16; prmt.b32 u, $2, $6, q; prmt.b32 v, $10, $14, q; prmt.b32 b, u, v, p; "
            f"prmt.b32 $0, a, b, {pick}; }}"
        )
    low = f"shr.u32 s, $1, {2 * (slot % 2)}; and.b32 s, s, 0x33333333; "
    t0, t1 = ("$2", "$2") if bits == 2 else ("$3", "$7")
    high = ""
    if bits == 3:
        up = 2 - (slot % 2 + 2 * slab)  # the third bit stands at slot % 2 + 2 slab and must come to bit 2
        high = (f"shl.b32 r, $2, {up}; " if up >= 0 else f"shr.u32 r, $2, {-up}; ") + (
            "and.b32 r, r, 0x44444444; or.b32 s, s, r; "
        )
    return (
        "{ .reg .b32 s, r, a, b; " + low + high + f"shr.u32 r, s, 16; prmt.b32 a, {t0}, {t1}, s; "
        f"prmt.b32 b, {t0}, {t1}, r; prmt.b32 $0, a, b, {pick}; }}"
    )


@triton.jit
def _fast(low, high, t0, t1, t2, t3, SLOT_IDX: tl.constexpr, SLAB_IDX: tl.constexpr, BITS: tl.constexpr,
          TABLE: tl.constexpr):  # fmt: skip
    """int8 weights of one slot through one inline block; means the same as _plain, four elements at a time."""
    ASM: tl.constexpr = _slot_asm(BITS, SLOT_IDX, SLAB_IDX, TABLE)
    if BITS == 2:
        w = tl.inline_asm_elementwise(ASM, "=r,r,r,r,r,r", [low, t0], dtype=tl.int8, is_pure=True, pack=4)
    elif BITS == 3:
        w = tl.inline_asm_elementwise(
            ASM, "=r,r,r,r,r,r,r,r,r,r,r", [low, high, t0, t1], dtype=tl.int8, is_pure=True, pack=4
        )
    elif TABLE == 0:
        w = tl.inline_asm_elementwise(ASM, "=r,r", [low], dtype=tl.int8, is_pure=True, pack=4)
    else:
        w = tl.inline_asm_elementwise(
            ASM, "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [low, t0, t1, t2, t3], dtype=tl.int8, is_pure=True, pack=4
        )
    return w


@triton.jit
def _slot(low, high, t0, t1, t2, t3, group_table, SLOT_IDX: tl.constexpr, SLAB_IDX: tl.constexpr, BITS: tl.constexpr,
          TABLE: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """int8 [BN, 32] weights of one slot."""
    if FAST and TABLE != 2:
        w = _fast(low, high, t0, t1, t2, t3, SLOT_IDX, SLAB_IDX, BITS, TABLE)
    else:
        w = _plain(low, high, t0, t1, t2, t3, group_table, SLOT_IDX, SLAB_IDX, BITS, TABLE)
    return w


@triton.jit
def _flush(acc, sums, w_scale, x_scale, zero, x_sum, BN: tl.constexpr, BM: tl.constexpr, ZERO: tl.constexpr,
           UNIT: tl.constexpr):  # fmt: skip
    """Add one group's exact integer sums [BN, 2 BM] to the float accumulator; high and low parts are neighbours."""
    high, low = tl.split(tl.reshape(sums, (BN, BM, 2)))
    total = high * 254 + low
    if ZERO:
        total -= (zero.to(tl.int32) * UNIT)[:, None] * x_sum[None, :]
    return acc + (total.to(tl.float32) * w_scale.to(tl.float32)[:, None]) * x_scale[None, :]


@triton.jit
def _lowbit_matmul_kernel(
    x_parts, x_scale, x_sum, codes, w_scales, zeros, tables, group_tables, out,
    rows, N, k_tiles, tiles_per_split, factor,
    BITS: tl.constexpr, GROUP: tl.constexpr, TABLE: tl.constexpr, ZERO: tl.constexpr, FAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: BN output rows by all tokens, over tiles_per_split column tiles of 256.

    Grid (ceil(N / BN), splits). out [splits, rows, N].
    """
    PLANE: tl.constexpr = 128 * 32
    PLANES: tl.constexpr = 4 if BITS == 4 else BITS
    GROUPS: tl.constexpr = 256 // GROUP
    PER_SLAB: tl.constexpr = 128 // GROUP
    SLOTS: tl.constexpr = GROUP // 32
    UNIT: tl.constexpr = 16 if (BITS == 4 and TABLE == 0) else 1

    first_row = tl.program_id(0) * BN
    split = tl.program_id(1)
    tile_row = (first_row // 128).to(tl.int64)
    lane_row = first_row % 128 + tl.arange(0, BN)
    byte = tl.arange(0, 32)
    token = tl.arange(0, BM)
    in_tile = lane_row[:, None] * 32 + byte[None, :]
    in_x = tl.arange(0, 2 * BM)[None, :] * 32 + byte[:, None]

    # A [1, 1] tensor, not a scalar: through a splat the compiler would not carry the fragment layout up to the load of
    # the packed bytes, and would pass the unpacked bytes through shared memory instead.
    one = tl.arange(0, 1)[:, None]
    t0, t1, t2, t3 = 0, 0, 0, 0
    if TABLE == 1:
        t0 = tl.load(tables + one)
        if BITS > 2:
            t1 = tl.load(tables + 1 + one)
        if BITS > 3:
            t2 = tl.load(tables + 2 + one)
            t3 = tl.load(tables + 3 + one)

    acc = tl.zeros((BN, BM), dtype=tl.float32)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, k_tiles)
    for k_tile in range(first_tile, last_tile):
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
            xs = tl.load(x_scale + (k_tile * 2 + slab) * BM + token)
            for part in tl.static_range(PER_SLAB):
                group = slab * PER_SLAB + part
                ws = tl.load(w_scales + group_base + group * 128 + lane_row)
                zero, total = 0, 0
                if ZERO:
                    zero = tl.load(zeros + group_base + group * 128 + lane_row)
                    total = tl.load(x_sum + (k_tile * GROUPS + group) * BM + token)
                table = 0
                if TABLE == 2:
                    table = tl.load(group_tables + group_base + group * 128 + lane_row).to(tl.int32)[:, None]
                sums = tl.zeros((BN, 2 * BM), dtype=tl.int32)
                for inner in tl.static_range(SLOTS):
                    x = tl.load(x_parts + (k_tile * 8 + slab * 4 + part * SLOTS + inner) * (64 * BM) + in_x)
                    if part * SLOTS + inner < 2:
                        low = low_a
                    else:
                        low = low_b
                    w = _slot(low, high, t0, t1, t2, t3, table, part * SLOTS + inner, slab, BITS, TABLE, FAST)
                    sums = tl.dot(w, x, sums, out_dtype=tl.int32)
                acc = _flush(acc, sums, ws, xs, zero, total, BN, BM, ZERO, UNIT)

    n = first_row + tl.arange(0, BN)
    y = acc * factor
    target = out + (split * rows + token)[None, :].to(tl.int64) * N + n[:, None]
    tl.store(target, y.to(out.dtype.element_ty), mask=(n < N)[:, None] & (token < rows)[None, :])


@triton.jit
def _prepare_rows_kernel(
    x, columns, x_parts, x_scale, x_sum, rows, K, row_stride,
    GROUP: tl.constexpr, BM: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """One program: one slab of 128 columns of one row; padded rows become zeros. Grid (Kp / 128, BM)."""
    slab = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.arange(0, 4)[:, None]
    element = tl.arange(0, 32)[None, :]
    if GROUP == 32:
        column = slab * 128 + 32 * slot + element
    else:
        column = slab * 128 + 64 * (slot // 2) + 2 * element + slot % 2
    source = tl.load(columns + column) if MAPPED else column
    real = (source >= 0) & (source < K) & (row < rows)
    value = tl.load(x + row.to(tl.int64) * row_stride + source, mask=real, other=0.0).to(tl.float32)
    step = tl.max(tl.max(tl.abs(value), axis=1), axis=0) / 32258.0
    inverse = tl.where(step > 0, 1.0 / tl.where(step > 0, step, 1.0), 0.0)
    whole = tl.floor(value * inverse + 0.5)  # -32258 .. 32258
    high = tl.floor(whole / 254.0 + 0.5)
    low = whole - 254.0 * high
    at = x_parts + (slab * 4 + slot) * (64 * BM) + 64 * row + element
    tl.store(at, high.to(tl.int8))
    tl.store(at + 32, low.to(tl.int8))
    tl.store(x_scale + slab * BM + row, step)
    per_slot = tl.sum(whole, axis=1).to(tl.int32)
    part = tl.arange(0, 4)
    for group in tl.static_range(128 // GROUP):
        total = tl.sum(tl.where(part // (GROUP // 32) == group, per_slot, 0), axis=0)
        tl.store(x_sum + (slab * (128 // GROUP) + group) * BM + row, total)


@triton.jit
def _add_splits_kernel(partial, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out = sum of the splits' partial results, in rising order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    total = tl.load(partial + at, mask=real, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial + split * size + at, mask=real, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=real)


@dataclass(frozen=True)
class Weights:
    """A packed matrix on the device: the sections of agens_quant.format.PackedTensor as tensors.

    codes   [N/128, Kp/256, tile bytes] uint8        scales  [N/128, Kp/256, 256/group, 128] fp16 or fp32
    zeros   as scales, int8, or None                 table   [2**bits] int8, or None (4 bits, two's complement)
    group_tables  as scales, int16/uint16 at 2 bits or int32/uint32 at 3, or None
    columns [Kp] int32, or None
    """

    out_features: int
    in_features: int
    bits: int
    group_size: int
    exponent: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    table: Tensor | None = None
    group_tables: Tensor | None = None
    columns: Tensor | None = None

    def __post_init__(self) -> None:
        if self.table is not None and self.table.dtype != torch.int8:
            raise ValueError(f"table is {self.table.dtype}; this kernel decodes int8 tables")
        if self.bits not in (2, 3, 4) or self.group_size not in (32, 64, 128):
            raise ValueError(f"{self.bits} bits in groups of {self.group_size}; 2, 3, 4 bits in groups of 32, 64, 128")
        if (self.table is None and self.group_tables is None) != (self.bits == 4 and self.table is None):
            raise ValueError(f"{self.bits} bits need a table per tensor or per group (4 bits: none, or one a tensor)")
        tiles = (-(-self.out_features // TILE_ROWS), self.codes.shape[1])
        if tuple(self.codes.shape[:2]) != tiles or not self.codes.is_contiguous():
            raise ValueError(f"codes are {list(self.codes.shape)}; {self.out_features} rows take {tiles[0]} row tiles")

    @property
    def padded_columns(self) -> int:
        return self.codes.shape[1] * TILE_COLUMNS

    @property
    def table_kind(self) -> int:
        return TABLE_GROUP if self.group_tables is not None else TABLE_NONE if self.table is None else TABLE_TENSOR


@dataclass(frozen=True)
class PreparedRows:
    """Activations as the kernel reads them; the buffers may be reused from step to step."""

    rows: int
    parts: Tensor  # [Kp/32, 2 BM, 32] int8
    scale: Tensor  # [Kp/128, BM] fp32
    sums: Tensor  # [Kp/group, BM] int32

    @property
    def padded_rows(self) -> int:
        return self.scale.shape[1]


def padded_rows(rows: int) -> int:
    """BM, the rows the kernel works on: 8 or 16."""
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"{rows} rows; the low-bit matmul takes 1 to {MAX_ROWS}")
    return 8 if rows <= 8 else 16


def prepare_rows(x: Tensor, weights: Weights, into: PreparedRows) -> PreparedRows:
    """Write x [rows, K] (fp16, bf16 or fp32, last axis contiguous) as two int8 parts in the weights' column order."""
    if x.dim() != 2 or x.shape != (into.rows, weights.in_features) or x.stride(1) != 1:
        raise ValueError(f"x is {list(x.shape)}; expected [{into.rows}, {weights.in_features}], rows contiguous")
    grid = (weights.padded_columns // SLAB, into.padded_rows)
    _prepare_rows_kernel[grid](
        x,
        into.scale if weights.columns is None else weights.columns,
        into.parts,
        into.scale,
        into.sums,
        into.rows,
        weights.in_features,
        x.stride(0),
        GROUP=weights.group_size,
        BM=into.padded_rows,
        MAPPED=weights.columns is not None,
        num_warps=1,
    )
    return into


def lowbit_matmul(x: PreparedRows, weights: Weights, *, out: Tensor, workspace: Tensor | None = None) -> Tensor:
    """y = x W^T, one launch, or two with a workspace; no allocation and no sync, so a CUDA graph can hold it.

    out        [rows, N], any float type, contiguous
    workspace  [splits, rows, N] fp32: columns are divided among `splits` programs (fills the chip when N is small)
    """
    n, rows = weights.out_features, x.rows
    if tuple(out.shape) != (rows, n) or not out.is_contiguous():
        raise ValueError(f"out is {list(out.shape)}; expected [{rows}, {n}], contiguous")
    if (
        x.parts.shape[0] * SLOT != weights.padded_columns
        or x.sums.shape[0] * weights.group_size != weights.padded_columns
    ):
        raise ValueError("x was prepared for another matrix: its padded columns or groups differ")
    k_tiles = weights.codes.shape[1]
    splits = 1 if workspace is None else workspace.shape[0]
    if workspace is not None and (tuple(workspace.shape[1:]) != (rows, n) or workspace.dtype != torch.float32):
        raise ValueError(f"workspace is {workspace.dtype} {list(workspace.shape)}; expected fp32 [splits, {rows}, {n}]")
    block_n, warps, stages = block_sizes(weights.bits, x.padded_rows, weights.group_size)
    kind = weights.table_kind
    unit = 16.0 if weights.bits == 4 and kind == TABLE_NONE else 1.0
    target = out if workspace is None else workspace
    _lowbit_matmul_kernel[(triton.cdiv(n, block_n), splits)](
        x.parts,
        x.scale,
        x.sums,
        weights.codes,
        weights.scales,
        weights.scales if weights.zeros is None else weights.zeros,
        weights.scales if weights.table is None else weights.table.view(torch.int32),
        weights.scales if weights.group_tables is None else weights.group_tables,
        target,
        rows,
        n,
        k_tiles,
        triton.cdiv(k_tiles, splits),
        2.0**weights.exponent / unit,
        BITS=weights.bits,
        GROUP=weights.group_size,
        TABLE=kind,
        ZERO=weights.zeros is not None,
        FAST=os.environ.get("TRITON_INTERPRET") != "1",
        BM=x.padded_rows,
        BN=block_n,
        num_warps=warps,
        num_stages=stages,
    )
    if workspace is not None:
        size = rows * n
        _add_splits_kernel[(triton.cdiv(size, 1024),)](workspace, out, size, SPLITS=splits, BLOCK=1024)
    return out
