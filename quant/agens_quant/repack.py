"""From compressed-tensors containers to the device layout, codes to codes: no weight becomes a float on the way.

    parts of one linear ──► scales, zero points by device group ──► set of codes ──► blocks of 128 rows ──► PackedTensor
                              (groups of any size, g_idx)            2, 3 or 4 bits    on all cores

Two ways through a block: 4-bit containers whose columns stay in order go from packed words to packed planes by copies
and logic on whole words (fast); everything else unpacks its codes first (plain). Both are tested against pack.py.
Scratch is 1 to 2 MiB a thread, whatever the tensor's size; the result is one blob, or the caller's buffer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from agens_quant import bit_planes, code_sets, pack
from agens_quant.columns import ColumnPlan, plan_columns
from agens_quant.compressed_tensors import (
    Encoding,
    PackedLayout,
    QuantFormatError,
    group_of_column,
    resolve_encoding,
    unpack_codes,
    unpack_zero_points,
)
from agens_quant.format import (
    SLOT,
    TILE_COLUMNS,
    TILE_ROWS,
    DeviceFormat,
    PackedTensor,
    Table,
    empty_blob,
)

_FAST_TILES = 40  # column tiles of a row block handled at once: 640 KiB of container; fewer cost more calls than cache
Allocate = Callable[[int], np.ndarray]


@dataclass(frozen=True)
class _Source:
    """A linear's parts, checked, as numpy."""

    layout: PackedLayout
    words: np.ndarray  # [N, W] uint32
    encoding: Encoding
    columns: ColumnPlan
    scales: np.ndarray  # [N, Kp / group] float32
    zeros: np.ndarray | None  # [N, Kp / group] int8, minus the centre

    @property
    def centre(self) -> int:
        return 1 << (self.layout.bits - 1)

    @property
    def whole_words(self) -> bool:
        """4-bit codes in their own order, no unused nibble: the words can be read as they are."""
        return self.layout.bits == 4 and self.layout.in_features % 8 == 0 and self.columns.sources is None

    @property
    def straight(self) -> bool:
        """The container's bytes are the layout's bytes but for the codes they hold (not in groups of 32)."""
        return self.whole_words and self.columns.group_size > SLOT


def repack_tensor(
    layout: PackedLayout, parts: Mapping[str, Tensor], *, workers: int | None = None, allocate: Allocate = empty_blob
) -> PackedTensor:
    """Repack one quantised linear, losslessly, to the fewest bits its codes allow.

    parts     tensors by suffix: weight_packed, weight_scale, optionally weight_zero_point and weight_g_idx
    workers   threads; None is one a core. The result does not depend on it
    allocate  gives the blob's uint8 buffer for a number of bytes (an arena's, say)
    returns   a tensor whose dequantize() equals compressed_tensors.dequantize() bit for bit
    raises    QuantFormatError: wrong dtypes or shapes, scales that are not finite;
              NotPackableError: 8-bit codes with over 16 values
    """
    source = _read(layout, parts)
    bits, mask, masks = _find_set(source)
    if masks is not None:
        return _pack(source, bits, "group", allocate, workers, _GroupBlocks(source, masks, bits))
    if layout.bits == 8:
        values = _distinct(source)
        blocks: _Blocks = _PlainBlocks(source, bits, values)
        return _pack(source, bits, "int8", allocate, workers, blocks, table=_filled(values, bits, source.centre))
    if source.straight:
        try:
            table = None if bits == 4 else code_sets.table_of(mask, bits)
            kind: Table = "none" if bits == 4 else "int8"
            return _pack(source, bits, kind, allocate, workers, _FastBlocks(source, bits, mask), table=table)
        except _CodeOutsideSetError:  # the sample was too kind: look at everything
            full = code_sets.tensor_mask(source.words)
            return _pack_by_mask(source, full, allocate, workers)
    if source.whole_words:
        mask = code_sets.tensor_mask(source.words)  # it was a guess from a sample
    return _pack_by_mask(source, mask, allocate, workers)


def device_format(layout: PackedLayout, parts: Mapping[str, Tensor]) -> tuple[DeviceFormat, int]:
    """What repack_tensor would make of these parts, (format, padded columns), without making it; raises the same.

    An ordinary 4-bit tensor is known from a few rows; a narrower one is read once.
    """
    source = _read(layout, parts)
    bits, mask, masks = _find_set(source)
    kind: Table = "group" if masks is not None else "int8"
    if masks is None and layout.bits != 8:
        if source.whole_words and bits < 4:
            mask = code_sets.tensor_mask(source.words)  # it was a guess from a sample
        bits = min(code_sets.choose_bits(mask), layout.bits)
        kind = "none" if bits == 4 else "int8"
    return _format_of(source, bits, kind)[0], source.columns.padded_columns


