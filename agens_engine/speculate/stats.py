"""Draft statistics: proposed and accepted tokens per source and slot, and the time each source took."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from agens_engine.core import NUM_VERIFY_ROWS, SourceCount, StepResult
from agens_engine.speculate.source import judged_runs

_log = logging.getLogger(__name__)

WATCHED_TOKENS = 200
FEWEST_ACCEPTED = 0.01  # a head that fits accepts 0.3 and more of its first drafts; a wrong one about 1 / vocabulary


class AcceptanceWatch:
    """Warns once when hardly any of a source's first 200 judged drafts is accepted (spec drafters.md, last table)."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._num_judged = self._num_accepted = 0

    def observe(self, result: StepResult) -> None:
        if self._num_judged >= WATCHED_TOKENS:
            return
        for run, _, num_judged, num_accepted in judged_runs(result):
            if run.source == self._source:
                self._num_judged += num_judged
                self._num_accepted += num_accepted
        if self._num_judged >= WATCHED_TOKENS and self._num_accepted < FEWEST_ACCEPTED * self._num_judged:
            _log.warning(
                "draft source %s: %d of its first %d drafts were accepted; wrong head for this model? The answers are "
                "right all the same, only slower than without it",
                self._source, self._num_accepted, self._num_judged,
            )  # fmt: skip


class DraftStats:
    """Running totals, of one request or of the whole server.

    sources   name -> totals, the form `Timings.sources` carries
    slots     name -> one entry per slot 1..7
    """

    def __init__(self) -> None:
        self.sources: dict[str, SourceCount] = {}
        self.slots: dict[str, list[SourceCount]] = {}
        self.num_steps = 0
        self.num_committed = 0

    def record(self, result: StepResult, seconds: Mapping[str, float]) -> None:
        """Count one verify step; `seconds` is Drafted.seconds."""
        self.num_steps += 1
        self.num_committed += len(result.committed)
        for name, spent in seconds.items():
            self._total(name).seconds += spent
        for run, first_slot, _, num_accepted in judged_runs(result):
            num = len(run.token_ids)
            total = self._total(run.source)
            total.proposed += num
            total.accepted += num_accepted
            slots = self.slots[run.source]
            for i in range(num):
                slots[first_slot - 1 + i].proposed += 1
                slots[first_slot - 1 + i].accepted += i < num_accepted

    def summary(self) -> dict[str, Any]:
        """For JSON and metrics; `accepted_by_slot` and `proposed_by_slot` list slots 1..7."""
        return {
            "verify_steps": self.num_steps,
            "tokens_per_step": self.num_committed / self.num_steps if self.num_steps else 0.0,
            "sources": {
                name: {
                    "proposed": total.proposed,
                    "accepted": total.accepted,
                    "seconds": total.seconds,
                    "proposed_by_slot": [s.proposed for s in self.slots[name]],
                    "accepted_by_slot": [s.accepted for s in self.slots[name]],
                }
                for name, total in list(self.sources.items())  # the engine's thread may add one meanwhile
            },
        }

    def _total(self, name: str) -> SourceCount:
        if name not in self.sources:
            self.slots[name] = [SourceCount() for _ in range(NUM_VERIFY_ROWS - 1)]
            self.sources[name] = SourceCount()
        return self.sources[name]
