"""Statistics weighted by gradients: the sums they stand for, and that a linear without gradients is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agens_quant.hessian import WeightedStatistics, output_loss

N, K = 12, 16


def collect(x: Tensor, gradient: Tensor, *, pieces: int = 1) -> WeightedStatistics:
    statistics = WeightedStatistics.of(gradient.shape[1], x.shape[1], False)
    for rows, back in zip(x.chunk(pieces), gradient.chunk(pieces), strict=True):
        statistics.add_inputs(rows)
        statistics.add_gradients(rows, back)
    return statistics


def data(tokens: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(tokens, K, generator=g), torch.randn(tokens, N, generator=g)


def test_tokens_count_by_their_gradients() -> None:
    x, gradient = data(600)
    s = gradient.square().mean(1, keepdim=True)
    found = collect(x, gradient)
    assert torch.allclose(found.hessian(), (x * s).T @ x / 600, rtol=1e-4, atol=1e-5)
    assert torch.allclose(found.importance(), gradient.square().sum(0) / gradient.square().sum() * N, rtol=1e-4)


def test_pieces_add_up() -> None:
    x, gradient = data(600)
    whole, pieces = collect(x, gradient), collect(x, gradient, pieces=5)
    assert torch.allclose(whole.hessian(), pieces.hessian(), rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_expected_damage_where_weights_and_outputs_are_independent() -> None:
    """Sum over tokens of (g . dW x)^2, which is what the factors stand for, with gradients that are independent."""
    x, gradient = data(40_000)
    error = torch.randn(N, K, generator=torch.Generator().manual_seed(3)) * 0.1
    statistics = collect(x, gradient)
    estimate = float((output_loss(error, statistics.hessian()) * statistics.importance()).sum())
    exact = float(((x @ error.T) * gradient).sum(1).square().mean())
    assert estimate == pytest.approx(exact, rel=0.05)


def test_without_gradients() -> None:
    x, gradient = data(50)
    unseen = WeightedStatistics.of(N, K, True)
    unseen.add_inputs(x)
    assert torch.allclose(unseen.hessian(), x.T @ x / 50, atol=1e-5)
    assert torch.equal(collect(x, torch.zeros(50, N)).hessian(), torch.zeros(K, K))
    assert torch.equal(collect(x, torch.zeros(50, N)).importance(), torch.ones(N))
    forgotten = WeightedStatistics.of(N, K, False)
    forgotten.add_inputs(x)
    with pytest.raises(AssertionError):
        forgotten.hessian()
