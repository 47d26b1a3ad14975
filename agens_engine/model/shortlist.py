"""The best token of an output row: over the whole usable vocabulary, or over a shortlist plus a few extra ids.

Source: spec drafters.md B.3. Which ids are listed changes only how often drafts are accepted, never the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from agens_engine.model.drafter_ends import TargetEnds


def recommended_ids(num_usable: int, control_ids: Iterable[int], size: int = 32768) -> list[int]:
    """The first `size` ids (merge rank: roughly by frequency) and all control tokens, below num_usable, ascending."""
    return sorted({*range(min(size, num_usable)), *(i for i in control_ids if 0 <= i < num_usable)})


class Shortlist:
    """A fixed list of ids with a copy of the head's rows for them.

    ids   any order, duplicates allowed; None: the whole usable vocabulary, read through the head itself
    """

    def __init__(self, ends: TargetEnds, ids: Iterable[int] | None = None) -> None:
        self._ends = ends
        self.ids: torch.Tensor | None = None
        if ids is not None:
            listed = sorted(set(ids))
            if not listed or listed[0] < 0 or listed[-1] >= ends.num_usable:
                raise ValueError(
                    f"a shortlist needs ids within 0..{ends.num_usable - 1}, not {listed[:1]}..{listed[-1:]}"
                )
            device = ends.head_rows(torch.tensor([0])).device
            self.ids = torch.tensor(listed, device=device)
            self._rows = ends.head_rows(self.ids)

    def best(
        self, hidden: torch.Tensor, extra: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest-scoring listed id of each row; of equals the lowest id.

        hidden    [B, C]
        extra     one [n] int64 per row: ids that count as listed for this row (n may be 0; unusable ids are ignored)
        returns   ids [B] int64, and ok [B] bool: False where a score was NaN or infinite
        """
        if self.ids is None:
            score, ids = self._ends.head(hidden)[:, : self._ends.num_usable].max(-1)
            return ids, score.isfinite()
        score, index = (hidden @ self._rows.T).float().max(-1)
        ids, ok = self.ids[index], score.isfinite()
        if extra is None or not any(e.numel() for e in extra):
            return ids, ok
        also = torch.nn.utils.rnn.pad_sequence([e.long() for e in extra], batch_first=True, padding_value=-1)
        listed = (also >= 0) & (also < self._ends.num_usable)
        rows = self._ends.head_rows(also.clamp(0, self._ends.num_usable - 1))
        scores = torch.einsum("bc,bnc->bn", hidden, rows).float().masked_fill(~listed, float("-inf"))
        top = scores.max(-1).values
        ok = ok & (top.isfinite() | top.isneginf())
        # of the equals among the extra ids the lowest
        tied = torch.where(scores == top.unsqueeze(-1), also, torch.iinfo(torch.long).max)
        extra_id = tied.min(-1).values
        wins = (top > score) | ((top == score) & (extra_id < ids))
        return torch.where(wins & top.isfinite(), extra_id, ids), ok
