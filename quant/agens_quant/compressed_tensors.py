"""The compressed-tensors "pack-quantized" layout: pack and unpack side by side, and the decode to float weights.

Bits of one row (spec volundr-weights.md, section 3; low bits first, unsigned codes, code = q + 2**(bits-1)):

    4 bits, 8 values a word     |31  v7  28|27  v6  24| ... |7  v1  4|3  v0  0|
    3 bits, padded              |31 30 unused|29  v9  27| ... |5  v1  3|2  v0  0|      10 values a word
    3 bits, dense               32 values in 3 words, values 10 and 21 straddle a word border

Value j starts at bit j * bits of its period in both encodings; they differ only in the period (10 values in 1 word
against 32 values in 3 words). For 2, 4 and 8 bits they are the same thing.

Weights     w[r, c] = (code[r, c] - zero[r, g]) * scale[r, g],   g = c // group_size, or g_idx[c] when it is given;
            zero is 2**(bits-1) when symmetric. Zero points are packed along the OUTPUT dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Encoding = Literal["padded", "dense"]
ENCODINGS: tuple[Encoding, ...] = ("padded", "dense")
SUPPORTED_BITS = (4, 8, 2, 3)  # in the order of preference when a packed width fits several
PART_SUFFIXES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
_CHUNK_ELEMENTS = 1 << 22  # rows are decoded in pieces of about this many weights, to keep temporaries small


class QuantFormatError(ValueError):
    """A packed tensor does not follow the layout; the message has the numbers, the caller adds the tensor's name."""


def period(bits: int, encoding: Encoding) -> tuple[int, int]:
    """Values and words after which the bit pattern repeats."""
    if bits not in SUPPORTED_BITS:
        raise QuantFormatError(f"{bits} bits per weight; supported are {sorted(SUPPORTED_BITS)}")
    if encoding == "padded":
        return 32 // bits, 1
    common = math.lcm(bits, 32)
    return common // bits, common // 32


