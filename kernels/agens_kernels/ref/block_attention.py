"""Softmax attention of a short block of rows over a context plus the block itself, in both directions or causal.

Math    row j at position first + j sees a key at position p when |first + j - p| < window (if there is a window), and,
        when causal, p <= first + j; scale D^(-1/2); query head h reads KV head h div (H / Hkv)

            key_start                    first - 1 | first            first + T - 1
            [ context keys ...                    ]|[ keys of the block itself     ]

Layout  q [..., T, H, D]; k, v [..., S, Hkv, D]; visible [..., T, S] bool
Test    tests/parity/test_golden_drafters.py, tests/unit/model/test_drafters_parts.py
Source  spec drafters.md A.4
"""

from __future__ import annotations

import torch


def block_visibility(
    first: int,
    length: int,
    key_start: int,
    num_keys: int,
    *,
    window: int | None,
    causal: bool,
    device: torch.device | None = None,
) -> torch.Tensor | None:
    """Which of the keys at key_start .. are seen by the rows at first .. ; [T, S] bool, or None when all are."""
    reach = max(first + length - 1 - key_start, key_start + num_keys - 1 - first)  # the farthest pair
    if not causal and (window is None or reach < window):
        return None
    rows = torch.arange(first, first + length, device=device).unsqueeze(-1)
    gap = rows - torch.arange(key_start, key_start + num_keys, device=device)
    visible = gap >= 0 if causal else torch.ones_like(gap, dtype=torch.bool)
    return visible if window is None else visible & (gap.abs() < window)


def block_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """Every row must see at least one key. Differentiable. Returns [..., T, H, D]."""
    kv_heads, dim = k.shape[-2:]
    grouped = (q * dim**-0.5).unflatten(-2, (kv_heads, -1))  # [..., T, Hkv, G, D]
    scores = torch.einsum("...thgd,...shd->...hgts", grouped, k)
    if visible is not None:
        scores = scores.masked_fill(~visible.unsqueeze(-3).unsqueeze(-3), float("-inf"))
    return torch.einsum("...hgts,...shd->...thgd", scores.softmax(-1), v).flatten(-3, -2)
