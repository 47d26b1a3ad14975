"""Copying from the context, by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from agens_engine.core import DraftChain, DraftRun, SamplingParams, StepResult
from agens_engine.sampling.seeds import RequestStream
from agens_engine.speculate.context_copy import FORGIVE_STEPS, ContextCopy
from agens_engine.speculate.source import Ask
from agens_engine.speculate.suffix_index import MAX_MATCH, SuffixIndex


@dataclass
class Seq:
    token_ids: list[int]
    request_id: str = "r"
    num_output_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: RequestStream = field(default_factory=lambda: RequestStream(0))
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)


def propose(copy: ContextCopy, seq: Seq, prefix: tuple[int, ...], num_slots: int) -> DraftRun | None:
    (run,) = copy.propose([Ask(seq, prefix, num_slots)])
    assert run is None or isinstance(run, DraftRun)
    return run


def proposal(tokens: list[int], num_slots: int = 7, prefix: tuple[int, ...] = ()) -> tuple[int, ...] | None:
    copy, seq = ContextCopy(), Seq(tokens)
    copy.begin(seq)
    run = propose(copy, seq, prefix, num_slots)
    assert run is None or (run.source == "copy" and run.q is None)
    return None if run is None else run.token_ids


def test_continuation_of_a_match():
    assert proposal([1, 2, 3, 10, 11, 12, 13, 1, 2, 3], 4) == (10, 11, 12, 13)


def test_two_tokens_are_no_match():
    assert proposal([5, 2, 3, 10, 11, 12, 1, 2, 3]) is None
    assert proposal([]) is None and proposal([4]) is None


def test_longest_match_wins_over_a_more_recent_one():
    tokens = [9, 1, 2, 3, 20, 8, 1, 2, 3, 30, 9, 1, 2, 3]
    assert proposal(tokens, 1) == (20,)


def test_most_recent_of_equal_matches_wins():
    assert proposal([7, 1, 2, 3, 20, 8, 1, 2, 3, 30, 6, 1, 2, 3], 1) == (30,)


def test_period_is_continued_past_the_newest_token():
    assert proposal([1, 2, 3, 1, 2, 3], 7) == (1, 2, 3, 1, 2, 3, 1)
    assert proposal([5, 5, 5, 5], 3) == (5, 5, 5)


def test_goes_on_after_the_drafts_of_another_source():
    assert proposal([1, 2, 3, 4, 5, 6, 9, 1, 2], 2, prefix=(3, 4)) == (5, 6)


def test_known_text_includes_the_other_source_s_drafts():
    # 2 3 4 matches; after its end come 7, the drafts 2 3 4, and then the copy repeats itself
    assert proposal([2, 3, 4, 7], 5, prefix=(2, 3, 4)) == (7, 2, 3, 4, 7)


def test_grows_with_the_sequence():
    copy, seq = ContextCopy(), Seq([1, 2, 3, 4, 9])
    copy.begin(seq)
    assert propose(copy, seq, (), 2) is None
    seq.token_ids += [1, 2, 3]
    run = propose(copy, seq, (), 2)
    assert run is not None and run.token_ids == (4, 9)


def step(copy: ContextCopy, seq: Seq, num_accepted: int, num: int = 7) -> None:
    copy.observe(seq, StepResult(DraftChain((DraftRun("copy", (1,) * num),)), (1,) * (num_accepted + 1), num_accepted))


def test_back_off_asks_for_longer_matches_and_recovers():
    copy, seq = ContextCopy(), Seq([1, 2, 3, 10, 11, 1, 2, 3])
    copy.begin(seq)
    step(copy, seq, 0)
    assert propose(copy, seq, (), 7) is None  # a match of 3 is no longer believed
    step(copy, seq, 4)
    assert propose(copy, seq, (), 7) is not None


def test_back_off_is_forgiven_when_nothing_is_copied():
    copy, seq = ContextCopy(), Seq([1, 2, 3, 10, 11, 1, 2, 3])
    copy.begin(seq)
    for _ in range(20):
        step(copy, seq, 0)
    nothing = StepResult(DraftChain(), (1,), 0)
    for _ in range((MAX_MATCH - 3) * FORGIVE_STEPS):
        assert propose(copy, seq, (), 7) is None
        copy.observe(seq, nothing)
    assert propose(copy, seq, (), 7) is not None


def test_a_copy_behind_a_refused_draft_is_not_judged():
    copy, seq = ContextCopy(), Seq([1, 2, 3, 10, 11, 1, 2, 3])
    copy.begin(seq)
    chain = DraftChain((DraftRun("mtp", (4, 4)), DraftRun("copy", (1, 1))))
    copy.observe(seq, StepResult(chain, (4, 5), 1))
    assert propose(copy, seq, (), 7) is not None


def test_h9_h12_h15_state_belongs_to_one_request():
    copy = ContextCopy()
    a, b = Seq([1, 2, 3, 10, 1, 2, 3], "a"), Seq([5, 6, 7, 5, 6], "b")
    copy.begin(a)
    copy.begin(b)
    step(copy, b, 0)
    assert propose(copy, b, (), 2) is None
    run = propose(copy, a, (), 1)
    assert run is not None and run.token_ids == (10,)
    copy.end(a)
    again = Seq([1, 2, 3], "a")
    copy.begin(again)
    assert propose(copy, again, (), 7) is None
    copy.end(again)
    copy.end(again)
    copy.end(b)
    assert not copy._states


def test_memory_at_the_full_context():
    tokens = np.random.default_rng(0).integers(0, 248_077, 262_144).tolist()
    index = SuffixIndex(tokens)
    assert index.num_bytes == 52 * 262_144
    assert index.find(tokens[1000:1008]) == (8, 1007)
