"""agens_quant.pack: assemble and dequantize against the formula, scales kept exactly, bad input refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agens_quant import pack
from agens_quant.compressed_tensors import QuantFormatError


def parts(n: int = 5, kp: int = 256, bits: int = 2, group: int = 128) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "codes": rng.integers(0, 1 << bits, (n, kp), dtype=np.uint8),
        "scales": rng.uniform(-1, 1, (n, kp // group)).astype(np.float16).astype(np.float32),
        "shape": (n, kp),
        "bits": bits,
        "group_size": group,
        "table": None if bits == 4 else rng.integers(-128, 128, 1 << bits).astype(np.int8),
    }


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [128, 64, 32])
@pytest.mark.parametrize("kind", ["int8", "float16", "group"])
def test_assembled_weights_follow_the_formula(bits: int, group: int, kind: str) -> None:
    if bits == 4 and kind == "group":
        pytest.skip("there are no 4-bit tables per group")
    rng = np.random.default_rng(2)
    n, k, kp = 131, 300, 512
    groups = kp // group
    given = parts(n, kp, bits, group) | {"shape": (n, k)}
    zeros = rng.integers(-8, 8, (n, groups))
    tables = rng.integers(-8, 8, (n, groups, 1 << bits)).astype(np.int8)
    given["table"] = None if kind == "group" else rng.normal(size=1 << bits).astype(np.float16)
    if kind == "int8":
        given["table"] = rng.integers(-128, 128, 1 << bits).astype(np.int8)
    tensor = pack.assemble(**given, zeros=zeros, group_tables=tables if kind == "group" else None)
    group_of = np.arange(kp) // group
    if kind == "group":
        values = np.take_along_axis(tables[:, group_of], given["codes"][..., None].astype(int), 2)[..., 0]
    else:
        values = given["table"][given["codes"]]
    expected = (values.astype(np.float32) - zeros[:, group_of]) * given["scales"][:, group_of]
    assert np.array_equal(pack.dequantize(tensor), expected.astype(np.float32)[:, :k])


def test_without_a_table_four_bits_are_twos_complement() -> None:
    given = parts(bits=4)
    given["codes"][0, :16] = np.arange(16)
    weights = pack.dequantize(pack.assemble(**given))
    expected = [*range(8), *range(-8, 0)]
    assert (weights[0, :16] / given["scales"][0, 0]).tolist() == expected


def test_columns_go_back_to_their_places() -> None:
    given = parts(3, 256, 4) | {"shape": (3, 200)}
    columns = np.full(256, -1, np.int32)
    columns[50:250] = np.random.default_rng(3).permutation(200)
    plain = pack.dequantize(pack.assemble(**(given | {"shape": (3, 256)})))
    moved = pack.dequantize(pack.assemble(**given, columns=columns))
    assert np.array_equal(moved[:, columns[50:250]], plain[:, 50:250])


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ([1.0, -0.5, 0.0], ("float16", 0)),
        ([0.0, 0.0], ("float16", 0)),
        ([2.0**-30, 2.0**-20], ("float16", -35)),
        ([65504.0], ("float16", 0)),
        ([2.0**20], ("float16", 5)),
        ([1.0 + 2.0**-7, 2.0**-16 * (1 + 2.0**-7)], ("float16", -15)),
        ([1.0 + 2.0**-12], ("float32", 0)),
        ([2.0**15, 2.0**-30], ("float32", 0)),
        ([3.4e38, 1e-38], ("float32", 0)),
    ],
)
def test_scales_are_stored_without_loss(scales: list[float], expected: tuple[str, int]) -> None:
    array = np.array(scales, np.float32)
    kind, exponent = pack.fit_scales(array)
    stored = np.ldexp(array, -exponent).astype(kind)
    assert np.array_equal(np.ldexp(stored.astype(np.float32), exponent), array)
    assert (kind, exponent) == expected
    assert np.isfinite(stored).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": np.full((5, 256), 4, np.uint8)}, r"2 bits hold 0\.\.3"),
        ({"codes": np.zeros((5, 200), np.uint8)}, "columns come in 256s"),
        ({"scales": np.full((5, 2), np.nan, np.float32)}, "nan"),
        ({"scales": np.full((5, 2), np.inf, np.float32)}, "inf"),
        ({"table": None}, "does not exist at 2 bits"),
        ({"table": np.zeros(4, np.float32)}, "float32"),
        ({"group_size": 100}, "groups of 100"),
        ({"zeros": np.full((5, 2), 128)}, r"-128\.\.127"),
        ({"group_tables": np.full((5, 2, 4), 8, np.int8), "table": None}, "nibble"),
        ({"shape": (5, 257)}, "do not fit"),
    ],
)
def test_bad_parts_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantFormatError, match=message):
        pack.assemble(**(parts() | change))


def test_group_arrangement_is_its_own_inverse() -> None:
    values = np.random.default_rng(4).normal(size=(130, 7)).astype(np.float32)
    tiles = pack.to_groups(values, 64, 512)
    assert tiles.shape == (2, 2, 4, 128)
    back = pack.from_groups(tiles, 130)
    assert np.array_equal(back[:, :7], values) and not back[:, 7:].any()
