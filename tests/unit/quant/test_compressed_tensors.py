"""agens_quant.compressed_tensors: the bit layout against an independent one-bit-at-a-time packer, and the decode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from agens_quant.compressed_tensors import (
    ENCODINGS,
    SUPPORTED_BITS,
    Encoding,
    PackedLayout,
    QuantFormatError,
    dequantize,
    infer_layout,
    pack_codes,
    packed_width,
    unpack_codes,
)

BITS = st.sampled_from(SUPPORTED_BITS)
ENCODING = st.sampled_from(ENCODINGS)


def pack_bit_by_bit(codes: np.ndarray, bits: int, encoding: Encoding) -> list[list[int]]:
    """The spec's sentence as Python integers: one long number a row (dense), or one number a word (padded)."""
    rows = []
    for row in codes.tolist():
        if encoding == "dense":
            number = sum(code << (bits * i) for i, code in enumerate(row))
            words = [(number >> (32 * w)) & 0xFFFFFFFF for w in range(-(-len(row) * bits // 32))]
        else:
            per_word = 32 // bits
            pieces = [row[i : i + per_word] for i in range(0, len(row), per_word)]
            words = [sum(code << (bits * i) for i, code in enumerate(piece)) for piece in pieces]
        rows.append(words)
    return rows


def random_codes(seed: int, n: int, k: int, bits: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, (n, k), dtype=np.uint8)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 200), BITS, ENCODING)
def test_pack_and_unpack_are_inverse_and_follow_the_layout(
    seed: int, n: int, k: int, bits: int, encoding: Encoding
) -> None:
    codes = random_codes(seed, n, k, bits)
    packed = pack_codes(codes, bits, encoding)
    assert packed.dtype == np.int32
    assert packed.shape == (n, packed_width(k, bits, encoding))
    assert packed.view(np.uint32).tolist() == pack_bit_by_bit(codes, bits, encoding)
    assert np.array_equal(unpack_codes(packed, bits, k, encoding), codes)


def test_vector_of_the_specification() -> None:
    codes = np.array([[0, 1, 8, 9, 15, 7, 3, 12]], dtype=np.uint8)
    packed = pack_codes(codes, 4)
    assert packed.tolist() == [[-1015048176]]
    assert packed.view(np.uint32).tolist() == [[0xC37F9810]]
    layout = infer_layout((1, 8), {"weight_packed": (1, 1), "weight_scale": (1, 1)})
    weights = dequantize(layout, torch.from_numpy(packed), torch.tensor([[0.5]]))
    assert weights.tolist() == [[-4.0, -3.5, 0.0, 0.5, 3.5, -0.5, -2.5, 2.0]]


@pytest.mark.parametrize("bad", [-1, 16])
def test_a_code_that_does_not_fit_is_refused(bad: int) -> None:
    with pytest.raises(QuantFormatError, match=r"4 bits hold 0\.\.15"):
        pack_codes(np.array([[0, bad]]), 4)


def test_other_widths_are_refused() -> None:
    with pytest.raises(QuantFormatError, match="5 bits per weight"):
        pack_codes(np.zeros((1, 8), np.uint8), 5)
    with pytest.raises(QuantFormatError, match="take 2 words"):
        unpack_codes(np.zeros((1, 3), np.int32), 4, 16)


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 40),
    groups=st.integers(1, 5),
    group_size=st.integers(1, 40),
    bits=BITS,
    encoding=ENCODING,
    zero_points=st.booleans(),
    g_idx=st.booleans(),
    scale_dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_decode_equals_the_formula(
    seed: int,
    n: int,
    groups: int,
    group_size: int,
    bits: int,
    encoding: Encoding,
    zero_points: bool,
    g_idx: bool,
    scale_dtype: torch.dtype,
) -> None:
    k = groups * group_size
    rng = np.random.default_rng(seed)
    codes = random_codes(seed, n, k, bits)
    scale = torch.from_numpy(rng.normal(size=(n, groups))).to(scale_dtype)  # negative ones among them
    zeros = random_codes(seed + 1, n, groups, bits) if zero_points else np.full((n, groups), 1 << (bits - 1))
    group_of = rng.integers(0, groups, k) if g_idx else np.arange(k) // group_size
    layout = PackedLayout(n, k, bits, encoding, groups, group_size, zero_points, g_idx)

    out = dequantize(
        layout,
        torch.from_numpy(pack_codes(codes, bits, encoding)),
        scale,
        torch.from_numpy(np.ascontiguousarray(pack_codes(zeros.T, bits, encoding).T)) if zero_points else None,
        torch.from_numpy(group_of).int() if g_idx else None,
    )

    expected = np.empty((n, k), dtype=np.float32)
    wide = scale.float().numpy()
    for r in range(n):
        for c in range(k):
            g = group_of[c]
            expected[r, c] = (np.float32(codes[r, c]) - np.float32(zeros[r, g])) * wide[r, g]
    assert out.dtype == torch.float32
    assert np.array_equal(out.numpy(), expected)  # one exact difference, one rounding: equal bit by bit


