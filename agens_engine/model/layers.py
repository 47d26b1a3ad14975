"""Small shared modules: norms with weights named as in the checkpoint, and the gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from agens_kernels.ref import norm


class GemmaNorm(nn.Module):
    """RMS norm with factor 1 + weight (spec volundr-model.md section 3)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm.rms_gemma(x, self.weight, self.eps)


class PlainNorm(nn.Module):
    """RMS norm with factor weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm.rms_plain(x, self.weight, self.eps)


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate x) * (up x)). x [T, C]."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
