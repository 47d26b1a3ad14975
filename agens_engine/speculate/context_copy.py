"""Draft by copying: find the newest tokens earlier in the text and propose what followed them there.

The longest match between 3 and 8 tokens wins, the most recent one among equally long (spec drafters.md section C). When
the copied stretch reaches the newest token it goes on through its own proposals, so a periodic text is continued. The
proposal distribution is a point mass.

Back-off: the shortest match that is believed rises by one with each copy whose first token is refused, up to 8. It
falls by one when at least half of a copy is accepted, and also after 16 steps in a row without a copy, or else a text
without long matches would never try again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agens_engine.core import DraftRun, StepResult
from agens_engine.speculate.source import Ask, CommittedRows, DraftFault, Reads, SequenceView, judged_runs
from agens_engine.speculate.suffix_index import MAX_MATCH, MIN_MATCH, SuffixIndex

FORGIVE_STEPS = 16


@dataclass
class _CopyState:
    index: SuffixIndex
    min_match: int = MIN_MATCH
    num_idle_steps: int = 0


class ContextCopy:
    """The `copy` source. State is one suffix index per request; `end` frees it."""

    name = "copy"
    reads = Reads()

    def __init__(self) -> None:
        self._states: dict[str, _CopyState] = {}

    def begin(self, seq: SequenceView) -> None:
        self._states[seq.request_id] = _CopyState(SuffixIndex(seq.token_ids))

    def prepare(self, asks: Sequence[Ask]) -> None:
        """Nothing is shared."""

    def commit(self, rows: Sequence[CommittedRows]) -> None:
        """The text is all this source reads."""

    def propose(self, asks: Sequence[Ask]) -> list[DraftRun | DraftFault | None]:
        return [self._propose(ask.seq, ask.prefix, ask.num_slots) for ask in asks]

    def _propose(self, seq: SequenceView, prefix: tuple[int, ...], num_slots: int) -> DraftRun | None:
        state = self._states[seq.request_id]
        index = state.index
        if len(index) < len(seq.token_ids):
            index.extend(seq.token_ids[len(index) :])
        newest = index.tokens(max(len(index) - MAX_MATCH, 0), len(index)) + list(prefix)
        match = index.find(newest, state.min_match)
        if match is None:
            return None
        _, end = match
        copied = index.tokens(end + 1, end + 1 + num_slots)
        if len(copied) < num_slots:
            copied += prefix[: num_slots - len(copied)]
        period = len(index) + len(prefix) - (end + 1)
        while len(copied) < num_slots:  # past everything known: repeat what was just copied
            copied.append(copied[-period])
        return DraftRun(self.name, tuple(copied))

    def observe(self, seq: SequenceView, result: StepResult) -> None:
        state = self._states[seq.request_id]
        for run, _, num_judged, num_accepted in judged_runs(result):
            if run.source != self.name:
                continue
            state.num_idle_steps = 0
            if num_judged and num_accepted == 0:
                state.min_match = min(state.min_match + 1, MAX_MATCH)
            elif 2 * num_accepted >= len(run.token_ids):
                state.min_match = max(state.min_match - 1, MIN_MATCH)
            return
        state.num_idle_steps += 1
        if state.num_idle_steps >= FORGIVE_STEPS:
            state.num_idle_steps = 0
            state.min_match = max(state.min_match - 1, MIN_MATCH)

    def end(self, seq: SequenceView) -> None:
        self._states.pop(seq.request_id, None)