def repack_stream(
    sources: Iterable[tuple[str, PackedLayout, Callable[[], Mapping[str, Tensor]]]],
    *,
    workers: int | None = None,
    allocate: Allocate = empty_blob,
) -> Iterator[tuple[str, PackedTensor]]:
    """Repack linears one after another; each is loaded when its turn comes and let go before the next.

    sources   (name, layout, loader of its parts)
    raises    QuantFormatError with the tensor's name
    """
    for name, layout, load in sources:
        try:
            packed = repack_tensor(layout, load(), workers=workers, allocate=allocate)
        except QuantFormatError as e:
            raise QuantFormatError(f"{name}: {e}") from e
        yield name, packed


class NotPackableError(QuantFormatError):
    """A sound tensor that the device layout cannot hold; it has to be kept some other way."""


class _CodeOutsideSetError(Exception):
    """A block holds a code that the sampled set does not have."""


def _read(layout: PackedLayout, parts: Mapping[str, Tensor]) -> _Source:
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype != torch.int32:
        raise QuantFormatError(f"weight_packed is {packed.dtype}; expected torch.int32")
    if not scale.is_floating_point():
        raise QuantFormatError(f"weight_scale is {scale.dtype}; expected bfloat16, float16 or float32")
    words = packed.contiguous().numpy()
    encoding = resolve_encoding(words, layout)
    n = layout.out_features
    scales = scale.float().reshape(n, layout.num_groups).numpy()
    if not np.isfinite(scales).all():
        row, group = (int(i[0]) for i in np.nonzero(~np.isfinite(scales)))
        raise QuantFormatError(f"weight_scale holds {scales[row, group]} at row {row}, group {group}")
    of_column = group_of_column(layout, parts.get("weight_g_idx")).numpy()
    columns = plan_columns(layout.in_features, layout.group_size, of_column)
    zeros = None
    if (stored := parts.get("weight_zero_point")) is not None:
        codes = unpack_zero_points(layout, stored, encoding).numpy()
        centred = (codes - float(1 << (layout.bits - 1))).astype(np.int8)
        zeros = _by_device_group(centred, columns) if centred.any() else None
    return _Source(layout, words.view(np.uint32), encoding, columns, _by_device_group(scales, columns), zeros)


def _by_device_group(per_group: np.ndarray, columns: ColumnPlan) -> np.ndarray:
    """[N, G] -> [N, Kp / group], zero where a device group has no source."""
    if np.array_equal(columns.group_of, np.arange(per_group.shape[1])):
        return per_group
    taken = np.ascontiguousarray(per_group[:, np.maximum(columns.group_of, 0)])
    taken[:, columns.group_of < 0] = 0
    return taken


def _find_set(source: _Source) -> tuple[int, int, np.ndarray | None]:
    """(bits, mask of the tensor's codes or a guess from a sample, sets by row and device group when those decide)."""
    if source.layout.bits == 8:
        return (2 if (d := len(_distinct(source))) <= 4 else 3 if d <= 8 else 4), 0, None
    if not source.whole_words:
        mask = 0
        for rows in _row_blocks(source):
            for code in np.unique(_codes(source, rows)):
                mask |= 1 << int(code)
        return min(code_sets.choose_bits(mask), source.layout.bits), mask, None
    sample = code_sets.sample_rows(source.words)
    mask = code_sets.tensor_mask(sample)
    if (bits := code_sets.choose_bits(mask)) < 4:
        return bits, mask, None
    group_words = source.columns.group_size // 8
    if source.words.shape[1] % group_words:
        return 4, mask, None
    groups = source.words.shape[1] // group_words
    most = 8 if source.columns.group_size > 32 else 4  # eight nibbles for 32 codes would be a whole bit a weight
    if int(code_sets.popcounts()[code_sets.group_masks(sample, groups)].max()) > most:
        return 4, mask, None
    masks = np.concatenate([code_sets.group_masks(source.words[rows], groups) for rows in _row_blocks(source)])
    widest = int(code_sets.popcounts()[masks].max())
    if widest > most:
        return 4, mask, None
    return (2 if widest <= 4 else 3), mask, masks


def _row_blocks(source: _Source) -> list[slice]:
    n = source.layout.out_features
    return [slice(start, min(start + TILE_ROWS, n)) for start in range(0, n, TILE_ROWS)]


def _codes(source: _Source, rows: slice) -> np.ndarray:
    """[rows, K] uint8 codes of the container."""
    words = source.words[rows].view(np.int32)
    return unpack_codes(words, source.layout.bits, source.layout.in_features, source.encoding)


