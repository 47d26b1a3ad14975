"""Who runs in the next step, and how many tokens of each: integers only, no tensors.

Steps       Every decoding sequence runs in every step, and one budget of prompt tokens is spent beside them, so a
            running stream waits for at most one prefill chunk (case K1).
Prefill     Steps alternate between the prompt with the least left and the one whose turn it is, and what is left of the
            budget goes to other prompts whose next piece fits, shortest first. So a short prompt gets through within
            two steps (K3), and of n prompts each gets a chunk in 2 n steps whatever arrives.
Pieces      end at multiples of the chunk size, wherever a sequence resumed and whatever its neighbours do (G8).
Admission   by what a sequence can come to hold, a seat and pages for prompt and answer, so that one that runs always
            finishes: nothing is ever preempted (K4). First come, first served; a sequence whose pages are not free may
            be overtaken MAX_OVERTAKEN times by others that fit, then they wait behind it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agens_engine.sequence import LiveSequence

MAX_OVERTAKEN = 16


@dataclass(frozen=True)
class Work:
    """One segment of a step: `num_prompt_tokens` of a prompt, or 0 for a verify step of a decoding sequence."""

    sequence: LiveSequence
    num_prompt_tokens: int = 0

    @property
    def is_prefill(self) -> bool:
        return self.num_prompt_tokens > 0


@dataclass
class QueueTimes:
    """How long requests waited for their turn; seconds."""

    admitted: int = 0
    total_seconds: float = 0.0
    longest_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.admitted += 1
        self.total_seconds += seconds
        self.longest_seconds = max(self.longest_seconds, seconds)

    def summary(self, waiting: Sequence[LiveSequence]) -> dict[str, float]:
        """For JSON; `waiting` are those in the queue now."""
        now = time.perf_counter()
        return {
            "length": len(waiting),
            "oldest_seconds": max((now - sequence.submitted_at for sequence in waiting), default=0.0),
            "admitted": self.admitted,
            "mean_seconds": self.total_seconds / self.admitted if self.admitted else 0.0,
            "longest_seconds": self.longest_seconds,
        }


class Scheduler:
    """Waiting and running sequences. `chunk_tokens` is both the size of a chunk and the prompt budget of a step.

    num_pages, pages_of   pages there are, and the most that a sequence may come to hold; None: seats alone count
    """

    def __init__(
        self,
        max_running: int,
        chunk_tokens: int,
        *,
        num_pages: int = 0,
        pages_of: Callable[[LiveSequence], int] | None = None,
    ) -> None:
        self.max_running, self.chunk_tokens = max_running, chunk_tokens
        self._num_pages, self._pages_of = num_pages, pages_of
        self.waiting: deque[LiveSequence] = deque()
        self.running: list[LiveSequence] = []
        self._turns: deque[LiveSequence] = deque()  # prefilling sequences, next turn first
        self._shortest_first = False
        self._overtaken = 0  # how often the head of the queue was

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: LiveSequence) -> None:
        self.waiting.append(sequence)

    @property
    def pages_promised(self) -> int:
        """Pages that the running sequences may come to hold."""
        return 0 if self._pages_of is None else sum(map(self._pages_of, self.running))

    def admit(self) -> list[LiveSequence]:
        """Move waiting sequences to running while there is room; the caller gives them memory."""
        admitted = []
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_running:
                break
            head = sequence is self.waiting[0]
            if not self._fits(sequence):
                if head and self._overtaken >= MAX_OVERTAKEN:
                    break
                continue
            self._overtaken = 0 if head else self._overtaken + 1
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self._turns.append(sequence)
            admitted.append(sequence)
            if not head and self._overtaken >= MAX_OVERTAKEN:
                break
        return admitted

    def _fits(self, sequence: LiveSequence) -> bool:
        # with nothing running it may try: a request larger than the memory fails by itself, it does not block the queue
        if self._pages_of is None or not self.running:
            return True
        return self.pages_promised + self._pages_of(sequence) <= self._num_pages

    def remove(self, sequence: LiveSequence) -> None:
        """Forget a sequence, whatever it was doing."""
        if self.waiting and sequence is self.waiting[0]:
            self._overtaken = 0
        for group in (self.waiting, self.running, self._turns):
            if sequence in group:
                group.remove(sequence)

    def next_step(self) -> list[Work]:
        """Verify rows of every decoding sequence, then prompt pieces within the budget."""
        work = [Work(sequence) for sequence in self.running if sequence.prefill_left == 0]
        budget = self.chunk_tokens
        for sequence in self._prefill_order():
            tokens = self._piece(sequence)
            if tokens > budget:
                continue
            budget -= tokens
            work.append(Work(sequence, tokens))
            self._turns.remove(sequence)
            if sequence.prefill_left > tokens:
                self._turns.append(sequence)
        return work

    def _prefill_order(self) -> list[LiveSequence]:
        """By what is left; in every other step the one whose turn it is comes first."""
        order = sorted(self._turns, key=lambda sequence: sequence.prefill_left)
        self._shortest_first = not self._shortest_first
        if order and not self._shortest_first:
            order.remove(self._turns[0])
            order.insert(0, self._turns[0])
        return order

    def _piece(self, sequence: LiveSequence) -> int:
        done = sequence.prompt_len - sequence.prefill_left
        return min(self.chunk_tokens - done % self.chunk_tokens, sequence.prefill_left)
