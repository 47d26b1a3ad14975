"""The plan is the law: nano under plans of several sizes, full sessions, and what a step really allocates."""

from __future__ import annotations

import pytest
import torch

from agens_engine.core import FinishReason, Request, SamplingParams
from agens_engine.errors import PlanError, UsageError
from agens_engine.memory.arena import Arena
from agens_engine.memory.state import StatePool, unplanned
from agens_engine.model.batch import StepBatch
from agens_engine.model.loading import load_model
from agens_engine.model.volundr import Volundr
from agens_engine.model_files import resolve_model
from agens_engine.planning import PlanRequest, build_question, make_plan, plan_run
from agens_engine.settings import Settings
from agens_engine.startup import load_engine
from tests.memorykit import peak_bytes
from tests.modelkit import CPU
from tests.unit.test_engine import Inbox

GREEDY = SamplingParams(temperature=0.0)


def settings(context: int, sequences: int, chunk: int) -> Settings:
    flags = {"model": "nano", "context_tokens": context, "max_sequences": sequences, "prefill_chunk_tokens": chunk}
    return Settings.build(flags, environ={})


@pytest.fixture(scope="module")
def nano() -> Volundr:
    return load_model(resolve_model("nano"), device=CPU)


def test_a_full_session_stays_inside_every_line() -> None:
    """Prefill to the limit, decode, abort, start again: each line is claimed exactly, none is passed."""
    engine, inbox = load_engine(settings(512, 2, 64)), Inbox()
    try:
        full = [3 + i % 200 for i in range(500)]
        engine.submit(Request("full", full, GREEDY, max_tokens=100), inbox)
        engine.submit(Request("aborted", full, GREEDY, max_tokens=100), inbox)
        inbox.wait_for_token("aborted")
        engine.abort("aborted")
        inbox.wait("full", "aborted", seconds=120)
        assert inbox.finish("full") is FinishReason.LENGTH and len(inbox.tokens("full")) == 12
        engine.submit(Request("again", full, GREEDY, max_tokens=12), inbox)
        inbox.wait("again", seconds=120)
        assert inbox.tokens("again") == inbox.tokens("full")
    finally:
        engine.shutdown()
    engine.check()
    assert engine.arena is not None
    report = engine.arena.report()
    counted, planned, cap = (report[name] or 0 for name in ("counted_peak_bytes", "planned_bytes", "cap_bytes"))
    assert 0 < counted <= planned <= cap
    held = {name: use for name, use in engine.arena.lines.items() if name.startswith(("weights.", "kv.", "state.k"))}
    assert all(use.used_bytes == use.planned_bytes for use in held.values()), held


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("context", [64, 128, 512, 2100])
@pytest.mark.parametrize(("resident", "hot"), [(0, 0), (0, 7), (1, 100_000), (2, 5), (None, 64)])
def test_sequence_memory_is_exactly_what_its_lines_say(
    nano: Volundr, resident: int | None, hot: int, context: int, sequences: int
) -> None:
    """Pages, rings, far pools, hot caches and staging, for every split of resident and host layers."""
    request = PlanRequest(
        profile="cpu",
        context=str(context),
        sequences=str(sequences),
        settings=(f"far_resident_layers={'auto' if resident is None else resident}", f"hot_cache_blocks={hot}"),
    )
    plan = make_plan(build_question(request, environ={}))
    arena = Arena.of_plan(plan, CPU)
    StatePool(
        nano.state_shapes(),
        sequences,
        arena.claim,
        context_tokens=context,
        chunk_tokens=plan.choice.chunk_tokens,
        far_resident_layers=plan.choice.far_resident_layers,
        hot_cache_blocks=plan.hot_cache_blocks,
    )
    ours = {n: use for n, use in arena.lines.items() if n.startswith(("kv.", "far.", "host.far", "state.k", "state.c"))}
    assert all(use.used_bytes == use.planned_bytes for name, use in ours.items() if name != "kv.tables"), ours
    assert ("host.far_pool" in ours) == (context > 128 and resident in (0, 1))


@pytest.mark.parametrize(
    ("context", "sequences", "chunk"), [(4096, 8, 256), (1024, 1, 64), (512, 2, 32), (2048, 3, 128)]
)
def test_temporaries_of_a_step_fit_their_lines(nano: Volundr, context: int, sequences: int, chunk: int) -> None:
    plan = plan_run(settings(context, sequences, chunk))
    pool = StatePool(nano.state_shapes(), sequences, unplanned(CPU), context_tokens=context, chunk_tokens=chunk)
    states = [pool.create() for _ in range(sequences)]

    def prefill() -> None:
        nano(StepBatch([(states[0], [7] * chunk)], CPU))
        states[0].commit(chunk)

    def verify() -> None:
        hidden, _ = nano(StepBatch([(state, [9] * 8) for state in states], CPU))
        nano.logits(hidden)

    with torch.inference_mode():
        while states[0].num_tokens < context - 2 * chunk:  # the last chunks see the longest context
            prefill()
        assert peak_bytes(prefill) <= plan.bytes_of("activations.prefill") + plan.bytes_of("state.records")
        snapshot = states[0].snapshot()
        for state in states[1:]:
            state.restore(snapshot)
        lines = ("activations.verify", "logits.verify", "state.records")
        assert peak_bytes(verify) <= sum(plan.bytes_of(line) for line in lines)


def test_more_than_a_line_and_unknown_lines_are_refused() -> None:
    arena = Arena({"kv.dense": ("device", 1000)}, cap_bytes=2000, device=CPU)
    arena.claim("kv.dense", (100,))
    with pytest.raises(PlanError, match=r"kv\.dense holds 1000 B, 400 B of it taken; 604 B more"):
        arena.claim("kv.dense", (151,))
    with pytest.raises(PlanError, match="no line 'kv.other'"):
        arena.claim("kv.other", (1,))
    with arena.using("kv.dense", 600):
        assert arena.report()["counted_peak_bytes"] == 1000
    arena.check()
    assert arena.lines["kv.dense"].used_bytes == 400


def test_a_cap_that_is_too_small_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENS_PLAN_CAP_BYTES", "16MiB")
    with pytest.raises(PlanError, match="does not fit"):
        load_engine(settings(512, 1, 64))


def test_the_cap_flag_reaches_the_plan() -> None:
    with pytest.raises(PlanError, match="does not fit"):
        plan_run(Settings.build({"model": "nano", "device_memory": "16MiB"}, environ={}))
    assert plan_run(Settings.build({"model": "nano", "device_memory": "1GiB"}, environ={})).cap_bytes == 2**30
    with pytest.raises(UsageError, match="--device-memory"):
        plan_run(Settings.build({"model": "nano", "device_memory": "lots"}, environ={}))


def test_a_gpu_profile_is_refused_by_the_reference_engine() -> None:
    with pytest.raises(PlanError, match="--profile cpu"):
        plan_run(Settings.build({"model": "nano", "profile": "16gb"}, environ={}))