def _distinct(source: _Source) -> list[int]:
    """The distinct codes of an 8-bit container; at most 16, or it is no low-bit tensor."""
    found: set[int] = set()
    for rows in _row_blocks(source):
        found.update(np.unique(_codes(source, rows)).tolist())
        if len(found) > 16:
            raise NotPackableError(
                f"8-bit codes with {len(found)} or more distinct values; the device layout holds 16, keep it as it is"
            )
    return sorted(found)


def _filled(codes: list[int], bits: int, centre: int) -> np.ndarray:
    values = [c - centre for c in codes]
    return np.array(values + values[-1:] * ((1 << bits) - len(values)), np.int8)


def _pack_by_mask(source: _Source, mask: int, allocate: Allocate, workers: int | None) -> PackedTensor:
    bits = min(code_sets.choose_bits(mask), source.layout.bits)
    if bits == 4:
        blocks: _Blocks = _FastBlocks(source, 4, mask) if source.straight else _PlainBlocks(source, 4, None)
        return _pack(source, 4, "none", allocate, workers, blocks)
    codes = code_sets.codes_of(mask)
    blocks = _FastBlocks(source, bits, mask) if source.straight else _PlainBlocks(source, bits, codes)
    return _pack(source, bits, "int8", allocate, workers, blocks, table=_filled(codes, bits, source.centre))


class _Blocks:
    """How 128 rows of codes are written; `write` is called once per row tile, from several threads."""

    def write(self, rows: slice, target: np.ndarray) -> None:
        raise NotImplementedError

    def finish(self, out: PackedTensor) -> None:
        """Sections beside codes, scales and zeros."""


def _format_of(source: _Source, bits: int, table_kind: Table) -> tuple[DeviceFormat, int]:
    """The format and the exponent of the scales."""
    columns = source.columns
    scale_type, exponent = pack.fit_scales(source.scales)
    zeros, reordered = source.zeros is not None, columns.sources is not None
    return DeviceFormat(bits, columns.group_size, table_kind, scale_type, zeros, reordered), exponent


def _pack(
    source: _Source,
    bits: int,
    table_kind: Table,
    allocate: Allocate,
    workers: int | None,
    blocks: _Blocks,
    table: np.ndarray | None = None,
) -> PackedTensor:
    layout, columns = source.layout, source.columns
    fmt, exponent = _format_of(source, bits, table_kind)
    n, kp = layout.out_features, columns.padded_columns
    out = PackedTensor((n, layout.in_features), kp, fmt, exponent, allocate(fmt.nbytes(n, kp)))
    codes = out.section("codes")
    jobs = list(enumerate(_row_blocks(source)))
    threads = min(len(jobs), workers or os.cpu_count() or 1)
    if threads == 1:
        for tile, rows in jobs:
            blocks.write(rows, codes[tile])
    else:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(blocks.write, rows, codes[tile]) for tile, rows in jobs]:
                done.result()
    pack.write_scales(out, source.scales)
    if source.zeros is not None:
        out.section("zeros")[...] = pack.to_groups(source.zeros, fmt.group_size, kp)
    if table is not None:
        out.section("table")[...] = table
    if columns.sources is not None:
        out.section("columns")[...] = columns.sources
    blocks.finish(out)
    return out


class _PlainBlocks(_Blocks):
    """Unpack, reorder columns, index the set, pack: any container."""

    def __init__(self, source: _Source, bits: int, codes: list[int] | None) -> None:
        self.source, self.bits = source, bits
        size = 1 << source.layout.bits
        if codes is None:  # two's complement nibbles
            self.index = (np.arange(size) ^ 8).astype(np.uint8)
        else:
            self.index = np.zeros(size, np.uint8)
            self.index[codes] = np.arange(len(codes))

    def arranged(self, rows: slice) -> np.ndarray:
        """[128, Kp] codes of the container in padded order, 0 in the padding."""
        found, plan = _codes(self.source, rows), self.source.columns
        whole = np.zeros((TILE_ROWS, plan.padded_columns), np.uint8)
        if plan.sources is None:
            whole[: found.shape[0], : found.shape[1]] = found
        else:
            real = plan.sources >= 0
            whole[: found.shape[0], real] = found[:, plan.sources[real]]
        return whole

    def write(self, rows: slice, target: np.ndarray) -> None:
        target[...] = pack.pack_codes(self.index[self.arranged(rows)], self.bits, self.source.columns.group_size)[0]


