"""Where one request stands with its thought: not begun, open, or over. Plain values, so that drafts can be tried.

The block counts as open at the start when <|think|> is among the last 16 prompt tokens without a later <|/think|> (spec
serving.md section 5). A tool call ends it, too: the text is split there (section 3), and a <|/think|> forced into the
middle of a call would only damage it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from agens_engine.core import ReasoningControl, ReasoningEnd

PROMPT_WINDOW = 16


class Phase(Enum):
    BEFORE = "before"
    OPEN = "open"
    OVER = "over"


@dataclass(frozen=True)
class Thought:
    """num_tokens: tokens since the block opened, the closing one not counted."""

    phase: Phase = Phase.BEFORE
    num_tokens: int = 0
    ended_by: ReasoningEnd | None = None

    @classmethod
    def at_start(cls, prompt_ids: Sequence[int], control: ReasoningControl) -> Thought:
        for token in reversed(prompt_ids[-PROMPT_WINDOW:]):
            if token == control.think_end_id:
                break
            if token == control.think_start_id:
                return cls(Phase.OPEN)
        return cls()

    @property
    def is_open(self) -> bool:
        return self.phase is Phase.OPEN

    def after(self, token: int, control: ReasoningControl, forced: ReasoningEnd | None = None) -> Thought:
        """The state after one more token. forced: why <|/think|> was the only token allowed, if it was."""
        if self.phase is Phase.BEFORE:
            return Thought(Phase.OPEN) if token == control.think_start_id else self
        if self.phase is Phase.OVER:  # a later block neither counts nor is limited
            return self
        if token == control.think_end_id:
            return replace(self, phase=Phase.OVER, ended_by=forced or ReasoningEnd.MODEL)
        if token == control.call_start_id:
            return replace(self, phase=Phase.OVER, ended_by=ReasoningEnd.CALL)
        return replace(self, num_tokens=self.num_tokens + 1)
