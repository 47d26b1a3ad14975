"""The slot filler: order, limits, faulty sources."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from agens_engine.core import DraftChain, DraftRun, StepResult
from agens_engine.speculate.drafting import MAX_DRAFTS, SlotFiller, find_fault

VOCAB = 10


class Seq:
    request_id = "r"
    prompt_len = 2
    token_ids = (1, 2)


class Source:
    """Answers with fixed tokens, cut to the slots asked for, or raises in one verb."""

    def __init__(self, name: str, tokens: tuple[int, ...] = (), fail: str = "", run: DraftRun | None = None) -> None:
        self.name, self.tokens, self.fail, self.run = name, tokens, fail, run
        self.calls: list[Any] = []

    def _note(self, verb: str, *args: Any) -> None:
        self.calls.append((verb, *args))
        if verb == self.fail:
            raise RuntimeError("broken drafter")

    def begin(self, seq):
        self._note("begin")

    def propose(self, seq, prefix, num_slots):
        self._note("propose", prefix, num_slots)
        return self.run or DraftRun(self.name, self.tokens[:num_slots])

    def observe(self, seq, result, taps=None):
        self._note("observe", taps)

    def end(self, seq):
        self._note("end")


def filler(*sources: Source, allowed: frozenset[str] | None = None) -> SlotFiller:
    f = SlotFiller(sources, VOCAB)
    f.begin(Seq(), allowed)
    return f


def test_sources_fill_slots_in_order_and_see_what_is_filled():
    a, b = Source("a", (1, 2, 3)), Source("b", (4,) * 9)
    drafted = filler(a, b).fill(Seq())
    assert drafted.chain.runs == (DraftRun("a", (1, 2, 3)), DraftRun("b", (4, 4, 4, 4)))
    assert a.calls[-1] == ("propose", (), MAX_DRAFTS) and b.calls[-1] == ("propose", (1, 2, 3), 4)
    assert set(drafted.seconds) == {"a", "b"} and min(drafted.seconds.values()) >= 0


def test_h17_seven_slots_by_default_and_never_more():
    f = filler(Source("a", (1,) * 20))
    assert len(f.fill(Seq()).chain) == len(f.fill(Seq(), 50).chain) == MAX_DRAFTS == 7


def test_fewer_slots():
    a, b = Source("a", (1, 2)), Source("b", (3,))
    f = filler(a, b)
    assert f.fill(Seq(), 2).chain.token_ids == (1, 2)
    assert [c[0] for c in b.calls] == ["begin"]  # no slot was left to ask it for
    assert f.fill(Seq(), 0).chain == DraftChain()


def test_a_source_without_a_guess_leaves_its_slots():
    assert filler(Source("a"), Source("b", (3, 4))).fill(Seq()).chain.runs == (DraftRun("b", (3, 4)),)


def test_request_chooses_its_sources():
    a, b = Source("a", (1,)), Source("b", (2,))
    assert filler(a, b, allowed=frozenset({"b", "unknown"})).fill(Seq()).chain.token_ids == (2,)
    assert a.calls == []
    assert len(filler(a, b, allowed=frozenset()).fill(Seq()).chain) == 0


def test_a_raising_source_is_skipped_counted_and_logged_once(caplog):
    f = filler(Source("bad", fail="propose"), Source("good", (5,)))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert f.fill(Seq()).chain.token_ids == (5,)
    assert f.num_failures == {"bad": 3, "good": 0}
    assert len(caplog.records) == 1 and "broken drafter" in caplog.text


def test_a_source_that_lost_track_sits_out_the_request():
    bad = Source("bad", (1,), fail="observe")
    f = filler(bad)
    assert len(f.fill(Seq()).chain) == 1
    f.observe(Seq(), StepResult(DraftChain(), (3,), 0), taps="taps")
    assert bad.calls[-1] == ("observe", "taps")
    assert len(f.fill(Seq()).chain) == 0
    f.end(Seq())
    assert bad.calls[-1] == ("end",)
    f.begin(Seq())
    assert len(f.fill(Seq()).chain) == 1


def test_a_source_that_cannot_begin_is_not_asked():
    bad = Source("bad", (1,), fail="begin")
    assert len(filler(bad).fill(Seq()).chain) == 0
    assert [c[0] for c in bad.calls] == ["begin"]


def q(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


HALF = [0.5, 0.5] + [0.0] * 8


@pytest.mark.parametrize(
    ("run", "word"),
    [
        (DraftRun("a", (10,)), "outside"),
        (DraftRun("a", (-1,)), "outside"),
        (DraftRun("a", (1,) * 8), "8 tokens"),
        (DraftRun("b", (1,)), "labelled"),
        (DraftRun("a", (1, 1), q(HALF)), "shape"),
        (DraftRun("a", (1,), q([0.5, 0.5])), "shape"),
        (DraftRun("a", (1,), q([0.5, np.nan] + [0.0] * 8)), "NaN"),
        (DraftRun("a", (1,), q([-0.5, 1.5] + [0.0] * 8)), "negative"),
        (DraftRun("a", (1,), q([0.5, 0.4] + [0.0] * 8)), "sums"),
        (DraftRun("a", (2,), q(HALF)), "no probability"),
    ],
)
def test_h16_nonsense_is_refused_with_its_reason(run, word):
    assert word in str(find_fault(run, "a", 7, VOCAB))
    f = filler(Source("a", run=run), Source("c", (3,)))
    assert f.fill(Seq()).chain.token_ids == (3,)
    assert f.num_failures["a"] == 1


def test_a_sound_proposal_has_no_fault():
    assert find_fault(DraftRun("a", (1, 0), q(HALF, HALF)), "a", 7, VOCAB) is None


def test_names_must_differ():
    with pytest.raises(ValueError, match="share a name"):
        SlotFiller([Source("a"), Source("a")], VOCAB)
