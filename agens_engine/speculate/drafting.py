"""The slot filler: asks the sources in order until the slots of a verify step are full.

A source that yields nothing leaves its slots to the next one. One that raises or returns nonsense is skipped for the
step; the event is counted, and logged the first time. Drafting can thus slow a request down, never break it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agens_engine.core import NUM_VERIFY_ROWS, DraftChain, DraftRun, StepResult
from agens_engine.speculate.source import DraftSource, SequenceView

_log = logging.getLogger(__name__)

MAX_DRAFTS = NUM_VERIFY_ROWS - 1
_Q_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Drafted:
    """What the sources gave for one step.

    seconds   wall time of each source that was asked
    """

    chain: DraftChain = field(default_factory=DraftChain)
    seconds: dict[str, float] = field(default_factory=dict)


class SlotFiller:
    """Owns the ordered draft sources and the calls into them.

    sources      asked in this order
    vocab_size   ids at or above it are nonsense (pass the number of usable ids)
    """

    def __init__(self, sources: Sequence[DraftSource], vocab_size: int) -> None:
        names = [s.name for s in sources]
        if len(set(names)) != len(names):
            raise ValueError(f"two draft sources share a name: {names}")
        self.sources = tuple(sources)
        self.num_failures: dict[str, int] = dict.fromkeys(names, 0)
        self._vocab_size = vocab_size
        self._logged: set[str] = set()
        self._off: dict[str, set[str]] = {}  # request id -> sources whose state for it is lost

    def begin(self, seq: SequenceView, allowed: frozenset[str] | None = None) -> None:
        """A request starts. Only `allowed` sources (None: all) take part in it; unknown names are ignored."""
        off = {s.name for s in self.sources if allowed is not None and s.name not in allowed}
        self._off[seq.request_id] = off
        for source in self._active(seq):
            if not self._guarded(source, "begin", seq)[0]:
                off.add(source.name)

    def fill(self, seq: SequenceView, num_slots: int = MAX_DRAFTS) -> Drafted:
        """Draft up to num_slots tokens (at most 7) after seq.token_ids; an empty chain means a plain decode step."""
        runs: list[DraftRun] = []
        prefix: tuple[int, ...] = ()
        seconds: dict[str, float] = {}
        num_slots = min(num_slots, MAX_DRAFTS)
        for source in self._active(seq):
            num_left = num_slots - len(prefix)
            if num_left <= 0:
                break
            started = time.perf_counter()
            run = self._propose(source, seq, prefix, num_left)
            seconds[source.name] = time.perf_counter() - started
            if run is not None:
                runs.append(run)
                prefix += run.token_ids
        return Drafted(DraftChain(tuple(runs)), seconds)

    def observe(self, seq: SequenceView, result: StepResult, taps: Any = None) -> None:
        """Tell the sources what was committed. A source that fails here has lost track and sits out the request."""
        for source in self._active(seq):
            if not self._guarded(source, "observe", seq, result, taps)[0]:
                self._off[seq.request_id].add(source.name)

    def end(self, seq: SequenceView) -> None:
        """The request is over; every source forgets it, also those that were switched off."""
        if self._off.pop(seq.request_id, None) is not None:
            for source in self.sources:
                self._guarded(source, "end", seq)

    def _active(self, seq: SequenceView) -> list[DraftSource]:
        off = self._off[seq.request_id]
        return [s for s in self.sources if s.name not in off]

    def _propose(
        self, source: DraftSource, seq: SequenceView, prefix: tuple[int, ...], num_slots: int
    ) -> DraftRun | None:
        _, run = self._guarded(source, "propose", seq, prefix, num_slots)
        if run is None or not run.token_ids:
            return None
        fault = find_fault(run, source.name, num_slots, self._vocab_size)
        if fault is None:
            return run
        self._count_failure(source, "propose", fault)
        return None

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
