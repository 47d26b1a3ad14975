"""Sessions in the engine: a resumed run says what a cold run says, computes only what is new, and loses nothing."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agens_engine.core import FinishReason, Request
from agens_engine.engine import Engine
from agens_engine.memory.session_files import SessionFiles
from agens_engine.model.volundr import Volundr
from agens_engine.settings import Settings
from agens_engine.startup import load_engine
from tests.modelkit import random_model, write_checkpoint
from tests.sessionkit import GREEDY, close, session_engine, turn
from tests.unit.test_engine import Inbox, Oracle, prompt

CHUNK = 64  # as session_engine has it


@pytest.fixture(scope="module")
def model() -> Volundr:
    return random_model()


@pytest.fixture
def engines(model: Volundr) -> Iterator[Any]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(session_engine(model, **options))
        return made[-1]

    yield make
    for engine in made:
        close(engine)


@pytest.fixture(scope="module")
def cold(model: Volundr) -> Iterator[Any]:
    """(ids, count) -> the answer of a run that resumes from nothing."""
    engine = session_engine(model, session_bytes=0)
    yield lambda ids, count: turn(engine, ids, count)[0]
    close(engine)


def follow_up(make: Any, cold: Any, length: int, tail: int, *, drafts: bool = False) -> None:
    """Two turns on a fresh server; the second resumes from the end of the first."""
    engine = make(drafts=drafts)
    first = prompt(length, length)
    answer, _ = turn(engine, first, 6)
    assert answer == cold(first, 6)
    second = first + answer + prompt(1000 + tail, tail)
    answer, end = turn(engine, second, 6)
    assert answer == cold(second, 6), (length, tail)
    assert end.cached_tokens == length + 5  # the last token of the answer has not run yet
    assert engine.prompt_tokens == length + 1 + tail


@pytest.mark.parametrize("residue", [0, 1, 37, 63, 64, 117, 127])
def test_g1_g2_a_follow_up_equals_a_cold_run_at_this_residue(engines: Any, cold: Any, residue: int) -> None:
    follow_up(engines, cold, 256 + residue, 1 + residue % 64, drafts=residue % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("residue", range(128))
def test_g1_residue_sweep(engines: Any, cold: Any, residue: int) -> None:
    follow_up(engines, cold, 256 + residue, 9)


@pytest.mark.slow
@pytest.mark.parametrize("tail", range(1, 65))
def test_g1_residue_sweep_of_tails(engines: Any, cold: Any, tail: int) -> None:
    follow_up(engines, cold, 256 + 117, tail)


def test_g8_g9_the_same_session_prompt_three_times_takes_the_same_pieces(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the logits of the first token are those of the cold run, whatever went on in between."""
    seen: list[torch.Tensor] = []
    logits = Volundr.logits

    def recording(self: Volundr, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(self, hidden))
        return seen[-1]

    engine, ids = engines(), prompt(3, 339)
    turn(engine, prompt(4, 200), 3)
    monkeypatch.setattr(Volundr, "logits", recording)
    cached = []
    for _ in range(3):
        cached.append(turn(engine, ids, 1)[1].cached_tokens)
        turn(engine, ids[:100] + prompt(5, 50), 1)
    assert cached == [0, 256, 256]  # the last whole chunk that leaves 64 tokens
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[0], seen[4])


def test_g10_a_session_whose_header_changes_resumes_before_the_change(engines: Any, cold: Any) -> None:
    """The next turn drops the thought: it shares all of the prompt but its last tokens."""
    engine, first = engines(), prompt(6, 300)
    turn(engine, first, 20)
    second = first[:-4] + prompt(7, 40)
    answer, end = turn(engine, second, 8)
    assert answer == cold(second, 8)
    assert end.cached_tokens == (300 - 64) // CHUNK * CHUNK == 192


def test_g3_a_longer_kv_match_without_recurrent_session_state_is_no_hit(engines: Any, cold: Any) -> None:
    """K/V exists for every position, recurrent state only at snapshots: the hit is the longest with both."""
    engine, first = engines(), prompt(8, 300)
    turn(engine, first, 4)
    fork = first[:290] + prompt(9, 30)
    answer, end = turn(engine, fork, 6)
    assert end.cached_tokens == 192 and answer == cold(fork, 6)


