"""The knapsack: exact against brute force, never over budget, and clear about a budget out of reach."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agens_quant import allocate as module
from agens_quant.allocate import BudgetError, Option, allocate, total_cost, total_size

options = st.lists(
    st.builds(Option, size=st.integers(1, 60), cost=st.floats(0, 100, allow_nan=False)), min_size=1, max_size=4
)
problems = st.tuples(st.lists(options, min_size=1, max_size=5), st.floats(0, 1))


def best_by_force(tensors: list[list[Option]], budget: int) -> float:
    plans = itertools.product(*(range(len(t)) for t in tensors))
    return min(total_cost(tensors, p) for p in plans if total_size(tensors, p) <= budget)


def budget_of(tensors: list[list[Option]], share: float) -> int:
    low = sum(min(o.size for o in t) for t in tensors)
    high = sum(max(o.size for o in t) for t in tensors)
    return low + int(share * (high - low))


@settings(max_examples=300, deadline=None)
@given(problems)
def test_small_problems_are_solved_exactly(problem: tuple[list[list[Option]], float]) -> None:
    tensors, share = problem
    budget = budget_of(tensors, share)
    plan = allocate(tensors, budget)
    assert total_size(tensors, plan) <= budget
    assert total_cost(tensors, plan) == pytest.approx(best_by_force(tensors, budget), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(problems)
def test_coarse_steps_keep_the_budget_and_stay_close(problem: tuple[list[list[Option]], float]) -> None:
    tensors, share = problem
    budget = budget_of(tensors, share)
    states, module.MAX_STATES = module.MAX_STATES, 7
    try:
        plan = allocate(tensors, budget)
    finally:
        module.MAX_STATES = states
    assert total_size(tensors, plan) <= budget
    # never worse than everything at its smallest
    smallest = [min((o.size, o.cost, i) for i, o in enumerate(t))[2] for t in tensors]
    assert total_cost(tensors, plan) <= total_cost(tensors, smallest) + 1e-9


def test_sensitive_tensors_get_the_bits() -> None:
    harmless = [Option(200, 1.0), Option(300, 0.5), Option(400, 0.25)]
    touchy = [Option(200, 100.0), Option(300, 10.0), Option(400, 1.0)]
    assert allocate([harmless, touchy], 600) == [0, 2]


def test_a_budget_out_of_reach_says_what_is() -> None:
    with pytest.raises(BudgetError) as caught:
        allocate([[Option(10, 1.0), Option(20, 0.0)], [Option(5, 1.0)]], 14)
    assert (caught.value.low, caught.value.high) == (15, 25)
    assert allocate([[Option(10, 1.0), Option(20, 0.0)], [Option(5, 1.0)]], 10**9) == [1, 0]


def test_real_sizes_use_nearly_the_whole_budget() -> None:
    shapes = [(34816, 5120), (5120, 17408), (16384, 5120), (640, 5120)] * 16
    tensors = [
        [Option(n * k * b + n * k // 8, (i % 7 + 1) * 4.0**-b * n * k) for b in (2, 3, 4)]
        for i, (n, k) in enumerate(shapes)
    ]
    budget = int(2.82 * sum(n * k for n, k in shapes))
    plan = allocate(tensors, budget)
    assert 0.999 * budget < total_size(tensors, plan) <= budget
