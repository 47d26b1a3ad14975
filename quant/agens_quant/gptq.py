"""Error-compensated rounding of one linear to any grid, and its refinement.

    1. scales     per row and group: the factor with the least error, columns weighted by their input energy
    2. rounding   column by column; what a column loses is made up for by the columns not yet rounded (GPTQ), in the
                  order of falling input energy when `act_order` (groups stay those of the original columns)
    3. refinement  scales in closed form and codes one at a time, both for the exact loss trace(dW H dW^T): each step
                  can only lower it

The value of a weight is levels[code] * scale. Scales are rounded to the type they are stored in before codes are
chosen. Sources: GPTQ (arXiv:2210.17323), coordinate descent on codes as in QuantEase (arXiv:2309.01885).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from agens_quant.hessian import damped, inverse_factor, output_loss

_BLOCK = 128
_FACTORS = 28


@dataclass(frozen=True)
class Recipe:
    """How a tensor is rounded.

    group_size   columns per scale; the last group may be shorter
    compensate   False rounds to nearest
    refine       rounds of refinement after compensation
    damping      share of the mean diagonal that is added to H
    scale_type   what a scale is stored as
    """

    group_size: int = 128
    compensate: bool = True
    act_order: bool = True
    refine: int = 2
    damping: float = 0.01
    scale_search: bool = True
    scale_type: torch.dtype = torch.float16


@dataclass(frozen=True)
class Rounded:
    """codes [N, K] uint8 into levels [L] float32, scales [N, G] float32 already rounded to their stored type."""

    codes: Tensor
    levels: Tensor
    scales: Tensor
    group_size: int

    def dequantize(self) -> Tensor:
        """[N, K] float32."""
        return self.levels[self.codes.long()] * expand_scales(self.scales, self.group_size, self.codes.shape[1])


def expand_scales(scales: Tensor, group_size: int, columns: int) -> Tensor:
    """[N, G] -> [N, K]."""
    return scales.repeat_interleave(group_size, 1)[:, :columns]


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Index of the closest of the ascending levels, int64; halfway goes down."""
    return _above(x, _middles(levels))


def _middles(levels: Tensor) -> list[float]:
    return ((levels[1:] + levels[:-1]) / 2).tolist()


def _above(x: Tensor, middles: list[float]) -> Tensor:
    """How many of the middles lie below x: a few comparisons beat a search over so short a list by far."""
    count = torch.zeros(x.shape, dtype=torch.uint8)
    for middle in middles:
        count += x > middle
    return count.long()


def quantize(weight: Tensor, hessian: Tensor, levels: Tensor, recipe: Recipe) -> Rounded:
    """Round [N, K] float32 to levels * scale.

    hessian  [K, K], not negative definite; columns that were never active are rounded all the same
    levels   [L] float32 ascending
    raises   ValueError when H cannot be factored
    """
    n, k = weight.shape
    h = damped(hessian, recipe.damping)
    scales = search_scales(weight, h.diagonal(), levels, recipe)
    wide = expand_scales(scales, recipe.group_size, k)
    if recipe.compensate:
        order = torch.argsort(h.diagonal(), descending=True, stable=True) if recipe.act_order else torch.arange(k)
        codes = torch.empty(n, k, dtype=torch.int64)
        codes[:, order] = _compensated(weight[:, order], h[order][:, order], wide[:, order], levels)
        for _ in range(recipe.refine):
            codes, scales = _refined(weight, h, codes, scales, levels, recipe)
    else:
        codes = nearest(weight * _inverse(wide), levels)
    return Rounded(codes.to(torch.uint8), levels, scales, recipe.group_size)


def best_of(weight: Tensor, hessian: Tensor, candidates: list[Tensor], recipe: Recipe) -> Rounded:
    """The grid with the least rounding error (weighted by input energy) gets the full treatment."""
    if len(candidates) > 1:
        diagonal = damped(hessian, recipe.damping).diagonal()

        def error(levels: Tensor) -> float:
            scales = expand_scales(search_scales(weight, diagonal, levels, recipe), recipe.group_size, weight.shape[1])
            rounded = levels[nearest(weight * _inverse(scales), levels)] * scales
            return float(((weight - rounded).square() * diagonal).sum())

        candidates = [min(candidates, key=error)]
    return quantize(weight, hessian, candidates[0], recipe)


def loss_of(weight: Tensor, hessian: Tensor, rounded: Rounded, importance: Tensor | None = None) -> float:
    """Mean squared output error, summed over outputs with their importance [N]."""
    per_output = output_loss(weight - rounded.dequantize(), hessian)
    return float((per_output if importance is None else per_output * importance).sum())


