"""Rows of a verify step equal the same rows evaluated one after another (cases H1, H2)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agens_engine.core import SamplingParams
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.sampling.sampler import SequenceSampler

VOCAB = 12
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=7)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 4, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-3, 3), max_size=2),
)


def reference_scores(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], unused: set[int]
) -> list[float]:
    """The rules of spec serving.md section 6 before temperature, one token at a time."""
    scores = []
    for token, value in enumerate(logits):
        if token in unused:
            scores.append(-np.inf)
            continue
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = output.count(token)
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        scores.append(value + params.logit_bias.get(token, 0.0))
    return scores


@settings(max_examples=150, deadline=None, derandomize=True)
@given(PARAMS, TOKENS, TOKENS, TOKENS, st.sampled_from([(), (11,), (2, 5)]), st.integers(0, 2**32 - 1))
def test_h1_h2_rows_equal_sequential_evaluation(params, prompt, output, drafts, unused, seed):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (len(drafts) + 1, VOCAB)))
    mask = UnusedTokens(VOCAB, unused)

    def fresh(emitted: list[int]) -> SequenceSampler:
        sampler = SequenceSampler(params, prompt, mask)
        sampler.commit(emitted)
        return sampler

    together = fresh(output).process_rows(logits, tuple(drafts))
    assert (together.probs is None) == params.greedy
    for j in range(len(drafts) + 1):
        emitted = output + drafts[:j]
        alone = fresh(emitted).process_rows(logits[j : j + 1])
        torch.testing.assert_close(together.scores[j], alone.scores[0], rtol=0, atol=1e-12)
        expected = reference_scores(logits[j].tolist(), params, prompt, emitted, set(unused))
        torch.testing.assert_close(together.scores[j].tolist(), expected, rtol=0, atol=1e-6)
        if together.probs is not None and alone.probs is not None:
            torch.testing.assert_close(together.probs[j], alone.probs[0], rtol=0, atol=1e-12)


def reference_distribution(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p, min-p on a sorted copy, straight from their definitions."""
    p = np.exp((scores - scores.max()) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0.0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0.0
    p[p < params.min_p * p.max()] = 0.0
    return p / p.sum()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(PARAMS.filter(lambda p: not p.greedy), st.integers(0, 2**32 - 1))
def test_h10_processed_distribution_equals_its_definition(params, seed):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (1, VOCAB)))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        rows = SequenceSampler(params, [], UnusedTokens(VOCAB)).process_rows(logits.to(dtype))
        assert rows.probs is not None
        expected = reference_distribution(rows.scores[0].double().numpy(), params)
        assert np.abs(rows.probs[0].double().numpy() - expected).sum() / 2 < tolerance


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95, 0.9999])
def test_top_p_over_a_large_flat_vocabulary(top_p):
    """More tokens than the first sort looks at."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 0.2, (3, 20_000)))
    params = SamplingParams(top_p=top_p)
    rows = SequenceSampler(params, [], UnusedTokens(20_000)).process_rows(logits, (0, 1))
    assert rows.probs is not None
    for scores, probs in zip(rows.scores.numpy(), rows.probs.numpy(), strict=True):
        np.testing.assert_allclose(probs, reference_distribution(scores, params), rtol=1e-9, atol=0)
