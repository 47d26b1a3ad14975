"""The ways of rounding that are compared, each tensor at several widths, and how widths are given out.

    rtn        uniform steps, range from the extremes, nearest
    rtn_fit    the same with scale search
    codebook   int8 table per tensor by weighted k-means, scale search, nearest
    rotated    uniform steps after a block Hadamard rotation, scale search, nearest
    gptq       uniform steps, range from the extremes, plain statistics, activation order
    gptq_fit   the same with scale search
    subset     the best of some fixed sets of 4-bit codes, gradient-weighted statistics, compensation and refinement:
               what `agens quantize` writes, since a 4-bit container can hold it
    ours       the same with a codebook
    ours_rot   the same after rotation

Bits count codes, fp16 scales of groups of 128 (the last of a row may be shorter) and tables of 8 bits an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from agens_quant.allocate import Option, allocate
from agens_quant.codebook import int8_levels, kmeans_levels, subset_levels, uniform_levels
from agens_quant.container import stored_bits
from agens_quant.gptq import Recipe, Rounded, best_of, quantize
from agens_quant.hessian import output_loss
from agens_quant.rotation import rotate_columns, rotate_hessian, signs, unrotate_columns

GROUP = 128
RECIPES = {
    "rtn": Recipe(compensate=False, scale_search=False),
    "rtn_fit": Recipe(compensate=False),
    "codebook": Recipe(compensate=False),
    "rotated": Recipe(compensate=False),
    "gptq": Recipe(refine=0, scale_search=False),
    "gptq_fit": Recipe(refine=0),
    "subset": Recipe(),
    "ours": Recipe(),
    "ours_rot": Recipe(),
}


@dataclass(frozen=True)
class Rounding:
    """A rounded tensor, whether its columns are rotated, and the estimated damage."""

    rounded: Rounded
    rotated: bool
    damage: float

    def weight(self) -> Tensor:
        """[N, K] float32."""
        values = self.rounded.dequantize()
        return unrotate_columns(values, signs(values.shape[1], 0)) if self.rotated else values


def round_one(weight: Tensor, hessian: Tensor, fisher: Tensor, importance: Tensor, method: str, bits: int) -> Rounding:
    """[N, K] by a method, with 0.5 * importance-weighted loss on the gradient-weighted statistics."""
    statistics = fisher if method.startswith(("ours", "subset")) else hessian
    w, h = weight, statistics
    rotated = method in ("rotated", "ours_rot")
    if rotated:
        sign = signs(weight.shape[1], 0)
        w, h = rotate_columns(w, sign), rotate_hessian(h, sign)
    if method == "subset":
        found = Rounding(best_of(w, h, subset_levels(bits), RECIPES[method]), rotated, 0.0)
    else:
        levels = uniform_levels(bits)
        if method in ("codebook", "ours", "ours_rot"):
            levels = table_levels(w, h.diagonal(), bits)
        found = Rounding(quantize(w, h, levels, RECIPES[method]), rotated, 0.0)
    damage = 0.5 * float((output_loss(weight - found.weight(), fisher) * importance).sum())
    return Rounding(found.rounded, rotated, damage)


def table_levels(weight: Tensor, energy: Tensor, bits: int) -> Tensor:
    """[2**bits] int8 table for [N, K], columns counting by their energy [K]."""
    return int8_levels(kmeans_levels(_normalised(weight), energy.expand_as(weight), 1 << bits))


def _normalised(w: Tensor) -> Tensor:
    """Each group of a row divided by its root mean square."""
    return torch.cat([g / g.square().mean(1, keepdim=True).sqrt().clamp_min(1e-12) for g in w.split(GROUP, 1)], 1)


def round_all(
    statistics: Path, weights: dict[str, Tensor], method: str, bits: int, workers: int
) -> dict[str, Rounding]:
    """Every linear by one method at one width; `statistics` is the file that eval_quant_real_model.py saves."""
    names = list(weights)
    if workers == 1:
        return _job(statistics, weights, method, bits)
    parts = [{n: weights[n] for n in names[i::workers]} for i in range(workers)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_job, statistics, part, method, bits) for part in parts]
        found: dict[str, Rounding] = {}
        for job in jobs:
            found |= job.result()
    return {n: found[n] for n in names}


def _job(statistics: Path, weights: dict[str, Tensor], method: str, bits: int) -> dict[str, Rounding]:
    torch.set_num_threads(1)
    known = torch.load(statistics, mmap=True)
    rounded = {}
    for n, w in weights.items():
        hessian, fisher, importance = known[n]
        rounded[n] = round_one(w, hessian, fisher, importance, method, bits)
    return rounded


def save(roundings: dict[str, Rounding], file: Path) -> None:
    parts = {
        n: (r.rounded.codes, r.rounded.levels, r.rounded.scales, r.rounded.group_size, r.rotated, r.damage)
        for n, r in roundings.items()
    }
    temporary = file.with_suffix(".tmp")
    torch.save(parts, temporary)
    temporary.replace(file)


def load(file: Path) -> dict[str, Rounding]:
    return {
        n: Rounding(Rounded(codes, levels, scales, size), rotated, damage)
        for n, (codes, levels, scales, size, rotated, damage) in torch.load(file, mmap=True).items()
    }


def size_of(weight: Tensor, bits: int) -> int:
    n, k = weight.shape
    return stored_bits(n, k, bits, -(-k // GROUP))


def by_damage(
    weights: dict[str, Tensor], roundings: dict[int, dict[str, Rounding]], mean_bits: float
) -> dict[str, int]:
    """Widths that minimise the summed damage under the mean of bits, everything included."""
    widths = sorted(roundings)
    tensors = [[Option(size_of(w, b), roundings[b][n].damage) for b in widths] for n, w in weights.items()]
    plan = allocate(tensors, int(mean_bits * sum(w.numel() for w in weights.values())))
    return {n: widths[o] for n, o in zip(weights, plan, strict=True)}


def in_order(weights: dict[str, Tensor], widths: Sequence[int], mean_bits: float) -> dict[str, int]:
    """No sensitivity: the lower of two neighbouring widths everywhere, the higher from the first layer on while it
    fits."""
    budget = mean_bits * sum(w.numel() for w in weights.values())
    low, high = min(widths), max(widths)
    chosen = dict.fromkeys(weights, low)
    left = budget - sum(size_of(w, low) for w in weights.values())
    for name, w in weights.items():
        more = size_of(w, high) - size_of(w, low)
        if more <= left:
            chosen[name] = high
            left -= more
    return chosen


def mean_bits_of(weights: dict[str, Tensor], widths: dict[str, int]) -> float:
    return sum(size_of(w, widths[n]) for n, w in weights.items()) / sum(w.numel() for w in weights.values())
