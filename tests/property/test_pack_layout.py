"""Packing is exact for every shape: round trips of the layout, and container -> device -> weights bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agens_quant import pack
from agens_quant.compressed_tensors import Encoding
from agens_quant.format import GROUP_SIZES
from agens_quant.repack import repack_tensor
from tests.quantkit import linear_of, random_codes

SEEDS = st.integers(0, 2**32 - 1)


def round_trip(seed: int, n: int, tiles: int, bits: int, group: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (n, 256 * tiles), dtype=np.uint8)
    packed = pack.pack_codes(codes, bits, group)
    assert packed.shape == (-(-n // 128), tiles, 4096 * (4 if bits == 4 else bits))
    assert np.array_equal(pack.unpack_codes(packed, bits, n, group), codes)


LAYOUTS: dict[str, Any] = {
    "seed": SEEDS,
    "n": st.integers(1, 140),
    "tiles": st.integers(1, 2),
    "bits": st.sampled_from((2, 3, 4)),
    "group": st.sampled_from(GROUP_SIZES),
}


@given(**LAYOUTS)
@settings(max_examples=150)
def test_codes_survive_the_layout(seed: int, n: int, tiles: int, bits: int, group: int) -> None:
    round_trip(seed, n, tiles, bits, group)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute on a quiet core, many on a shared one
@given(**LAYOUTS)
@settings(max_examples=5_000)
def test_codes_survive_the_layout_many(seed: int, n: int, tiles: int, bits: int, group: int) -> None:
    round_trip(seed, n, tiles, bits, group)


@st.composite
def containers(draw: st.DrawFn) -> dict[str, Any]:
    bits = draw(st.sampled_from((4, 4, 4, 3, 2)))
    k = draw(st.one_of(st.integers(1, 70), st.integers(1, 40).map(lambda i: 8 * i), st.sampled_from((256, 384, 520))))
    group = draw(st.sampled_from([g for g in (16, 20, 32, 48, 64, 100, 128, 256) if k % g == 0] + [k]))
    return {
        "seed": draw(SEEDS),
        "n": draw(st.one_of(st.integers(1, 12), st.sampled_from((127, 128, 129)))),
        "k": k,
        "bits": bits,
        "group": group,
        "encoding": draw(st.sampled_from(("padded", "dense"))),
        "zeros": draw(st.booleans()),
        "g_idx": draw(st.booleans()),
        "allowed": draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=1, max_size=16, unique=True)),
        "per_group": draw(st.sampled_from((0, 0, 2, 4, 7))),
    }


def container_to_device(case: dict[str, Any]) -> None:
    encoding: Encoding = case["encoding"]
    codes = random_codes(case["n"], case["k"], case["allowed"], case["seed"])
    if case["per_group"] and case["bits"] == 4:
        rng = np.random.default_rng(case["seed"])
        width, groups = case["per_group"], case["k"] // case["group"]
        base = np.repeat(rng.integers(0, 17 - width, (case["n"], groups)), case["group"], axis=1)
        codes = (base + rng.integers(0, width, base.shape)).astype(np.uint8)
    options = {name: case[name] for name in ("bits", "group", "zeros", "g_idx", "seed")}
    linear = linear_of(codes, encoding=encoding, **options)
    packed = repack_tensor(linear.layout, linear.parts, workers=1)
    assert np.array_equal(pack.dequantize(packed), linear.decoded())
    if linear.layout.encoding is None:  # too few columns to tell the encodings apart: other codes may have been read
        return
    distinct = len(np.unique(codes))
    if distinct <= 4:
        assert packed.format.bits == 2
    elif distinct <= 8:
        assert packed.format.bits <= 3


@given(case=containers())
@settings(max_examples=150)
def test_containers_decode_to_the_same_floats(case: dict[str, Any]) -> None:
    container_to_device(case)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute on a quiet core, many on a shared one
@given(case=containers())
@settings(max_examples=5_000)
def test_containers_decode_to_the_same_floats_many(case: dict[str, Any]) -> None:
    container_to_device(case)