def test_g6_the_whole_session_prompt_is_stored_but_one_token_is_left(engines: Any, cold: Any) -> None:
    """8192 of 8193: the end of one prompt is the next one without its last token."""
    engine, ids = engines(), prompt(10, 257)
    turn(engine, ids[:256], 1)
    answer, end = turn(engine, ids, 6)
    assert end.cached_tokens == 256 and answer == cold(ids, 6)
    answer, end = turn(engine, ids[:256], 6)  # all of it is stored, so a shorter prefix is used
    assert end.cached_tokens == 192 and answer == cold(ids[:256], 6)


def test_g7_38_sessions_that_share_a_header(engines: Any, cold: Any) -> None:
    engine, header = engines(), prompt(11, 130)
    turn(engine, header + prompt(12, 80), 1)
    for i in range(38):
        ids = header + prompt(100 + i, 70 + i)
        answer, end = turn(engine, ids, 4)
        assert answer == cold(ids, 4), i
        assert end.cached_tokens == 128 if i else end.cached_tokens in (128, 0)


def test_session_k_v_is_shared_by_reference(engines: Any) -> None:
    engine, first = engines(), prompt(13, 400)
    turn(engine, first, 2)
    used = engine.pool.pages.pages_used
    assert used == 3  # 400 tokens fill three pages of 128; the fourth was private and is free again
    answer, _ = turn(engine, first + prompt(14, 10), 2)
    assert engine.pool.pages.pages_used == used
    engine.check()


def test_cache_prompt_off_neither_reads_nor_leaves_sessions(engines: Any, cold: Any) -> None:
    engine, ids = engines(), prompt(15, 200)
    turn(engine, ids, 2, cache_prompt=False)
    assert engine.stats()["sessions"]["entries"] == 0
    turn(engine, ids, 2)
    answer, end = turn(engine, ids, 2, cache_prompt=False)
    assert end.cached_tokens == 0 and answer == cold(ids, 2)


def test_other_image_content_is_another_session(engines: Any) -> None:
    engine, ids = engines(), prompt(16, 260)
    turn(engine, ids, 1, image_keys=((70, "cat"),))
    assert turn(engine, ids, 1, image_keys=((70, "dog"),))[1].cached_tokens == 0
    assert turn(engine, ids, 1, image_keys=((70, "cat"),))[1].cached_tokens == 192
    assert turn(engine, ids, 1, image_keys=((230, "dog"),))[1].cached_tokens == 0  # an image of the first is missing


@pytest.mark.parametrize("wrong", [(), (1,), (4,), (3, 6)])
def test_g12_g14_a_session_that_stops_inside_a_block_of_drafts(engines: Any, cold: Any, wrong: tuple[int, ...]) -> None:
    """The stop keeps a prefix of the step's rows, a deferred commit: the snapshot must have it written."""
    ids = prompt(61, 140)
    expected = cold(ids, 12)
    stop = next(token for token in expected[4:] if expected.index(token) >= 4)
    oracle = Oracle(expected, frozenset(wrong))
    engine = engines(sources=[oracle])
    answer, end = turn(engine, ids, 12, stop_token_ids=frozenset({stop}))
    assert end.finish_reason is FinishReason.STOP and answer == expected[: expected.index(stop) + 1]
    assert len(oracle.results[-1].chain) + 1 > len(oracle.results[-1].committed)  # rows were left over
    second = ids + answer + prompt(62, 11)
    again, end = turn(engine, second, 8)
    assert end.cached_tokens == len(ids) + len(answer) - 1 and again == cold(second, 8)


@pytest.mark.parametrize("drafts", [False, True])
def test_g14_a_session_snapshot_after_rejected_drafts_is_that_of_a_run_without(
    engines: Any, cold: Any, drafts: bool
) -> None:
    engine, ids = engines(drafts=drafts), (prompt(17, 40) * 5)[:170]
    for turns in range(4):
        answer, end = turn(engine, ids, 7 + turns)
        assert answer == cold(ids, 7 + turns)
        assert turns == 0 or end.cached_tokens > 160
        ids = ids + answer + prompt(18 + turns, 3)


