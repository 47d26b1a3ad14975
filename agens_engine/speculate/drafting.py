"""The slot filler: asks the sources in order until the slots of a verify step are full, all sequences at once.

    copy    ──► propose                                         reads only the text
    mtp     ──► prepare ┐            propose (consumes copies)  prepare of every source that reads the target comes
    dflash  ──► prepare ┘ ─────────► propose (the rest)         before any of them proposes: one may use another's work

A source that yields nothing leaves its slots to the next one. One that raises or returns nonsense is skipped for the
step; the event is counted, and logged the first time. Drafting can thus slow a request down, never break it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from agens_engine.core import NUM_VERIFY_ROWS, DraftChain, DraftRun, StepResult
from agens_engine.speculate.source import (
    Ask,
    CommittedRows,
    DraftFault,
    DraftSource,
    KeepsContext,
    Reads,
    SequenceView,
)
from agens_engine.speculate.stats import AcceptanceWatch

_log = logging.getLogger(__name__)

MAX_DRAFTS = NUM_VERIFY_ROWS - 1
_Q_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Drafted:
    """What the sources gave one sequence for one step.

    seconds   wall time of each source that was asked, shared equally among the sequences it was asked for
    """

    chain: DraftChain = field(default_factory=DraftChain)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTime:
    """What a step's forward and verification took, drafting not included; all of its rows, and the sequences that
    decoded in it. One object for the whole step."""

    seconds: float
    num_sequences: int
    num_rows: int
    has_prefill: bool = False


class DraftPolicy(Protocol):
    """Decides how much each source may draft; keeps state per request only (case H15)."""

    def begin(self, seq: SequenceView) -> None: ...

    def limits(self, seq: SequenceView, sources: Sequence[str], num_slots: int) -> dict[str, int]:
        """How many of num_slots each source may fill in this step; 0 skips it, and then nothing of it runs."""
        ...

    def observe(self, seq: SequenceView, result: StepResult, seconds: Mapping[str, float], step: StepTime) -> None:
        """A verify step was committed; seconds is Drafted.seconds."""
        ...

    def end(self, seq: SequenceView) -> None: ...

    def summary(self) -> dict[str, Any]:
        """What was decided so far, for JSON."""
        ...


@dataclass
class _Slots:
    """One sequence while its slots are being filled; limits of the sources that take part in this step."""

    seq: SequenceView
    num_slots: int
    limits: dict[str, int]
    runs: list[DraftRun] = field(default_factory=list)
    prefix: tuple[int, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def ask(self, source: str) -> Ask | None:
        num = min(self.num_slots - len(self.prefix), self.limits.get(source, 0))
        return Ask(self.seq, self.prefix, num) if num > 0 else None

    def ask_to_prepare(self, source: str) -> Ask | None:
        """Every slot that is left: the ones a source will be asked for may come after those of another."""
        num = self.num_slots - len(self.prefix)
        return Ask(self.seq, self.prefix, num) if num > 0 and self.limits.get(source, 0) > 0 else None


class SlotFiller:
    """Owns the ordered draft sources and the calls into them.

    sources      asked in this order
    vocab_size   ids at or above it are nonsense (pass the number of usable ids)
    policy       None: every source may fill all that is left
    """

    def __init__(self, sources: Sequence[DraftSource], vocab_size: int, policy: DraftPolicy | None = None) -> None:
        names = [s.name for s in sources]
        if len(set(names)) != len(names):
            raise ValueError(f"two draft sources share a name: {names}")
        if len({s.reads.taps for s in sources if s.reads.taps}) > 1:
            raise ValueError("draft sources want different taps of the target; a step hands over one set")
        self.sources = tuple(sources)
        self.num_failures: dict[str, int] = dict.fromkeys(names, 0)
        self._policy = policy
        self._vocab_size = vocab_size
        self._logged: set[str] = set()
        self._off: dict[str, set[str]] = {}  # request id -> sources that take no part in it
        self._watches = {s.name: AcceptanceWatch(s.name) for s in sources if s.reads}

    def begin(self, seq: SequenceView, allowed: frozenset[str] | None = None) -> None:
        """A request starts. Only `allowed` sources (None: all) take part in it; unknown names are ignored."""
        off = {s.name for s in self.sources if allowed is not None and s.name not in allowed}
        self._off[seq.request_id] = off
        if self._policy is not None:
            self._policy.begin(seq)
        for source in self._active(seq):
            if not self._guarded(source, "begin", seq)[0]:
                off.add(source.name)

    def reads(self, seqs: Sequence[SequenceView]) -> Reads:
        """What the target must hand over for these sequences in a step."""
        wanted = [s.reads for seq in seqs for s in self._active(seq)]
        return Reads(any(r.hidden for r in wanted), next((r.taps for r in wanted if r.taps), ()))

    def fill(self, asks: Sequence[Ask]) -> list[Drafted]:
        """Draft after each seq.token_ids + prefix, at most 7 tokens; an empty chain means a plain decode step.

        asks   at most one per sequence; num_slots may be 0
        """
        slots = [self._slots(ask) for ask in asks]
        prepared = False
        for source in self.sources:
            if source.reads and not prepared:
                prepared = True
                self._prepare(slots)
            open_slots = [(s, ask) for s in slots if (ask := s.ask(source.name)) is not None]
            if open_slots:
                self._propose(source, open_slots)
        return [Drafted(DraftChain(tuple(s.runs)), s.seconds) for s in slots]

    def commit(self, rows: Sequence[CommittedRows]) -> None:
        """Hand final target rows to the sources that read them. One that fails has lost track of these requests."""
        for source in self.sources:
            mine = [r for r in rows if source.reads and source.name not in self._off.get(r.seq.request_id, ())]
            if mine and not self._guarded(source, "commit", mine)[0]:
                for r in mine:
                    self._off[r.seq.request_id].add(source.name)

    def observe(self, seq: SequenceView, result: StepResult, drafted: Drafted, step: StepTime) -> None:
        """Tell the sources what was committed. A source that fails here has lost track and sits out the request."""
        for watch in self._watches.values():
            watch.observe(result)
        if self._policy is not None:
            self._policy.observe(seq, result, drafted.seconds, step)
        for source in self._active(seq):
            if not self._guarded(source, "observe", seq, result)[0]:
                self._off[seq.request_id].add(source.name)

    def save(self, seq: SequenceView) -> dict[str, torch.Tensor]:
        """What the sources of this request can store, keys "<source>.<part>"."""
        saved: dict[str, torch.Tensor] = {}
        for source in self._active(seq):
            if isinstance(source, KeepsContext):
                done, parts = self._guarded(source, "save", seq)
                saved |= {f"{source.name}.{key}": value for key, value in parts.items()} if done else {}
        return saved

    def load(self, seq: SequenceView, saved: Mapping[str, torch.Tensor]) -> None:
        """Give the sources back what `save` got from them for the same tokens; one that fails sits out the request."""
        for source in self._active(seq):
            head = f"{source.name}."
            parts = {key.removeprefix(head): value for key, value in saved.items() if key.startswith(head)}
            if isinstance(source, KeepsContext) and parts and not self._guarded(source, "load", seq, parts)[0]:
                self._off[seq.request_id].add(source.name)

    def end(self, seq: SequenceView) -> None:
        """The request is over; every source forgets it, also those that were switched off."""
        if self._off.pop(seq.request_id, None) is not None:
            if self._policy is not None:
                self._policy.end(seq)
            for source in self.sources:
                self._guarded(source, "end", seq)

    def _active(self, seq: SequenceView) -> list[DraftSource]:
        off = self._off[seq.request_id]
        return [s for s in self.sources if s.name not in off]

    def _slots(self, ask: Ask) -> _Slots:
        num = min(ask.num_slots, MAX_DRAFTS)
        names = [source.name for source in self._active(ask.seq)] if num > 0 else []
        if self._policy is None or not names:
            limits = dict.fromkeys(names, num)
        else:
            limits = self._policy.limits(ask.seq, names, num)
        return _Slots(ask.seq, num, limits, prefix=ask.prefix)

    def _prepare(self, slots: Sequence[_Slots]) -> None:
        for source in self.sources:
            if not source.reads:
                continue
            open_slots = [(s, ask) for s in slots if (ask := s.ask_to_prepare(source.name)) is not None]
            if not open_slots:
                continue
            with _timed(source.name, open_slots):
                done, _ = self._guarded(source, "prepare", [ask for _, ask in open_slots])
            if not done:
                for s, _ in open_slots:
                    s.limits[source.name] = 0

    def _propose(self, source: DraftSource, open_slots: Sequence[tuple[_Slots, Ask]]) -> None:
        with _timed(source.name, open_slots):
            done, answers = self._guarded(source, "propose", [ask for _, ask in open_slots])
        if not done:
            return
        if len(answers) != len(open_slots):
            self._count_failure(source, "propose", f"{len(answers)} answers to {len(open_slots)} asks")
            return
        for (s, ask), run in zip(open_slots, answers, strict=True):
            if run is None or (isinstance(run, DraftRun) and not run.token_ids):
                continue
            bad = isinstance(run, DraftFault)
            fault = run.reason if bad else find_fault(run, source.name, ask.num_slots, self._vocab_size)
            if fault is not None:
                self._count_failure(source, "propose", fault)
                continue
            s.runs.append(run)
            s.prefix += run.token_ids

    def _guarded(self, source: DraftSource, verb: str, *args: Any) -> tuple[bool, Any]:
        try:
            return True, getattr(source, verb)(*args)
        except Exception as error:  # a drafter is optional: whatever goes wrong in it, decoding goes on without it
            self._count_failure(source, verb, f"{type(error).__name__}: {error}")
            return False, None

    def _count_failure(self, source: DraftSource, verb: str, reason: str) -> None:
        self.num_failures[source.name] += 1
        if source.name not in self._logged:
            self._logged.add(source.name)
            _log.warning(
                "draft source %s failed in %s (%s); it is skipped, further failures are counted only",
                source.name, verb, reason,
            )  # fmt: skip


@contextmanager
def _timed(source: str, open_slots: Sequence[tuple[_Slots, Ask]]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    share = (time.perf_counter() - started) / len(open_slots)
    for s, _ in open_slots:
        s.seconds[source] = s.seconds.get(source, 0.0) + share


def find_fault(run: DraftRun, source: str, num_slots: int, vocab_size: int) -> str | None:
    """Say what makes a proposal unusable, or None when it is sound (cases H16, H20)."""
    num = len(run.token_ids)
    if run.source != source:
        return f"run is labelled {run.source!r}"
    if num > num_slots:
        return f"{num} tokens for {num_slots} slots"
    for token_id in run.token_ids:
        if not 0 <= token_id < vocab_size:
            return f"token id {token_id} is outside 0..{vocab_size - 1}"
    if run.q is None:
        return None
    if run.q.ndim != 2 or run.q.shape[0] != num or run.q.shape[1] < vocab_size:
        return f"q has shape {run.q.shape} for {num} tokens"
    sums = run.q.sum(axis=1, dtype=np.float64)
    if not np.isfinite(sums).all() or (run.q < 0).any():
        return "q has NaN, infinite or negative entries"
    if (np.abs(sums - 1.0) > _Q_SUM_TOLERANCE).any():
        return f"q sums to {sums.tolist()}"
    if (run.q[np.arange(num), list(run.token_ids)] <= 0).any():
        return "q gives a proposed token no probability"
    return None
