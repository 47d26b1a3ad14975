"""SequenceSampler: order of the rules, rows, state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from agens_engine.core import SamplingParams
from agens_engine.errors import RequestError
from agens_engine.sampling.rules.row_rules import RowEffect
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.sampling.sampler import SequenceSampler


def sampler(params: SamplingParams, prompt: Sequence[int] = (), vocab: int = 4, unused: Sequence[int] = (), rules=()):
    return SequenceSampler(params, prompt, UnusedTokens(vocab, unused), rules)


def test_full_order_by_hand():
    """Mask 3; repetition halves token 0; bias lifts 1; temperature 0.5; top-k 2 of {0: 2, 1: 1.5, 2: 1}."""
    params = SamplingParams(temperature=0.5, top_k=2, repetition_penalty=2.0, logit_bias={1: 0.5, 3: 100.0})
    rows = sampler(params, prompt=[0], unused=[3]).process_rows(torch.tensor([[4.0, 1.0, 1.0, 9.0]]))
    torch.testing.assert_close(rows.scores, torch.tensor([[2.0, 1.5, 1.0, -math.inf]]))
    assert rows.probs is not None
    w = math.exp((1.5 - 2.0) / 0.5)
    torch.testing.assert_close(rows.probs, torch.tensor([[1 / (1 + w), w / (1 + w), 0.0, 0.0]]))


def test_top_p_counts_what_top_k_left():
    """0.4, 0.3, 0.2, 0.1: top-k 2 leaves 4/7 and 3/7, so top-p 0.5 leaves the first alone."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    probs = sampler(SamplingParams(top_k=2, top_p=0.5)).process_rows(logits).probs
    assert probs is not None and probs.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_greedy_has_no_distribution_and_may_skip_the_rules():
    greedy = sampler(SamplingParams(temperature=0.0))
    assert greedy.scores_are_logits()
    assert greedy.process_rows(torch.zeros(1, 4)).probs is None
    for params in (
        SamplingParams(temperature=0.0, presence_penalty=0.1),
        SamplingParams(temperature=0.0, frequency_penalty=0.1),
        SamplingParams(temperature=0.0, repetition_penalty=1.1),
        SamplingParams(temperature=0.0, logit_bias={1: 1.0}),
    ):
        assert not sampler(params).scores_are_logits()


def test_the_prompt_counts_for_repetition_only():
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0)
    rows = sampler(params, prompt=[1, 1]).process_rows(torch.tensor([[2.0, 2.0, 2.0, 2.0]]))
    assert rows.scores.tolist() == [[2.0, 1.0, 2.0, 2.0]]


def test_commit_feeds_the_penalties():
    s = sampler(SamplingParams(temperature=0.0, frequency_penalty=1.0))
    s.commit([2, 2])
    s.commit([3])
    assert s.num_output_tokens == 3
    assert s.process_rows(torch.zeros(1, 4)).scores.tolist() == [[0.0, 0.0, -2.0, -1.0]]


def test_logits_are_left_alone():
    logits = torch.randn(3, 4)
    before = logits.clone()
    params = SamplingParams(top_p=0.5, presence_penalty=1.0, logit_bias={0: 1.0})
    sampler(params, unused=[3]).process_rows(logits, (1, 2))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_processed_in_float32(dtype):
    rows = sampler(SamplingParams(temperature=0.7)).process_rows(torch.randn(1, 4).to(dtype))
    assert rows.scores.dtype == torch.float32 and rows.probs is not None
    assert rows.probs.sum().item() == pytest.approx(1.0, abs=1e-6)


def test_bias_outside_the_vocabulary_is_the_users_mistake():
    with pytest.raises(RequestError, match="logit_bias"):
        sampler(SamplingParams(logit_bias={4: 1.0}))


class CloseAfter:
    """Forces token 3 once `limit` tokens were emitted: a reasoning budget in miniature."""

    def __init__(self, limit: int) -> None:
        self.limit, self.num = limit, 0

    def effects(self, drafts: tuple[int, ...]) -> list[RowEffect | None]:
        return [RowEffect(force=3) if self.num + j == self.limit else None for j in range(len(drafts) + 1)]

    def commit(self, token_ids: Sequence[int]) -> None:
        self.num += len(token_ids)


def test_row_rules_see_the_drafted_prefix_and_win_over_the_mask():
    s = sampler(SamplingParams(temperature=0.0), unused=[3], rules=[CloseAfter(2)])
    assert s.scores_are_logits((0,)) and not s.scores_are_logits((0, 0))
    logits = torch.tensor([[1.0, 0.0, 0.0, 5.0]] * 3)
    assert s.process_rows(logits, (0, 0)).scores.argmax(-1).tolist() == [0, 0, 3]
    s.commit([0])
    assert s.process_rows(logits, (0, 0)).scores.argmax(-1).tolist() == [0, 3, 0]


def test_top_k_with_and_without_a_tie_at_the_cut():
    """Both ways through top-k give the same rows; of equal tokens at the cut the lowest id stays."""
    params = SamplingParams(top_k=2)
    probs = sampler(params).process_rows(torch.tensor([[1.0, 3.0, 1.5, 3.0], [2.0, 2.0, 3.0, 2.0]]), (0,)).probs
    w = math.exp(-1.0)
    assert probs is not None
    expected = torch.tensor([[0.0, 0.5, 0.0, 0.5], [w / (1 + w), 0.0, 1 / (1 + w), 0.0]])
    torch.testing.assert_close(probs, expected)
    alone = sampler(params).process_rows(torch.tensor([[1.0, 3.0, 1.5, 3.0]])).probs
    assert alone is not None
    torch.testing.assert_close(alone[0], expected[0])
