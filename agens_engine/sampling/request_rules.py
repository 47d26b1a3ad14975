"""The row rules that a request asks for, in the order in which they apply."""

from __future__ import annotations

from collections.abc import Sequence

from agens_engine.core import Request
from agens_engine.sampling.rules.grammar import GrammarRule
from agens_engine.sampling.rules.reasoning import ReasoningRule
from agens_engine.sampling.rules.row_rules import RowRule


def request_rules(request: Request, prompt_ids: Sequence[int], vocab_size: int) -> tuple[RowRule, ...]:
    """Reasoning budget and guard, then the grammar, which waits for the end of the thought."""
    rules: list[RowRule] = []
    if request.reasoning is not None:
        rules.append(ReasoningRule(request.reasoning, prompt_ids))
    if request.grammar is not None:
        rules.append(GrammarRule(request.grammar, vocab_size, prompt_ids, request.reasoning))
    return tuple(rules)