def test_resumed_session_drafters_know_the_text_before(engines: Any) -> None:
    engine, ids = engines(drafts=True), prompt(19, 200)
    answer, _ = turn(engine, ids, 6)
    sources = {source.name: source for source in engine.filler.sources}
    lengths: list[tuple[int, int]] = []
    begin = engine.sessions.resume

    def resume(sequence: Any) -> None:
        begin(sequence)
        name = sequence.request_id
        context = sources["dflash"]._contexts[name]  # type: ignore[attr-defined]
        lengths.append((context.length, sources["mtp"]._states[name].cache.length))  # type: ignore[attr-defined]
        assert context.start < 205 and sources["mtp"]._states[name].cache.newest is not None  # type: ignore[attr-defined]

    engine.sessions.resume = resume  # type: ignore[method-assign]
    turn(engine, ids + answer + [1, 2, 3], 6)
    assert lengths == [(205, 205)]
    assert not any(engine.stats()["drafts"]["failures"].values())


def test_e3_a_session_aborted_at_any_point_of_prefill_leaks_nothing(engines: Any, cold: Any) -> None:
    engine, inbox = engines(prefill_chunk_tokens=16), Inbox()
    for i, wait in enumerate((0.0, 0.002, 0.01, 0.03, 0.06)):
        engine.submit(Request(f"left{i}", prompt(20, 500), GREEDY, max_tokens=5), inbox)
        time.sleep(wait)
        engine.abort(f"left{i}")
        inbox.wait(f"left{i}")
    engine.check()
    assert turn(engine, prompt(20, 500), 5)[0] == cold(prompt(20, 500), 5)


