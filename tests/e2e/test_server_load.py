"""Small runs of scripts/bench_server.py: the same load, aborts and measurement, with bounds on what must not happen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agens_engine.settings import Settings
from scripts.bench_server import RunningServer, aborts, load, overhead


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path) -> Iterator[RunningServer]:
    settings = {"model": str(tiny_model_dir), "max_sequences": 4, "context_tokens": 1024, "log_level": "warning"}
    running = RunningServer(Settings.build(settings, environ={}))
    yield running
    running.stop()
    running.engine.check()


def test_clients_in_parallel_get_whole_answers_and_leave_nothing_behind(server: RunningServer) -> None:
    result = asyncio.run(load(server, clients=6, requests=4, max_tokens=6))
    assert result.errors == []
    assert result.leaked == 0
    assert [len(waits) for waits in result.waits] == [4] * 6
    assert max(max(waits) for waits in result.waits) > 0, "six clients on four seats must have waited"


def test_E1_E3_E4_E5_every_sequence_is_freed_within_one_step_of_its_abort(server: RunningServer) -> None:
    """Queued, in prefill and in decode, with drafts on, streamed and whole."""
    result = asyncio.run(aborts(server, count=60, at_once=12))
    assert len(result.steps) >= 30, "half of them are streams, each known to the engine when its client leaves"
    assert max(result.steps) <= 1
    assert result.leaked == 0
    assert set(result.states) == {"decode", "queue or prefill"}


def test_the_cost_of_a_token_is_measured(server: RunningServer) -> None:
    """No bound on the time here: that is the benchmark's. Both parts must be there."""
    (pair,) = asyncio.run(overhead(server, tokens=40, rounds=1))
    assert all(cost > 0 for cost in pair)