class _GroupBlocks(_PlainBlocks):
    """A table per row and group: a code's index is its rank in the group's own set."""

    def __init__(self, source: _Source, masks: np.ndarray, bits: int) -> None:
        super().__init__(source, bits, None)
        groups = source.columns.padded_columns // source.columns.group_size
        self.masks = np.ones((masks.shape[0], groups), np.uint16)  # padding groups hold code 0 only
        self.masks[:, : masks.shape[1]] = masks

    def write(self, rows: slice, target: np.ndarray) -> None:
        codes = self.arranged(rows)
        masks = np.ones((TILE_ROWS, self.masks.shape[1]), np.uint16)
        masks[: rows.stop - rows.start] = self.masks[rows]
        below = (np.left_shift(np.uint16(1), codes.astype(np.uint16)) - np.uint16(1)).astype(np.uint16)
        ranks = code_sets.popcounts()[np.repeat(masks, self.source.columns.group_size, axis=1) & below]
        # padding inside a group holds code 0, which the group's set may lack; its rank 0 is as good as any
        target[...] = pack.pack_codes(ranks, self.bits, self.source.columns.group_size)[0]

    def finish(self, out: PackedTensor) -> None:
        unique, inverse = np.unique(self.masks, return_inverse=True)
        tables = np.stack([code_sets.table_of(int(mask), self.bits) for mask in unique])
        words = pack.nibbles(tables)[inverse.reshape(self.masks.shape)]
        fmt = out.format
        out.section("group_tables")[...] = pack.to_groups(words, fmt.group_size, out.padded_columns)


class _FastBlocks(_Blocks):
    """Packed words to packed planes. Byte j of a half's 32 bytes holds columns 2 j and 2 j + 1: the layout's element j.

    The half-rows of 32 bytes are brought into plane order first; what follows runs over long contiguous stretches.
    """

    def __init__(self, source: _Source, bits: int, mask: int) -> None:
        self.words = source.words
        self.column_tiles = source.columns.padded_columns // TILE_COLUMNS
        filler = 8 if bits == 4 else code_sets.codes_of(mask)[0]
        self.filler = np.uint32(filler * 0x11111111)
        self.circuit = None if bits == 4 else bit_planes.circuit_of(mask, bits)
        self.local = threading.local()

    def write(self, rows: slice, target: np.ndarray) -> None:
        # A plain read in order: it brings the rows into the cache at twice the speed of the gather's strides.
        np.bitwise_or.reduce(self.words[rows], axis=None)
        step = self._step()
        for first in range(0, self.column_tiles, step):
            tiles = min(step, self.column_tiles - first)
            out = target[first : first + tiles]
            if self.circuit is None:
                self._gather(rows, first, tiles, out, halves_first=False)
                words = out.view(np.uint64)
                np.bitwise_xor(words, np.uint64(0x8888888888888888), out=words)
                continue
            registers = self._registers(tiles, bit_planes.scratch_registers(self.circuit))
            self._gather(rows, first, tiles, registers[:4], halves_first=True)
            if not bit_planes.compact(registers, self.circuit, out.view(np.uint64).reshape(tiles, -1, 512)):
                raise _CodeOutsideSetError

    def _step(self) -> int:
        """Column tiles at once: at most _FAST_TILES, in blocks of nearly equal size."""
        return -(-self.column_tiles // -(-self.column_tiles // _FAST_TILES))

    def _registers(self, tiles: int, count: int) -> np.ndarray:
        """[count, tiles, 512] uint64, kept by each thread: fresh pages would cost as much as the work."""
        if not hasattr(self.local, "buffer"):
            self.local.buffer = np.empty(count * self._step() * 512, np.uint64)
        buffer: np.ndarray = self.local.buffer
        return buffer[: count * tiles * 512].reshape(count, tiles, 512)

    def _gather(self, rows: slice, first: int, tiles: int, out: np.ndarray, *, halves_first: bool) -> None:
        """Half-rows of 32 bytes (64 columns) to [tile, half, row] or [half, tile, row], a valid code in the padding."""
        begin, end = first * (TILE_COLUMNS // 8), (first + tiles) * (TILE_COLUMNS // 8)
        width = self.words.shape[1]
        if rows.stop - rows.start == TILE_ROWS and end <= width and width % 8 == 0:
            half_rows = self.words[rows].reshape(-1)[begin:].view("V32")
        else:
            taken = self.words[rows, begin:end]
            whole = np.full((TILE_ROWS, end - begin), self.filler)
            whole[: taken.shape[0], : taken.shape[1]] = taken
            half_rows, width = whole.reshape(-1).view("V32"), end - begin
        # "clip" because the checking mode would go through another buffer; the index is in range by construction
        np.take(half_rows, _gather_index(width // 8, tiles, halves_first), out=out.reshape(-1).view("V32"), mode="clip")


@cache
def _gather_index(row: int, tiles: int, halves_first: bool) -> np.ndarray:
    """Where the half-rows of a block lie, `row` of them in a row of the source, in the order they are wanted."""
    order = np.arange(TILE_ROWS) * row + np.arange(tiles)[:, None, None] * 4 + np.arange(4)[:, None]
    return (order.transpose(1, 0, 2) if halves_first else order).reshape(-1)
