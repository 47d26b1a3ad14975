"""Properties of every plan: the cap holds, the search is exact and monotone, JSON repeats it, order does not matter."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agens_planner import (
    DeviceFacts,
    HostFacts,
    MemoryPlan,
    ModelShapes,
    PlanOptions,
    PlanRefused,
    Profile,
    plan,
)
from agens_planner.build import build_model
from agens_planner.card import read_card
from agens_planner.shapes import TensorSpec
from agens_planner.units import GIB, MIB, TIB

CARD = Path(__file__).resolve().parents[2] / "agens_engine" / "assets" / "volundr-32b"


@cache
def shapes_of(build: str) -> ModelShapes:
    return read_card(CARD, build)


SIZES = st.integers(0, 2 * GIB)
PROFILES = st.fixed_dictionaries(
    {
        "device": st.sampled_from(["cuda", "cuda", "cuda", "cpu"]),
        "dtype": st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"]),
        "cap_bytes": st.integers(9 * GIB, 40 * GIB),
        "cap_margin_bytes": st.integers(0, GIB),
        "headroom_bytes": SIZES,
        "display_reserve_bytes": SIZES,
        "host_bytes": st.none() | st.integers(8 * GIB, 64 * GIB),
        "host_headroom_bytes": SIZES,
        "pinned_bytes": st.none() | st.integers(0, 16 * GIB),
        "snapshot_bytes": SIZES,
        "load_buffer_bytes": SIZES,
        "page_tokens": st.sampled_from([16, 64, 256, 1000, 4096]),
        "chunk_tokens_max": st.sampled_from([256, 1024, 4096, 8192]),
        "chunk_tokens_min": st.sampled_from([16, 17, 100, 256]),
        "head_bits": st.sampled_from([4, 8, 16]),
        "drafter_bits": st.sampled_from([4, 8, 16]),
        "mtp_bits": st.sampled_from([4, 16]),
        "mtp_context_tokens": st.sampled_from([1024, 16384, 262144]),
        "hot_cache_blocks": st.sampled_from([0, 64, 2048, 65536]),
        "image_pixels_max": st.sampled_from([65536, 4194304, 16777216]),
        "far_resident_layers": st.none() | st.integers(0, 17),
        "vision": st.sampled_from(["auto", "auto", "resident", "staged"]),
        "fp8_far": st.sampled_from(["auto", "on", "off"]),
        "fp8_dense": st.sampled_from(["auto", "on", "off"]),
    }
)
CONTEXTS = st.none() | st.integers(1, 262_144)
DEVICES = st.none() | st.builds(
    DeviceFacts,
    kind=st.just("cuda"),
    name=st.just("card"),
    total_bytes=st.none() | st.integers(12 * GIB, 48 * GIB),
    other_bytes=st.integers(0, 3 * GIB),
)
HOSTS = st.builds(
    HostFacts,
    available_bytes=st.none() | st.integers(4 * GIB, 96 * GIB),
    pinned_bytes=st.none() | st.integers(0, 32 * GIB),
)


@st.composite
def questions(draw: st.DrawFn) -> tuple[ModelShapes, Profile, DeviceFacts | None, HostFacts, PlanOptions]:
    build = draw(st.sampled_from(["engine-2.82", "engine-2.82", "engine-2", "int4"]))
    context = draw(CONTEXTS)
    sequences = draw(st.integers(1, 12)) if context is None else draw(st.none() | st.integers(1, 12))
    options = PlanOptions(context, sequences, draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
    values: dict[str, Any] = draw(PROFILES)
    return shapes_of(build), Profile(name="random", **values), draw(DEVICES), draw(HOSTS), options


def answer(question: tuple[Any, ...]) -> MemoryPlan | None:
    try:
        return plan(*question)
    except PlanRefused as refused:
        check_refused(refused)
        return None


def check_refused(refused: PlanRefused) -> None:
    found = refused.plan
    assert not found.fits
    assert refused.missing_bytes > 0
    assert found.bytes_of(refused.binding_line) > 0
    host = found.planned_host_bytes - found.bytes_of("host.snapshots")
    over_host = found.host_limit_bytes is not None and host > found.host_limit_bytes
    assert found.planned_peak_bytes > found.limit_bytes or over_host
    assert "\n" not in str(refused)


def check_plan(question: tuple[Any, ...]) -> None:
    shapes, profile, device, host, options = question
    found = answer(question)
    if found is None:
        return
    # the cap holds, on both sides
    assert found.planned_peak_bytes <= found.limit_bytes <= found.cap_bytes <= profile.cap_bytes
    if device is not None and device.total_bytes is not None:
        assert found.cap_bytes <= device.total_bytes
    assert found.host_limit_bytes is None or found.planned_host_bytes <= found.host_limit_bytes
    pinned_limit = host.pinned_bytes if host.pinned_bytes is not None else profile.pinned_bytes
    if pinned_limit is not None:
        assert sum(x.bytes for x in found.lines if x.place == "host_pinned") <= pinned_limit
    assert all(x.bytes >= 0 and x.bytes == x.derivation.value and x.formula for x in found.lines)
    # JSON is the plan
    document = json.loads(json.dumps(found.to_json()))
    assert [(x["name"], x["place"], x["bytes"]) for x in document["lines"]] == [
        (x.name, x.place, x.bytes) for x in found.lines
    ]
    assert document["device"]["planned_peak_bytes"] == sum(
        x["bytes"] for x in document["lines"] if x["place"] == "device"
    )
    assert document["context_tokens"] == found.context_tokens and document["sequences"] == found.sequences
    # the search is exact: one more page, or one more sequence, does not fit
    fixed = replace(options, context_tokens=found.context_tokens, sequences=found.sequences)
    if options.context_tokens is None and found.context_tokens < shapes.dims.max_context:
        longer = min(found.context_tokens + profile.page_tokens, shapes.dims.max_context)
        check_binding(question, found, replace(fixed, context_tokens=longer))
    elif options.context_tokens is None:
        assert found.binding_line == "limit.model_context"
    if options.sequences is None:
        if found.sequences < 4096:
            check_binding(question, found, replace(fixed, sequences=found.sequences + 1))
        else:
            assert found.binding_line == "limit.sequences"
    assert found.choice.chunk_tokens % shapes.dims.compress == 0
    # what was found also fits when asked for directly, and gives the same plan
    again = answer((shapes, profile, device, host, fixed))
    assert again is not None and again.lines == found.lines


def check_binding(question: tuple[Any, ...], found: MemoryPlan, more: PlanOptions) -> None:
    """`more` does not fit, and the binding line lies in the place that it exceeds, and grows from `found` to it."""
    shapes, profile, device, host, _ = question
    with pytest.raises(PlanRefused) as refused:
        plan(shapes, profile, device, host, more)
    larger = refused.value.plan
    over_device = larger.planned_peak_bytes > larger.limit_bytes
    binding = larger.line(found.binding_line)
    assert binding.name != "host.device_lines"
    if over_device or profile.device == "cuda":
        assert (binding.place == "device") == over_device
    # under the refused plan's own policies, with all the memory in the world, the smaller request needs less of it
    c = larger.choice
    same = replace(
        profile,
        cap_bytes=1000 * TIB,
        host_bytes=None,
        far_resident_layers=c.far_resident_layers,
        vision="staged" if c.vision_staged else "resident",
        fp8_far="on" if c.fp8_far else "off",
        fp8_dense="on" if c.fp8_dense else "off",
        chunk_tokens_max=c.chunk_tokens,
        chunk_tokens_min=c.chunk_tokens,
    )
    sizes = replace(more, context_tokens=found.context_tokens, sequences=found.sequences)
    smaller = plan(shapes, same, options=sizes)
    assert smaller.choice == replace(c, context_tokens=found.context_tokens, sequences=found.sequences)
    assert smaller.bytes_of(binding.name) < binding.bytes


@given(questions())
@settings(max_examples=500, suppress_health_check=[HealthCheck.too_slow])
def test_every_plan_keeps_its_promises(question: tuple[Any, ...]) -> None:
    check_plan(question)


@pytest.mark.slow
@given(questions())
@settings(max_examples=10_000, suppress_health_check=[HealthCheck.too_slow])
def test_ten_thousand_profiles(question: tuple[Any, ...]) -> None:
    check_plan(question)


def size_of(question: tuple[Any, ...]) -> tuple[int, int]:
    found = answer(question)
    return (found.context_tokens, found.sequences) if found else (0, 0)


@given(questions(), st.integers(1, 4 * GIB), st.sampled_from(["device", "host", "margin", "headroom", "other"]))
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_more_memory_never_gives_less(question: tuple[Any, ...], more: int, budget: str) -> None:
    shapes, profile, device, host, options = question
    before = size_of(question)
    if budget == "device":
        device = device and replace(device, total_bytes=device.total_bytes and device.total_bytes + more)
        profile = replace(profile, cap_bytes=profile.cap_bytes + more)
    elif budget == "host":
        profile = replace(profile, host_bytes=profile.host_bytes and profile.host_bytes + more)
        host = replace(host, available_bytes=host.available_bytes and host.available_bytes + more)
    elif budget == "margin":
        profile = replace(profile, cap_margin_bytes=max(0, profile.cap_margin_bytes - more))
    elif budget == "headroom":
        profile = replace(profile, headroom_bytes=max(0, profile.headroom_bytes - more))
    else:
        device = device and replace(device, other_bytes=max(0, device.other_bytes - more))
    after = size_of((shapes, profile, device, host, options))
    assert after >= before


@given(st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_the_order_of_tensors_and_keys_does_not_matter(random: Any) -> None:
    specs = [TensorSpec(f"model.language_model.{n}", s) for n, s in _tiny_tensors()]
    text = {"max_position_embeddings": 4096, **_tiny_config()}
    expected = plan(
        build_model("m", "s", {"text_config": text}, specs), Profile(name="p", cap_bytes=2 * GIB, headroom_bytes=MIB)
    )
    random.shuffle(specs)
    items = list(text.items())
    random.shuffle(items)
    shuffled = plan(
        build_model("m", "s", {"text_config": dict(items)}, specs),
        Profile(name="p", headroom_bytes=MIB, cap_bytes=2 * GIB),
    )
    assert shuffled.to_json() == expected.to_json()
    assert json.dumps(shuffled.to_json()) == json.dumps(expected.to_json())


def _tiny_config() -> dict[str, Any]:
    return {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "vocab_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "mixer_types": ["bcsa"],
        "bcsa_window": 64,
        "bcsa_compress": 4,
        "bcsa_topk": 8,
        "tie_word_embeddings": True,
    }


def _tiny_tensors() -> list[tuple[str, tuple[int, ...]]]:
    attention = "layers.0.self_attn."
    return [
        ("embed_tokens.weight", (32, 8)),
        ("norm.weight", (8,)),
        ("layers.0.input_layernorm.weight", (8,)),
        ("layers.0.post_attention_layernorm.weight", (8,)),
        ("layers.0.mlp.gate_proj.weight", (16, 8)),
        ("layers.0.mlp.up_proj.weight", (16, 8)),
        ("layers.0.mlp.down_proj.weight", (8, 16)),
        (attention + "q_proj.weight", (16, 8)),
        (attention + "k_proj.weight", (4, 8)),
        (attention + "v_proj.weight", (4, 8)),
        (attention + "o_proj.weight", (8, 8)),
        (attention + "idx_q.weight", (8, 8)),
        (attention + "idx_k.weight", (4, 8)),
    ]
