"""Who runs when: bounded stall for running streams, turns for prompts, canonical chunks."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from agens_engine.scheduler import Scheduler
from agens_engine.sequence import LiveSequence


class FakeSequence:
    """Only what the scheduler reads."""

    def __init__(self, name: str, prompt: int) -> None:
        self.name, self.prompt_len, self.done = name, prompt, 0

    @property
    def prefill_left(self) -> int:
        return max(0, self.prompt_len - self.done)


def add(scheduler: Scheduler, name: str, prompt: int) -> Any:
    sequence = FakeSequence(name, prompt)
    scheduler.add(cast(LiveSequence, sequence))
    return sequence


def step(scheduler: Scheduler) -> list[tuple[str, int]]:
    scheduler.admit()
    work = scheduler.next_step()
    for item in work:
        cast(Any, item.sequence).done += item.num_prompt_tokens
    return [(cast(Any, item.sequence).name, item.num_prompt_tokens) for item in work]


def test_k1_a_running_stream_decodes_in_every_step_of_a_long_prefill() -> None:
    scheduler = Scheduler(4, 16)
    add(scheduler, "stream", 5)
    assert step(scheduler) == [("stream", 5)]
    add(scheduler, "long", 100)
    for _ in range(7):
        names = step(scheduler)
        assert names[0] == ("stream", 0)
        assert sum(tokens for _, tokens in names) <= 16
    assert step(scheduler) == [("stream", 0), ("long", 0)]


def test_k3_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    scheduler = Scheduler(4, 16)
    add(scheduler, "long", 1000)
    step(scheduler)
    add(scheduler, "short", 4)
    steps = [step(scheduler) for _ in range(2)]
    assert any(("short", 4) in names for names in steps)


def test_short_prompts_share_one_step() -> None:
    scheduler = Scheduler(4, 16)
    for name in "abc":
        add(scheduler, name, 5)
    assert step(scheduler) == [("a", 5), ("b", 5), ("c", 5)]


def test_no_more_run_than_seats_and_the_rest_wait_in_order() -> None:
    scheduler = Scheduler(2, 16)
    sequences = [add(scheduler, name, 3) for name in "abcd"]
    step(scheduler)
    assert [cast(Any, s).name for s in scheduler.running] == ["a", "b"]
    scheduler.remove(sequences[0])
    scheduler.remove(sequences[2])
    step(scheduler)
    assert [cast(Any, s).name for s in scheduler.running] == ["b", "d"]
    assert len(scheduler) == 2


@settings(deadline=None, max_examples=200)
@given(
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    chunk=st.integers(1, 32),
    seats=st.integers(1, 4),
)
def test_every_prompt_finishes_in_canonical_chunks(prompts: list[int], chunk: int, seats: int) -> None:
    """G8: a sequence's chunks start at multiples of the chunk size, whatever runs beside it; nothing starves."""
    scheduler = Scheduler(seats, chunk)
    sequences = [add(scheduler, str(i), prompt) for i, prompt in enumerate(prompts)]
    for _ in range(10 * sum(prompts) + 10):
        scheduler.admit()
        work = scheduler.next_step()
        assert sum(item.num_prompt_tokens for item in work) <= chunk
        assert len({id(item.sequence) for item in work}) == len(work)
        for item in work:
            sequence = cast(Any, item.sequence)
            if item.is_prefill:
                assert sequence.done % chunk == 0
                assert item.num_prompt_tokens == min(chunk, sequence.prefill_left)
                sequence.done += item.num_prompt_tokens
            else:
                scheduler.remove(item.sequence)
        if all(s.done == s.prompt_len for s in sequences) and not len(scheduler):
            return
    raise AssertionError("a sequence starved")
