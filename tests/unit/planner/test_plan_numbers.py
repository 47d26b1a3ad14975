"""The numbers the plan must reach, and lines checked by hand against the published sizes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from agens_planner import ModelShapes, PlanOptions, PlanRefused, Profile, load_profile, plan
from agens_planner.units import GIB

FULL = 262_144


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("images", [False, True])
def test_16gb_reaches_the_full_context_below_15_5_gib(
    shapes: ModelShapes, profile16: Profile, mtp: bool, images: bool
) -> None:
    found = plan(shapes, profile16, options=PlanOptions(drafter=True, mtp=mtp, images=images))
    assert found.context_tokens == FULL
    assert found.planned_peak_bytes <= 15.5 * GIB
    assert found.cap_bytes == 16 * GIB
    assert found.choice.chunk_tokens >= 1024
    names = {line.name for line in found.lines}
    assert {"drafter.weights", "drafter.context", "drafter.scratch", "host.codebooks"} <= names
    assert ("mtp.weights" in names) == mtp
    assert ("vision.scratch" in names) == images


def test_16gb_keeps_16_bit_kv_at_the_full_context(shapes: ModelShapes, profile16: Profile) -> None:
    found = plan(shapes, profile16, options=PlanOptions(drafter=True, mtp=True, images=True))
    assert not found.choice.fp8_dense
    assert not found.choice.fp8_far


def test_24gb_holds_int4_with_everything(shapes_of: Callable[[str], ModelShapes]) -> None:
    profile = load_profile("24gb")
    everything = PlanOptions(drafter=True, mtp=True, images=True)
    one = plan(shapes_of("int4"), profile, options=everything)
    assert one.context_tokens == FULL
    assert one.planned_peak_bytes <= one.cap_bytes == 23 * GIB
    many = plan(
        shapes_of("int4"),
        profile,
        options=PlanOptions(context_tokens=65_536, sequences=None, drafter=True, mtp=True, images=True),
    )
    assert many.sequences >= 4


def test_12gb_plans_without_drafter_and_refuses_with_it(shapes: ModelShapes) -> None:
    profile = load_profile("12gb")
    found = plan(shapes, profile)
    assert not any(line.name.startswith("drafter") for line in found.lines)
    assert found.context_tokens >= 32_768
    with pytest.raises(PlanRefused) as refused:
        plan(shapes, profile, options=PlanOptions(drafter=True))
    assert refused.value.missing_bytes > 0
    assert "over the" in str(refused.value)
    assert refused.value.binding_line.startswith("weights.")


def test_lines_agree_with_the_published_sizes(shapes: ModelShapes, profile16: Profile) -> None:
    found = plan(shapes, profile16, options=PlanOptions(context_tokens=FULL, drafter=True, mtp=True))
    size = {line.name: line.bytes for line in found.lines}
    assert size["state.kda"] == 169_869_312
    assert size["state.conv"] == 3_317_760
    assert size["state.records"] == 54 * 8 * (10_240 * 2 + 6_144 * 4 + 48 * 4)
    paged = (FULL + 8 + 127) // 128 * 128  # positions of whole pages
    assert size["kv.dense"] == paged * 4_096
    assert size["kv.block_keys"] == paged * 1_088
    assert size["kv.window"] == 17 * (4_096 + found.choice.chunk_tokens) * 4_096
    assert size["drafter.context"] == (2_048 + 8 + 8 + 48) * 20_480
    assert size["host.embedding"] == 248_320 * 5_120 * 2
    assert size["host.engram_tables"] == 4_294_967_296
    assert size["host.codebooks"] == 2 * 248_320 * 256 * 2
    blocks = paged // 4
    hosted = 17 - found.choice.far_resident_layers
    assert size["host.far_pool"] == hosted * blocks * 4_096
    # 27,367,833,600 core weights at 2.82 bits plus one fp16 scale per 128: 10.08 GB
    packed = sum(bytes_ for name, bytes_ in size.items() if name.endswith(".w2_82"))
    assert packed == pytest.approx(27_367_833_600 * (2.82 + 16 / 128) / 8, abs=3)
    assert size["weights.head.w4"] == pytest.approx(0.6555e9, rel=1e-3)
    assert size["mtp.weights"] == pytest.approx(0.22e9, rel=0.02)
    assert size["mtp.context"] == pytest.approx(0.07e9, rel=0.05)
    assert size["logits.verify"] == 8 * 248_320 * 4


def test_step_bytes_agree_with_the_bandwidth_budget(shapes: ModelShapes, profile16: Profile) -> None:
    """Target bytes of an 8-row step: 11.75 GB at 4K counted by hand; the plan adds logits and padding."""
    found = plan(shapes, profile16, options=PlanOptions(context_tokens=FULL, drafter=True))
    assert found.step_short.target_bytes == pytest.approx(11.75e9, rel=0.01)
    assert found.step.target_bytes > found.step_short.target_bytes
    assert found.step.bytes_read == sum(found.step.lines.values())
    assert found.step_short.bus_bytes < found.step.bus_bytes


def test_bf16_build_is_refused_and_named(shapes_of: Callable[[str], ModelShapes], profile16: Profile) -> None:
    with pytest.raises(PlanRefused) as refused:
        plan(shapes_of("bf16"), profile16)
    assert refused.value.binding_line == "weights.mlp.bf16"


def test_a_plan_is_quick(shapes: ModelShapes, profile16: Profile) -> None:
    times = []
    for _ in range(5):
        start = time.process_time()  # not the wall clock: a busy machine must not fail this
        plan(shapes, profile16, options=PlanOptions(drafter=True, mtp=True, images=True))
        times.append(time.process_time() - start)
    assert min(times) < 0.05


def test_card_adds_up_to_the_published_totals(shapes: ModelShapes) -> None:
    assert shapes.parameters == 32_688_700_242
    assert shapes.vision is not None and shapes.vision.parameters == 460_730_096
    assert shapes.drafter is not None and shapes.mtp is not None
    drafter = sum(g.parameters for g in shapes.drafter.groups + shapes.drafter.codebooks)
    assert drafter == 1_924_404_480
    assert sum(g.count for g in shapes.drafter.groups + shapes.drafter.codebooks) == 81
    assert sum(g.parameters for g in shapes.mtp.groups) == 424_699_392
    assert sum(g.count for g in shapes.mtp.groups) == 15
    assert (shapes.dims.kda_layers, shapes.dims.bcsa_layers, shapes.dims.attn_layers) == (54, 17, 1)
    assert (shapes.dims.index_heads, shapes.dims.index_dim) == (4, 128)


@pytest.mark.parametrize("parts", [{}, {"images": True}, {"mtp": True}, {"images": True, "mtp": True}])
def test_the_bus_takes_at_most_a_twentieth_of_a_step_at_219k(
    shapes: ModelShapes, profile16: Profile, parts: dict[str, bool]
) -> None:
    """PCIe 4.0 x16, the assumed hit rate of the hot cache; every host layer's selected blocks are counted."""
    options = PlanOptions(context_tokens=219 * 1024, drafter=True, **parts)
    found = plan(shapes, profile16, options=options)
    far, hosted = found.step.far, 17 - found.choice.far_resident_layers
    assert (far.hit_rate, far.hit_source) == (0.9, "assumed")
    assert far.selected_bytes == hosted * 1000 * (2_048 if found.choice.fp8_far else 4_096)
    assert far.missed_bytes == pytest.approx(far.selected_bytes / 10, abs=1)
    assert found.step.bus_bytes > far.missed_bytes
    card = found.roofline["RTX 4080 SUPER"]
    assert card.bus_seconds == found.step.bus_bytes / 24.7e9
    assert 0 < card.bus_share <= 0.05
    shown = found.to_json()
    assert shown["roofline"]["RTX 4080 SUPER"]["bus_share"] == card.bus_share
    assert shown["step"]["far_pool"] == {
        "selected_bytes": far.selected_bytes,
        "missed_bytes": far.missed_bytes,
        "hit_rate": 0.9,
        "hit_rate_source": "assumed",
    }


def test_a_measured_hit_rate_replaces_the_assumed_one(shapes: ModelShapes, profile16: Profile) -> None:
    """Without any hit the same step is well over the twentieth, so the figure above can fail."""
    worst = profile16.replace(hot_hit_percent=0, far_resident_layers=0)
    found = plan(shapes, worst, options=PlanOptions(context_tokens=219 * 1024))
    assert found.step.far.missed_bytes == found.step.far.selected_bytes == 17 * 1000 * 4_096
    assert found.step.far.hit_source == "profile"
    assert found.roofline["RTX 4080 SUPER"].bus_share > 0.05
    best = plan(shapes, worst.replace(hot_hit_percent=100), options=PlanOptions(context_tokens=219 * 1024))
    assert best.step.far.missed_bytes == 0 and best.step.bytes_read > found.step.bytes_read
