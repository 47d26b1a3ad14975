"""Pack and unpack the device layout (format.py), plainly, in numpy: the reference every faster path is tested against.

Codes here are [N, Kp] uint8 in plain column order, one a byte; N is padded inside, Kp is a multiple of 256.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from agens_quant.compressed_tensors import QuantFormatError
from agens_quant.format import (
    SLOT,
    TILE_COLUMNS,
    TILE_ROWS,
    DeviceFormat,
    PackedTensor,
    ScaleType,
    empty_blob,
    padded,
    slot_order,
)

MAX_EXPONENT = 15  # of a finite fp16 number
MIN_EXPONENT = -24  # of its smallest step


def pack_codes(codes: np.ndarray, bits: int, group_size: int = 128) -> np.ndarray:
    """[N, Kp] codes below 2**bits -> [N/128, Kp/256, tile bytes] uint8; unpack_codes is the exact inverse.

    group_size  decides the order of columns (format.py), nothing else
    raises  QuantFormatError when a code does not fit or Kp is ragged
    """
    n, k = codes.shape
    if k % TILE_COLUMNS:
        raise QuantFormatError(f"{k} columns; pad them to a multiple of {TILE_COLUMNS} first")
    if codes.size and (int(codes.min()) < 0 or int(codes.max()) >= 1 << bits):
        raise QuantFormatError(f"codes run from {codes.min()} to {codes.max()}; {bits} bits hold 0..{(1 << bits) - 1}")
    whole = np.zeros((padded(n, TILE_ROWS), k), np.uint8)
    whole[:n] = codes
    tiles = whole[:, slot_order(k, group_size)].reshape(-1, TILE_ROWS, k // TILE_COLUMNS, 2, 4, SLOT)
    tiles = tiles.transpose(0, 2, 3, 4, 1, 5)  # [row tile, column tile, slab, slot, row, element]
    num_planes = 4 if bits == 4 else bits
    planes = np.zeros((*tiles.shape[:2], num_planes, TILE_ROWS, SLOT), np.uint8)
    for slab in range(2):
        for slot in range(4):
            code = tiles[:, :, slab, slot]
            for plane, shift, low, width in _places(bits, slab, slot):
                planes[:, :, plane] |= ((code >> np.uint8(low)) & np.uint8((1 << width) - 1)) << np.uint8(shift)
    return planes.reshape(*planes.shape[:2], -1)


def unpack_codes(packed: np.ndarray, bits: int, n: int, group_size: int = 128) -> np.ndarray:
    """[N/128, Kp/256, tile bytes] uint8 -> [n, Kp] uint8 codes in plain column order."""
    planes = packed.reshape(*packed.shape[:2], -1, TILE_ROWS, SLOT)
    row_tiles, column_tiles = packed.shape[:2]
    tiles = np.zeros((row_tiles, column_tiles, 2, 4, TILE_ROWS, SLOT), np.uint8)
    for slab in range(2):
        for slot in range(4):
            for plane, shift, low, width in _places(bits, slab, slot):
                piece = (planes[:, :, plane] >> np.uint8(shift)) & np.uint8((1 << width) - 1)
                tiles[:, :, slab, slot] |= piece << np.uint8(low)
    k = column_tiles * TILE_COLUMNS
    in_slot_order = tiles.transpose(0, 4, 1, 2, 3, 5).reshape(row_tiles * TILE_ROWS, k)
    codes = np.empty_like(in_slot_order)
    codes[:, slot_order(k, group_size)] = in_slot_order
    return codes[:n]


def _places(bits: int, slab: int, slot: int) -> list[tuple[int, int, int, int]]:
    """Where the bits of a code lie: (plane, shift inside the byte, lowest bit of the code, how many bits)."""
    if bits == 4:
        return [(2 * slab + slot // 2, 4 * (slot % 2), 0, 4)]
    low = [(slab, 2 * slot, 0, 2)]
    return low if bits == 2 else [*low, (2, slot % 2 + 2 * slab + 4 * (slot // 2), 2, 1)]


def to_groups(per_group: np.ndarray, group_size: int, padded_columns: int) -> np.ndarray:
    """[N, G] -> [N/128, Kp/256, 256/group, 128], zeros where there is no row or no group."""
    n, groups = per_group.shape
    whole = np.zeros((padded(n, TILE_ROWS), padded_columns // group_size), per_group.dtype)
    whole[:n, :groups] = per_group
    tiles = whole.reshape(-1, TILE_ROWS, padded_columns // TILE_COLUMNS, TILE_COLUMNS // group_size)
    return np.ascontiguousarray(tiles.transpose(0, 2, 3, 1))


def from_groups(tiles: np.ndarray, n: int) -> np.ndarray:
    """The inverse of to_groups: [n, Kp / group]."""
    return tiles.transpose(0, 3, 1, 2).reshape(tiles.shape[0] * TILE_ROWS, -1)[:n]


def fit_scales(scales: np.ndarray) -> tuple[ScaleType, int]:
    """How to store float32 scales without changing one: (type, exponent e), scale = stored * 2**e.

    fp16 when some power of two brings all of them onto fp16 values (bfloat16 scales within 2**30 of each other
    always), else fp32 with e = 0.
    """
    size = np.abs(scales)
    largest = float(size.max(initial=0.0))
    if largest == 0.0:
        return "float16", 0
    top = math.frexp(largest)[1] - 1  # 2**top <= largest scale < 2**(top + 1)
    smallest = float(size.min())
    if smallest == 0.0:
        smallest = float(size[size > 0].min())
    # Values near 1 are left alone, so that the usual scale reads as itself; an fp16 number has 11 significant bits.
    usual = top <= MAX_EXPONENT and math.frexp(smallest)[1] - 11 >= MIN_EXPONENT
    choice = 0 if usual else top - MAX_EXPONENT
    stored = torch.from_numpy(_stored(scales, "float16", choice)).float().numpy()
    return (
        ("float16", choice)
        if np.array_equal(np.ldexp(stored, choice) if choice else stored, scales)
        else ("float32", 0)
    )


def _stored(scales: np.ndarray, scale_type: ScaleType, exponent: int) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):  # what does not fit is found by comparing
        scaled = np.ascontiguousarray(np.ldexp(scales, -exponent) if exponent else scales, np.float32)
    # torch rounds as numpy does and uses the processor's own conversion: some 30 times faster
    return torch.from_numpy(scaled).half().numpy() if scale_type == "float16" else scaled


def assemble(
    codes: np.ndarray,
    scales: np.ndarray,
    *,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    table: np.ndarray | None = None,
    group_tables: np.ndarray | None = None,
    zeros: np.ndarray | None = None,
    columns: np.ndarray | None = None,
) -> PackedTensor:
    """Build a packed tensor from parts in plain order; dequantize is its inverse. Used by the quantiser and the tests.

    codes         [N, Kp] uint8, Kp a multiple of 256 that holds every column
    scales        [N, Kp / group] or fewer groups, float32, finite; negative is legal
    table         [2**bits] int8 or float16, or None (4 bits only: codes are two's complement)
    group_tables  [N, Kp / group, 2**bits] int8 in -8 .. 7, instead of table
    zeros         [N, Kp / group] integers in -128 .. 127, in the units of the table
    columns       [Kp] source column of each padded column, -1 for none
    raises        QuantFormatError with what does not fit
    """
    kind = "group" if group_tables is not None else "none" if table is None else str(table.dtype)
    if kind not in ("none", "group", "int8", "float16"):
        raise QuantFormatError(f"table of {kind}; the layout holds int8 or float16 entries")
    if not np.isfinite(scales).all():
        raise QuantFormatError(f"scale {scales[~np.isfinite(scales)][0]} cannot be stored")
    if zeros is not None and zeros.size and (int(zeros.min()) < -128 or int(zeros.max()) > 127):
        raise QuantFormatError(f"zero points run from {zeros.min()} to {zeros.max()}; int8 holds -128..127")
    scale_type, exponent = fit_scales(scales)
    fmt = DeviceFormat(bits, group_size, kind, scale_type, zeros is not None, columns is not None)  # type: ignore[arg-type]
    n, kp = shape[0], codes.shape[1]
    out = PackedTensor(shape, kp, fmt, exponent, empty_blob(fmt.nbytes(n, kp)))
    out.section("codes")[...] = pack_codes(codes, bits, group_size)
    write_scales(out, scales)
    if zeros is not None:
        out.section("zeros")[...] = to_groups(zeros.astype(np.int8), group_size, kp)
    if group_tables is not None:
        out.section("group_tables")[...] = to_groups(nibbles(group_tables), group_size, kp)
    if table is not None:
        out.section("table")[...] = table
    if columns is not None:
        out.section("columns")[...] = columns
    return out


def write_scales(out: PackedTensor, scales: np.ndarray) -> None:
    """Store float32 [N, groups] scales, divided by the tensor's power of two."""
    stored = _stored(scales, out.format.scale_type, out.exponent)
    out.section("scales")[...] = to_groups(stored, out.format.group_size, out.padded_columns)


def nibbles(tables: np.ndarray) -> np.ndarray:
    """[..., 4 or 8] int8 in -8 .. 7 -> [...] uint16 or uint32, entry i at bits 4 i."""
    if tables.size and (int(tables.min()) < -8 or int(tables.max()) > 7):
        raise QuantFormatError(f"group tables run from {tables.min()} to {tables.max()}; a nibble holds -8..7")
    kind = np.uint16 if tables.shape[-1] == 4 else np.uint32
    word = np.zeros(tables.shape[:-1], kind)
    for i in range(tables.shape[-1]):
        nibbles: np.ndarray = (tables[..., i] & 15).astype(kind)
        word |= np.left_shift(nibbles, kind(4 * i))
    return word


def column_sources(packed: PackedTensor) -> np.ndarray:
    """[Kp] int32 source column of each padded column in plain order, -1 for none."""
    if packed.format.columns:
        return packed.section("columns")
    columns = np.arange(packed.padded_columns, dtype=np.int32)
    columns[packed.shape[1] :] = -1
    return columns


def integer_values(packed: PackedTensor) -> np.ndarray:
    """[N, Kp] float32: value(code) - zero, before the scale."""
    n = packed.shape[0]
    codes = unpack_codes(packed.section("codes"), packed.format.bits, n, packed.format.group_size)
    group = packed.format.group_size
    if packed.format.table == "group":
        words = np.repeat(from_groups(packed.section("group_tables"), n).astype(np.uint32), group, axis=1)
        values = (((words >> (4 * codes.astype(np.uint32))) & 15) ^ 8).astype(np.float32) - 8
    else:
        values = packed.values.astype(np.float32)[codes]
    if packed.format.zero_points:
        values -= np.repeat(from_groups(packed.section("zeros"), n).astype(np.float32), group, axis=1)
    return values


def scale_values(packed: PackedTensor) -> np.ndarray:
    """[N, Kp / group] float32 scales, the power of two included."""
    stored = from_groups(packed.section("scales"), packed.shape[0]).astype(np.float32)
    return np.ldexp(stored, packed.exponent).astype(np.float32)


def dequantize(packed: PackedTensor) -> np.ndarray:
    """[N, K] float32: the weights, in the order of the source's columns."""
    weights = integer_values(packed) * np.repeat(scale_values(packed), packed.format.group_size, axis=1)
    sources = column_sources(packed)
    out = np.zeros(packed.shape, np.float32)
    out[:, sources[sources >= 0]] = weights[:, sources >= 0]
    return out
