"""Reasoning budget and repetition guard (spec serving.md sections 5 and 6), for every row of a verify step.

    n < 0.8 * budget               nothing
    0.8 * budget <= n < budget     soft_bias is added to <|/think|>
    n >= budget, or in circles     <|/think|> is the only token
    after such a forced close      <|think|> is masked for the rest of the request

After a natural close nothing more is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from agens_engine.core import ReasoningControl, ReasoningEnd, ReasoningReport
from agens_engine.sampling.repetition import RepetitionWatch
from agens_engine.sampling.rules.row_rules import RowEffect
from agens_engine.sampling.thought import Phase, Thought

_FORCED = (ReasoningEnd.BUDGET, ReasoningEnd.REPETITION)


class ReasoningRule:
    """One request's thought."""

    def __init__(self, control: ReasoningControl, prompt_ids: Sequence[int]) -> None:
        self._control = control
        self._thought = Thought.at_start(prompt_ids, control)
        self._watch = RepetitionWatch() if control.repetition_guard else None
        self._force = RowEffect(force=control.think_end_id)
        self._soft = RowEffect(bias={control.think_end_id: control.soft_bias}) if control.soft_bias else None
        self._shut = RowEffect(block=(control.think_start_id,))

    @property
    def report(self) -> ReasoningReport:
        return ReasoningReport(self._thought.num_tokens, self._thought.ended_by)

    def effects(self, drafts: tuple[int, ...]) -> Sequence[RowEffect | None]:
        """See RowRule."""
        rows: list[RowEffect | None] = []
        thought = self._thought
        repeating = self._repeating(drafts)
        for j, circles in enumerate(repeating):
            forced = self._forced(thought, circles)
            rows.append(self._effect(thought, forced))
            if j == len(drafts) or (forced is not None and drafts[j] != self._control.think_end_id):
                break
            thought = thought.after(drafts[j], self._control, forced)
        return rows + [None] * (len(drafts) + 1 - len(rows))

    def commit(self, token_ids: Sequence[int]) -> None:
        """See RowRule."""
        for token in token_ids:
            before = self._thought
            circles = self._watch is not None and before.is_open and self._watch.repeating
            self._thought = before.after(token, self._control, self._forced(before, circles))
            if self._watch is not None and before.is_open and self._thought.is_open:
                self._watch.append(token)

    def _repeating(self, drafts: tuple[int, ...]) -> list[bool]:
        """For each row, whether the thought is in circles there. One that begins among the drafts cannot be yet."""
        num_rows = len(drafts) + 1
        if self._watch is None or not self._thought.is_open:
            return [False] * num_rows
        ends = (self._control.think_end_id, self._control.call_start_id)
        num_inside = next((j for j, token in enumerate(drafts) if token in ends), len(drafts))
        answers = self._watch.ahead(drafts[:num_inside])
        return answers + [False] * (num_rows - len(answers))

    def _forced(self, thought: Thought, circles: bool) -> ReasoningEnd | None:
        if not thought.is_open:
            return None
        if self._control.budget is not None and thought.num_tokens >= self._control.budget:
            return ReasoningEnd.BUDGET
        return ReasoningEnd.REPETITION if circles else None

    def _effect(self, thought: Thought, forced: ReasoningEnd | None) -> RowEffect | None:
        if forced is not None:
            return self._force
        if thought.phase is Phase.OVER:
            return self._shut if thought.ended_by in _FORCED else None
        budget = self._control.budget
        if thought.is_open and budget is not None and 5 * thought.num_tokens >= 4 * budget:
            return self._soft
        return None
