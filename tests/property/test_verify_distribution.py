"""Verification keeps the target's distribution, and never changes what a greedy or seeded request says."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agens_engine.core import DraftChain, DraftRun, SamplingParams, TokenLogprob
from agens_engine.sampling.draw import draw_tokens
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.sampling.sampler import SequenceSampler
from agens_engine.sampling.seeds import Lane
from agens_engine.speculate.verify import VerifyItem, accept_prefix, choose_against_q, verify_batch

NUM_ROUNDS = 20_000
FALSE_ALARM = 1e-9


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's statistic; cells with fewer than 5 expected are merged into one."""
    assert counts[probs == 0].sum() == 0, "a token of probability 0 came out"
    expected = probs * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    used = expected > 0
    return float(((observed[used] - expected[used]) ** 2 / expected[used]).sum())


def chi_square_limit(num_cells: int) -> float:
    """A chi-square variable exceeds this with probability at most FALSE_ALARM (Laurent and Massart 2000, lemma 1)."""
    k, x = num_cells - 1, -math.log(FALSE_ALARM)
    return k + 2 * math.sqrt(k * x) + 2 * x


def random_rows(rng: np.random.Generator, num: int, vocab: int) -> np.ndarray:
    rows = rng.dirichlet(np.full(vocab, 0.7), num)
    rows[rng.random(rows.shape) < 0.15] = 0.0  # what top-k and masks leave
    rows[:, 0] += 0.05
    return rows / rows.sum(1, keepdims=True)


def emitted(p: np.ndarray, q: np.ndarray, q_claimed: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """NUM_ROUNDS tokens for drafts drawn from q and verified as if drawn from q_claimed; counts and acceptance rate."""

    def rows(row: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(row).expand(NUM_ROUNDS, -1)

    u = torch.from_numpy(rng.random((3, NUM_ROUNDS)))
    drafts = draw_tokens(rows(q), u[0])
    tokens = choose_against_q(rows(p), rows(q_claimed), drafts, u[1], u[2])
    return np.bincount(tokens.numpy(), minlength=len(p)), float((tokens == drafts).double().mean())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(2, 9))
def test_general_q_keeps_the_distribution_and_accepts_as_often_as_theory_says(seed, vocab):
    rng = np.random.default_rng(seed)
    p, q = random_rows(rng, 2, vocab)
    counts, rate = emitted(p, q, q, rng)
    assert chi_square(counts, p) < chi_square_limit(vocab)
    assert abs(rate - np.minimum(p, q).sum()) < 6.5 * 0.5 / math.sqrt(NUM_ROUNDS)


def test_h10_negative_control_a_q_the_draft_was_not_drawn_from_is_found():
    p = np.array([0.40, 0.30, 0.20, 0.10])
    q = np.array([0.35, 0.35, 0.20, 0.10])
    right, _ = emitted(p, q, q, np.random.default_rng(3))
    assert chi_square(right, p) < chi_square_limit(4)
    top_k = np.array([0.5, 0.5, 0.0, 0.0])  # q after a truncation which the drafter did not apply
    with_wrong_q, _ = emitted(p, q, np.maximum(top_k, 1e-9), np.random.default_rng(3))
    assert chi_square(with_wrong_q, p) > chi_square_limit(4)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(2, 9))
def test_point_mass_follows_the_rejection_rule(seed, vocab):
    """Accepted with p(draft); a refused draft leaves p without it, renormalised."""
    rng = np.random.default_rng(seed)
    p = random_rows(rng, 1, vocab)[0]
    draft = int(rng.integers(vocab))
    tokens = draw_tokens(torch.from_numpy(p).expand(NUM_ROUNDS, -1), torch.from_numpy(rng.random(NUM_ROUNDS))).numpy()
    results = [accept_prefix((draft,), (t, 0)) for t in tokens.tolist()]
    num_accepted = sum(n for _, n in results)
    assert abs(num_accepted / NUM_ROUNDS - p[draft]) < 6.5 * 0.5 / math.sqrt(NUM_ROUNDS)
    refused = np.bincount([c[0] for c, n in results if n == 0] or [0], minlength=vocab)
    if num_accepted < NUM_ROUNDS - 1000:
        rest = np.where(np.arange(vocab) == draft, 0.0, p)
        assert chi_square(refused, rest / rest.sum()) < chi_square_limit(vocab)


