"""Min-p: drop tokens much less likely than the best one (arXiv:2407.01082)."""

from __future__ import annotations

import math

import torch


def apply_min_p(logits: torch.Tensor, min_p: float) -> torch.Tensor:
    """Keep tokens with probability >= min_p * the row's largest, in place; min_p = 0 keeps all.

    The comparison is made on logits [R, V]: the ratio of two probabilities is the exponential of their difference.
    """
    if min_p <= 0.0:
        return logits
    floor = logits.amax(dim=-1, keepdim=True) + math.log(min_p)
    return logits.masked_fill_(logits < floor, -torch.inf)
