"""Misbehaviour reported of other servers (group J of the case list), as tests of the plan. The id is in each name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agens_planner import (
    DeviceFacts,
    HostFacts,
    ModelShapes,
    PlannerInputError,
    PlanOptions,
    PlanRefused,
    Profile,
    load_profile,
    plan,
    read_checkpoint,
    read_mtp,
)
from agens_planner.units import GIB, MIB

FULL = 262_144


def test_j1_drafter_state_graphs_and_scratch_are_counted(shapes: ModelShapes, profile16: Profile) -> None:
    bare = plan(shapes, profile16, options=PlanOptions(context_tokens=32_768))
    loaded = plan(shapes, profile16, options=PlanOptions(context_tokens=32_768, drafter=True, mtp=True))
    for line in ("weights", "context", "scratch"):
        assert loaded.bytes_of(f"drafter.{line}") > 0
        assert loaded.bytes_of(f"mtp.{line}") > 0
    assert loaded.bytes_of("runtime.graphs") > bare.bytes_of("runtime.graphs") > 0
    for line in ("state.kda", "kv.dense", "sampling.scratch", "activations.verify"):
        assert bare.bytes_of(line) > 0


def test_j2_drafter_context_follows_the_chosen_context(shapes: ModelShapes, profile16: Profile) -> None:
    short = plan(shapes, profile16, options=PlanOptions(context_tokens=1_024, drafter=True, mtp=True))
    long = plan(shapes, profile16, options=PlanOptions(context_tokens=FULL, drafter=True, mtp=True))
    assert short.bytes_of("drafter.context") == (1_024 + 8) * 20_480
    assert long.bytes_of("drafter.context") == (2_048 + 8 + 8 + 48) * 20_480
    assert short.bytes_of("mtp.context") == (1_024 + 8) * 4_096
    assert long.bytes_of("mtp.context") == (16_384 + 8 + 8 + 48) * 4_096


def test_j3_vision_tower_and_scratch_are_counted(shapes: ModelShapes, profile16: Profile) -> None:
    resident = plan(shapes, load_profile("24gb"), options=PlanOptions(images=True))
    assert resident.bytes_of("vision.weights") == 460_730_096 * 2
    staged = plan(shapes, profile16.replace(vision="staged"), options=PlanOptions(images=True))
    assert staged.bytes_of("vision.staging") > 0
    assert staged.bytes_of("host.vision_weights") == 460_730_096 * 2
    # Whatever the chunk, prefill room and the tower's extra scratch together hold the largest image.
    small = plan(shapes, profile16.replace(chunk_tokens_max=1024), options=PlanOptions(images=True))
    together = [p.bytes_of("activations.prefill") + p.bytes_of("vision.scratch") for p in (staged, small)]
    least = 65_536 * 3 * 1_152 * 2
    assert small.bytes_of("vision.scratch") > 0
    assert min(together) >= least


def test_j4_all_parameters_are_counted(shapes: ModelShapes, profile16: Profile) -> None:
    """Every parameter of the checkpoint lies on some line, on the device or on the host."""
    found = plan(shapes, profile16.replace(head_bits=16, cap_bytes="80GiB"), options=PlanOptions(images=True))
    stored = sum(
        x.bytes for x in found.lines if x.name.startswith(("weights.", "host.embedding", "host.engram_tables"))
    )
    stored += found.bytes_of("vision.weights")
    core = 27_367_833_600
    small = sum(g.parameters for g in shapes.groups if g.kind == "small")
    rest = 32_688_700_242 - core - small
    expected = core * (2.82 + 0.125) / 8 + 2 * rest + 4 * small
    assert stored == pytest.approx(expected, abs=8)


def test_j5_a_desktop_on_the_gpu_is_subtracted_or_refused(shapes: ModelShapes, profile16: Profile) -> None:
    options = PlanOptions(context_tokens=FULL, drafter=True)
    desktop = DeviceFacts("cuda", "16 GB card", 16 * GIB, int(1.3 * GIB), display=True)
    crowded = plan(shapes, profile16, desktop, options=PlanOptions(drafter=True))
    free = plan(shapes, profile16, DeviceFacts("cuda", "16 GB card", 16 * GIB), options=PlanOptions(drafter=True))
    assert crowded.bytes_of("reserve.other") == int(1.3 * GIB)
    assert crowded.planned_peak_bytes <= 16 * GIB
    assert crowded.planned_peak_bytes - crowded.bytes_of("reserve.other") < free.planned_peak_bytes
    with pytest.raises(PlanRefused):
        plan(shapes, profile16, DeviceFacts("cuda", "16 GB card", 16 * GIB, 5 * GIB), options=options)


def test_j5_use_outside_the_cap_does_not_count(shapes: ModelShapes, profile16: Profile) -> None:
    card = DeviceFacts("cuda", "24 GB card", 24 * GIB, int(1.3 * GIB), display=True)
    assert plan(shapes, profile16, card).bytes_of("reserve.other") == 0
    nearly_full = DeviceFacts("cuda", "24 GB card", 24 * GIB, 9 * GIB)
    assert plan(shapes, profile16, nearly_full).bytes_of("reserve.other") == 1 * GIB


def test_j7_graphs_and_buffers_cover_the_largest_admitted_batch(shapes: ModelShapes) -> None:
    profile = load_profile("24gb").replace(cap_bytes="64GiB")
    sizes = {n: plan(shapes, profile, options=PlanOptions(context_tokens=4_096, sequences=n)) for n in (1, 7, 8)}
    per_row = 248_320 * 4
    for n, found in sizes.items():
        assert found.bytes_of("logits.verify") == n * 8 * per_row
    assert sizes[1].bytes_of("runtime.graphs") < sizes[7].bytes_of("runtime.graphs")
    assert sizes[7].bytes_of("runtime.graphs") == sizes[8].bytes_of("runtime.graphs")  # 1, 2, 4 and the largest


def test_j8_the_plan_follows_the_tensors_in_the_file(
    write_checkpoint: Callable[..., Path], tiny: Callable[[], tuple[dict, dict]]
) -> None:
    profile = load_profile("cpu")
    tensors, config = tiny()
    before = plan(read_checkpoint(write_checkpoint(tensors, config)), profile)
    config["text_config"]["vocab_size"] = 64
    for name in ("model.language_model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = ("BF16", (64, 8))
    after = plan(read_checkpoint(write_checkpoint(tensors, config)), profile)
    assert after.bytes_of("weights.head.fp32") == 2 * before.bytes_of("weights.head.fp32") == 64 * 8 * 4


def test_j10_prefill_scratch_is_planned_and_shrinks_with_the_chunk(shapes: ModelShapes, profile16: Profile) -> None:
    sizes = []
    for chunk in (1024, 2048, 4096):
        fixed = profile16.replace(chunk_tokens_max=chunk, chunk_tokens_min=chunk)
        sizes.append(plan(shapes, fixed, options=PlanOptions(context_tokens=65_536)).bytes_of("activations.prefill"))
    assert sizes == sorted(sizes)
    assert sizes[0] > 200 * MIB  # recurrent chunk kernels of others took about 500 MiB nobody had planned
    assert sizes[1] < 2 * sizes[0]


def test_j12_wsl_pins_little_and_the_plan_says_so(shapes: ModelShapes, profile16: Profile) -> None:
    host = HostFacts(available_bytes=32 * GIB, pinned_bytes=512 * MIB, pinned_reason="WSL2", wsl=True)
    found = plan(shapes, profile16, host=host, options=PlanOptions(drafter=True))
    assert sum(x.bytes for x in found.lines if x.place == "host_pinned") <= 512 * MIB
    assert found.line("host.far_pool").place == "host_pageable"
    assert any("WSL2" in note for note in found.notes)
    free = plan(shapes, profile16, host=HostFacts(available_bytes=32 * GIB), options=PlanOptions(drafter=True))
    assert free.line("host.far_pool").place == "host_pinned"
    assert free.planned_host_bytes == found.planned_host_bytes


def test_j13_a_missing_shard_is_named(
    write_checkpoint: Callable[..., Path], tiny: Callable[[], tuple[dict, dict]]
) -> None:
    tensors, _ = tiny()
    index = dict.fromkeys(tensors, "model-00001-of-00002.safetensors") | {"lm_head.weight": "missing.safetensors"}
    with pytest.raises(PlannerInputError, match=r"missing\.safetensors"):
        read_checkpoint(write_checkpoint(tensors, index=index))


def test_j15_an_index_entry_without_its_tensor_is_refused(
    write_checkpoint: Callable[..., Path], tiny: Callable[[], tuple[dict, dict]]
) -> None:
    tensors, _ = tiny()
    index = dict.fromkeys(tensors, "model-1.safetensors") | {"mtp.fc.weight": "model-1.safetensors"}
    with pytest.raises(PlannerInputError, match=r"mtp\.fc\.weight"):
        read_checkpoint(write_checkpoint(tensors, index=index))


def test_j15_an_mtp_folder_without_fc_is_refused(write_checkpoint: Callable[..., Path]) -> None:
    folder = write_checkpoint({"mtp.norm.weight": ("BF16", (8,))})
    with pytest.raises(PlannerInputError, match=r"mtp\.fc\.weight is missing"):
        read_mtp(folder)
