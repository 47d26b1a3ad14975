"""Grids: k-means finds the known optimum, tables fit their types."""

from __future__ import annotations

import torch

from agens_quant.codebook import SUBSETS, int8_levels, kmeans_levels, subset_levels, uniform_levels
from agens_quant.gptq import nearest


def error(x: torch.Tensor, levels: torch.Tensor) -> float:
    return float((x - levels[nearest(x, levels)]).square().mean())


def test_kmeans_finds_the_optimum_of_a_bell_curve() -> None:
    """Max 1960: mean squared error 0.1175, 0.03454 and 0.009497 for 4, 8 and 16 levels of a unit normal."""
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    for count, optimum in ((4, 0.1175), (8, 0.03454), (16, 0.009497)):
        levels = kmeans_levels(x, torch.ones(1), count)
        assert levels.shape == (count,) and bool((levels[1:] > levels[:-1]).all())
        assert error(x, levels) < 1.03 * optimum
        assert error(x, int8_levels(levels) * (float(levels.abs().max()) / 127)) < 1.05 * optimum


def test_weights_pull_the_levels() -> None:
    x = torch.cat([torch.full((100,), -1.0), torch.linspace(0, 1, 100)])
    heavy = torch.cat([torch.full((100,), 1e-6), torch.ones(100)])
    assert int((kmeans_levels(x, heavy, 4) > -0.5).sum()) >= 3


def test_degenerate_values_still_give_usable_tables() -> None:
    for x in (torch.zeros(10), torch.full((10,), 3.0), torch.tensor([1.0, -1.0])):
        levels = int8_levels(kmeans_levels(x, torch.ones(1), 8))
        assert bool((levels[1:] > levels[:-1]).all()) and float(levels.abs().max()) <= 127
    assert torch.equal(int8_levels(torch.zeros(4)), int8_levels(torch.zeros(4)).sort().values)


def test_subsets_are_ascending_4_bit_codes_of_the_right_count() -> None:
    for bits in SUBSETS:
        for levels in subset_levels(bits):
            assert levels.shape == (1 << bits,) and bool((levels[1:] > levels[:-1]).all())
            assert float(levels[0]) >= -8 and float(levels[-1]) <= 7
    assert uniform_levels(2).tolist() == [-2, -1, 0, 1]
