"""Weights whose size in the device layout is known exactly: lines, storage names, the CPU's scratch for them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from agens_planner import MemoryPlan, ModelShapes, Profile, TensorSpec, plan, read_checkpoint, with_packed
from agens_planner.shapes import MtpShapes, WeightGroup
from agens_planner.weight_lines import group_formula

GATE = "model.layers.{}.mlp.gate_proj.weight"


@pytest.fixture
def golden() -> ModelShapes:
    return read_checkpoint(Path(__file__).parents[2] / "data" / "golden")


def planned(shapes: ModelShapes, **changes: object) -> MemoryPlan:
    profile = Profile(device="cpu", dtype="float32", context_tokens=256, head_bits=16).replace(**changes)
    return plan(shapes, profile)


def specs(shapes: ModelShapes, sizes: list[tuple[int, int]]) -> list[TensorSpec]:
    """Gate projections of the first layers as (bits, bytes)."""
    shape = (shapes.dims.intermediate, shapes.dims.hidden)
    return [TensorSpec(GATE.format(i), shape, Fraction(b), 128, False, size) for i, (b, size) in enumerate(sizes)]


def test_lines_hold_the_stated_bytes_and_the_rest_is_plain(golden: ModelShapes) -> None:
    plain = planned(with_packed(golden))
    packed = planned(with_packed(golden, specs(golden, [(2, 1000), (3, 1500), (2, 1100)])), weight_bits="3")
    one = 4 * golden.dims.intermediate * golden.dims.hidden
    assert packed.bytes_of("weights.mlp.w2") == 2100  # the profile's average does not overrule what was looked at
    assert packed.bytes_of("weights.mlp.w3") == 1500
    assert packed.bytes_of("weights.mlp.fp32") == plain.bytes_of("weights.mlp.fp32") - 3 * one
    assert packed.packed_weights and not plain.packed_weights
    assert packed.bytes_of("runtime.unpack") > 0 == plain.bytes_of("runtime.unpack")
    assert with_packed(golden).parameters == golden.parameters


def test_drafters_of_a_quantised_checkpoint_are_unpacked_too(golden: ModelShapes) -> None:
    group = WeightGroup("linear", (8, 16), 2, Fraction(4), 8, True)
    mtp = MtpShapes(1, 16, 32, 2, 1, 8, (group,))
    unpacked = with_packed(replace(golden, mtp=mtp)).mtp
    assert unpacked is not None and unpacked.groups == (WeightGroup("linear", (8, 16), 2),)
    assert with_packed(replace(golden, mtp=None)).mtp is None


def test_a_known_size_beats_the_formula() -> None:
    group = WeightGroup("mlp", (100, 200), 3, Fraction(2), 128, packed_bytes=777)
    assert group_formula(group, Fraction(2), 4).value == 3 * 777
    assert group_formula(group, None, 4).value == 3 * 100 * 200 * 4
