"""Grouped dynamic convolution of the DFlash2 drafter: a short causal filter whose taps are partly computed per row.

Math    out_t[c] = sum_tap (base[tap][c] + coefs_t[tap][c div group]) * x_{t-tap}[c]; rows before the block are 0
Layout  x [..., T, C]; base [K, C]; coefs [..., T, K, G], C a multiple of G; tap 0 is the row itself
Test    tests/parity/test_golden_drafters.py, tests/unit/model/test_drafters_parts.py
Source  spec drafters.md A.4
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def grouped_conv(x: torch.Tensor, base: torch.Tensor, coefs: torch.Tensor) -> torch.Tensor:
    """Filter the rows of one block; differentiable. Returns [..., T, C]."""
    kernel = base + coefs.repeat_interleave(x.shape[-1] // coefs.shape[-1], -1)  # [..., T, K, C]
    out = kernel[..., 0, :] * x
    for tap in range(1, min(base.shape[0], x.shape[-2])):
        earlier = F.pad(x[..., :-tap, :], (0, 0, tap, 0))
        out = out + kernel[..., tap, :] * earlier
    return out
