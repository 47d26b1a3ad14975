"""Which tokens a request has seen, as the penalties need it: a growing list of distinct ids with their output counts.

Distinct ids number far fewer than the vocabulary, and a verify row adds at most the drafts before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch


class TokenHistory:
    """Distinct token ids of prompt and output, and how often each occurs in the output."""

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._slots = {int(t): slot for slot, t in enumerate(distinct)}
        self._num = len(distinct)
        self._ids = np.zeros(max(64, 2 * self._num), dtype=np.int64)
        self._ids[: self._num] = distinct
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    def append(self, token_ids: Iterable[int]) -> None:
        """These tokens were emitted."""
        for token_id in token_ids:
            slot = self._slots.setdefault(token_id, self._num)
            if slot == self._num:
                if slot == len(self._ids):
                    self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._ids[slot] = token_id
                self._num += 1
            self._counts[slot] += 1

    def rows(self, drafts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The history of each row of a verify step, row j including drafts[:j].

        returns ids [n] int64 (distinct), seen [R, n] bool, output_counts [R, n] float32 with R = len(drafts) + 1
        """
        extra: dict[int, int] = {}
        for draft in drafts:
            if draft not in self._slots and draft not in extra:
                extra[draft] = self._num + len(extra)
        num_rows, num_ids = len(drafts) + 1, self._num + len(extra)
        ids = np.concatenate([self._ids[: self._num], np.fromiter(extra, dtype=np.int64, count=len(extra))])
        counts = np.zeros((num_rows, num_ids), dtype=np.float32)
        counts[:, : self._num] = self._counts[: self._num]
        seen = np.zeros((num_rows, num_ids), dtype=bool)
        seen[:, : self._num] = True
        for j, draft in enumerate(drafts):
            slot = self._slots.get(draft, extra.get(draft))
            counts[j + 1 :, slot] += 1
            seen[j + 1 :, slot] = True
        return torch.from_numpy(ids), torch.from_numpy(seen), torch.from_numpy(counts)
