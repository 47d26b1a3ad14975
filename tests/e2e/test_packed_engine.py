"""A quantised checkpoint through the engine, packed and decoded: same greedy tokens, each plan held to the byte."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from agens_engine.core import FinishReason, Request, SamplingParams
from agens_engine.errors import CheckpointError, PlanError, UsageError
from agens_engine.memory.state import StatePool, unplanned
from agens_engine.model.batch import StepBatch
from agens_engine.model.loading import load_model
from agens_engine.model.packed_weights import survey_packed
from agens_engine.planning import plan_run
from agens_engine.settings import Settings
from agens_engine.startup import load_engine
from tests.memorykit import peak_bytes
from tests.modelkit import CPU, write_checkpoint
from tests.packedkit import edit_tensor, write_quantised
from tests.unit.test_engine import Inbox

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = {f"r{i}": [3 + (7 * i + j * j) % 90 for j in range(40 + i)] for i in range(2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantised(tmp_path_factory.mktemp("models") / "mixed")


def settings(folder: Path, **flags: Any) -> Settings:
    given = {"model": str(folder), "context_tokens": 256, "max_sequences": 2, "prefill_chunk_tokens": 32, **flags}
    return Settings.build(given, environ={})


def run(chosen: Settings) -> tuple[dict[str, list[int]], dict[str, tuple[int, int]]]:
    """Greedy answers, and (planned, claimed) bytes of the lines that hold weights."""
    engine, inbox = load_engine(chosen), Inbox()
    try:
        for name, prompt in PROMPTS.items():
            engine.submit(Request(name, prompt, GREEDY, max_tokens=12), inbox)
        inbox.wait(*PROMPTS, seconds=240)
        assert all(inbox.finish(name) is FinishReason.LENGTH for name in PROMPTS)
    finally:
        engine.shutdown()
    engine.check()
    assert engine.arena is not None
    held = {
        name: (use.planned_bytes, use.used_bytes)
        for name, use in engine.arena.lines.items()
        if name.startswith(("weights.", "host.embedding", "host.engram", "runtime.unpack"))
    }
    return {name: inbox.tokens(name) for name in PROMPTS}, held


def test_both_executions_give_the_same_tokens_and_claim_what_was_planned(folder: Path, tmp_path: Path) -> None:
    decoded, lines = run(settings(folder, weights="dequantise"))
    assert {name.rpartition(".")[2] for name in lines if name.startswith("weights.")} == {"fp32"}
    assert all(planned == used for planned, used in lines.values()), lines
    for attempt in ("packed", "packed from the cache"):
        packed, lines = run(settings(folder, weights="packed", repack_cache=str(tmp_path / "cache")))
        assert packed == decoded, attempt
        assert {"weights.mlp.w2", "weights.mlp.w3", "weights.mlp.w4", "runtime.unpack"} <= lines.keys()
        assert all(planned == used for planned, used in lines.values()), lines


def test_auto_unpacks_what_fits_and_keeps_the_rest_packed(tmp_path: Path) -> None:
    """Between the two sizes lies the cap at which the choice turns; below the smaller one it is refused."""
    large = write_quantised(tmp_path / "large", hidden_size=512, intermediate_size=4096, num_hidden_layers=8,
                            mixer_types=["kda", "attn"] * 4, engram_layers=[])  # fmt: skip
    survey = survey_packed(large)

    def planned(**flags: Any) -> Any:
        return plan_run(settings(large, **flags), survey.values)

    unpacked, packed = planned(weights="dequantise"), planned(weights="packed")
    assert not unpacked.packed_weights and packed.packed_weights
    assert packed.planned_peak_bytes < 0.7 * unpacked.planned_peak_bytes
    assert planned(device_memory=str(unpacked.planned_peak_bytes)).packed_weights is False
    chosen = planned(device_memory=str(unpacked.planned_peak_bytes - 1))
    assert chosen.packed_weights and chosen.planned_peak_bytes == packed.planned_peak_bytes
    with pytest.raises(PlanError, match="does not fit"):
        planned(device_memory=str(packed.planned_peak_bytes - 1))
    with pytest.raises(PlanError, match="does not fit"):
        planned(device_memory=str(packed.planned_peak_bytes), weights="dequantise")


def test_looking_at_the_codes_is_left_out_when_it_decides_nothing(folder: Path) -> None:
    def survey() -> Any:
        raise AssertionError("asked for")

    assert not plan_run(settings(folder), survey).packed_weights
    assert not plan_run(settings(folder, weights="dequantise"), survey).packed_weights


def test_packed_is_refused_where_nothing_can_stay_packed(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain")
    with pytest.raises(UsageError, match="--weights packed: .* has no quantised linears"):
        load_engine(settings(plain, weights="packed"))
    with pytest.raises(UsageError, match="--weights must be one of auto, dequantise, packed"):
        settings(plain, weights="sometimes")


def test_a_steps_scratch_fits_its_lines(folder: Path) -> None:
    survey = survey_packed(folder)
    plan = plan_run(settings(folder, weights="packed", max_sequences=1), survey.values)
    model = load_model(folder, device=CPU, packed=survey)
    pool = StatePool(model.state_shapes(), 1, unplanned(CPU), context_tokens=256, chunk_tokens=32)
    state = pool.create()

    def prefill() -> None:
        model(StepBatch([(state, [7] * 32)], CPU))
        state.commit(32)

    def verify() -> None:
        hidden, _ = model(StepBatch([(state, [9] * 8)], CPU))
        model.logits(hidden)

    unpack = plan.bytes_of("runtime.unpack")
    with torch.inference_mode():
        while state.num_tokens < 192:
            prefill()
        peak = peak_bytes(prefill)
        assert unpack // 8 < peak <= plan.bytes_of("activations.prefill") + plan.bytes_of("state.records") + unpack
        lines = ("activations.verify", "logits.verify", "state.records", "runtime.unpack")
        assert peak_bytes(verify) <= sum(plan.bytes_of(line) for line in lines)


def test_a_damaged_checkpoint_is_named_before_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(folder, tmp_path / "bad"))
    part = "model.language_model.layers.0.mlp.gate_proj.weight_scale"
    edit_tensor(bad, part, lambda scale: scale * float("nan"))
    for weights in ("packed", "dequantise"):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: quantised linear .*gate_proj\.weight: .*nan"):
            load_engine(settings(bad, weights=weights))
