"""The interface between the engine and anything that can guess the next tokens.

A source keeps state per request and forgets it at `end`; nothing it does may touch the target's memory. Guesses cost
time and never change the distribution of the output, so a source may be wrong, late or empty, but its `q` must be the
distribution its tokens were really drawn from (case H10), with random numbers of its own or of Lane.DRAFT.

Calls are batched over the sequences of a step, all on the engine's thread:

    begin(seq)            the request starts; its prompt is known
    commit(rows)          target rows became final: after every prefill chunk and after every verify step
    prepare(asks)         once per verify step, before the first source that reads the target is asked
    propose(asks)         once per verify step, after the sources before it have filled their slots
    observe(seq, result)  the verdict of a verify step, before the commit of the same rows
    end(seq)              the request is over
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from agens_engine.core import DraftRun, SamplingParams, StepResult
from agens_engine.sampling.seeds import RequestStream


class SequenceView(Protocol):
    """What a source may see of a sequence; read only.

    token_ids   prompt and answer so far; the last one is the anchor, which the target has not run through yet. It grows
                by appending. A reference, not a copy: reading it must cost nothing.
    sampling    the request's settings; a source that samples uses its temperature
    stream      random numbers of the request. A draft for slot s (from 1) takes the number of answer position
                num_output_tokens + s - 1 of Lane.DRAFT, so that it belongs to the position and to nothing else.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def prompt_len(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def stream(self) -> RequestStream: ...


@dataclass(frozen=True)
class Ask:
    """One sequence that wants drafts.

    prefix      drafts that earlier sources put into the first slots of this step; not committed
    num_slots   how many slots are left for this source, >= 1
    """

    seq: SequenceView
    prefix: tuple[int, ...]
    num_slots: int


@dataclass(frozen=True)
class DraftFault:
    """A source's answer when its numbers went bad for one sequence (NaN): skipped for the step and counted."""

    reason: str


@dataclass(frozen=True)
class Reads:
    """What a source needs to know of the target's committed rows.

    hidden   the state after the final norm
    taps     layers whose output (stream 0) it needs, in the order in which they are joined
    """

    hidden: bool = False
    taps: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.hidden or bool(self.taps)


@dataclass(frozen=True)
class CommittedRows:
    """Target rows of one sequence that are final.

    first      position of the first row; a source whose own length differs has missed rows and starts afresh there
    hidden     [n, C] after the final norm; None when no source reads it
    taps       [n, n_taps * C]; None when no source reads them
    next_ids   [n] int64, the token after each row: prompt tokens inside a prompt, the first sampled token after its
               last row, the committed tokens in a verify step
    """

    seq: SequenceView
    first: int
    hidden: torch.Tensor | None
    taps: torch.Tensor | None
    next_ids: torch.Tensor


class DraftSource(Protocol):
    """A drafter. See the module for when each verb is called.

    name    short and stable: it is a key in statistics and in `draft_sources` of a request
    reads   what `commit` must bring; an empty Reads means that commit and prepare are never called
    """

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> Reads: ...

    def begin(self, seq: SequenceView) -> None:
        """The prompt is known; prepare state for this request."""
        ...

    def prepare(self, asks: Sequence[Ask]) -> None:
        """These sequences may be asked in this step (prefix and num_slots as known now); compute what is shared."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[DraftRun | DraftFault | None]:
        """Guess the tokens that follow seq.token_ids + prefix of each ask.

        returns   one entry per ask: at most num_slots tokens, or None for no guess
        """
        ...

    def commit(self, rows: Sequence[CommittedRows]) -> None:
        """Take in final target rows of some sequences. A row handed over is never taken back."""
        ...

    def observe(self, seq: SequenceView, result: StepResult) -> None:
        """A verify step was committed: seq.token_ids already ends with result.committed."""
        ...

    def end(self, seq: SequenceView) -> None:
        """The request is over; drop its state. Also called for a request that never proposed."""
        ...


@runtime_checkable
class KeepsContext(Protocol):
    """A source whose state of a request can be stored with a snapshot. Optional: a source that is not given its state
    back starts afresh at the first row it sees, which only costs acceptance."""

    def save(self, seq: SequenceView) -> dict[str, torch.Tensor]:
        """Copies on the CPU of what the committed rows left behind."""
        ...

    def load(self, seq: SequenceView, saved: Mapping[str, torch.Tensor]) -> None:
        """Take in what `save` gave for the same tokens, after begin(); what does not fit is ignored."""
        ...


def judged_runs(result: StepResult) -> Iterator[tuple[DraftRun, int, int, int]]:
    """Split a step's outcome by run.

    yields (run, first slot, num_judged, num_accepted): slots count from 1; a draft is judged when every draft before it
    was accepted, so num_judged is num_accepted, plus one where the run holds the refused draft; a stop inside the
    accepted drafts leaves the next one unjudged
    """
    first = 0
    refused = len(result.committed) > result.num_accepted
    for run in result.chain.runs:
        num = len(run.token_ids)
        num_accepted = min(max(result.num_accepted - first, 0), num)
        num_judged = min(max(result.num_accepted + refused - first, 0), num)
        yield run, first + 1, num_judged, num_accepted
        first += num
