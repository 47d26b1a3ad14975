"""Sees when a thought goes round in circles (spec serving.md section 6). Fed token by token; a few microseconds each.

    cycle   the last k * L tokens are k times the same segment, L in 8..512, k = 4
    reuse   at least 90 % of the last 2,000 runs of 32 tokens occurred earlier in the same thought

Cycles: `_runs` counts for every L how many tokens in a row equal the one L before them; k repeats are (k - 1) * L.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SHORTEST, LONGEST = 8, 512
REPEATS = 4
GRAM = 32
REUSE_WINDOW = 2000
REUSED = 1800  # 90 % of the window

_LAGS = np.arange(LONGEST, SHORTEST - 1, -1)  # in the order in which the tokens lie in the buffer
_NEEDED = (REPEATS - 1) * _LAGS


class RepetitionWatch:
    """The tokens of one thought. `ahead` looks at drafts without keeping them."""

    def __init__(self) -> None:
        self._tokens = np.full(4 * LONGEST, -1, dtype=np.int64)  # begins with LONGEST entries that equal no token
        self._end = LONGEST
        self._runs = np.zeros(len(_LAGS), dtype=np.int64)
        self._first_at: dict[int, int] = {}  # hash of a gram -> where it ended for the first time
        self._reused = [0]  # [n]: how many of the first n grams had occurred before

    def append(self, token: int) -> None:
        if self._end == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        before = self._tokens[self._end - LONGEST : self._end - SHORTEST + 1]
        self._runs = (self._runs + 1) * (before == token)
        self._tokens[self._end] = token
        self._end += 1
        if self._end >= LONGEST + GRAM:
            first = self._first_at.setdefault(self._last_gram(), self._end)
            self._reused.append(self._reused[-1] + (first < self._end))

    @property
    def repeating(self) -> bool:
        num_grams = len(self._reused) - 1
        if num_grams >= REUSE_WINDOW and self._reused[-1] - self._reused[-1 - REUSE_WINDOW] >= REUSED:
            return True
        return bool((self._runs >= _NEEDED).any())

    def ahead(self, drafts: Sequence[int]) -> list[bool]:
        """`repeating` now and after each of these tokens; they are not kept."""
        runs, answers = self._runs, [self.repeating]
        for token in drafts:
            self.append(token)
            answers.append(self.repeating)
        for _ in drafts:
            self._drop_last()
        self._runs = runs
        return answers

    def _last_gram(self) -> int:
        return hash(self._tokens[self._end - GRAM : self._end].tobytes())

    def _drop_last(self) -> None:
        """Undo an append, except for `_runs`."""
        if len(self._reused) > 1:
            gram = self._last_gram()
            if self._first_at[gram] == self._end:
                del self._first_at[gram]
            self._reused.pop()
        self._end -= 1
