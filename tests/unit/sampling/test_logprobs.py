"""Log-probabilities of emitted tokens (cases H3, H5)."""

from __future__ import annotations

import math

import pytest
import torch

from agens_engine.sampling.logprobs import token_logprobs


def test_by_hand():
    scores = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]).log() + 3.0
    first, second = token_logprobs(scores, [1, 0], 2)
    assert (first.token_id, second.token_id) == (1, 0)
    assert first.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [t for t, _ in first.top] == [2, 1]
    assert first.top[0][1] == pytest.approx(math.log(0.7), abs=1e-6)
    assert [t for t, _ in second.top] == [0, 1]  # equal ones: the lowest id


def test_ruled_out_tokens_are_not_listed():
    (entry,) = token_logprobs(torch.tensor([[0.0, -math.inf, -math.inf]]), [0], 20)
    assert entry.top == ((0, 0.0),)


def test_no_alternatives_and_fewer_tokens_than_rows():
    entries = token_logprobs(torch.zeros(3, 4), [2], 0)
    assert len(entries) == 1 and entries[0].top == ()
    assert entries[0].logprob == pytest.approx(-math.log(4), abs=1e-6)
    assert token_logprobs(torch.zeros(3, 4), [], 5) == []
