"""Probabilities and a uniform number -> a token, by the inverse of the cumulative distribution."""

from __future__ import annotations

import torch


def draw_tokens(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one token per row.

    weights   [N, V] float, >= 0, not all zero; need not sum to 1
    uniforms  [N] float64 in [0, 1)
    returns   [N] int64: the first id whose cumulative weight exceeds uniform * total, summed in float64 in id order,
              so a token of weight 0 is never drawn
    """
    cumulative = weights.to(torch.float64).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # uniform * total may round up to total, which no id exceeds
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms.to(weights.device)[:, None] * total, below_total)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)
