"""RMS norms in their two forms (spec volundr-model.md section 3). Statistics in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_plain(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. x [..., C], weight [C]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The Gemma form: the factor is 1 + weight. x [..., C], weight [C]."""
    return F.rms_norm(x, weight.shape, 1.0 + weight, eps)


def l2_normalise(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis (spec section 6, step 4)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
