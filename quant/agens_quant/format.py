"""The device layout of low-bit weights: which bit is which weight, and how many bytes that takes.

A matrix [N, K] becomes one blob of sections, each starting at a multiple of 256 bytes, in this order:

    codes | scales | zeros? | group tables? | tensor table? | columns?

Tiles   Rows are padded to a multiple of 128, columns to a multiple of 256 (Kp). Tile (r, t) covers rows 128 r .. + 127
        and columns 256 t .. + 255; every section is [N/128][Kp/256][...], so a tile's bytes are consecutive and a
        kernel streams them. A tile has two slabs of 128 columns, a slab four slots of 32, a slot 32 elements.

Order   Column 64 h + 2 e + j of a slab (h, j in 0..1, e in 0..31) is element e of slot 2 h + j: even columns of the
        first half, odd ones, even ones of the second half, odd ones. 4-bit containers then repack without moving
        nibbles; the activations are brought into slot order once per step by whoever writes them for the kernel.
        Groups of 32 need a slot each, so there the order is plain: column 32 s + e of a slab is element e of slot s.

Codes   Planes of [128 rows][32 bytes]; byte e of a row belongs to element e of every slot it serves, so unpacking is
        the same few operations on each byte and no code straddles a byte.

    2 bits  planes: slab 0, slab 1                  |7 slot 3 6|5 slot 2 4|3 slot 1 2|1 slot 0 0|
    3 bits  the two planes above hold bits 0 and 1; a third plane, shared by both slabs, holds bit 2:
                bit of (slab a, slot s) = s % 2 + 2 a + 4 (s // 2)
            |7 a1 s3|6 a1 s2|5 a0 s3|4 a0 s2|3 a1 s1|2 a1 s0|1 a0 s1|0 a0 s0|
    4 bits  planes: slab 0 half 0, slab 0 half 1, slab 1 half 0, slab 1 half 1; half h has slots 2 h and 2 h + 1
            |7 slot 2 h + 1 4|3 slot 2 h 0|

Groups  Of 128, 64 or 32 columns, never crossing a slab. scales [..][256/group][128] fp16, or fp32 where fp16 times a
        power of two cannot hold them; zeros int8 and group tables alike.

Weight  w = (value(code) - zero) * float32(scale) * 2**exponent, in this order, in float32. The first factor is exact
        (integers), the last is exact (chosen so), hence one rounding, the same as the container's own decode.
        value, by `table`:
            none    4 bits only: two's complement, -8 .. 7
            int8    one table of 2**bits int8 entries for the tensor
            float16 the same with fp16 entries (decoded here; the int8 kernels refuse it)
            group   one table per row and group, signed nibbles, entry i at bits 4 i: uint16 at 2 bits, uint32 at 3

Columns int32 [Kp], only when columns were reordered (g_idx) or groups padded: the source column of each padded column
        in plain order, -1 for none. Where it is absent, padded column c is source column c, none from K on.

Padding codes 0, scales 0 on padded rows; padded columns meet an activation of zero.
Unknown No timing on a GPU stands behind the tile shape; compiled code does (scripts/compile_kernels.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from agens_quant.compressed_tensors import QuantFormatError

TILE_ROWS = 128
TILE_COLUMNS = 256
SLAB = 128
SLOT = 32
PLANE_BYTES = TILE_ROWS * SLOT
ALIGNMENT = 256
GROUP_SIZES = (128, 64, 32)
BITS = (2, 3, 4)

Table = Literal["none", "int8", "float16", "group"]
ScaleType = Literal["float16", "float32"]


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class DeviceFormat:
    """What the sections hold. raises QuantFormatError for a combination the layout does not have."""

    bits: int
    group_size: int = 128
    table: Table = "none"
    scale_type: ScaleType = "float16"
    zero_points: bool = False
    columns: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise QuantFormatError(f"{self.bits} bits per weight; the device layout has {list(BITS)}")
        if self.group_size not in GROUP_SIZES:
            raise QuantFormatError(f"groups of {self.group_size}; the device layout has {list(GROUP_SIZES)}")
        if self.table not in ("none", "int8", "float16", "group") or self.scale_type not in ("float16", "float32"):
            raise QuantFormatError(f"table {self.table!r}, scales {self.scale_type!r}: not in the device layout")
        if (self.table == "none") != (self.bits == 4) and self.table in ("none", "group"):
            raise QuantFormatError(f"table {self.table!r} does not exist at {self.bits} bits")

    def __str__(self) -> str:
        extras = [self.table] * (self.table != "none") + ["zeros"] * self.zero_points + ["columns"] * self.columns
        return " ".join([f"int{self.bits} g{self.group_size}", *extras])

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile's codes: 32 weights per plane byte column at 2 bits (8 KiB), 3 (12 KiB), 4 (16 KiB)."""
        return PLANE_BYTES * (4 if self.bits == 4 else self.bits)

    @property
    def groups_per_tile(self) -> int:
        return TILE_COLUMNS // self.group_size

    def sections(self, n: int, padded_columns: int) -> dict[str, Section]:
        """Name -> where it lies, for N rows (padded here) and Kp columns (a multiple of 256)."""
        if n < 1 or padded_columns < 1 or padded_columns % TILE_COLUMNS:
            raise QuantFormatError(f"{n} rows of {padded_columns} padded columns; columns come in {TILE_COLUMNS}s")
        tiles = (padded(n, TILE_ROWS) // TILE_ROWS, padded_columns // TILE_COLUMNS)
        groups = (*tiles, self.groups_per_tile, TILE_ROWS)
        wanted: list[tuple[str, str, tuple[int, ...]]] = [
            ("codes", "uint8", (*tiles, self.tile_bytes)),
            ("scales", self.scale_type, groups),
        ]
        if self.zero_points:
            wanted.append(("zeros", "int8", groups))
        if self.table == "group":
            wanted.append(("group_tables", "uint16" if self.bits == 2 else "uint32", groups))
        if self.table in ("int8", "float16"):
            wanted.append(("table", self.table, (1 << self.bits,)))
        if self.columns:
            wanted.append(("columns", "int32", (padded_columns,)))
        found: dict[str, Section] = {}
        offset = 0
        for name, dtype, shape in wanted:
            section = Section(offset, np.dtype(dtype), shape)
            found[name] = section
            offset = padded(section.offset + section.nbytes, ALIGNMENT)
        return found

    def nbytes(self, n: int, padded_columns: int) -> int:
        """Size of the blob, padding and alignment included."""
        last = list(self.sections(n, padded_columns).values())[-1]
        return padded(last.offset + last.nbytes, ALIGNMENT)


@dataclass(frozen=True)
class Section:
    """A typed array inside the blob; `offset` is a multiple of ALIGNMENT."""

    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def of(self, blob: np.ndarray) -> np.ndarray:
        """The section as a view of the blob."""
        return blob[self.offset : self.offset + self.nbytes].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class PackedTensor:
    """One matrix in the device layout.

    shape           (N, K) of the matrix it stands for
    padded_columns  Kp, a multiple of 256
    blob            uint8 [format.nbytes(N, Kp)], starting at a multiple of 64 bytes; may lie in a caller's buffer
    exponent        scales are stored divided by 2**exponent
    """

    shape: tuple[int, int]
    padded_columns: int
    format: DeviceFormat
    exponent: int
    blob: np.ndarray = field(repr=False)

    def __post_init__(self) -> None:
        n, k = self.shape
        if k > self.padded_columns:
            raise QuantFormatError(f"{k} columns do not fit in {self.padded_columns}")
        size = self.format.nbytes(n, self.padded_columns)
        if self.blob.dtype != np.uint8 or self.blob.shape != (size,):
            raise QuantFormatError(
                f"blob is {self.blob.dtype} {list(self.blob.shape)}; {self.format} takes {size} bytes"
            )

    def section(self, name: str) -> np.ndarray:
        """A section as a view; KeyError for one this format does not have."""
        return self.format.sections(self.shape[0], self.padded_columns)[name].of(self.blob)

    @property
    def nbytes(self) -> int:
        return self.blob.nbytes

    @property
    def bits_per_weight(self) -> float:
        """Bits of the whole blob (codes, scales, tables, padding) per weight of the matrix it stands for."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    @property
    def values(self) -> np.ndarray:
        """[2**bits] table of the tensor, int8 or float16; two's complement nibbles where none is stored."""
        if self.format.table == "group":
            raise QuantFormatError("tables per group: there is no single table")
        if self.format.table == "none":
            return np.array([*range(8), *range(-8, 0)], np.int8)
        return self.section("table")


def empty_blob(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] of zeros at a 64-byte aligned address."""
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def slot_order(padded_columns: int, group_size: int) -> np.ndarray:
    """[Kp] int32: the padded column (plain order) at each position of slot order (slab, slot, element)."""
    if group_size == SLOT:
        return np.arange(padded_columns, dtype=np.int32)
    slab, half, odd, element = np.ix_(range(padded_columns // SLAB), range(2), range(2), range(SLOT))
    return (slab * SLAB + 64 * half + 2 * element + odd).reshape(-1).astype(np.int32)
