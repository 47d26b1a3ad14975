"""Statistics weighted by gradients: the sums they stand for, and what keeps a few loud tokens from deciding alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agens_quant.codebook import uniform_levels
from agens_quant.gptq import Recipe, loss_of, quantize
from agens_quant.hessian import WeightedStatistics

N, K = 12, 16


def collect(x: Tensor, gradient: Tensor, *, pieces: int = 1, unseen: bool = False) -> WeightedStatistics:
    statistics = WeightedStatistics.of(gradient.shape[1], x.shape[1], unseen)
    for rows, back in zip(x.chunk(pieces), gradient.chunk(pieces), strict=True):
        statistics.add_inputs(rows)
        if not unseen:
            statistics.add_gradients(rows, back)
    return statistics


def data(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, K, generator=g), torch.randn(tokens, N, generator=g)


def test_even_weights_give_the_weighted_moments() -> None:
    x, _ = data(4000)
    gradient = torch.full((4000, N), 0.5)
    found = collect(x, gradient).moments()
    assert torch.allclose(found, 0.25 * x.T @ x / 4000, atol=1e-5)
    assert torch.allclose(collect(x, gradient).importance(), torch.ones(N))


def test_the_order_of_the_pieces_does_not_matter() -> None:
    x, gradient = data(600)
    whole, pieces = collect(x, gradient), collect(x, gradient, pieces=5)
    assert torch.allclose(whole.moments(), pieces.moments(), rtol=1e-4, atol=1e-5)
    assert whole.importance().mean() == pytest.approx(1, abs=1e-5)


def test_many_effective_tokens_keep_their_weights() -> None:
    """Tokens along the first axis count nine times: with enough of them that must show nearly in full."""
    x, gradient = data(20_000)
    loud = x[:, 0].abs() > 1
    gradient[loud] *= 3
    s = gradient.square().mean(1, keepdim=True)
    exact = (x * s).T @ x / len(x)
    assert torch.allclose(collect(x, gradient).moments(), exact, rtol=0.02, atol=0.05)


def test_one_loud_token_does_not_hide_the_damage() -> None:
    """With nearly all weight on one token, compensation could fit that token and call the rounding free."""
    x, gradient = data(2000, seed=1)
    gradient[0] *= 1000
    statistics = collect(x, gradient)
    raw = statistics.weighted / statistics.num_tokens
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(2))
    levels, recipe = uniform_levels(2), Recipe(group_size=32, damping=1e-4)
    plain = x.T @ x / len(x)
    fitted, shrunk = (quantize(weight, h, levels, recipe) for h in (raw, statistics.moments()))
    assert loss_of(weight, plain, shrunk) < 0.8 * loss_of(weight, plain, fitted)
    scale = float(plain.trace() / raw.trace())
    assert scale * loss_of(weight, raw, fitted) < 0.2 * loss_of(weight, plain, fitted), "the trap is there"
    honest = float(plain.trace() / statistics.moments().trace()) * loss_of(weight, statistics.moments(), shrunk)
    assert honest > 0.5 * loss_of(weight, plain, shrunk)


def test_without_gradients() -> None:
    x, gradient = data(50)
    assert torch.allclose(collect(x, gradient, unseen=True).moments(), x.T @ x / 50, atol=1e-5)
    assert torch.equal(collect(x, torch.zeros(50, N)).moments(), torch.zeros(K, K))
    assert torch.equal(collect(x, torch.zeros(50, N)).importance(), torch.ones(N))
