"""agens_quant.repack: every kind of container keeps its weights in the fewest bits; bad ones are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agens_quant import code_sets, pack, repack
from agens_quant.compressed_tensors import QuantFormatError
from agens_quant.format import empty_blob
from tests.quantkit import Linear, linear_of, random_codes


def check(linear: Linear) -> str:
    packed = repack.repack_tensor(linear.layout, linear.parts, workers=1)
    assert np.array_equal(pack.dequantize(packed), linear.decoded())
    return str(packed.format)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (range(16), "int4 g128"),
        (range(4, 12), "int3 g128 int8"),
        ((0, 2, 3, 5, 9, 11, 14), "int3 g128 int8"),
        ((6, 7, 8, 9), "int2 g128 int8"),
        ((1, 4, 9, 15), "int2 g128 int8"),
        ((8,), "int2 g128 int8"),
    ],
)
def test_the_set_of_codes_decides(allowed: range, expected: str) -> None:
    for n, k in ((130, 512), (64, 1000), (3, 2560)):
        assert check(linear_of(random_codes(n, k, allowed))) == expected


def test_a_rare_code_outside_the_sample_is_not_lost() -> None:
    codes = random_codes(1000, 256, (6, 7, 8, 9))
    codes[999, 255] = 3
    assert check(linear_of(codes)) == "int3 g128 int8"
    codes[998, :16] = np.arange(16)
    assert check(linear_of(codes)) == "int4 g128"


def test_sets_per_group_are_used_where_they_pay() -> None:
    rng = np.random.default_rng(0)
    for width, group, expected in ((4, 128, "int2 g128 group"), (8, 64, "int3 g64 group"), (8, 32, "int4 g32")):
        base = np.repeat(rng.integers(0, 17 - width, (140, 512 // group)), group, axis=1)
        codes = (base + rng.integers(0, width, base.shape)).astype(np.uint8)
        assert check(linear_of(codes, group=group)) == expected
        check(linear_of(codes, group=group, zeros=True))


def test_containers_of_other_widths() -> None:
    assert check(linear_of(random_codes(20, 130, range(4)), bits=2, group=130)) == "int2 g128 int8"
    for encoding in ("padded", "dense"):
        for count, expected in ((8, "int3 g128 int8"), (4, "int2 g128 int8")):
            linear = linear_of(random_codes(20, 256, range(count)), bits=3, encoding=encoding)  # type: ignore[arg-type]
            assert check(linear) == expected
    assert check(linear_of(random_codes(20, 256, (0, 100, 128, 255)), bits=8)) == "int2 g128 int8"
    assert check(linear_of(random_codes(20, 256, range(120, 136)), bits=8, zeros=True)) == "int4 g128 int8 zeros"
    with pytest.raises(QuantFormatError, match="distinct values"):
        check(linear_of(random_codes(20, 256, range(17)), bits=8))


def test_activation_order_keeps_every_column() -> None:
    assert check(linear_of(random_codes(10, 512, range(16)), g_idx=True)) == "int4 g128 columns"
    assert check(linear_of(random_codes(10, 300, range(4)), group=100, g_idx=True, zeros=True)).endswith("columns")


def test_an_ignorable_g_idx_costs_nothing() -> None:
    linear = linear_of(random_codes(10, 512, range(16)))
    for g_idx in (torch.full((512,), -1, dtype=torch.int32), torch.arange(512, dtype=torch.int32) // 128):
        packed = repack.repack_tensor(linear.layout, {**linear.parts, "weight_g_idx": g_idx}, workers=1)
        assert str(packed.format) == "int4 g128"


def test_zero_points_at_the_centre_are_dropped() -> None:
    linear = linear_of(random_codes(16, 256, range(16)))
    zeros = torch.full((2, 2), int(np.uint32(0x88888888).view(np.int32)), dtype=torch.int32)
    packed = repack.repack_tensor(linear.layout, {**linear.parts, "weight_zero_point": zeros}, workers=1)
    assert not packed.format.zero_points
    assert np.array_equal(pack.dequantize(packed), linear.decoded())


def test_fp32_scales_that_need_it_are_kept() -> None:
    linear = linear_of(random_codes(8, 256, range(16)), scale_dtype=torch.float32)
    packed = repack.repack_tensor(linear.layout, linear.parts, workers=1)
    assert packed.format.scale_type == "float32"
    assert np.array_equal(pack.dequantize(packed), linear.decoded())


def test_threads_and_the_callers_buffer_change_nothing() -> None:
    linear = linear_of(random_codes(700, 1000, range(5)))
    alone = repack.repack_tensor(linear.layout, linear.parts, workers=1)
    buffers: list[np.ndarray] = []

    def allocate(nbytes: int) -> np.ndarray:
        buffers.append(empty_blob(nbytes + 512)[256 : 256 + nbytes])
        buffers[-1][...] = 0xAB  # an arena's memory is not zero
        return buffers[-1]

    together = repack.repack_tensor(linear.layout, linear.parts, workers=3, allocate=allocate)
    assert together.blob is buffers[0]
    for name in alone.format.sections(700, alone.padded_columns):
        assert np.array_equal(alone.section(name), together.section(name)), name


def test_a_stream_loads_one_tensor_at_a_time_and_names_the_bad_one() -> None:
    good = linear_of(random_codes(4, 128, range(4)))
    loaded: list[str] = []

    def loader(name: str, parts: dict[str, torch.Tensor]):  # type: ignore[no-untyped-def]
        def load() -> dict[str, torch.Tensor]:
            loaded.append(name)
            return parts

        return load

    bad = {**good.parts, "weight_scale": torch.full((4, 1), float("nan"))}
    stream = repack.repack_stream(
        [("a", good.layout, loader("a", good.parts)), ("b", good.layout, loader("b", bad))], workers=1
    )
    name, packed = next(stream)
    assert (name, loaded) == ("a", ["a"])
    assert np.array_equal(pack.dequantize(packed), good.decoded())
    with pytest.raises(QuantFormatError, match="b: weight_scale holds nan at row 0, group 0"):
        next(stream)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("weight_packed", torch.zeros(4, 16, dtype=torch.int64), "int64"),
        ("weight_scale", torch.zeros(4, 1, dtype=torch.int32), "int32"),
        ("weight_scale", torch.full((4, 1), float("inf")), "inf"),
        ("weight_g_idx", torch.full((128,), 7, dtype=torch.int32), "groups"),
        ("weight_zero_point", torch.zeros(1, 1), "float32"),
    ],
)
def test_bad_parts_are_refused(part: str, value: torch.Tensor, message: str) -> None:
    linear = linear_of(random_codes(4, 128, range(16)))
    with pytest.raises(QuantFormatError, match=message):
        repack.repack_tensor(linear.layout, {**linear.parts, part: value}, workers=1)


def test_masks_see_exactly_the_codes_that_occur() -> None:
    codes = random_codes(40, 256, range(16), seed=5)
    codes[:, 128:] = 7
    words = linear_of(codes).parts["weight_packed"].numpy().view(np.uint32)
    masks = code_sets.group_masks(words, 2)
    for row in range(40):
        assert code_sets.codes_of(int(masks[row, 0])) == sorted(set(codes[row, :128].tolist()))
        assert int(masks[row, 1]) == 1 << 7
    assert code_sets.tensor_mask(words) == int(np.bitwise_or.reduce(masks, axis=None))
