"""Counters per source and slot."""

from __future__ import annotations

import json

from agens_engine.core import DraftChain, DraftRun, StepResult
from agens_engine.speculate.source import judged_runs
from agens_engine.speculate.stats import DraftStats

CHAIN = DraftChain((DraftRun("copy", (1, 2)), DraftRun("mtp", (3, 4, 5))))


def test_judged_runs():
    for num_accepted, expected in {
        0: [(1, 1, 0), (3, 0, 0)],
        2: [(1, 2, 2), (3, 1, 0)],
        3: [(1, 2, 2), (3, 2, 1)],
        5: [(1, 2, 2), (3, 3, 3)],
    }.items():
        result = StepResult(CHAIN, (0,) * (num_accepted + 1), num_accepted)
        assert [t[1:] for t in judged_runs(result)] == expected


def test_totals_and_slots():
    stats = DraftStats()
    stats.record(StepResult(CHAIN, (1, 2, 3, 9), 3), {"copy": 0.5, "mtp": 0.25})
    stats.record(StepResult(DraftChain((DraftRun("mtp", (7,)),)), (8,), 0), {"copy": 0.5, "mtp": 0.25})
    stats.record(StepResult(DraftChain(), (8,), 0), {})
    summary = json.loads(json.dumps(stats.summary()))
    assert summary["verify_steps"] == 3 and summary["tokens_per_step"] == 2.0
    assert summary["sources"]["copy"] == {
        "proposed": 2, "accepted": 2, "seconds": 1.0,
        "proposed_by_slot": [1, 1, 0, 0, 0, 0, 0], "accepted_by_slot": [1, 1, 0, 0, 0, 0, 0],
    }  # fmt: skip
    assert summary["sources"]["mtp"] == {
        "proposed": 4, "accepted": 1, "seconds": 0.5,
        "proposed_by_slot": [1, 0, 1, 1, 1, 0, 0], "accepted_by_slot": [0, 0, 1, 0, 0, 0, 0],
    }  # fmt: skip


def test_empty_summary():
    assert DraftStats().summary() == {"verify_steps": 0, "tokens_per_step": 0.0, "sources": {}}
