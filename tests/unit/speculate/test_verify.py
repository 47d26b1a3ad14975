"""Verification of one step, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agens_engine.core import DraftChain, DraftRun, SamplingParams
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.sampling.sampler import SequenceSampler
from agens_engine.speculate.verify import (
    Verdict,
    VerifyItem,
    accept_prefix,
    choose_against_q,
    choose_rows,
    verify_batch,
)

GREEDY = SamplingParams(temperature=0.0)


def chain(*tokens: int) -> DraftChain:
    return DraftChain((DraftRun("copy", tokens),)) if tokens else DraftChain()


def one_hot(*tokens: int, vocab: int = 5) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


def verify(logits: torch.Tensor, draft: DraftChain, params: SamplingParams = GREEDY, unused=(), rules=()) -> Verdict:
    mask = UnusedTokens(logits.shape[1], unused)
    return verify_batch(logits, [VerifyItem(SequenceSampler(params, [], mask, rules), draft, 0)], mask)[0]


@pytest.mark.parametrize(
    ("drafts", "choices", "committed"),
    [((), (4,), (4,)), ((1, 2), (1, 2, 3), (1, 2, 3)), ((1, 2), (1, 4, 3), (1, 4)), ((1, 2), (2, 2, 3), (2,))],
)
def test_accept_prefix(drafts, choices, committed):
    assert accept_prefix(drafts, choices) == (committed, len(committed) - 1)


def test_greedy_step():
    verdict = verify(one_hot(1, 2, 4, 0), chain(1, 2, 3))
    assert verdict.committed == (1, 2, 4) and verdict.num_accepted == 2 and verdict.logprobs == ()


def test_decode_is_a_step_without_drafts():
    assert verify(one_hot(3), chain()) == Verdict((3,), 0)


def test_greedy_ties_go_to_the_lowest_id():
    rows = torch.zeros(2, 3000)
    rows[0, [700, 2900]] = 1.0
    assert verify(rows, chain(700)).committed == (700, 0)


def test_unused_tokens_are_neither_chosen_nor_accepted():
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 9.0]] * 2)
    assert verify(logits, chain(4), unused=[4]).committed == (1,)


def test_batch_keeps_sequences_apart():
    mask = UnusedTokens(5)
    logits = torch.cat([one_hot(1, 2), one_hot(3), one_hot(0, 4, 4)])
    params = (
        GREEDY,
        SamplingParams(temperature=0.5, top_k=1, seed=1),
        SamplingParams(temperature=0.0, logit_bias={1: 5.0}),
    )
    items = [
        VerifyItem(SequenceSampler(p, [], mask), c, first)
        for p, c, first in zip(params, (chain(1), chain(), chain(1, 1)), (0, 2, 3), strict=True)
    ]
    assert [v.committed for v in verify_batch(logits, items, mask)] == [(1, 2), (3,), (1, 1, 1)]


@pytest.mark.parametrize(("frequency", "committed"), [(2.0, (0, 1)), (-2.0, (0, 0, 0, 0)), (0.0, (0, 0, 0, 0))])
def test_h1_penalties_count_the_drafted_prefix(frequency, committed):
    logits = torch.tensor([[1.0, 0.5, 0.0]] * 4)
    params = SamplingParams(temperature=0.0, frequency_penalty=frequency)
    assert verify(logits, chain(0, 0, 0), params).committed == committed


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, repetition_penalty=3.0),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
        SamplingParams(temperature=0.0, frequency_penalty=1.0),
    ],
)
def test_h2_every_penalty_acts_on_drafts(params):
    logits = torch.tensor([[1.0, 0.5, 0.0]] * 3)
    assert verify(logits, chain(0, 0), params).committed == (0, 1)


def test_h2_min_p_acts_on_drafts():
    logits = torch.tensor([[0.7, 0.29, 0.01]]).log().repeat(2, 1)
    for seed in range(200):
        verdict = verify(logits.clone(), chain(2), SamplingParams(min_p=0.5, seed=seed))
        assert verdict.committed == (0,)


def test_h5_logprobs_are_present_and_finite_on_the_speculative_path():
    verdict = verify(one_hot(1, 2, 0), chain(1, 3), SamplingParams(temperature=0.0, logprobs=2))
    assert verdict.committed == (1, 2)
    expected = -math.log(1 + 4 * math.exp(-1))
    assert [lp.token_id for lp in verdict.logprobs] == [1, 2]
    for lp in verdict.logprobs:
        assert lp.logprob == pytest.approx(expected, abs=1e-6)
        assert lp.top[0] == (lp.token_id, lp.logprob) and len(lp.top) == 2


def test_general_q_by_hand():
    p = torch.tensor([[0.25, 0.75]] * 3)
    q = torch.tensor([[0.5, 0.5]] * 3)
    drafts = torch.tensor([0, 0, 1])  # accept token 0 with 0.25 / 0.5, token 1 always
    accept_u = torch.tensor([0.49, 0.51, 0.99], dtype=torch.float64)
    draw_u = torch.zeros(3, dtype=torch.float64)  # the residual holds token 1 alone
    assert choose_against_q(p, q, drafts, accept_u, draw_u).tolist() == [0, 1, 1]


def test_general_q_with_a_residual_of_zero_draws_from_p():
    p = torch.tensor([[0.0, 1.0]])
    q = torch.tensor([[1.0, 1.0]])  # not a distribution: nothing of p is left over
    u = torch.tensor([0.5], dtype=torch.float64)
    assert choose_against_q(p, q, torch.tensor([0]), u, u).tolist() == [1]


def test_h20_each_run_meets_its_own_rows():
    """A point mass in slot 1, then two drafts with q: row 1 belongs to q[0], row 2 to q[1]."""
    p = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.8, 0.0], [0.8, 0.2, 0.0], [0.0, 0.0, 1.0]])
    q = np.array([[0.2, 0.8, 0.0], [0.8, 0.2, 0.0]], dtype=np.float32)
    runs = DraftChain((DraftRun("copy", (1,)), DraftRun("block", (1, 0), q)))
    accept_u = np.full(4, 0.999)  # q equals p row by row, so all is accepted; shifted by one row nothing would be
    assert choose_rows(p, runs, accept_u, np.full(4, 0.5)) == [1, 1, 0, 2]


def test_q_shorter_than_the_vocabulary():
    p = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    runs = DraftChain((DraftRun("mtp", (0,), np.array([[1.0, 0.0]], dtype=np.float32)),))
    assert choose_rows(p, runs, np.full(2, 0.5), np.full(2, 0.5)) == [2, 0]


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(seed=0), SamplingParams(temperature=0.0, presence_penalty=1.0)]
)
def test_nan_fails_the_request_and_no_other(params):
    mask = UnusedTokens(3)
    logits = torch.tensor([[0.0, math.nan, 0.0], [0.0, 5.0, 0.0]])
    items = [VerifyItem(SequenceSampler(p, [], mask), chain(), i) for i, p in enumerate((params, GREEDY))]
    bad, good = verify_batch(logits, items, mask)
    assert bad.committed == () and "NaN" in str(bad.error)
    assert good.committed == (1,) and good.error is None


def test_nan_past_the_first_refused_draft_does_no_harm():
    logits = torch.tensor([[0.0, 1.0], [math.nan, 0.0]])
    assert verify(logits, chain(0)).committed == (1,)


def test_rules_that_leave_no_token_fail_the_request():
    class Deadlock:
        def effects(self, drafts):
            from agens_engine.sampling.rules.row_rules import RowEffect

            return [RowEffect(block=range(3))] * (len(drafts) + 1)

        def commit(self, token_ids):
            raise AssertionError("nothing was committed")

    for params in (GREEDY, SamplingParams(seed=3)):
        assert "no token is possible" in str(verify(torch.zeros(1, 3), chain(), params, rules=[Deadlock()]).error)
