"""Constrained output: which tokens a grammar allows in every row of a verify step (cases D1, D3).

The matcher stands after the committed tokens. For the rows of a step it walks along the drafts and is rolled back, so
a rejected draft leaves no trace. While a thought is open the grammar waits; nothing may end the answer then, and a tool
call may end the thought only where the grammar begins with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from agens_engine.core import Grammar, ReasoningControl
from agens_engine.errors import AgensError, RequestError
from agens_engine.sampling.rules.row_rules import RowEffect
from agens_engine.sampling.thought import Thought


class GrammarRule:
    """One request's place in its grammar.

    vocab_size   of the model; ids that the grammar's tokenizer does not have are never allowed
    control      the think markers, or None: the grammar holds from the first token
    """

    def __init__(
        self, grammar: Grammar, vocab_size: int, prompt_ids: Sequence[int], control: ReasoningControl | None
    ) -> None:
        self._matcher: Any = grammar.matcher()
        self._ends = grammar.end_token_ids
        self._end_index = sorted(self._ends)
        self._vocab_size = vocab_size
        self._control = control
        self._thought = Thought() if control is None else Thought.at_start(prompt_ids, control)
        self._ended = False
        self._waiting = self._wait_effect() if self._thought.is_open else None

    def effects(self, drafts: tuple[int, ...]) -> Sequence[RowEffect | None]:
        """See RowRule."""
        rows: list[RowEffect | None] = []
        thought, num_consumed = self._thought, 0
        try:
            for j in range(len(drafts) + 1):
                rows.append(self._waiting if thought.is_open else self._allowed(self._ended))
                if j == len(drafts) or not self._permits(rows[j], drafts[j]) or drafts[j] in self._ends:
                    break
                thought, is_text = self._follow(thought, drafts[j])
                if is_text:
                    self._consume(drafts[j])
                    num_consumed += 1
        finally:
            if num_consumed and not self._matcher.rollback(num_consumed):
                raise AgensError(f"the grammar cannot be rolled back: {self._matcher.get_error()}")
        return rows + [None] * (len(drafts) + 1 - len(rows))

    def commit(self, token_ids: Sequence[int]) -> None:
        """See RowRule."""
        for token in token_ids:
            self._thought, is_text = self._follow(self._thought, token)
            if token in self._ends:
                self._ended = True
            elif is_text:
                self._consume(token)

    def _follow(self, thought: Thought, token: int) -> tuple[Thought, bool]:
        """The thought after this token, and whether the token belongs to the grammar."""
        if self._control is None or not thought.is_open:
            return thought, True
        after = thought.after(token, self._control)
        return after, not after.is_open and token != self._control.think_end_id

    def _consume(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise AgensError(f"the grammar refuses token {token}, which it had allowed: {self._matcher.get_error()}")

    def _permits(self, effect: RowEffect | None, token: int) -> bool:
        if effect is None:
            return True
        return token not in effect.block and (effect.allow is None or bool(effect.allow[token]))

    def _wait_effect(self) -> RowEffect:
        """Inside the thought: no end of the answer, no call that the grammar does not begin with."""
        assert self._control is not None
        call = self._control.call_start_id
        allow = self._allowed(ended=False).allow
        assert allow is not None
        shut = [] if call is None or allow[call] else [call]
        return RowEffect(block=(*self._end_index, *shut))

    def _allowed(self, ended: bool) -> RowEffect:
        allow = np.zeros(self._vocab_size, dtype=bool)
        accepts = ended or self._matcher.is_accepting()
        if not ended:
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            num = min(len(bits), self._vocab_size)
            allow[:num] = bits[:num]
            if self._matcher.is_error():
                raise RequestError(f"the grammar cannot be followed any further: {self._matcher.get_error()[:300]}")
        allow[self._end_index] = accepts
        return RowEffect(allow=torch.from_numpy(allow))
