"""The interface between the engine and anything that can guess the next tokens.

A source keeps state per request and forgets it at `end`; nothing it does may touch the target's memory. Guesses cost
time and never change the distribution of the output, so a source may be wrong, late or empty, but its `q` must be the
distribution its tokens were really drawn from (case H10), with random numbers of its own or of Lane.DRAFT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from agens_engine.core import DraftRun, StepResult


class SequenceView(Protocol):
    """What a source may see of a sequence; read only.

    token_ids   prompt and answer so far; the last one is the anchor, which the target has not run through yet. It grows
                by appending. A reference, not a copy: reading it must cost nothing.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def prompt_len(self) -> int: ...


class DraftSource(Protocol):
    """A drafter, called from the engine's thread in the order begin, (propose, observe)*, end for each request.

    name   short and stable: it is a key in statistics and in `draft_sources` of a request
    """

    @property
    def name(self) -> str: ...

    def begin(self, seq: SequenceView) -> None:
        """The prompt is known; prepare state for this request."""
        ...

    def propose(self, seq: SequenceView, prefix: tuple[int, ...], num_slots: int) -> DraftRun | None:
        """Guess the tokens that follow seq.token_ids + prefix.

        prefix      drafts that earlier sources put into the first slots of this step; not committed
        num_slots   how many slots are left, >= 1
        returns     at most num_slots tokens, or None for no guess
        """
        ...

    def observe(self, seq: SequenceView, result: StepResult, taps: Any = None) -> None:
        """A step was committed: seq.token_ids already ends with result.committed.

        taps   hidden states of the committed rows, for sources that ask the model for them
        """
        ...

    def end(self, seq: SequenceView) -> None:
        """The request is over; drop its state. Also called for a request that never proposed."""
        ...


def judged_runs(result: StepResult) -> Iterator[tuple[DraftRun, int, int, int]]:
    """Split a step's outcome by run.

    yields (run, first slot, num_judged, num_accepted): slots count from 1; a draft is judged when every draft before it
    was accepted, so num_judged is num_accepted, plus one where the run holds the refused draft
    """
    first = 0
    for run in result.chain.runs:
        num = len(run.token_ids)
        num_accepted = min(max(result.num_accepted - first, 0), num)
        num_judged = min(max(result.num_accepted + 1 - first, 0), num)
        yield run, first + 1, num_judged, num_accepted
        first += num