def packed_width(columns: int, bits: int, encoding: Encoding) -> int:
    """int32 words that hold `columns` codes."""
    return -(-columns // (32 // bits)) if encoding == "padded" else -(-columns * bits // 32)


def pack_codes(codes: np.ndarray, bits: int, encoding: Encoding = "padded") -> np.ndarray:
    """Pack unsigned codes along the last axis; unpack_codes is the exact inverse.

    codes    [N, K] unsigned or non-negative integers below 2**bits
    returns  [N, packed_width(K)] int32, unused bits zero
    raises   QuantFormatError when a code does not fit
    """
    values, words = period(bits, encoding)
    n, k = codes.shape
    if codes.size and (int(codes.min()) < 0 or int(codes.max()) >= 1 << bits):
        raise QuantFormatError(f"codes run from {codes.min()} to {codes.max()}; {bits} bits hold 0..{(1 << bits) - 1}")
    num_periods = -(-k // values)
    padded = np.zeros((n, num_periods * values), dtype=np.uint32)
    padded[:, :k] = codes
    packed = np.zeros((n, num_periods * words), dtype=np.uint32)
    for j in range(values):
        word, shift = divmod(j * bits, 32)
        column = padded[:, j::values]
        packed[:, word::words] |= column << np.uint32(shift)
        if shift + bits > 32:
            packed[:, word + 1 :: words] |= column >> np.uint32(32 - shift)
    return np.ascontiguousarray(packed[:, : packed_width(k, bits, encoding)]).view(np.int32)


def unpack_codes(packed: np.ndarray, bits: int, columns: int, encoding: Encoding = "padded") -> np.ndarray:
    """The codes of pack_codes.

    packed   [N, packed_width(columns)] int32
    returns  [N, columns] uint8
    raises   QuantFormatError when the width is another one
    """
    values, words = period(bits, encoding)
    expected = packed_width(columns, bits, encoding)
    if packed.ndim != 2 or packed.shape[1] != expected:
        raise QuantFormatError(f"packed shape {packed.shape}; {columns} columns of {bits} bits take {expected} words")
    n = packed.shape[0]
    num_periods = -(-columns // values)
    source = np.zeros((n, num_periods * words), dtype=np.uint32)
    source[:, :expected] = packed.view(np.uint32) if packed.dtype == np.int32 else packed
    mask = np.uint32((1 << bits) - 1)
    codes = np.empty((n, num_periods * values), dtype=np.uint8)
    for j in range(values):
        word, shift = divmod(j * bits, 32)
        column = source[:, word::words] >> np.uint32(shift)
        if shift + bits > 32:
            column |= source[:, word + 1 :: words] << np.uint32(32 - shift)
        codes[:, j::values] = column & mask
    return codes[:, :columns]


@dataclass(frozen=True)
class PackedLayout:
    """How one quantised linear is stored, as far as shapes tell.

    encoding is None where both encodings give the same width but not the same bits (3 bits, few columns); the unused
    top bits of the words decide when the data is read.
    """

    out_features: int
    in_features: int
    bits: int
    encoding: Encoding | None
    num_groups: int
    group_size: int
    zero_points: bool = False
    g_idx: bool = False

    def __str__(self) -> str:
        group = "channel" if self.num_groups == 1 else f"g{self.group_size}"
        extras = (" zero points" if self.zero_points else "") + (" g_idx" if self.g_idx else "")
        return f"int{self.bits} {group}{extras}"


def infer_layout(
    weight_shape: tuple[int, ...],
    part_shapes: Mapping[str, tuple[int, ...]],
    *,
    bits_hint: int | None = None,
    group_size_hint: int | None = None,
) -> PackedLayout:
    """Read the layout off the shapes; hints from config.json only settle what the shapes leave open.

    weight_shape   contents of X.weight_shape: (out, in)
    part_shapes    shapes by suffix (PART_SUFFIXES); weight_packed and weight_scale are required
    raises         QuantFormatError with the shape that does not fit
    """
    if len(weight_shape) != 2 or min(weight_shape) < 1:
        raise QuantFormatError(f"weight_shape says {list(weight_shape)}; two positive numbers (out, in) are expected")
    n, k = weight_shape
    packed = part_shapes["weight_packed"]
    if len(packed) != 2 or packed[0] != n:
        raise QuantFormatError(f"weight_packed is {list(packed)}, weight_shape says {n} rows")
    fits = [(b, e) for b in SUPPORTED_BITS for e in ENCODINGS if packed_width(k, b, e) == packed[1]]
    if not fits:
        raise QuantFormatError(
            f"weight_packed has {packed[1]} words a row, weight_shape {k} columns: "
            f"that is none of {sorted(SUPPORTED_BITS)} bits"
        )
    # The width rules: low-bit builds keep their values in 4-bit containers whatever config.json calls them.
    bits = bits_hint if any(b == bits_hint for b, _ in fits) else fits[0][0]
    assert bits is not None
    encodings = [e for b, e in fits if b == bits]

    groups, group_size = _groups(part_shapes["weight_scale"], n, k, group_size_hint)
    zero_shape, idx_shape = part_shapes.get("weight_zero_point"), part_shapes.get("weight_g_idx")
    if zero_shape is not None:
        allowed = {(packed_width(n, bits, e), groups) for e in ENCODINGS}
        if zero_shape not in allowed:
            raise QuantFormatError(f"weight_zero_point is {list(zero_shape)}; expected {_options(allowed)}")
    if idx_shape is not None and idx_shape != (k,):
        raise QuantFormatError(f"weight_g_idx is {list(idx_shape)}; expected [{k}]")
    return PackedLayout(
        out_features=n,
        in_features=k,
        bits=bits,
        encoding=_same_bits(encodings, k, bits),
        num_groups=groups,
        group_size=group_size,
        zero_points=zero_shape is not None,
        g_idx=idx_shape is not None,
    )


def _options(shapes: set[tuple[int, int]]) -> str:
    return " or ".join(str(list(s)) for s in sorted(shapes))


def _same_bits(encodings: list[Encoding], columns: int, bits: int) -> Encoding | None:
    """The encoding, or None when two remain whose bits differ (a value would straddle the first word border)."""
    if len(encodings) == 1:
        return encodings[0]
    return "padded" if 32 % bits == 0 or columns <= 32 // bits else None


def _groups(scale_shape: tuple[int, ...], n: int, k: int, hint: int | None) -> tuple[int, int]:
    """(number of groups, columns per group); a [N] scale is one group, the channel strategy."""
    if not (scale_shape == (n,) or (len(scale_shape) == 2 and scale_shape[0] == n and scale_shape[1] >= 1)):
        raise QuantFormatError(f"weight_scale is {list(scale_shape)}; expected [{n}, in / group_size]")
    groups = 1 if len(scale_shape) == 1 else scale_shape[1]
    if hint is not None and hint > 0 and -(-k // hint) == groups:
        return groups, hint
    if k % groups:
        raise QuantFormatError(f"weight_scale has {groups} columns, which do not divide the {k} input columns")
    return groups, k // groups


def resolve_encoding(packed: np.ndarray, layout: PackedLayout) -> Encoding:
    """Settle an open encoding by the data: padded words leave their top bits zero, dense words use them.

    raises  QuantFormatError when words known to be padded use those bits: they are damaged
    """
    used = (32 // layout.bits) * layout.bits
    if layout.encoding == "dense" or used == 32:
        return layout.encoding or "padded"
    stray = packed.view(np.uint32) >> np.uint32(used)
    if layout.encoding is None:
        return "dense" if np.any(stray) else "padded"
    if np.any(stray):
        row, word = (int(i[0]) for i in np.nonzero(stray))
        raise QuantFormatError(f"weight_packed is corrupt: row {row}, word {word} has bits set above its {used}")
    return layout.encoding


def dequantize(
    layout: PackedLayout,
    packed: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    g_idx: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode one linear; the arithmetic is float32 whatever `dtype` it is stored to.

    packed      [N, words] int32
    scale       [N, G] bf16, fp16 or fp32; finite, negative is legal
    zero_point  [words over N, G] int32, packed along N
    g_idx       [K] integer; all -1 counts as absent
    returns     [N, K] dtype
    raises      QuantFormatError: another dtype, a scale that is not finite, a group index out of range
    """
    n, k, bits = layout.out_features, layout.in_features, layout.bits
    if packed.dtype != torch.int32:
        raise QuantFormatError(f"weight_packed is {packed.dtype}; expected torch.int32")
    if not scale.is_floating_point():
        raise QuantFormatError(f"weight_scale is {scale.dtype}; expected bfloat16, float16 or float32")
    scales = scale.float().reshape(n, layout.num_groups)
    if not bool(torch.isfinite(scales).all()):
        row, group = (int(i) for i in torch.nonzero(~torch.isfinite(scales))[0])
        raise QuantFormatError(f"weight_scale holds {float(scales[row, group])} at row {row}, group {group}")

    words = packed.contiguous().numpy()
    encoding = resolve_encoding(words, layout)
    zeros = torch.full((1, 1), float(1 << (bits - 1)))
    if zero_point is not None:
        zeros = unpack_zero_points(layout, zero_point, encoding)
    group_of = group_of_column(layout, g_idx)

    out = torch.empty(n, k, dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        codes = torch.from_numpy(unpack_codes(words[rows], bits, k, encoding)).float()
        codes -= zeros[rows].index_select(1, group_of) if zero_point is not None else zeros
        codes *= scales[rows].index_select(1, group_of)
        out[rows] = codes
    return out


def unpack_zero_points(layout: PackedLayout, zero_point: Tensor, encoding: Encoding) -> Tensor:
    """[N, G] float32 codes; the packing runs down the output dimension, so unpack the transpose."""
    if zero_point.dtype != torch.int32:
        raise QuantFormatError(f"weight_zero_point is {zero_point.dtype}; expected torch.int32 (packed)")
    n, bits = layout.out_features, layout.bits
    columns_first = zero_point.t().contiguous().numpy()  # [G, words]
    if columns_first.shape[1] != packed_width(n, bits, encoding):
        encoding = "dense" if encoding == "padded" else "padded"
    return torch.from_numpy(unpack_codes(columns_first, bits, n, encoding)).t().float().contiguous()


def group_of_column(layout: PackedLayout, g_idx: Tensor | None) -> Tensor:
    """[K] int64 group of each input column."""
    if g_idx is None or bool((g_idx == -1).all()):
        return torch.arange(layout.in_features) // layout.group_size
    if g_idx.is_floating_point() or int(g_idx.min()) < 0 or int(g_idx.max()) >= layout.num_groups:
        raise QuantFormatError(
            f"weight_g_idx runs from {g_idx.min().item()} to {g_idx.max().item()}; there are {layout.num_groups} groups"
        )
    return g_idx.long()
