"""Random session schedules: begin, extend, fork, abort, evict, restart; every answer is that of a cold run."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from agens_engine.core import Request
from agens_engine.engine import Engine
from agens_engine.memory.session_files import SessionFiles
from agens_engine.model.volundr import Volundr
from tests.modelkit import random_model
from tests.sessionkit import CONTEXT, GREEDY, close, session_engine, turn
from tests.unit.test_engine import Inbox, prompt

MOST = CONTEXT - 160  # texts longer than this are left alone, so that everything fits


@cache
def model() -> Volundr:
    return random_model()


@cache
def cold_engine() -> Engine:
    return session_engine(model(), session_bytes=0)


@cache
def cold_answer(ids: tuple[int, ...], count: int) -> list[int]:
    return turn(cold_engine(), list(ids), count)[0]


class SessionSchedule(RuleBasedStateMachine):
    """A server with drafters, little snapshot memory, fewer pages than texts, and files; `texts` are conversations."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="sessions"))
        self.texts: list[list[int]] = []
        self.num_named = 0
        self.engine: Engine | None = None

    def start(self) -> Engine:
        files = SessionFiles(self.folder, model="m", dtype="float32", limit_bytes=1 << 26)
        return session_engine(
            model(), session_bytes=self.budget, drafts=self.drafts, max_sequences=2, session_files=files
        )

    @initialize(budget=st.sampled_from([60_000, 400_000, 1 << 24]), drafts=st.booleans())
    def begin_server(self, budget: int, drafts: bool) -> None:
        self.budget, self.drafts = budget, drafts
        self.engine = self.start()

    def new_name(self) -> str:
        """An id is free again shortly after its last event only, so none is used twice."""
        self.num_named += 1
        return f"request{self.num_named}"

    def answer(self, ids: list[int], count: int) -> list[int]:
        """An answer that ends anywhere: its third token, where there is one, is a stop token in every other text."""
        assert self.engine is not None
        expected = cold_answer(tuple(ids), count)
        stop = frozenset(expected[2:3] if len(ids) % 2 else ())
        found, end = turn(self.engine, ids, count, stop_token_ids=stop)
        kept = next((i + 1 for i, token in enumerate(expected) if token in stop), count)
        assert found == expected[:kept], (len(ids), count, end.cached_tokens)
        assert 0 <= end.cached_tokens < len(ids)
        return found

    @rule(seed=st.integers(0, 3), length=st.integers(1, 280), count=st.integers(1, 9))
    def begin(self, seed: int, length: int, count: int) -> None:
        ids = prompt(seed, 300)[:length]  # few seeds: prompts share their beginnings
        self.texts.append(ids + self.answer(ids, count))

    @rule(which=st.integers(0, 50), seed=st.integers(4, 6), length=st.integers(1, 70), count=st.integers(1, 9))
    def extend(self, which: int, seed: int, length: int, count: int) -> None:
        if self.texts and len(text := self.texts[which % len(self.texts)]) < MOST:
            text += prompt(seed, 100)[:length]
            text += self.answer(list(text), count)

    @rule(which=st.integers(0, 50), share=st.floats(0.0, 1.0), seed=st.integers(7, 9), length=st.integers(1, 40))
    def fork(self, which: int, share: float, seed: int, length: int) -> None:
        if self.texts:
            text = self.texts[which % len(self.texts)]
            if len(text) < MOST:
                ids = text[: int(share * len(text))] + prompt(seed, 60)[:length]
                self.texts.append(ids + self.answer(ids, 3))

    @rule(which=st.integers(0, 50), count=st.integers(1, 6))
    def two_at_once(self, which: int, count: int) -> None:
        if not self.texts or len(text := self.texts[which % len(self.texts)]) >= MOST:
            return
        assert self.engine is not None
        inbox, wanted = Inbox(), {}
        for i in range(2):
            name = self.new_name()
            wanted[name] = ids = [*text, *prompt(10 + i, 5)]
            self.engine.submit(Request(name, ids, GREEDY, max_tokens=count), inbox)
        inbox.wait(*wanted)
        for name, ids in wanted.items():
            assert inbox.tokens(name) == cold_answer(tuple(ids), count)

    @rule(which=st.integers(0, 50), length=st.integers(1, 200))
    def abort(self, which: int, length: int) -> None:
        assert self.engine is not None
        inbox, name = Inbox(), self.new_name()
        ids = [*(self.texts[which % len(self.texts)] if self.texts else []), *prompt(12, 200)[:length]][:MOST]
        self.engine.submit(Request(name, ids, GREEDY, max_tokens=30), inbox)
        self.engine.abort(name)
        inbox.wait(name)

    @rule()
    def evict(self) -> None:
        """Another conversation needs all the pages there are."""
        assert self.engine is not None
        inbox, names = Inbox(), [self.new_name() for _ in range(2)]
        for i, name in enumerate(names):
            self.engine.submit(Request(name, prompt(13 + i, CONTEXT - 4), GREEDY, max_tokens=2), inbox)
        inbox.wait(*names)

    @rule()
    def restart(self) -> None:
        assert self.engine is not None
        close(self.engine)
        self.engine = self.start()

    @invariant()
    def nothing_is_lost(self) -> None:
        if self.engine is not None:
            self.engine.check()

    def teardown(self) -> None:
        if self.engine is not None:
            close(self.engine)
        shutil.rmtree(self.folder)


def schedules(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


def test_a_few_session_schedules() -> None:
    run_state_machine_as_test(SessionSchedule, settings=schedules(4, 8))  # type: ignore[no-untyped-call]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_1000_session_schedules() -> None:
    run_state_machine_as_test(SessionSchedule, settings=schedules(1000, 10))  # type: ignore[no-untyped-call]
