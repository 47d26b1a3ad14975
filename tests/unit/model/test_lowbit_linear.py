"""LowbitLinear against the container's own decode, in every form the layout has, and its scratch against the plan's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agens_engine.model.lowbit_linear import LowbitLinear
from agens_planner.constants import REFERENCE_UNPACK_BYTES, REFERENCE_UNPACK_VALUES
from agens_quant.repack import device_format, repack_tensor
from tests.memorykit import peak_bytes
from tests.quantkit import Linear, linear_of, random_codes


def by_group(n: int, k: int, count: int) -> np.ndarray:
    """Codes with a set of `count` for each row and group of 128."""
    rng = np.random.default_rng(3)
    sets = np.argsort(rng.random((n, k // 128, 16)), axis=2)[:, :, :count]
    picks = rng.integers(0, count, (n, k // 128, 128))
    return np.take_along_axis(sets, picks, 2).reshape(n, k).astype(np.uint8)


# name -> (expected format, linear); ragged sizes, several pieces across and down
CASES: dict[str, tuple[str, Any]] = {
    "4 bits": ("int4 g128", lambda: linear_of(random_codes(300, 2304, range(16)))),
    "3 bits": ("int3 g128 int8", lambda: linear_of(random_codes(700, 1000, range(4, 11)))),
    "2 bits": ("int2 g64 int8", lambda: linear_of(random_codes(1, 320, (3, 7, 8)), group=64)),
    "zero points": ("int2 g32 int8 zeros", lambda: linear_of(random_codes(130, 96, range(4)), group=32, zeros=True)),
    "g_idx": ("int4 g32 zeros columns", lambda: linear_of(random_codes(257, 2500, range(16)), zeros=True, g_idx=True)),
    "groups of 100": ("int3 g128 int8 columns", lambda: linear_of(random_codes(40, 900, range(5)), group=100)),
    "fp32 scales": ("int4 g128", lambda: linear_of(random_codes(33, 512, range(16)), scale_dtype=torch.float32)),
    "2 bits by group": ("int2 g128 group", lambda: linear_of(by_group(200, 1024, 4))),
    "3 bits by group": ("int3 g128 group", lambda: linear_of(by_group(1100, 512, 8))),
}  # fmt: skip


def case(name: str) -> tuple[Linear, LowbitLinear]:
    expected, make = CASES[name]
    linear = make()
    packed = repack_tensor(linear.layout, linear.parts, workers=1)
    assert str(packed.format) == expected
    assert device_format(linear.layout, linear.parts) == (packed.format, packed.padded_columns)
    return linear, LowbitLinear(packed)


@pytest.mark.parametrize("name", CASES)
def test_products_equal_those_of_the_decoded_matrix(name: str) -> None:
    linear, lowbit = case(name)
    x = torch.randn(2, 5, linear.layout.in_features, generator=torch.Generator().manual_seed(1))
    exact = x.double() @ torch.from_numpy(linear.decoded()).double().T
    out = lowbit(x)
    assert out.shape == exact.shape and out.dtype == torch.float32
    # sums of up to 2,500 float32 products, in another order
    assert float((out - exact).abs().max()) <= 2e-6 * float(exact.abs().max()) * 8


@pytest.mark.parametrize("name", CASES)
def test_rows_are_bit_identical(name: str) -> None:
    linear, lowbit = case(name)
    n = linear.layout.out_features
    ids = torch.tensor([n - 1, 0, n // 2, n - 1])
    assert torch.equal(lowbit.rows(ids), torch.from_numpy(linear.decoded())[ids])


@pytest.mark.parametrize("name", CASES)
def test_scratch_is_what_the_plan_reserves(name: str) -> None:
    linear, lowbit = case(name)
    x = torch.randn(8, linear.layout.in_features)
    tiles = lowbit.codes.shape[0] * lowbit.codes.shape[1]
    piece = min(tiles * 128 * 256, REFERENCE_UNPACK_VALUES)
    columns = min(lowbit.codes.shape[1] * 256, REFERENCE_UNPACK_VALUES // 128)
    out = 4 * 8 * linear.layout.out_features
    reserved = piece * REFERENCE_UNPACK_BYTES + 8 * columns * 4
    assert piece * 8 < peak_bytes(lambda: lowbit(x)) <= reserved + out


def test_damage_shows() -> None:
    _, lowbit = case("3 bits")
    x = torch.randn(1, 1000, generator=torch.Generator().manual_seed(2))
    before = lowbit(x)
    lowbit.codes[0, 0, 17] ^= 0xFF
    assert int((lowbit(x) != before).sum()) == 1