def search_scales(weight: Tensor, energy: Tensor, levels: Tensor, recipe: Recipe) -> Tensor:
    """[N, G] scales, rounded to their stored type; negative ones are tried where the grid is not symmetric."""
    n, k = weight.shape
    size = recipe.group_size
    groups = -(-k // size)
    padded = torch.zeros(n, groups * size)
    padded[:, :k] = weight
    w = padded.view(n, groups, size)
    importance = torch.zeros(groups * size)
    importance[:k] = energy
    importance = importance.view(groups, size)
    top = float(levels.abs().max())
    base = w.abs().amax(2) / top
    if not recipe.scale_search:
        low, high = -float(levels[0]) or top, float(levels[-1])
        base = torch.maximum(w.amax(2) / high, -w.amin(2) / low)
        return _stored(base, recipe)
    smallest = 0.25 if len(levels) <= 4 else 0.4 if len(levels) <= 8 else 0.6
    factors = torch.linspace(smallest, 1.08, _FACTORS)
    if not torch.equal(levels, -levels.flip(0)):
        factors = torch.cat((factors, -factors))
    scales = _stored(base[..., None] * factors, recipe)
    best = _scale_errors(w, importance.expand_as(w), levels, scales).argmin(2, keepdim=True)
    return scales.gather(2, best)[..., 0]


def _scale_errors(w: Tensor, importance: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """[N, G, F] weighted squared error of the groups w [N, G, S] rounded to nearest with each scale [N, G, F].

    Sorted once, a group falls into one interval per level; prefix sums of importance times 1, w and w^2 give the error
    of an interval without a look at its members.
    """
    ordered, order = w.sort(2)
    mass = importance.gather(2, order).double()
    moment = mass * ordered
    sums = [F.pad(x.cumsum(2), (1, 0)) for x in (mass, moment)]
    total = (moment * ordered).sum(2)
    middles, count = (levels[1:] + levels[:-1]) / 2, len(levels)
    # with a negative scale the levels run downwards: lower bounds come from the other end
    reverse = (scales < 0)[..., None]
    bounds = torch.where(reverse, middles.flip(0), middles) * scales[..., None]
    values = (torch.where(reverse, levels.flip(0), levels) * scales[..., None]).double()
    cuts = torch.searchsorted(ordered.contiguous(), bounds.flatten(2).contiguous(), right=True)
    inside = []
    for prefix in sums:
        at = prefix.gather(2, cuts).unflatten(2, (-1, count - 1))
        end = prefix[:, :, -1:, None].expand(*at.shape[:3], 1)
        inside.append(torch.cat((at, end), 3).diff(dim=3, prepend=torch.zeros_like(end)))
    return (total[..., None] + (values * (values * inside[0] - 2 * inside[1])).sum(3)).float()


def _stored(scales: Tensor, recipe: Recipe) -> Tensor:
    return scales.to(recipe.scale_type).float()


def _inverse(scales: Tensor) -> Tensor:
    """1 / scale, and 0 where the scale is 0 (every level then stands for 0)."""
    return torch.where(scales == 0, torch.zeros_like(scales), 1 / scales)


def _compensated(weight: Tensor, hessian: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """GPTQ in the given column order; scales [N, K] by column. Returns codes [N, K]."""
    upper = inverse_factor(hessian)
    n, k = weight.shape
    left = weight.clone()
    codes = torch.empty(k, n, dtype=torch.int64)
    middles = _middles(levels)
    scale_rows, inverse_rows = scales.T.contiguous(), _inverse(scales).T.contiguous()
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        block = left[:, start:stop].T.contiguous()  # [block, N]: a column of the weight is a contiguous row
        errors = torch.empty_like(block)
        for j in range(stop - start):
            column = block[j]
            code = _above(column * inverse_rows[start + j], middles)
            codes[start + j] = code
            error = (column - levels[code] * scale_rows[start + j]) / upper[start + j, start + j]
            errors[j] = error
            block[j + 1 :].addr_(upper[start + j, start + j + 1 : stop], error, alpha=-1)
        left[:, stop:] -= errors.T @ upper[start:stop, stop:]
    return codes.T


def _refined(
    weight: Tensor, hessian: Tensor, codes: Tensor, scales: Tensor, levels: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """One round over the groups: the scale in closed form, then each code of the group."""
    k, size = weight.shape[1], recipe.group_size
    codes, scales = codes.clone(), scales.clone()
    middles = _middles(levels)
    error = weight - levels[codes] * expand_scales(scales, size, k)
    gradient = error @ hessian  # of half the loss, negated: how much a rise of each value would help
    for g, start in enumerate(range(0, k, size)):
        span = slice(start, min(start + size, k))
        h = hessian[span, span]
        chosen = levels[codes[:, span]]
        curvature = ((chosen @ h) * chosen).sum(1)
        step = torch.where(curvature > 0, (chosen * gradient[:, span]).sum(1) / curvature, torch.zeros_like(curvature))
        moved = _stored(scales[:, g] + step, recipe)
        # keep the old scale where rounding it for storage would undo the gain
        gain = (moved - scales[:, g]) * (2 * step - (moved - scales[:, g])) * curvature
        moved = torch.where((gain > 0) & (moved != 0), moved, scales[:, g])
        change = (moved - scales[:, g])[:, None] * chosen
        scales[:, g] = moved
        gradient -= change @ hessian[span]
        inverse = _inverse(moved)
        local = gradient[:, span].T.contiguous()
        value = (levels[codes[:, span]] * moved[:, None]).T.contiguous()
        before = value.clone()
        code_rows = codes[:, span].T.contiguous()
        diagonal = h.diagonal()
        for j in range(h.shape[0]):
            code = _above((value[j] + local[j] / diagonal[j]) * inverse, middles)
            new = levels[code] * moved
            code_rows[j] = code
            local.addr_(h[j], new - value[j], alpha=-1)
            value[j] = new
        codes[:, span] = code_rows.T
        gradient -= (value - before).T @ hessian[span]
    return codes, scales
