"""The slot filler: order, limits, faulty sources."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from agens_engine.core import DraftChain, DraftRun, SamplingParams, StepResult
from agens_engine.sampling.seeds import RequestStream
from agens_engine.speculate.drafting import MAX_DRAFTS, Drafted, SlotFiller, StepTime, find_fault
from agens_engine.speculate.source import Ask, CommittedRows, DraftFault, Reads

VOCAB = 10
COST = StepTime(0.1, 1, 8)
TEXT_ONLY = Reads()


class Seq:
    prompt_len = num_output_tokens = 2
    token_ids = (1, 2)
    sampling, stream = SamplingParams(), RequestStream(0)

    def __init__(self, request_id: str = "r") -> None:
        self.request_id = request_id


class Source:
    """Answers with fixed tokens, cut to the slots asked for, or raises in one verb."""

    def __init__(
        self, name: str, tokens: tuple[int, ...] = (), fail: str = "", run: Any = None, reads: Reads = TEXT_ONLY
    ) -> None:
        self.name, self.tokens, self.fail, self.run, self.reads = name, tokens, fail, run, reads
        self.calls: list[Any] = []

    def _note(self, verb: str, *args: Any) -> None:
        self.calls.append((verb, *args))
        if verb == self.fail:
            raise RuntimeError("broken drafter")

    def begin(self, seq):
        self._note("begin")

    def prepare(self, asks):
        self._note("prepare", [(ask.prefix, ask.num_slots) for ask in asks])

    def propose(self, asks):
        self._note("propose", *((ask.prefix, ask.num_slots) for ask in asks))
        return [self.run or DraftRun(self.name, self.tokens[: ask.num_slots]) for ask in asks]

    def commit(self, rows):
        self._note("commit", [r.seq.request_id for r in rows])

    def observe(self, seq, result):
        self._note("observe")

    def end(self, seq):
        self._note("end")


def filler(*sources: Source, allowed: frozenset[str] | None = None) -> SlotFiller:
    f = SlotFiller(sources, VOCAB)
    f.begin(Seq(), allowed)
    return f


def fill(f: SlotFiller, num_slots: int = MAX_DRAFTS) -> Drafted:
    return f.fill([Ask(Seq(), (), num_slots)])[0]


def test_sources_fill_slots_in_order_and_see_what_is_filled():
    a, b = Source("a", (1, 2, 3)), Source("b", (4,) * 9)
    drafted = fill(filler(a, b))
    assert drafted.chain.runs == (DraftRun("a", (1, 2, 3)), DraftRun("b", (4, 4, 4, 4)))
    assert a.calls[-1] == ("propose", ((), MAX_DRAFTS)) and b.calls[-1] == ("propose", ((1, 2, 3), 4))
    assert set(drafted.seconds) == {"a", "b"} and min(drafted.seconds.values()) >= 0


def test_h17_seven_slots_by_default_and_never_more():
    f = filler(Source("a", (1,) * 20))
    assert len(fill(f).chain) == len(fill(f, 50).chain) == MAX_DRAFTS == 7


def test_fewer_slots():
    a, b = Source("a", (1, 2)), Source("b", (3,))
    f = filler(a, b)
    assert fill(f, 2).chain.token_ids == (1, 2)
    assert [c[0] for c in b.calls] == ["begin"]  # no slot was left to ask it for
    assert fill(f, 0).chain == DraftChain()


def test_a_source_without_a_guess_leaves_its_slots():
    assert fill(filler(Source("a"), Source("b", (3, 4)))).chain.runs == (DraftRun("b", (3, 4)),)


def test_request_chooses_its_sources():
    a, b = Source("a", (1,)), Source("b", (2,))
    assert fill(filler(a, b, allowed=frozenset({"b", "unknown"}))).chain.token_ids == (2,)
    assert a.calls == []
    assert len(fill(filler(a, b, allowed=frozenset())).chain) == 0


def test_a_raising_source_is_skipped_counted_and_logged_once(caplog):
    f = filler(Source("bad", fail="propose"), Source("good", (5,)))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert fill(f).chain.token_ids == (5,)
    assert f.num_failures == {"bad": 3, "good": 0}
    assert len(caplog.records) == 1 and "broken drafter" in caplog.text


def test_a_source_that_lost_track_sits_out_the_request():
    bad = Source("bad", (1,), fail="observe")
    f = filler(bad)
    assert len(fill(f).chain) == 1
    f.observe(Seq(), StepResult(DraftChain(), (3,), 0), Drafted(), COST)
    assert bad.calls[-1] == ("observe",)
    assert len(fill(f).chain) == 0
    f.end(Seq())
    assert bad.calls[-1] == ("end",)
    f.begin(Seq())
    assert len(fill(f).chain) == 1


def test_a_source_that_cannot_begin_is_not_asked():
    bad = Source("bad", (1,), fail="begin")
    assert len(fill(filler(bad)).chain) == 0
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
    assert fill(f).chain.token_ids == (3,)
    assert f.num_failures["a"] == 1


def test_a_sound_proposal_has_no_fault():
    assert find_fault(DraftRun("a", (1, 0), q(HALF, HALF)), "a", 7, VOCAB) is None


def test_sources_that_read_the_target_are_prepared_together_after_the_copy() -> None:
    taps = Reads(taps=(1, 2))
    a, b, c = Source("copy", (1, 2)), Source("mtp", (3,), reads=Reads(hidden=True)), Source("dflash", (4,), reads=taps)
    f = filler(a, b, c)
    assert f.reads([Seq()]) == Reads(True, (1, 2))
    assert fill(f).chain.token_ids == (1, 2, 3, 4)
    assert a.calls == [("begin",), ("propose", ((), 7))]
    assert b.calls[1:] == [("prepare", [((1, 2), 5)]), ("propose", ((1, 2), 5))]
    assert c.calls[1:] == [("prepare", [((1, 2), 5)]), ("propose", ((1, 2, 3), 4))]
    f.commit([CommittedRows(Seq(), 0, None, None, None)])  # type: ignore[arg-type]
    assert b.calls[-1] == c.calls[-1] == ("commit", ["r"]) and a.calls[-1][0] == "propose"


def test_one_call_serves_all_sequences_and_each_has_its_own_slots() -> None:
    a, b = Source("a", (1, 2)), Source("b", (3,) * 7)
    f = SlotFiller([a, b], VOCAB)
    one, two, three = Seq("one"), Seq("two"), Seq("three")
    f.begin(one)
    f.begin(two, frozenset({"b"}))
    f.begin(three, frozenset())
    drafted = f.fill([Ask(one, (), 7), Ask(two, (), 3), Ask(three, (), 7)])
    assert [d.chain.token_ids for d in drafted] == [(1, 2, 3, 3, 3, 3, 3), (3, 3, 3), ()]
    assert b.calls[-1] == ("propose", ((1, 2), 5), ((), 3))
    assert set(drafted[1].seconds) == {"b"} and drafted[2].seconds == {}


def test_a_fault_of_one_sequence_is_counted_and_the_others_keep_their_drafts() -> None:
    class Half(Source):
        def propose(self, asks):
            return [DraftFault("NaN"), *super().propose(asks[1:])]

    f = SlotFiller([Half("half", (1,)), Source("rest", (2,))], VOCAB)
    one, two = Seq("one"), Seq("two")
    f.begin(one)
    f.begin(two)
    assert [d.chain.token_ids for d in f.fill([Ask(one, (), 7), Ask(two, (), 7)])] == [(2,), (1, 2)]
    assert f.num_failures == {"half": 1, "rest": 0}


@pytest.mark.parametrize("verb", ["prepare", "commit"])
def test_a_source_that_fails_on_target_rows(verb: str) -> None:
    bad = Source("bad", (1,), fail=verb, reads=Reads(hidden=True))
    f = filler(bad, Source("good", (2,)))
    if verb == "prepare":
        assert fill(f).chain.token_ids == (2,)
        bad.fail = ""
        assert fill(f).chain.token_ids == (1, 2)  # only that step
    else:
        f.commit([CommittedRows(Seq(), 0, None, None, None)])  # type: ignore[arg-type]
        assert fill(f).chain.token_ids == (2,) and f.reads([Seq()]) == Reads()  # lost track: for the whole request
    assert f.num_failures["bad"] == 1


def test_the_policy_shortens_and_skips_sources() -> None:
    class Policy:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def begin(self, seq):
            self.calls.append("begin")

        def limits(self, seq, sources, num_slots):
            assert sources == ["a", "b", "c"]
            return {"a": 1, "b": 0, "c": num_slots}

        def observe(self, seq, result, seconds, step):
            self.calls.append((set(seconds), step))

        def end(self, seq):
            self.calls.append("end")

        def summary(self):
            return {}

    policy, b = Policy(), Source("b", (2,) * 7, reads=Reads(hidden=True))
    f = SlotFiller([Source("a", (1, 1)), b, Source("c", (3,) * 7)], VOCAB, policy)
    f.begin(Seq())
    drafted = fill(f)
    assert drafted.chain.token_ids == (1, *(3,) * 6) and b.calls == [("begin",)]
    f.observe(Seq(), StepResult(drafted.chain, (1, 0), 1), drafted, COST)
    f.end(Seq())
    assert policy.calls == ["begin", ({"a", "c"}, COST), "end"]


def test_a_source_prepares_for_every_slot_although_it_may_fill_only_the_last() -> None:
    """A block drafter limited to 2 slots fills slots 6 and 7 when the source before it fills 5."""

    class Policy:
        def begin(self, seq):
            """Nothing is kept."""

        def limits(self, seq, sources, num_slots):
            return {"head": 5, "block": 2}

        def observe(self, seq, result, seconds, step):
            """Nothing is learned."""

        def end(self, seq):
            """Nothing is kept."""

        def summary(self):
            return {}

    class Block(Source):
        prepared: list[int]

        def prepare(self, asks):
            self.prepared = [ask.num_slots for ask in asks]

    block = Block("block", (2,) * 7, reads=Reads(hidden=True))
    f = SlotFiller([Source("head", (1,) * 5, reads=Reads(hidden=True)), block], VOCAB, Policy())
    f.begin(Seq())
    assert fill(f).chain.token_ids == (1,) * 5 + (2,) * 2
    assert block.prepared == [7]


def test_a_wrong_head_is_named_once(caplog) -> None:
    f = filler(Source("head", (1,) * 7, reads=Reads(hidden=True)), Source("copy", (2,)))
    with caplog.at_level(logging.WARNING):
        for step in range(300):
            drafted = fill(f)
            f.observe(Seq(), StepResult(drafted.chain, (5,), 0), drafted, COST)
            assert len(caplog.records) == (step >= 199)
    assert "wrong head" in caplog.text and "0 of its first 200" in caplog.text


def test_a_head_that_fits_raises_no_alarm(caplog) -> None:
    f = filler(Source("head", (1,) * 7, reads=Reads(hidden=True)))
    with caplog.at_level(logging.WARNING):
        for step in range(300):
            drafted, good = fill(f), int(step % 10 == 0)
            f.observe(Seq(), StepResult(drafted.chain, (1,) * good + (5,), good), drafted, COST)
    assert not caplog.records


def test_names_must_differ():
    with pytest.raises(ValueError, match="share a name"):
        SlotFiller([Source("a"), Source("a")], VOCAB)
