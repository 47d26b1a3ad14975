"""agens_quant.format: sizes, alignment, and the bytes the docstring promises for single weights."""

from __future__ import annotations

import numpy as np
import pytest

from agens_quant.compressed_tensors import QuantFormatError
from agens_quant.format import ALIGNMENT, DeviceFormat, PackedTensor, empty_blob, padded, slot_order
from agens_quant.pack import pack_codes

FORMATS = [
    DeviceFormat(2, 128, "int8"),
    DeviceFormat(3, 64, "float16", zero_points=True),
    DeviceFormat(4, 32, "none", "float32", columns=True),
    DeviceFormat(2, 128, "group", zero_points=True, columns=True),
    DeviceFormat(3, 128, "group"),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_sections_are_aligned_disjoint_and_fill_the_blob(fmt: DeviceFormat) -> None:
    for n, kp in ((1, 256), (128, 512), (129, 768)):
        end = 0
        for section in fmt.sections(n, kp).values():
            assert section.offset % ALIGNMENT == 0
            assert end <= section.offset < end + ALIGNMENT
            end = section.offset + section.nbytes
        assert fmt.nbytes(n, kp) == padded(end, ALIGNMENT)


@pytest.mark.parametrize(
    ("fmt", "bits_per_weight"),
    [
        (DeviceFormat(2, 128, "int8"), 2.125),
        (DeviceFormat(3, 128, "int8"), 3.125),
        (DeviceFormat(4, 128), 4.125),
        (DeviceFormat(4, 64), 4.25),
        (DeviceFormat(4, 128, zero_points=True), 4.1875),
        (DeviceFormat(2, 128, "group"), 2.25),
        (DeviceFormat(3, 128, "group"), 3.375),
        (DeviceFormat(4, 128, scale_type="float32"), 4.25),
    ],
    ids=str,
)
def test_bits_of_a_weight_count_everything(fmt: DeviceFormat, bits_per_weight: float) -> None:
    n, k = 5120, 17408
    tensor = PackedTensor((n, k), k, fmt, 0, empty_blob(fmt.nbytes(n, k)))
    assert tensor.bits_per_weight == pytest.approx(bits_per_weight, abs=1e-4)
    assert tensor.bits_per_weight * n * k == 8 * tensor.blob.size


def test_padding_counts_too() -> None:
    fmt = DeviceFormat(2, 128, "int8")
    tensor = PackedTensor((1, 1), 256, fmt, 0, empty_blob(fmt.nbytes(1, 256)))
    assert tensor.bits_per_weight == 8 * (8192 + 512 + 256)


@pytest.mark.parametrize("group", [128, 64, 32])
def test_slot_order_is_a_permutation_that_keeps_groups_together(group: int) -> None:
    order = slot_order(512, group)
    assert sorted(order.tolist()) == list(range(512))
    for start in range(0, 512, group):
        assert set((order[start : start + group] // group).tolist()) == {start // group}


def one_weight(bits: int, column: int, code: int, row: int = 3, group: int = 128) -> dict[int, int]:
    """Byte position in the tile -> value, of a tile with a single non-zero code."""
    codes = np.zeros((128, 256), np.uint8)
    codes[row, column] = code
    tile = pack_codes(codes, bits, group)[0, 0]
    return {int(i): int(tile[i]) for i in np.nonzero(tile)[0]}


def test_single_weights_stand_where_the_docstring_says() -> None:
    plane, row = 4096, 3 * 32
    # column 64 h + 2 e + j of a slab is element e of slot 2 h + j
    assert one_weight(2, 2 * 5, 3) == {row + 5: 0b11}  # slot 0
    assert one_weight(2, 2 * 5 + 1, 2) == {row + 5: 0b1000}  # slot 1
    assert one_weight(2, 64 + 2 * 31 + 1, 1) == {row + 31: 0b01000000}  # slot 3
    assert one_weight(2, 128 + 64, 3) == {plane + row: 0b00110000}  # slab 1, slot 2
    assert one_weight(3, 2 * 7, 5) == {row + 7: 0b01, 2 * plane + row + 7: 1 << 0}
    assert one_weight(3, 64 + 2 * 7 + 1, 4) == {2 * plane + row + 7: 1 << 5}  # slab 0, slot 3: 1 + 4
    assert one_weight(3, 128 + 2 * 7 + 1, 4) == {2 * plane + row + 7: 1 << 3}  # slab 1, slot 1: 1 + 2
    assert one_weight(4, 2 * 9, 11) == {row + 9: 11}
    assert one_weight(4, 2 * 9 + 1, 11) == {row + 9: 11 << 4}
    assert one_weight(4, 64 + 1, 5) == {plane + row: 5 << 4}
    assert one_weight(4, 128 + 64, 5) == {3 * plane + row: 5}
    # groups of 32: slots hold plain runs
    assert one_weight(2, 33, 3, group=32) == {row + 1: 0b1100}


def test_an_int4_container_has_the_same_bytes() -> None:
    """Nibbles of a 4-bit container need not move: only the code's sign bit flips."""
    from agens_quant.compressed_tensors import pack_codes as pack_container

    codes = np.random.default_rng(0).integers(0, 16, (128, 256), dtype=np.uint8)
    stored = pack_container(codes, 4).view(np.uint8).reshape(128, 4, 32).transpose(1, 0, 2)
    assert np.array_equal(pack_codes(codes, 4)[0, 0].reshape(4, 128, 32), stored)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 5},
        {"bits": 4, "group_size": 16},
        {"bits": 2},
        {"bits": 3, "table": "none"},
        {"bits": 4, "table": "group"},
        {"bits": 2, "table": "int4"},
        {"bits": 4, "scale_type": "bfloat16"},
    ],
)
def test_what_the_layout_does_not_have_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(QuantFormatError):
        DeviceFormat(**wrong)  # type: ignore[arg-type]


def test_wrong_sizes_are_refused() -> None:
    fmt = DeviceFormat(4)
    with pytest.raises(QuantFormatError, match="256s"):
        fmt.nbytes(1, 100)
    with pytest.raises(QuantFormatError, match="takes 16896 bytes"):
        PackedTensor((1, 1), 256, fmt, 0, empty_blob(256))
    with pytest.raises(QuantFormatError, match="do not fit"):
        PackedTensor((1, 300), 256, fmt, 0, empty_blob(fmt.nbytes(1, 256)))


def test_blobs_start_aligned() -> None:
    for size in (1, 100, 4096):
        blob = empty_blob(size)
        assert blob.ctypes.data % 64 == 0 and blob.shape == (size,) and not blob.any()
