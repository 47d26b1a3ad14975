"""Manifold hyper-connections of one layer: weights around the reference op (spec volundr-model.md section 5)."""

from __future__ import annotations

import torch
from torch import nn

from agens_engine.model.layers import PlainNorm
from agens_kernels.ref import mhc as ref


class StreamMixer(nn.Module):
    """Mixes S residual streams into the layer's input and spreads its output over them."""

    def __init__(self, hidden: int, streams: int, iters: int, eps: float) -> None:
        super().__init__()
        self.iters, self.eps = iters, eps
        self.dyn = nn.Linear(hidden, 2 * streams + streams * streams, bias=False)
        self.norm = PlainNorm(hidden, eps)
        self.pre_static = nn.Parameter(torch.zeros(streams))
        self.post_static = nn.Parameter(torch.ones(streams))
        self.res_static = nn.Parameter(torch.zeros(streams, streams))

    def mix(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """streams [T, S, C] -> x [T, C], post [T, S], R [T, S, S]."""
        statics = (self.pre_static, self.post_static, self.res_static)
        return ref.mix(streams, self.dyn.weight, self.norm.weight, statics, iters=self.iters, eps=self.eps)

    @staticmethod
    def combine(streams: torch.Tensor, res: torch.Tensor, post: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return ref.combine(streams, res, post, delta)