def test_a_failing_request_leaves_sessions_and_neighbours_alone(
    engines: Any, cold: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Volundr.forward

    def breaking(self: Volundr, batch: Any, taps: Any = ()) -> Any:
        if 7 in batch.ids[-1:].tolist():
            raise RuntimeError("cannot run token 7 at the end")
        return forward(self, batch, taps)

    engine, inbox = engines(), Inbox()
    good = [token for token in prompt(21, 300) if token != 7]
    monkeypatch.setattr(Volundr, "forward", breaking)
    engine.submit(Request("bad", [*good, 7], GREEDY, max_tokens=5), inbox)
    inbox.wait("bad")
    assert inbox.finish("bad") is FinishReason.ERROR
    monkeypatch.setattr(Volundr, "forward", forward)
    engine.check()
    answer, end = turn(engine, good, 5)
    assert end.cached_tokens > 0 and answer == cold(good, 5)


def test_a_full_session_budget_evicts_and_goes_on(engines: Any, cold: Any) -> None:
    probe = engines()
    turn(probe, prompt(22, 200), 1)
    one = probe.stats()["sessions"]["bytes"] // probe.stats()["sessions"]["entries"]
    engine = engines(session_bytes=3 * one)
    for seed in range(23, 29):
        ids = prompt(seed, 200)
        assert turn(engine, ids, 3)[0] == cold(ids, 3)
        engine.sessions.check()
    figures = engine.stats()["sessions"]
    assert figures["evicted"] > 5 and figures["bytes"] <= 3 * one
    tiny = engines(session_bytes=100)
    assert turn(tiny, prompt(22, 200), 3)[0] == cold(prompt(22, 200), 3)
    assert tiny.stats()["sessions"]["refused"] > 0 and tiny.stats()["sessions"]["entries"] == 0


def test_g4_session_pages_are_given_back_when_admission_needs_them(engines: Any, cold: Any) -> None:
    """Stored sessions hold pages while nobody needs them; then they move to the host and come back the same."""
    engine = engines(max_sequences=2)
    first = [prompt(30 + i, 500) for i in range(4)]
    answers = [turn(engine, ids, 4)[0] for ids in first]
    figures = engine.stats()["sessions"]
    assert figures["moved_to_host"] > 0 and figures["pages_free"] < figures["pages"]
    for ids, answer in zip(first, answers, strict=True):
        second = ids + answer + prompt(40, 5)
        again, end = turn(engine, second, 6)
        assert end.cached_tokens == len(ids) + 3 and again == cold(second, 6)
    engine.check()


def test_session_files_survive_a_restart(model: Volundr, engines: Any, cold: Any, tmp_path: Path) -> None:
    files = partial(SessionFiles, tmp_path, model="m", dtype="float32", limit_bytes=1 << 28)
    ids = prompt(50, 333)
    engine = session_engine(model, session_files=files())
    answer, _ = turn(engine, ids, 5)
    close(engine)
    engine = session_engine(model, session_files=files())
    second = ids + answer + prompt(51, 7)
    again, end = turn(engine, second, 6)
    assert end.cached_tokens == 337 and again == cold(second, 6)
    assert engine.stats()["sessions"]["files_loaded"] == 1
    close(engine)


def test_session_settings_reach_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory of another model is ignored with a warning; off is off."""
    folder = write_checkpoint(tmp_path / "model")
    other = write_checkpoint(tmp_path / "other", seed=1)
    base = {"context_tokens": 512, "max_sequences": 2, "session_dir": str(tmp_path / "sessions")}
    ids = prompt(60, 400)
    cached = []
    for name, wish in ((folder, "on"), (folder, "on"), (other, "on"), (folder, "off")):
        flags = {**base, "model": str(name), "session_cache": wish}
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            engine = load_engine(Settings.build(flags, environ={}))
            cached.append(turn(engine, ids, 2)[1].cached_tokens)
            engine.shutdown()
            engine.check()
        if name == other:
            assert "is ignored: its model is" in caplog.text
    assert cached[0] == cached[2] == cached[3] == 0 < cached[1]


def test_k1_16_sessions_with_mixed_prefills_no_stream_waits_longer_than_one_chunk(
    model: Volundr, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = session_engine(model, max_sequences=16, prefill_chunk_tokens=32)
    steps: list[tuple[int, set[str]]] = []
    run = engine._runner.run

    def watched(work: Any, drafted: Any, reads: Any) -> Any:
        steps.append((sum(w.num_prompt_tokens for w in work), {w.sequence.request_id for w in work}))
        return run(work, drafted, reads)

    monkeypatch.setattr(engine._runner, "run", watched)
    inbox = Inbox()
    names = [f"r{i}" for i in range(16)]
    for i, name in enumerate(names):
        ids = prompt(70 + i % 5, 40 + 37 * (i % 5)) + prompt(90 + i, i)
        engine.submit(Request(name, ids, GREEDY, max_tokens=24), inbox)
    inbox.wait(*names, seconds=120.0)
    assert max(tokens for tokens, _ in steps) <= 32
    for name in names:
        events = sum(1 for event in inbox.events[name] if event.token_ids)
        mine = [n for n, (_, who) in enumerate(steps) if name in who]
        streaming = mine[-events:]  # from its first token on it is in every step there is
        assert streaming == list(range(streaming[0], streaming[0] + len(streaming)))
    close(engine)


def test_k4_sessions_are_admitted_by_pages(model: Volundr) -> None:
    """Seats for four, pages for two: two run at a time, none is preempted, and stored sessions make way."""
    engine = session_engine(model, max_sequences=4, context_tokens=640)
    pages = engine.pool.pages
    engine._scheduler._num_pages = 10  # five a sequence
    taken = pages.alloc(pages.num_pages - 10)
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, engine.stats()["running"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    inbox, names = Inbox(), [f"r{i}" for i in range(8)]
    for i, name in enumerate(names):
        engine.submit(Request(name, prompt(i, 560), GREEDY, max_tokens=20), inbox)
    inbox.wait(*names, seconds=120.0)
    done.set()
    watcher.join()
    assert all(inbox.finish(name) is FinishReason.LENGTH for name in names)
    assert most == 2
    queue = engine.stats()["queue"]
    assert queue["admitted"] == 8 and queue["length"] == 0 and queue["longest_seconds"] >= queue["mean_seconds"] > 0
    pages.release(taken)
    close(engine)


def test_session_snapshots_of_long_prompts_are_spaced(model: Volundr, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agens_engine.sessions.SPACING_TOKENS", 150)
    engine = session_engine(model)
    turn(engine, prompt(1, 650), 3)
    lengths = sorted(itertools.chain(entry.num_tokens for entry in engine.sessions.store))
    assert lengths == [192, 384, 576, 650, 652]
    close(engine)