@given(st.integers(0, 2**32), st.integers(1, 300), BITS, ENCODING)
def test_shapes_give_back_bits_and_encoding(seed: int, k: int, bits: int, encoding: Encoding) -> None:
    assume(k > 32)  # below that a row is so short that widths coincide
    codes = random_codes(seed, 2, k, bits)
    codes[0, :] = (1 << bits) - 1  # so that dense words use the bits that padded ones leave empty
    packed = pack_codes(codes, bits, encoding)
    layout = infer_layout((2, k), {"weight_packed": packed.shape, "weight_scale": (2, 1)}, bits_hint=bits)
    assert layout.bits == bits
    out = dequantize(layout, torch.from_numpy(packed), torch.ones(2, 1))
    assert np.array_equal(out.numpy(), codes.astype(np.float32) - (1 << (bits - 1)))


def test_the_packed_width_overrules_the_stated_bits() -> None:
    """Low-bit builds keep 2- and 3-bit values in 4-bit containers, whatever num_bits says."""
    shapes = {"weight_packed": (4, 16), "weight_scale": (4, 1)}
    assert infer_layout((4, 128), shapes, bits_hint=3).bits == 4
    assert infer_layout((4, 128), shapes).bits == 4


@pytest.mark.parametrize(
    ("scale_shape", "hint", "expected"),
    [
        ((4, 2), None, (2, 128)),
        ((4, 8), 32, (8, 32)),
        ((4, 8), 128, (8, 32)),  # a wrong hint: the shape tells
        ((4, 1), 128, (1, 256)),  # channel
        ((4,), None, (1, 256)),
    ],
)
def test_group_size_comes_from_the_scale(
    scale_shape: tuple[int, ...], hint: int | None, expected: tuple[int, int]
) -> None:
    layout = infer_layout((4, 256), {"weight_packed": (4, 32), "weight_scale": scale_shape}, group_size_hint=hint)
    assert (layout.num_groups, layout.group_size) == expected


def test_a_ragged_last_group_needs_the_stated_group_size() -> None:
    shapes = {"weight_packed": (1, 38), "weight_scale": (1, 3)}  # 300 columns, the last word half empty
    layout = infer_layout((1, 300), shapes, group_size_hint=128)
    assert (layout.num_groups, layout.group_size) == (3, 128)
    scale = torch.tensor([[1.0, 10.0, 100.0]])
    out = dequantize(layout, torch.from_numpy(pack_codes(np.full((1, 300), 9), 4)), scale)
    assert out[0, [0, 127, 128, 255, 256, 299]].tolist() == [1, 1, 10, 10, 100, 100]


