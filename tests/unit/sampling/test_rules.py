"""Each sampling rule against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch

from agens_engine.errors import RequestError
from agens_engine.sampling.rules.logit_bias import apply_logit_bias, check_logit_bias
from agens_engine.sampling.rules.min_p import apply_min_p
from agens_engine.sampling.rules.penalties import apply_penalties
from agens_engine.sampling.rules.row_rules import RowEffect, apply_effect
from agens_engine.sampling.rules.temperature import apply_temperature
from agens_engine.sampling.rules.top_k import apply_top_k
from agens_engine.sampling.rules.top_p import apply_top_p
from agens_engine.sampling.rules.unused_tokens import UnusedTokens

INF = math.inf


def kept(rows: torch.Tensor) -> list[list[int]]:
    return [torch.nonzero(row > -INF)[:, 0].tolist() for row in rows]


def log(*probs: float) -> torch.Tensor:
    return torch.tensor([probs]).log()


@pytest.mark.parametrize("ids", [(3, 4), (0, 2), (), (4,)])
def test_unused_tokens_are_ruled_out_and_nothing_else(ids):
    rows = UnusedTokens(5, ids).apply(torch.zeros(2, 5))
    assert kept(rows) == [[t for t in range(5) if t not in ids]] * 2


def test_unused_tokens_refuse_impossible_lists():
    with pytest.raises(ValueError, match=r"0\.\.4"):
        UnusedTokens(5, [5])
    with pytest.raises(ValueError, match="every id"):
        UnusedTokens(2, [0, 1])


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 1.0, 3.0]] * 2)
    ids = torch.tensor([0, 1, 3])
    seen = torch.tensor([[True, True, False], [True, True, True]])
    counts = torch.tensor([[0.0, 2.0, 0.0], [0.0, 2.0, 1.0]])  # id 0 stands in the prompt only
    rows = apply_penalties(logits, ids, seen, counts, repetition=2.0, presence=0.5, frequency=0.25)
    expected = [
        [2.0 / 2, -2.0 * 2 - 0.5 - 2 * 0.25, 1.0, 3.0],
        [2.0 / 2, -2.0 * 2 - 0.5 - 2 * 0.25, 1.0, 3.0 / 2 - 0.5 - 0.25],
    ]
    torch.testing.assert_close(rows, torch.tensor(expected), atol=1e-6, rtol=0)


def test_penalties_leave_a_ruled_out_token_ruled_out():
    rows = apply_penalties(
        torch.tensor([[-INF, 0.0]]), torch.tensor([0]), torch.tensor([[True]]), torch.tensor([[3.0]]),
        repetition=0.5, presence=-2.0, frequency=-2.0,
    )  # fmt: skip
    assert rows.tolist() == [[-INF, 0.0]]


def test_logit_bias():
    rows = apply_logit_bias(torch.tensor([[1.0, 2.0, -INF]]), torch.tensor([0, 2]), torch.tensor([0.5, 100.0]))
    assert rows.tolist() == [[1.5, 2.0, -INF]]


def test_logit_bias_outside_the_vocabulary_is_refused():
    check_logit_bias({4: 1.0}, 5)
    with pytest.raises(RequestError, match="token 5") as caught:
        check_logit_bias({5: 1.0}, 5)
    assert caught.value.param == "logit_bias"


def test_forced_token_wins_even_when_it_was_ruled_out():
    row = apply_effect(torch.tensor([1.0, -INF, 2.0]), RowEffect(force=1, block=(1,)))
    assert row.tolist() == [-INF, 0.0, -INF]


def test_block_bias_and_allow():
    effect = RowEffect(block=(0,), bias={1: 0.5, 0: 9.0}, allow=torch.tensor([True, True, False]))
    assert apply_effect(torch.tensor([1.0, 1.0, 1.0]), effect).tolist() == [-INF, 1.5, -INF]


def test_temperature_by_hand():
    rows = apply_temperature(torch.tensor([[1.0, 3.0, -INF]]), 0.5)
    assert rows.tolist() == [[-4.0, 0.0, -INF]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6])
def test_tiny_temperature_is_arg_max_without_nan(temperature):
    probs = torch.softmax(apply_temperature(torch.tensor([[5e4, 4.9e4, -5e4]]), temperature), dim=-1)
    assert probs.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("k", "expected"), [(0, [0, 1, 2, 3]), (1, [2]), (2, [0, 2]), (3, [0, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_top_k(k, expected):
    assert kept(apply_top_k(torch.tensor([[2.0, 0.0, 3.0, 1.0]]), k)) == [expected]


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_equals():
    rows = torch.tensor([[1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    assert kept(apply_top_k(rows, 2)) == [[0, 1], [0, 1], [0, 1]]


def test_top_k_with_fewer_possible_tokens():
    assert kept(apply_top_k(torch.tensor([[-INF, 1.0, -INF]]), 2)) == [[1]]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(1.0, [0, 1, 2, 3]), (0.01, [1]), (0.49, [1]), (0.51, [1, 3]), (0.81, [0, 1, 3]), (0.96, [0, 1, 2, 3])],
)  # fmt: skip
@pytest.mark.parametrize("num_candidates", [1, 2, 256])
def test_top_p(top_p, expected, num_candidates):
    assert kept(apply_top_p(log(0.15, 0.5, 0.05, 0.3), top_p, num_candidates)) == [expected]


def test_top_p_of_equal_tokens_takes_the_lowest_ids():
    assert kept(apply_top_p(torch.zeros(1, 8), 0.4)) == [[0, 1, 2, 3]]  # 3/8 < 0.4 <= 4/8


def test_top_p_rows_are_independent():
    rows = torch.cat([log(0.9, 0.05, 0.03, 0.02), log(0.25, 0.26, 0.24, 0.25)])
    assert kept(apply_top_p(rows, 0.8)) == [[0], [0, 1, 2, 3]]


@pytest.mark.parametrize(("min_p", "expected"), [(0.0, [0, 1, 2, 3]), (0.2, [0, 1, 3]), (0.5, [1, 3]), (1.0, [1])])
def test_min_p(min_p, expected):
    assert kept(apply_min_p(log(0.15, 0.5, 0.05, 0.3), min_p)) == [expected]