class MarkovDrafts:
    """A target whose next token depends on the last one, and drafters that know it badly."""

    def __init__(self, vocab: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.vocab = vocab
        self.target = torch.from_numpy(random_rows(rng, vocab, vocab)).float().log()
        self.q = random_rows(rng, vocab, vocab).astype(np.float32)
        self.q /= self.q.sum(1, keepdims=True)
        self.guess = rng.integers(0, vocab, vocab)


def pairs_from_chains(model: MarkovDrafts, num_rounds: int, honest: bool) -> np.ndarray:
    """Counts of the first two tokens, through verify_batch; slot 1 is a point mass, slot 2 drawn from q (if honest)."""
    mask = UnusedTokens(model.vocab)
    samplers = [SequenceSampler(SamplingParams(seed=i), [], mask) for i in range(num_rounds)]
    drafts, items, rows = [], [], []
    for i, sampler in enumerate(samplers):
        first = int(model.guess[0])
        u = sampler.stream.uniform(1, Lane.DRAFT)
        second = min(int(np.searchsorted(np.cumsum(model.q[first]), u, side="right")), model.vocab - 1)
        q = model.q[first] if honest else model.q[(first + 1) % model.vocab]
        drafts.append((first, second))
        items.append(
            VerifyItem(sampler, DraftChain((DraftRun("copy", (first,)), DraftRun("mtp", (second,), q[None]))), 3 * i)
        )
        rows += [0, first, second]
    answers = [list(v.committed) for v in verify_batch(model.target[rows], items, mask)]
    for sampler, answer in zip(samplers, answers, strict=True):
        sampler.commit(answer)
    short = [i for i, answer in enumerate(answers) if len(answer) < 2]
    more = verify_batch(
        model.target[[answers[i][-1] for i in short]],
        [VerifyItem(samplers[i], DraftChain(), row) for row, i in enumerate(short)],
        mask,
    )
    for i, verdict in zip(short, more, strict=True):
        answers[i] += verdict.committed
    return np.bincount([a[0] * model.vocab + a[1] for a in answers], minlength=model.vocab**2)


@pytest.mark.parametrize("num_rounds", [3000, pytest.param(NUM_ROUNDS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("honest", [True, False])
def test_chains_keep_the_joint_distribution(honest, num_rounds):
    """Both sources in one chain, positions reused after a rejection; the dishonest q is the negative control."""
    model = MarkovDrafts(vocab=4, seed=11)
    counts = pairs_from_chains(model, num_rounds, honest)
    p = model.target.double().exp().numpy()
    joint = (p[0][:, None] * p).reshape(-1)
    passed = chi_square(counts, joint / joint.sum()) < chi_square_limit(model.vocab**2)
    assert passed == honest


VOCAB = 7


def toy_logits(tokens: list[int], seed: int) -> torch.Tensor:
    """A deterministic model: the next logits depend on the last two tokens."""
    return _toy_row(seed, *tokens[-2:])


@functools.cache
def _toy_row(*state: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(state).normal(0, 1.5, VOCAB)).float()


def generate(
    params: SamplingParams, seed: int, drafter: np.random.Generator | None
) -> tuple[list[int], list[TokenLogprob], int]:
    """16 tokens, their log-probabilities and the number of steps; drafts are right most of the time, or absent."""
    mask = UnusedTokens(VOCAB, [6])
    prompt, answer, logprobs = [1, 2, 3], list[int](), list[TokenLogprob]()
    sampler = SequenceSampler(params, prompt, mask)
    num_steps = 0
    while len(answer) < 16:
        drafts: list[int] = []
        if drafter is not None:
            for _ in range(drafter.integers(0, 8)):
                likely = int(toy_logits(prompt + answer + drafts, seed)[:6].argmax())
                drafts.append(likely if drafter.random() < 0.7 else int(drafter.integers(VOCAB)))
        logits = torch.stack([toy_logits(prompt + answer + drafts[:j], seed) for j in range(len(drafts) + 1)])
        chain = DraftChain((DraftRun("copy", tuple(drafts)),) if drafts else ())
        (verdict,) = verify_batch(logits, [VerifyItem(sampler, chain, 0)], mask)
        assert verdict.error is None and len(verdict.logprobs) == len(verdict.committed) == verdict.num_accepted + 1
        sampler.commit(verdict.committed)
        answer += verdict.committed
        logprobs += verdict.logprobs
        num_steps += 1
    return answer[:16], logprobs[:16], num_steps


SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    seed=st.integers(0, 2**64),
    logprobs=st.just(3),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(SETTINGS, st.integers(0, 2**32 - 1))
def test_h1_h2_h3_h5_h9_drafts_change_neither_tokens_nor_logprobs(params, seed):
    plain, plain_logprobs, num_plain_steps = generate(params, seed, None)
    drafted, drafted_logprobs, _ = generate(params, seed, np.random.default_rng(seed))
    assert num_plain_steps == 16
    assert drafted == plain and 6 not in plain
    for a, b in zip(plain_logprobs, drafted_logprobs, strict=True):
        assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-6)
        assert [t for t, _ in a.top] == [t for t, _ in b.top] and len(a.top) == 3
        assert a.logprob < 0.0


def test_the_toy_drafts_are_really_used():
    """Guards the test above: with its drafts, answers take fewer steps."""
    greedy = SamplingParams(temperature=0.0, logprobs=0)
    assert sum(generate(greedy, seed, np.random.default_rng(seed))[2] for seed in range(10)) < 120


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=7), st.data())
def test_greedy_acceptance_is_the_longest_matching_prefix(drafts, data):
    choices = data.draw(st.lists(st.integers(0, 3), min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    committed, num_accepted = accept_prefix(drafts, choices)
    assert list(committed) == choices[: num_accepted + 1]
    assert list(committed[:-1]) == drafts[:num_accepted]
    assert num_accepted == len(drafts) or drafts[num_accepted] != choices[num_accepted]


def test_h8_parallel_requests_do_not_influence_each_other():
    mask = UnusedTokens(VOCAB)
    rows = torch.zeros(6, VOCAB)

    def draw(seeds: list[int | None]) -> list[tuple[int, ...]]:
        items = [
            VerifyItem(SequenceSampler(SamplingParams(seed=s), [], mask), DraftChain((DraftRun("copy", (1,)),)), 2 * i)
            for i, s in enumerate(seeds)
        ]
        return [v.committed for v in verify_batch(rows[: 2 * len(seeds)].clone(), items, mask)]

    (a,), (b,) = draw([5]), draw([6])
    assert draw([5, None, 6])[::2] == [a, b] and draw([6, 5]) == [b, a]
