"""Rules that follow the text: reasoning budget, grammar. The hook, and how its answers change a row.

A RowRule looks at what was emitted so far and says, for every row of a verify step, which token is forced, blocked,
biased or allowed there. Nothing is rolled back when drafts are rejected (case D3), because `effects` changes nothing:
only `commit` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class RowEffect:
    """What a rule asks of one row.

    force   the only token allowed here; wins over everything below
    block   tokens ruled out
    bias    numbers added to logits
    allow   [V] bool, True where a token is allowed (a grammar mask), or None
    """

    force: int | None = None
    block: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    allow: torch.Tensor | None = None


class RowRule(Protocol):
    """One rule's state for one request."""

    def effects(self, drafts: tuple[int, ...]) -> Sequence[RowEffect | None]:
        """One entry for each of the len(drafts) + 1 rows; entry j as if drafts[:j] had been emitted. Changes no state.

        Past a draft that the rule itself forbids, entries may be None: those rows cannot be reached.
        """
        ...

    def commit(self, token_ids: Sequence[int]) -> None:
        """These tokens were emitted."""
        ...


def apply_effect(row: torch.Tensor, effect: RowEffect) -> torch.Tensor:
    """Apply one effect to row [V], in place.

    A forced token is set to the finite value 0 with all others at -inf: it may have been suppressed by an earlier rule
    (spec serving.md section 5).
    """
    if effect.force is not None:
        row.fill_(-torch.inf)
        row[effect.force] = 0.0
        return row
    for token_id, value in effect.bias.items():
        row[token_id] += value
    if effect.block:
        row[list(effect.block)] = -torch.inf
    if effect.allow is not None:
        row.masked_fill_(~effect.allow.to(row.device), -torch.inf)
    return row
