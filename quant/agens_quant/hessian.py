"""Second moments of a linear's input: what the rounding minimises is the error of the outputs, not of the weights.

    loss(dW) = sum over tokens of ||dW x||^2 = trace(dW H dW^T),   H = sum of x x^T

Sums run in float32 per call and float64 across calls, so a long text loses nothing.
Source: the layer-wise objective of OBQ and GPTQ (arXiv:2210.17323).
"""

from __future__ import annotations

import torch
from torch import Tensor


class InputStatistics:
    """Accumulates H [K, K] of one input; `num_tokens` rows have been added."""

    def __init__(self, columns: int) -> None:
        self.num_tokens = 0
        self._sum = torch.zeros(columns, columns, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """x [..., K] float; raises ValueError where an activation is not finite."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        if not bool(torch.isfinite(rows).all()):
            raise ValueError("an activation is not finite")
        self._sum += (rows.T @ rows).double()
        self.num_tokens += rows.shape[0]

    def hessian(self) -> Tensor:
        """[K, K] float32 mean of x x^T."""
        return (self._sum / max(1, self.num_tokens)).float()


def damped(hessian: Tensor, share: float) -> Tensor:
    """H plus `share` of its mean diagonal, as a copy: what the calibration text never showed still has some weight."""
    result = hessian.clone()
    mean = float(result.diagonal().mean())
    result.diagonal().add_(share * mean if mean > 0 else 1.0)
    return result


def inverse_factor(hessian: Tensor) -> Tensor:
    """Upper triangular U with H^-1 = U^T U, damped further until H is positive definite.

    raises  ValueError when even H + mean(diag) I is not
    """
    share = 1e-6
    candidate = hessian
    while share <= 1.0:
        lower, info = torch.linalg.cholesky_ex(candidate)
        if int(info) == 0:
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if int(info) == 0:
                return upper
        candidate = damped(hessian, share)
        share *= 10
    raise ValueError("the input statistics are not positive definite, whatever the damping")


def output_loss(error: Tensor, hessian: Tensor) -> Tensor:
    """[N] mean squared error of each output for a weight error [N, K]."""
    return ((error @ hessian) * error).sum(1)
