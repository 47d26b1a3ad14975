"""Inverse of the cumulative distribution."""

from __future__ import annotations

import pytest
import torch

from agens_engine.sampling.draw import draw_tokens

LAST_BELOW_ONE = 1.0 - 2.0**-53


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.24, 1), (0.26, 3), (0.74, 3), (0.76, 4), (LAST_BELOW_ONE, 4)]
)
def test_by_hand(uniform, token):
    weights = torch.tensor([[0.0, 0.5, 0.0, 1.0, 0.5, 0.0]])  # need not sum to 1
    assert draw_tokens(weights, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_impossible_tokens_are_never_drawn():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2000, 50, generator=generator)
    weights[weights < 0.9] = 0.0
    weights[:, 7] += 1e-30
    uniforms = torch.rand(2000, generator=generator, dtype=torch.float64)
    uniforms[:500], uniforms[500:1000] = 0.0, LAST_BELOW_ONE
    assert (weights.gather(1, draw_tokens(weights, uniforms)[:, None]) > 0).all()
