"""Rounding of one linear: each stage lowers the true loss, scales and codes are what a container can hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agens_quant.codebook import int8_levels, kmeans_levels, subset_levels, uniform_levels
from agens_quant.compressed_tensors import dequantize, infer_layout
from agens_quant.container import container_bits, container_parts, stored_bits
from agens_quant.gptq import Recipe, Rounded, best_of, loss_of, nearest, quantize
from agens_quant.hessian import InputStatistics, damped, inverse_factor, output_loss

GROUP = 32


def problem(n: int = 24, k: int = 80, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and statistics with correlated columns of very different energy."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=g) * 0.3 + torch.diag(torch.rand(k, generator=g) * 4)
    x = torch.randn(600, k, generator=g) @ mix
    return torch.randn(n, k, generator=g), x.T @ x / 600


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_stage_lowers_the_loss(bits: int) -> None:
    w, h = problem()
    levels = subset_levels(bits)[0]
    stages = [
        Recipe(GROUP, compensate=False, scale_search=False),
        Recipe(GROUP, compensate=False),
        Recipe(GROUP, refine=0),
        Recipe(GROUP, refine=1),
        Recipe(GROUP, refine=3),
    ]
    losses = [loss_of(w, h, quantize(w, h, levels, stage)) for stage in stages]
    assert losses[2] < 0.9 * losses[1], losses
    assert losses[3] < losses[2] and losses[4] < losses[3], losses
    assert losses[4] < 0.75 * losses[0], losses


def test_refinement_never_raises_the_damped_loss() -> None:
    w, h = problem(seed=3)
    levels = subset_levels(2)[0]
    h_damped = damped(h, Recipe().damping)
    before = float("inf")
    for rounds in range(5):
        loss = loss_of(w, h_damped, quantize(w, h, levels, Recipe(GROUP, refine=rounds)))
        assert loss <= before * (1 + 1e-5)
        before = loss


def test_identity_statistics_give_plain_rounding() -> None:
    w, _ = problem()
    plain = quantize(w, torch.eye(80), uniform_levels(4), Recipe(GROUP, compensate=False))
    compensated = quantize(w, torch.eye(80), uniform_levels(4), Recipe(GROUP, refine=0))
    assert torch.equal(plain.codes, compensated.codes)


def test_weights_on_the_grid_come_back_exactly() -> None:
    g = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 8, (6, 64), generator=g).float()
    codes[:, ::32] = -8.0  # every group uses its whole range
    w = codes * 0.25
    out = quantize(w, torch.eye(64), uniform_levels(4), Recipe(GROUP, scale_search=False)).dequantize()
    assert torch.equal(out, w)


def test_activation_order_helps_where_energies_differ() -> None:
    losses = {True: 0.0, False: 0.0}
    for seed in range(4):
        w, h = problem(seed=seed)
        for order in losses:
            losses[order] += loss_of(w, h, quantize(w, h, uniform_levels(2), Recipe(GROUP, act_order=order, refine=0)))
    assert losses[True] < losses[False]


def test_dead_columns_zero_rows_and_ragged_groups_are_finite() -> None:
    w, h = problem(k=70)
    h[:, 5] = 0
    h[5, :] = 0
    w[3] = 0
    out = quantize(w, h, subset_levels(2)[0], Recipe(GROUP))
    assert out.scales.shape == (24, 3)
    assert bool(torch.isfinite(out.dequantize()).all())
    assert float(out.dequantize()[3].abs().max()) == 0
    nothing = quantize(w, torch.zeros_like(h), subset_levels(3)[0], Recipe(GROUP))
    assert bool(torch.isfinite(nothing.dequantize()).all())


def test_it_is_deterministic() -> None:
    w, h = problem()
    a, b = (best_of(w, h, subset_levels(3), Recipe(GROUP)) for _ in range(2))
    assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and torch.equal(a.levels, b.levels)


def test_asymmetric_grids_may_flip_their_scale() -> None:
    w = -torch.tensor([[-2.0, -1.0, 0.0, 1.0] * 8])
    out = quantize(w, torch.eye(32), torch.tensor([-2.0, -1.0, 0.0, 1.0]), Recipe(GROUP))
    assert float(out.scales) < 0
    assert torch.allclose(out.dequantize(), w, atol=0.02)


@pytest.mark.parametrize("k", [64, 70, 96])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_containers_decode_to_the_same_weights(bits: int, k: int) -> None:
    w, h = problem(k=k)
    rounded = best_of(w, h, subset_levels(bits), Recipe(GROUP))
    parts = container_parts(rounded)
    layout = infer_layout((24, k), {s: tuple(t.shape) for s, t in parts.items()}, group_size_hint=GROUP)
    decoded = dequantize(layout, parts["weight_packed"], parts["weight_scale"])
    assert torch.equal(decoded, rounded.dequantize())
    assert container_bits(layout, parts["weight_packed"]) == bits


def test_bits_count_scales_and_tables() -> None:
    assert stored_bits(10, 256, 2, 2) == 10 * 256 * 2 + 10 * 2 * 16 + 4 * 8
    assert stored_bits(10, 256, 3, 2) == 10 * 256 * 3 + 10 * 2 * 16 + 8 * 8
    assert stored_bits(10, 256, 4, 2) == 10 * 256 * 4 + 10 * 2 * 16
    assert stored_bits(10, 256, 16, 2) == 10 * 256 * 16


def test_loss_is_the_output_error() -> None:
    w, _ = problem()
    g = torch.Generator().manual_seed(9)
    x = torch.randn(500, 80, generator=g)
    statistics = InputStatistics(80)
    statistics.add(x[:200].view(2, 100, 80))
    statistics.add(x[200:])
    rounded = quantize(w, statistics.hessian(), uniform_levels(3), Recipe(GROUP))
    true = ((x @ (w - rounded.dequantize()).T) ** 2).mean(0)
    assert torch.allclose(output_loss(w - rounded.dequantize(), statistics.hessian()), true, rtol=1e-4)
    weighted = loss_of(w, statistics.hessian(), rounded, torch.arange(24.0))
    assert weighted == pytest.approx(float((true * torch.arange(24.0)).sum()), rel=1e-4)
    with pytest.raises(ValueError, match="finite"):
        statistics.add(torch.full((1, 80), float("nan")))


def test_inverse_factor_needs_no_full_rank() -> None:
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    h = x.T @ x
    upper = inverse_factor(h)
    assert bool(torch.isfinite(upper).all()) and torch.equal(upper, upper.triu())
    full = damped(h, 0.1)
    u = inverse_factor(full)
    assert torch.allclose(u.T @ u @ full, torch.eye(20), atol=1e-3)


def test_nearest_agrees_with_distances() -> None:
    levels = int8_levels(kmeans_levels(torch.randn(500, generator=torch.Generator().manual_seed(2)), torch.ones(1), 8))
    x = torch.linspace(-200, 200, 801)
    distance = (x[:, None] - levels).abs()
    found = distance.gather(1, nearest(x, levels)[:, None]).squeeze(1)
    assert torch.equal(found, distance.min(1).values)


def test_rounded_uses_the_group_of_each_column() -> None:
    codes = torch.ones(1, 5, dtype=torch.uint8)
    rounded = Rounded(codes, torch.tensor([-1.0, 1.0]), torch.tensor([[1.0, 2.0, 4.0]]), 2)
    assert rounded.dequantize().tolist() == [[1.0, 1.0, 2.0, 2.0, 4.0]]
