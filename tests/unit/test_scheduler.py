"""Who runs when: bounded stall for running streams, turns for prompts, canonical chunks."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from agens_engine.scheduler import MAX_OVERTAKEN, Scheduler
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


def test_k3_short_prompts_get_through_a_crowd_of_long_ones() -> None:
    """Fifteen long prefills, then a short prompt: two steps, and the long ones take turns meanwhile."""
    scheduler = Scheduler(17, 16)
    for i in range(15):
        add(scheduler, f"long{i}", 1000)
    seen: list[list[tuple[str, int]]] = [step(scheduler) for _ in range(31)]
    assert {name for names in seen for name, _ in names} == {f"long{i}" for i in range(15)}
    add(scheduler, "short", 4)
    assert ("short", 4) in step(scheduler) + step(scheduler)


def test_k3_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    """More short prompts than there is budget for, for ever: each of 8 prompts still gets a chunk in 16 steps."""
    scheduler = Scheduler(8, 16)
    long = add(scheduler, "long", 320)
    for i in range(16 * 20):
        add(scheduler, f"short{i}", 16)
        for sequence in [s for s in scheduler.running if s.prefill_left == 0]:
            scheduler.remove(sequence)
        step(scheduler)
    assert long.prefill_left == 0


def test_a_resumed_session_goes_on_to_the_next_whole_chunk() -> None:
    scheduler = Scheduler(2, 16)
    resumed = add(scheduler, "resumed", 60)
    resumed.done = 21
    assert [step(scheduler) for _ in range(3)] == [[("resumed", 11)], [("resumed", 16)], [("resumed", 12)]]


def by_pages(max_running: int, num_pages: int) -> Scheduler:
    return Scheduler(max_running, 16, num_pages=num_pages, pages_of=lambda sequence: -(-sequence.prompt_len // 10))


def running(scheduler: Scheduler) -> list[str]:
    scheduler.admit()
    return [cast(Any, sequence).name for sequence in scheduler.running]


def test_k4_admission_counts_pages_not_heads() -> None:
    scheduler = by_pages(8, 4)
    sequences = [add(scheduler, f"s{i}", 20) for i in range(8)]
    assert running(scheduler) == ["s0", "s1"] and scheduler.pages_promised == 4
    scheduler.remove(sequences[0])
    assert running(scheduler) == ["s1", "s2"]


def test_k4_a_large_request_is_overtaken_but_not_for_ever() -> None:
    scheduler = by_pages(8, 4)
    add(scheduler, "stays", 10)
    add(scheduler, "large", 40)
    for i in range(MAX_OVERTAKEN + 5):
        sequence = add(scheduler, f"small{i}", 10)
        names = running(scheduler)
        assert (f"small{i}" in names) == (i < MAX_OVERTAKEN)
        if i < MAX_OVERTAKEN:
            scheduler.remove(sequence)
    scheduler.remove(scheduler.running[0])
    assert running(scheduler) == ["large"]
    scheduler.remove(scheduler.running[0])
    assert running(scheduler) == [f"small{MAX_OVERTAKEN + i}" for i in range(4)]


def test_a_request_larger_than_the_memory_does_not_block_the_queue() -> None:
    scheduler = by_pages(8, 4)
    large = add(scheduler, "large", 1000)
    assert running(scheduler) == ["large"]  # its own failure ends it
    scheduler.remove(large)
    add(scheduler, "next", 10)
    assert running(scheduler) == ["next"]


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
