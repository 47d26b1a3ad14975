"""Bits per tensor under a budget: the multiple-choice knapsack, one option from each tensor.

    minimise sum cost[i][choice[i]]   subject to   sum size[i][choice[i]] <= budget

Dynamic programming over the size above the minimum. It is exact while the sizes, divided by their greatest common
divisor, make at most MAX_STATES steps; beyond that sizes are rounded up to steps, the Lagrangian relaxation is solved
as well (exact on the convex hull), the better of the two is taken and what is left of the budget spent greedily.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_STATES = 40_000


@dataclass(frozen=True)
class Option:
    """One way to store a tensor: `size` in bits, everything included; `cost` the damage it does, not negative."""

    size: int
    cost: float


class BudgetError(ValueError):
    """The budget is under what the smallest options take."""

    def __init__(self, budget: int, low: int, high: int) -> None:
        super().__init__(f"{budget} bits are asked for, the options take {low} to {high}")
        self.budget, self.low, self.high = budget, low, high


def allocate(tensors: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """Index of the chosen option of each tensor. Raises BudgetError when not even the smallest ones fit."""
    low = sum(min(o.size for o in options) for options in tensors)
    high = sum(max(o.size for o in options) for options in tensors)
    if budget < low:
        raise BudgetError(budget, low, high)
    room = min(budget, high) - low
    extras = [[o.size - min(p.size for p in options) for o in options] for options in tensors]
    divisor = math.gcd(*(e for row in extras for e in row)) or 1
    step = max(divisor, -(-room // MAX_STATES))
    plans = [_dynamic(tensors, extras, room // step, step)]
    if step > divisor:
        plans.append(_lagrangian(tensors, extras, room))
    improved = [_spend_rest(tensors, extras, room, plan) for plan in plans]
    return min(improved, key=lambda plan: total_cost(tensors, plan))


def total_cost(tensors: Sequence[Sequence[Option]], plan: Sequence[int]) -> float:
    return math.fsum(options[i].cost for options, i in zip(tensors, plan, strict=True))


def total_size(tensors: Sequence[Sequence[Option]], plan: Sequence[int]) -> int:
    return sum(options[i].size for options, i in zip(tensors, plan, strict=True))


def _dynamic(tensors: Sequence[Sequence[Option]], extras: list[list[int]], states: int, step: int) -> list[int]:
    best = np.zeros(states + 1)
    chosen = np.zeros((len(tensors), states + 1), np.uint8)
    for i, options in enumerate(tensors):
        following = np.full(states + 1, np.inf)
        for o, option in enumerate(options):
            taken = -(-extras[i][o] // step)
            if taken > states:
                continue
            value = best[: states + 1 - taken] + option.cost
            better = value < following[taken:]
            following[taken:][better] = value[better]
            chosen[i, taken:][better] = o
        best = following
    plan = [0] * len(tensors)
    at = int(np.argmin(best))
    for i in range(len(tensors) - 1, -1, -1):
        plan[i] = int(chosen[i, at])
        at -= -(-extras[i][plan[i]] // step)
    return plan


def _lagrangian(tensors: Sequence[Sequence[Option]], extras: list[list[int]], room: int) -> list[int]:
    """The best plan of the form: every tensor minimises cost + price * size, for the smallest price that fits."""

    def at_price(price: float) -> list[int]:
        return [
            min(range(len(options)), key=lambda o: (options[o].cost + price * extra[o], extra[o]))
            for options, extra in zip(tensors, extras, strict=True)
        ]

    def used(plan: list[int]) -> int:
        return sum(extra[o] for extra, o in zip(extras, plan, strict=True))

    cheap, dear = 0.0, 1.0
    while used(at_price(dear)) > room:
        dear *= 4
    for _ in range(100):
        middle = (cheap + dear) / 2
        cheap, dear = (middle, dear) if used(at_price(middle)) > room else (cheap, middle)
    return at_price(dear)


def _spend_rest(tensors: Sequence[Sequence[Option]], extras: list[list[int]], room: int, plan: list[int]) -> list[int]:
    """Upgrade the tensor with the best gain per bit while anything fits."""
    plan = list(plan)
    left = room - sum(extra[o] for extra, o in zip(extras, plan, strict=True))
    while True:
        best: tuple[float, int, int] | None = None
        for i, options in enumerate(tensors):
            for o, option in enumerate(options):
                more = extras[i][o] - extras[i][plan[i]]
                gain = options[plan[i]].cost - option.cost
                if gain > 0 and more <= left:
                    rate = gain / max(more, 1)
                    if best is None or rate > best[0]:
                        best = (rate, i, o)
        if best is None:
            return plan
        _, i, o = best
        left -= extras[i][o] - extras[i][plan[i]]
        plan[i] = o
