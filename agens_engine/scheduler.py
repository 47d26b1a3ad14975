"""Who runs in the next step, and how many tokens of each: integers only, no tensors.

Every decoding sequence runs in every step, and one budget of prompt tokens is spent beside them, so a running stream
waits for at most one prefill chunk (case K1). Prefilling sequences take turns, so a short prompt does not wait behind a
long one (K3). A sequence's chunks always begin at multiples of the chunk size, whatever its neighbours do (G8).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from agens_engine.sequence import LiveSequence


@dataclass(frozen=True)
class Work:
    """One segment of a step: `num_prompt_tokens` of a prompt, or 0 for a verify step of a decoding sequence."""

    sequence: LiveSequence
    num_prompt_tokens: int = 0

    @property
    def is_prefill(self) -> bool:
        return self.num_prompt_tokens > 0


class Scheduler:
    """Waiting and running sequences. `chunk_tokens` is both the size of a chunk and the prompt budget of a step."""

    def __init__(self, max_running: int, chunk_tokens: int) -> None:
        self.max_running, self.chunk_tokens = max_running, chunk_tokens
        self.waiting: deque[LiveSequence] = deque()
        self.running: list[LiveSequence] = []
        self._turns: deque[LiveSequence] = deque()  # prefilling sequences, next turn first

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: LiveSequence) -> None:
        self.waiting.append(sequence)

    def admit(self) -> list[LiveSequence]:
        """Move waiting sequences to running while there is room; the caller gives them memory."""
        admitted = []
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            self._turns.append(sequence)
            admitted.append(sequence)
        return admitted

    def remove(self, sequence: LiveSequence) -> None:
        """Forget a sequence, whatever it was doing."""
        for group in (self.waiting, self.running, self._turns):
            if sequence in group:
                group.remove(sequence)

    def next_step(self) -> list[Work]:
        """Verify rows of every decoding sequence, then prompt chunks within the budget."""
        work = [Work(sequence) for sequence in self.running if sequence.prefill_left == 0]
        budget = self.chunk_tokens
        for _ in range(len(self._turns)):
            sequence = self._turns.popleft()
            tokens = min(self.chunk_tokens, sequence.prefill_left)
            if tokens > budget:
                self._turns.appendleft(sequence)
                break
            budget -= tokens
            work.append(Work(sequence, tokens))
            if sequence.prefill_left > tokens:
                self._turns.append(sequence)
        return work
