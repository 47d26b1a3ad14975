"""Second moments of a linear's input: what the rounding minimises is the error of the outputs, not of the weights.

    loss(dW) = sum over tokens of ||dW x||^2 = trace(dW H dW^T),   H = sum of x x^T

Sums run in float32 per call and float64 across calls, so a long text loses nothing.
With gradients of the model's loss at the outputs the tokens count by what an error there does to the predictions.
Sources: the layer-wise objective of OBQ and GPTQ (arXiv:2210.17323); weights from gradients, GuidedQuant
(arXiv:2505.07004).
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass
class WeightedStatistics:
    """Sums over the calibration tokens for one linear [N, K], with s the mean squared gradient of a token's outputs.

    moments  [K, K] of s x x^T; of x x^T when `unseen`, where no gradient will come and every token counts the same
    squares  [N] of each output's gradient
    """

    moments: Tensor
    squares: Tensor
    unseen: bool = False
    num_tokens: int = 0
    num_gradients: int = 0

    @staticmethod
    def of(n: int, k: int, unseen: bool) -> WeightedStatistics:
        return WeightedStatistics(torch.zeros(k, k), torch.zeros(n), unseen)

    def add_inputs(self, x: Tensor) -> None:
        """x [T, K]."""
        self.num_tokens += x.shape[0]
        if self.unseen:
            self.moments += x.T @ x

    def add_gradients(self, x: Tensor, gradient: Tensor) -> None:
        """The gradients [T, N] that came back for inputs x."""
        square = gradient.square()
        self.squares += square.sum(0)
        self.moments += (x * square.mean(1, keepdim=True)).T @ x
        self.num_gradients += x.shape[0]

    def hessian(self) -> Tensor:
        """[K, K] mean over the tokens."""
        # without its gradients a linear would look free to damage
        assert self.unseen or self.num_gradients == self.num_tokens, (self.num_gradients, self.num_tokens)
        return self.moments / max(1, self.num_tokens)

    def importance(self) -> Tensor:
        """[N] of each output, mean 1."""
        mean = float(self.squares.mean())
        return self.squares / mean if mean > 0 else torch.ones_like(self.squares)


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
