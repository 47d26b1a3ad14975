"""Which values a code may stand for: uniform steps, sets of 4-bit codes, or a table of int8 entries per tensor.

    uniform   -2 .. 1, -4 .. 3, -8 .. 7                     plain integer grids, for comparison
    subset    4, 8 or 16 of the codes -8 .. 7               fits the 4-bit containers of an Engine build
    int8      2**bits integers in -127 .. 127               weighted k-means; the device layout's table "int8"

Weights divided by their group's rms look alike in all groups, so one table per tensor is enough; weights count by the
input energy of their column. Source: Lloyd 1982; weighting by sensitivity as in SqueezeLLM (arXiv:2306.07629).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

INT8_MAX = 127
_BINS = 4096
_ROUNDS = 60
# 4-bit codes (minus 8) near the best levels of a bell curve; the measured best one is taken per tensor.
SUBSETS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((-3, -1, 1, 3), (-7, -2, 2, 7), (-2, -1, 0, 1), (-5, -2, 1, 4), (-7, -2, 1, 5)),
    3: (
        (-7, -5, -3, -1, 1, 3, 5, 7),
        (-7, -4, -2, -1, 1, 2, 4, 7),
        (-8, -5, -3, -1, 1, 3, 5, 7),
        (-8, -5, -3, -1, 0, 2, 4, 7),
        (-4, -3, -2, -1, 0, 1, 2, 3),
    ),
    4: (tuple(range(-8, 8)),),
}


def uniform_levels(bits: int) -> Tensor:
    """[2**bits] float32: the two's complement integers."""
    return torch.arange(-(1 << (bits - 1)), 1 << (bits - 1), dtype=torch.float32)


def subset_levels(bits: int) -> list[Tensor]:
    """Candidate sets of 4-bit codes, each [2**bits] float32 ascending."""
    return [torch.tensor(codes, dtype=torch.float32) for codes in SUBSETS[bits]]


def kmeans_levels(values: Tensor, weights: Tensor, num_levels: int) -> Tensor:
    """Weighted one-dimensional k-means over a fine histogram; deterministic.

    values   any shape; weights the same shape or broadcast to it, not negative
    returns  [num_levels] float32 ascending
    """
    value = values.reshape(-1).double().numpy()
    weight = weights.expand_as(values).reshape(-1).double().numpy()
    limit = float(np.abs(value).max()) or 1.0
    at = np.clip(((value / limit + 1) * 0.5 * _BINS).astype(np.int64), 0, _BINS - 1)
    mass = np.bincount(at, weight, _BINS)
    moment = np.bincount(at, weight * value, _BINS)
    if not mass.sum() > 0:
        return torch.linspace(-limit, limit, num_levels)
    filled = mass > 0
    centre, mass, moment = moment[filled] / mass[filled], mass[filled], moment[filled]
    # quantiles of the cube root of the density: near the optimum for a smooth density
    share = np.cumsum(np.cbrt(mass))
    levels = np.interp((np.arange(num_levels) + 0.5) / num_levels, share / share[-1], centre)
    for _ in range(_ROUNDS):
        owner = np.searchsorted((levels[1:] + levels[:-1]) / 2, centre)
        total = np.bincount(owner, mass, num_levels)
        mean = np.bincount(owner, moment, num_levels) / np.where(total > 0, total, 1)
        levels = np.sort(np.where(total > 0, mean, levels))
    return torch.from_numpy(levels).float()


def int8_levels(levels: Tensor) -> Tensor:
    """Scaled so that the largest is 127 and rounded; equal neighbours are pushed one step apart."""
    top = float(levels.abs().max()) or 1.0
    steps = [int(v) for v in torch.round(levels / top * INT8_MAX)]
    for i in range(1, len(steps)):
        steps[i] = max(steps[i], steps[i - 1] + 1)
    for i in range(len(steps) - 1, -1, -1):
        steps[i] = min(steps[i], INT8_MAX - (len(steps) - 1 - i))
    return torch.tensor(steps, dtype=torch.float32)
