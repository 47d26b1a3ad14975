"""Engram: which row of the hashed n-gram tables a position reads (spec volundr-model.md section 8)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

PRIMES = (1000003, 1000033, 1000037, 1000039, 1000081)
MASK = (1 << 61) - 1


def rows(ids: torch.Tensor, previous: torch.Tensor, orders: Sequence[int], num_rows: int) -> torch.Tensor:
    """Table rows of every position.

    ids       [B, T] int64 token ids
    previous  [B, M] int64, the M = max(orders) - 1 ids before them, oldest first; -1 where the sequence had not begun
    returns   [len(orders), B, T] int64 in [0, num_rows)
    """
    length, lead = ids.shape[1], previous.shape[1]
    shifted = torch.cat((previous, ids), 1) + 1
    out = []
    for order in orders:
        code = torch.zeros_like(ids)
        for j in range(order):
            start = lead - (order - 1) + j
            # int64 products wrap; the mask keeps the low 61 bits, which wrapping leaves right
            code = (code * PRIMES[j % len(PRIMES)] + shifted[:, start : start + length]) & MASK
        out.append(code % num_rows)
    return torch.stack(out)