def test_layouts_name_themselves() -> None:
    assert str(infer_layout((8, 256), {"weight_packed": (8, 32), "weight_scale": (8, 2)})) == "int4 g128"
    assert str(PackedLayout(8, 256, 3, "dense", 1, 256, True, True)) == "int3 channel zero points g_idx"


@pytest.mark.parametrize(
    ("weight_shape", "changes", "message"),
    [
        ((4,), {}, "two positive numbers"),
        ((4, 0), {}, "two positive numbers"),
        ((5, 256), {}, "weight_shape says 5 rows"),
        ((4, 256), {"weight_packed": (4, 33)}, "none of"),
        ((4, 256), {"weight_packed": (128,)}, "weight_packed is"),
        ((4, 256), {"weight_scale": (2, 4)}, "weight_scale is"),
        ((4, 256), {"weight_scale": (4, 0)}, "weight_scale is"),
        ((4, 256), {"weight_scale": (4, 3)}, "do not divide"),
        ((4, 256), {"weight_zero_point": (4, 2)}, r"weight_zero_point is \[4, 2\]; expected \[1, 2\]"),
        ((4, 256), {"weight_g_idx": (255,)}, "weight_g_idx is"),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(
    weight_shape: tuple[int, ...], changes: dict[str, tuple[int, ...]], message: str
) -> None:
    shapes = {"weight_packed": (4, 32), "weight_scale": (4, 2)} | changes
    with pytest.raises(QuantFormatError, match=message):
        infer_layout(weight_shape, shapes)


class TestDequantizeRefuses:
    layout = PackedLayout(2, 16, 4, "padded", 2, 8)
    packed = torch.zeros(2, 2, dtype=torch.int32)
    scale = torch.ones(2, 2)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_scales_that_are_not_finite(self, bad: float) -> None:
        scale = self.scale.clone()
        scale[1, 0] = bad
        with pytest.raises(QuantFormatError, match="at row 1, group 0"):
            dequantize(self.layout, self.packed, scale)

    def test_other_dtypes(self) -> None:
        with pytest.raises(QuantFormatError, match=r"weight_packed is torch\.int64"):
            dequantize(self.layout, self.packed.long(), self.scale)
        with pytest.raises(QuantFormatError, match=r"weight_scale is torch\.uint8"):
            dequantize(self.layout, self.packed, self.scale.to(torch.uint8))
        with pytest.raises(QuantFormatError, match=r"weight_zero_point is torch\.int8"):
            dequantize(self.layout, self.packed, self.scale, torch.zeros(2, 2, dtype=torch.int8))

    @pytest.mark.parametrize("bad", [-2, 2])
    def test_a_group_index_out_of_range(self, bad: int) -> None:
        g_idx = torch.zeros(16, dtype=torch.int32)
        g_idx[3] = bad
        with pytest.raises(QuantFormatError, match="there are 2 groups"):
            dequantize(self.layout, self.packed, self.scale, g_idx=g_idx)

    def test_but_takes_an_unused_g_idx(self) -> None:
        plain = dequantize(self.layout, self.packed, self.scale)
        unused = dequantize(self.layout, self.packed, self.scale, g_idx=torch.full((16,), -1, dtype=torch.int32))
        assert torch.equal(plain, unused)


def test_decoding_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = random_codes(3, 17, 64, 4)
    layout = PackedLayout(17, 64, 4, "padded", 2, 32, zero_points=True)
    zeros = torch.from_numpy(pack_codes(random_codes(4, 2, 17, 4), 4).T.copy())
    parts = (torch.from_numpy(pack_codes(codes, 4)), torch.randn(17, 2), zeros)
    whole = dequantize(layout, *parts)
    monkeypatch.setattr("agens_quant.compressed_tensors._CHUNK_ELEMENTS", 64 * 3)
    assert torch.equal(dequantize(layout, *parts), whole)
    assert torch.equal(dequantize(layout, *parts, dtype=torch.bfloat16), whole.bfloat16())
