"""The ways of rounding that are compared, each tensor at several widths, and how widths are given out.

    rtn        uniform steps, range from the extremes, nearest
    codebook   int8 table per tensor by weighted k-means, scale search, nearest
    rotated    uniform steps after a block Hadamard rotation, scale search, nearest
    gptq       uniform steps, range from the extremes, plain statistics, activation order
    ours       codebook with gradient-weighted statistics, compensation and refinement
    ours_rot   the same after rotation

Bits count codes, fp16 scales of groups of 128 (the last of a row may be shorter) and tables of 8 bits an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from agens_quant.allocate import Option, allocate
from agens_quant.codebook import int8_levels, kmeans_levels, uniform_levels
from agens_quant.container import stored_bits
from agens_quant.gptq import Recipe, quantize
from agens_quant.hessian import output_loss
from agens_quant.rotation import rotate_columns, rotate_hessian, signs, unrotate_columns

GROUP = 128
METHODS = ("rtn", "codebook", "rotated", "gptq", "ours", "ours_rot")
RECIPES = {
    "rtn": Recipe(compensate=False, scale_search=False),
    "codebook": Recipe(compensate=False),
    "rotated": Recipe(compensate=False),
    "gptq": Recipe(refine=0, scale_search=False),
    "ours": Recipe(refine=3),
    "ours_rot": Recipe(refine=3),
}
Rounding = tuple[Tensor, float]  # weight after rounding, estimated damage


def round_one(
    weight: Tensor, hessian: Tensor, fisher: Tensor, importance: Tensor, method: str, bits: int, seed: int = 0
) -> Rounding:
    """[N, K] after rounding by a method, and 0.5 * importance-weighted loss on the gradient-weighted statistics."""
    statistics = fisher if method.startswith("ours") else hessian
    w, h = weight, statistics
    sign = signs(weight.shape[1], seed)
    turned = method in ("rotated", "ours_rot")
    if turned:
        w, h = rotate_columns(w, sign), rotate_hessian(h, sign)
    levels = uniform_levels(bits)
    if method in ("codebook", "ours", "ours_rot"):
        levels = int8_levels(kmeans_levels(_normalised(w), h.diagonal().expand_as(w), 1 << bits))
    rounded = quantize(w, h, levels, RECIPES[method]).dequantize()
    result = unrotate_columns(rounded, sign) if turned else rounded
    damage = 0.5 * float((output_loss(weight - result, fisher) * importance).sum())
    return result, damage


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


def size_of(weight: Tensor, bits: int) -> int:
    n, k = weight.shape
    return stored_bits(n, k, bits, -(-k // GROUP))


def by_damage(
    weights: dict[str, Tensor], roundings: dict[int, dict[str, Rounding]], mean_bits: float
) -> dict[str, int]:
    """Widths that minimise the summed damage under the mean of bits, everything included."""
    widths = sorted(roundings)
    tensors = [[Option(size_of(w, b), roundings[b][n][1]) for b in widths] for n, w in weights.items()]
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
