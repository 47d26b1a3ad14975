"""How many slots each source may fill: as many as pay for themselves, decided per sequence before every step.

A plan gives `copy` up to c slots, `mtp` m and `dflash` the next d. Its worth is the rate

    (tokens of the others + 1 + expected accepted drafts) / (time of the step with these rows + time of the sources)

and the plan with the best rate is taken. What it needs is measured while serving: the acceptance of each source in each
slot, the seconds a source takes, the seconds of a step as a line over its rows. Acceptance belongs to the sequence
(case H15); a new one starts from the average of those before it. A source left out is tried again now and then, so that
text which becomes predictable is noticed; the tries may take half a percent of the time. Copying costs next to nothing
to propose, so it only has to pay for its rows.

Decisions depend on measured time. They change speed, never the distribution of the output (speculate/verify.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agens_engine.core import NUM_VERIFY_ROWS, StepResult
from agens_engine.speculate.context_copy import ContextCopy
from agens_engine.speculate.dflash import DFlashSource
from agens_engine.speculate.drafting import MAX_DRAFTS, StepTime
from agens_engine.speculate.mtp import DRAFTS_BESIDE_A_BLOCK, MtpSource
from agens_engine.speculate.source import SequenceView, judged_runs

COPY, MTP, DFLASH = ContextCopy.name, MtpSource.name, DFlashSource.name
RETRY_SHARE, FIRST_RETRY = 0.005, 16  # of the time for a source that was left out; steps before its first try
_MEMORY = 0.96  # of a sequence's acceptance, per judged draft of a slot
_SHARED_MEMORY = 0.995
_PRIOR = (1.6, 2.0)  # accepted, judged: optimistic, so that a source is tried before it is judged
_PRIOR_WEIGHT = 4.0
_OUTLIER = 2.0  # a step that took this many times what was expected says nothing about its rows


class Acceptance:
    """How often a draft in slot 1..7 is accepted, given that those before it were; older drafts count less."""

    def __init__(self, memory: float, prior: Acceptance | None = None) -> None:
        self._memory, self._prior = memory, prior
        self._accepted, self._judged = [0.0] * MAX_DRAFTS, [0.0] * MAX_DRAFTS

    def add(self, slot: int, accepted: bool) -> None:
        self._accepted[slot - 1] = self._memory * self._accepted[slot - 1] + accepted
        self._judged[slot - 1] = self._memory * self._judged[slot - 1] + 1.0

    def rate(self, slot: int) -> float:
        accepted, judged = self._accepted[slot - 1], self._judged[slot - 1]
        if self._prior is None:
            return (accepted + _PRIOR[0]) / (judged + _PRIOR[1])
        return (accepted + _PRIOR_WEIGHT * self._prior.rate(slot)) / (judged + _PRIOR_WEIGHT)


class StepCost:
    """Seconds of forward and verification as a line over the rows of a step, by recent steps."""

    _FIRST_SLOPE = 0.04  # of the mean step, per row, until steps of different sizes were seen
    _FIRST_SPREAD = 0.05  # rows squared; how much that guess counts
    _MEMORY = 0.995
    _FIRST_STEPS = 5.9  # decayed count of 6

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self.num_steps = 0

    def add(self, rows: int, seconds: float) -> None:
        if self._n >= 8.0:
            seconds = min(seconds, _OUTLIER * self.of(rows))
        self.num_steps += 1
        m = self._MEMORY
        self._n, self._x, self._y = m * self._n + 1.0, m * self._x + rows, m * self._y + seconds
        self._xx, self._xy = m * self._xx + rows * rows, m * self._xy + rows * seconds

    @property
    def known(self) -> bool:
        return self._n >= self._FIRST_STEPS

    def of(self, rows: float) -> float:
        """Expected seconds; 1 row costs something, and no row costs less than none."""
        if not self._n:
            return 1.0 + self._FIRST_SLOPE * rows
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        first = self._FIRST_SLOPE * mean_y
        slope = (self._xy / self._n - mean_x * mean_y + self._FIRST_SPREAD * first) / (spread + self._FIRST_SPREAD)
        slope = min(max(slope, 0.0), mean_y / max(mean_x, 1.0))
        return mean_y + slope * (rows - mean_x)


@dataclass
class _SequencePlan:
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    waited: dict[str, int] = field(default_factory=dict)  # steps since a source was left out


@dataclass
class Decisions:
    """In how many steps a source got all the slots it could have, fewer, or none; and how often it was tried again."""

    full: int = 0
    shortened: int = 0
    skipped: int = 0
    retried: int = 0


class AdaptivePolicy:
    """The DraftPolicy of the engine. Sources it does not know may fill all that is left."""

    def __init__(self) -> None:
        self.decisions: dict[str, Decisions] = {}
        self._sequences: dict[str, _SequencePlan] = {}
        self._shared: dict[str, Acceptance] = {}
        self._source_seconds: dict[tuple[str, str], float] = {}  # (source, "step" or "slot")
        self._step_cost: dict[int, StepCost] = {}
        self._last_step: StepTime | None = None
        self._num_sequences = 1
        self._mean_tokens, self._mean_rows = 1.0, 1.0  # per sequence and step

    # --- the engine's calls ------------------------------------------------------------------------------------------

    def begin(self, seq: SequenceView) -> None:
        self._sequences[seq.request_id] = _SequencePlan()

    def limits(self, seq: SequenceView, sources: Sequence[str], num_slots: int) -> dict[str, int]:
        """Slots each source may fill, of num_slots; 0 leaves it out of the step."""
        state = self._sequences[seq.request_id]
        wanted = dict.fromkeys(sources, num_slots)
        most_mtp = 0 if MTP not in wanted else min(num_slots, DRAFTS_BESIDE_A_BLOCK if DFLASH in wanted else MAX_DRAFTS)
        if MTP in wanted:
            wanted[MTP] = most_mtp
        if not self._cost().known:  # a few steps with every draft and with none, to see what rows cost
            return dict.fromkeys(sources, 0) if self._cost().num_steps % 2 else wanted
        if COPY in wanted:
            wanted[COPY] = self._best_copy(state, num_slots)
        if MTP in wanted or DFLASH in wanted:
            chosen = self._best_chain(state, num_slots, most_mtp, DFLASH in wanted)
            wanted |= {name: num for name, num in chosen.items() if name in wanted}
        most = {MTP: most_mtp, DFLASH: num_slots - wanted.get(MTP, 0)}
        for name in sources:
            wanted[name] = self._decided(state, name, wanted[name], most.get(name, num_slots))
        return wanted

    def observe(self, seq: SequenceView, result: StepResult, seconds: Mapping[str, float], step: StepTime) -> None:
        state = self._sequences[seq.request_id]
        for run, first, num_judged, num_accepted in judged_runs(result):
            for i in range(num_judged):
                self._shared_acceptance(run.source).add(first + i, i < num_accepted)
                self._acceptance(state, run.source).add(first + i, i < num_accepted)
            if run.source == MTP and MTP in seconds:
                self._average((MTP, "slot"), seconds[MTP] / len(run.token_ids))
        if DFLASH in seconds:
            self._average((DFLASH, "step"), seconds[DFLASH])
        rows = len(result.chain) + 1
        self._num_sequences = max(1, step.num_sequences)
        self._mean_tokens += 0.1 * (len(result.committed) - self._mean_tokens)
        self._mean_rows += 0.1 * (rows - self._mean_rows)
        if not step.has_prefill and step is not self._last_step:  # reported once for each of its sequences
            self._last_step = step
            self._cost().add(step.num_rows, step.seconds)

    def end(self, seq: SequenceView) -> None:
        self._sequences.pop(seq.request_id, None)

    def summary(self) -> dict[str, Any]:
        """For JSON: decisions by source, and the seconds that a step and its sources are expected to take."""
        cost = self._step_cost.get(1)
        return {
            "decisions": {name: vars(d).copy() for name, d in list(self.decisions.items())},
            "source_seconds": {f"{name}_per_{what}": s for (name, what), s in list(self._source_seconds.items())},
            "step_seconds": None if cost is None else {"1_row": cost.of(1), "8_rows": cost.of(NUM_VERIFY_ROWS)},
        }

    # --- choosing ----------------------------------------------------------------------------------------------------

    def _best_copy(self, state: _SequencePlan, num_slots: int) -> int:
        rates = self._acceptance(state, COPY)
        expected, reached = [0.0], 1.0
        for slot in range(1, num_slots + 1):
            reached *= rates.rate(slot)
            expected.append(expected[-1] + reached)
        return max(range(num_slots + 1), key=lambda n: (self._rate(expected[n], n, 0.0), n))

    def _best_chain(self, state: _SequencePlan, num_slots: int, most_mtp: int, drafter: bool) -> dict[str, int]:
        mtp, dflash = self._acceptance(state, MTP), self._acceptance(state, DFLASH)
        per_slot = self._source_seconds.get((MTP, "slot"), 0.0)
        per_block = self._source_seconds.get((DFLASH, "step"), 0.0)
        best, best_rate = (0, 0), self._rate(0.0, 0, 0.0)
        expected, reached = 0.0, 1.0
        for m in range(most_mtp + 1):
            if m:
                reached *= mtp.rate(m)
                expected += reached
            tail, tail_reached = expected, reached
            for d in range(num_slots - m + 1 if drafter else 1):
                if d:
                    tail_reached *= dflash.rate(m + d)
                    tail += tail_reached
                rate = self._rate(tail, m + d, m * per_slot + (per_block if d else 0.0))
                if rate > best_rate:
                    best, best_rate = (m, d), rate
        return {MTP: best[0], DFLASH: best[1]}

    def _rate(self, expected: float, drafts: int, source_seconds: float) -> float:
        """Tokens a second of the whole step when this sequence has so many drafts."""
        others = self._num_sequences - 1
        cost = self._cost()
        # a source's seconds are its share; the others pay theirs
        seconds = cost.of(others * self._mean_rows + drafts + 1) + source_seconds
        return (others * self._mean_tokens + 1.0 + expected) / seconds

    def _decided(self, state: _SequencePlan, name: str, wanted: int, most: int) -> int:
        """Count the decision; now and then a source that was left out is given all it could have."""
        decisions = self.decisions.setdefault(name, Decisions())
        if wanted == 0 and most > 0:
            waited = state.waited[name] = state.waited.get(name, 0) + 1
            if waited >= self._retry_after(name, most):
                state.waited[name] = 0
                decisions.retried += 1
                return most
            decisions.skipped += 1
        elif wanted < most:
            decisions.shortened += 1
        else:
            decisions.full += 1
        return wanted

    def _retry_after(self, name: str, drafts: int) -> float:
        """Steps without a source before a try with so many drafts, of which nothing may come, is cheap enough."""
        rows = self._num_sequences * self._mean_rows
        step, tried = self._cost().of(rows), self._cost().of(rows + drafts)
        seconds = tried - step + self._source_seconds.get((name, "step"), 0.0)
        seconds += drafts * self._source_seconds.get((name, "slot"), 0.0)
        return max(FIRST_RETRY, seconds / (RETRY_SHARE * step))

    # --- what was measured -------------------------------------------------------------------------------------------

    def _shared_acceptance(self, source: str) -> Acceptance:
        return self._shared.setdefault(source, Acceptance(_SHARED_MEMORY))

    def _acceptance(self, state: _SequencePlan, source: str) -> Acceptance:
        if source not in state.acceptance:
            state.acceptance[source] = Acceptance(_MEMORY, self._shared_acceptance(source))
        return state.acceptance[source]

    def _cost(self) -> StepCost:
        return self._step_cost.setdefault(self._num_sequences, StepCost())

    def _average(self, key: tuple[str, str], seconds: float) -> None:
        before = self._source_seconds.get(key)
        if before is None:
            self._source_seconds[key] = seconds
        else:
            self._source_seconds[key] = before + 0.05 * (min(seconds, _OUTLIER * before) - before)
