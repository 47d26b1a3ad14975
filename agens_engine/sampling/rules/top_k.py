"""Top-k: keep the k most likely tokens."""

from __future__ import annotations

import torch

from agens_engine.sampling.rules.boundary import keep_largest


def apply_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Keep exactly k tokens of each row of logits [R, V] (fewer where fewer are possible), in place; 0 keeps all."""
    if k == 0 or k >= logits.shape[-1]:
        return logits
    lowest_kept = logits.topk(k, dim=-1, sorted=True).values[:, -1:]
    return keep_largest(logits, lowest_kept, torch.full_like(lowest_kept, k, dtype=torch.int64))
