"""Reasoning budget and repetition guard: every sentence of the rule, and rows equal to one token at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from agens_engine.core import ReasoningControl, ReasoningEnd, SamplingParams
from agens_engine.sampling.repetition import REUSE_WINDOW, RepetitionWatch
from agens_engine.sampling.rules.reasoning import ReasoningRule
from agens_engine.sampling.rules.row_rules import RowEffect
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.sampling.sampler import SequenceSampler
from agens_engine.speculate.verify import accept_prefix

OPEN, CLOSE, CALL, END = 90, 91, 92, 93
PROMPT = [1, 2, OPEN]


def control(budget: int | None = None, soft_bias: float = 0.0, guard: bool = False) -> ReasoningControl:
    return ReasoningControl(OPEN, CLOSE, CALL, budget, soft_bias, guard)


def next_effect(rule: ReasoningRule) -> RowEffect | None:
    [effect] = rule.effects(())
    return effect


def forced(rule: ReasoningRule) -> bool:
    effect = next_effect(rule)
    return effect is not None and effect.force == CLOSE


def test_exactly_budget_tokens_precede_the_forced_close() -> None:
    rule = ReasoningRule(control(5), PROMPT)
    for token in range(5):
        assert not forced(rule)
        rule.commit([token])
    assert forced(rule)
    rule.commit([CLOSE])
    assert rule.report.num_tokens == 5 and rule.report.ended_by is ReasoningEnd.BUDGET


def test_after_a_forced_close_the_thought_cannot_open_again() -> None:
    rule = ReasoningRule(control(1), PROMPT)
    rule.commit([7, CLOSE])
    for token in (5, 6, 7):
        assert next_effect(rule) == RowEffect(block=(OPEN,))
        rule.commit([token])


def test_after_a_natural_close_nothing_more_is_done() -> None:
    rule = ReasoningRule(control(3), PROMPT)
    rule.commit([7, CLOSE])
    assert rule.report.ended_by is ReasoningEnd.MODEL
    for token in (OPEN, 5, 6, 7, 8, OPEN, 9):  # a later block neither re-arms the count nor is masked
        assert next_effect(rule) is None
        rule.commit([token])


def test_a_second_opening_inside_the_block_does_not_restart_the_count() -> None:
    rule = ReasoningRule(control(3), PROMPT)
    rule.commit([7, OPEN, 7])
    assert forced(rule)


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ([OPEN], True),
        ([OPEN, *[1] * 15], True),
        ([OPEN, *[1] * 16], False),  # out of the last 16 tokens
        ([OPEN, CLOSE], False),
        ([CLOSE, OPEN], True),
        ([OPEN, CLOSE, 5], False),
        ([1, 2, 3], False),
    ],
)
def test_the_block_is_open_when_the_last_16_prompt_tokens_say_so(prompt: list[int], is_open: bool) -> None:
    rule = ReasoningRule(control(1), prompt)
    rule.commit([5])
    assert forced(rule) is is_open


def test_a_block_that_the_model_opens_counts_from_there() -> None:
    rule = ReasoningRule(control(2), [1])
    rule.commit([5, 6, 7, OPEN, 8])
    assert not forced(rule)
    rule.commit([9])
    assert forced(rule)


def test_a_tool_call_ends_the_thought() -> None:
    rule = ReasoningRule(control(2), PROMPT)
    rule.commit([5, CALL, 6, 7, 8])
    assert next_effect(rule) is None
    assert rule.report.num_tokens == 1 and rule.report.ended_by is ReasoningEnd.CALL


def test_the_soft_bias_holds_over_the_last_fifth() -> None:
    rule = ReasoningRule(control(10, soft_bias=2.5), PROMPT)
    effects = []
    for token in range(11):
        effects.append(next_effect(rule))
        rule.commit([token])
    soft = RowEffect(bias={CLOSE: 2.5})
    assert effects == [*[None] * 8, soft, soft, RowEffect(force=CLOSE)]


def test_the_soft_bias_needs_a_budget() -> None:
    rule = ReasoningRule(control(None, soft_bias=2.5), PROMPT)
    rule.commit(list(range(80)))
    assert next_effect(rule) is None


def test_the_forced_token_is_finite_even_when_it_was_suppressed() -> None:
    sampler = SequenceSampler(
        SamplingParams(temperature=0.7), PROMPT, UnusedTokens(94, [CLOSE]), [ReasoningRule(control(1), PROMPT)]
    )
    sampler.commit([5])
    rows = sampler.process_rows(torch.randn(1, 94))
    assert rows.scores[0, CLOSE] == 0.0 and rows.scores.isfinite().sum() == 1
    assert rows.probs is not None and rows.probs[0, CLOSE] == 1.0


def greedy_run(
    control: ReasoningControl, logits_of: dict[int, torch.Tensor], num: int, drafts_seed: int | None
) -> list:
    """Greedy decoding of a stand-in model whose logits depend on the position; with drafts where a seed is given."""
    sampler = SequenceSampler(
        SamplingParams(temperature=0.0), PROMPT, UnusedTokens(94, []), [ReasoningRule(control, PROMPT)]
    )
    guess = random.Random(drafts_seed)
    out: list[int] = []
    while len(out) < num:
        drafts: list[int] = []
        for j in range(guess.randrange(8) if drafts_seed is not None else 0):
            best = int(logits_of[len(out) + j].argmax())
            drafts.append(guess.choice([best, best, CLOSE, OPEN, CALL, 3]))
        logits = torch.stack([logits_of[len(out) + j] for j in range(len(drafts) + 1)])
        choices = sampler.process_rows(logits, tuple(drafts)).scores.argmax(-1).tolist()
        committed, _ = accept_prefix(drafts, choices)
        sampler.commit(committed)
        out += committed
    return out[:num]


@pytest.mark.parametrize("seed", range(20))
def test_drafts_change_nothing(seed: int) -> None:
    make = torch.Generator().manual_seed(seed)
    logits = {i: torch.randn(94, generator=make) for i in range(80)}
    for i in range(20, 80):  # half of the seeds go round in circles from there
        if seed % 2:
            logits[i] = logits[20 + i % 9]
    how = control([None, 3, 20, 30][seed % 4], soft_bias=float(seed % 3), guard=True)
    plain = greedy_run(how, logits, 60, None)
    assert greedy_run(how, logits, 60, seed) == plain


def feed(watch: RepetitionWatch, tokens: Sequence[int]) -> int | None:
    """How many tokens it took until the watch saw a repetition."""
    for n, token in enumerate(tokens):
        if watch.repeating:
            return n
        watch.append(token)
    return len(tokens) if watch.repeating else None


def repeats_by_definition(tokens: Sequence[int]) -> bool:
    return any(
        len(tokens) >= 4 * n and all(tokens[-i] == tokens[-i - n] for i in range(1, 3 * n + 1)) for n in range(8, 513)
    )


@pytest.mark.parametrize("length", [8, 9, 31, 100, 512])
def test_four_repeats_of_a_segment_are_a_cycle(length: int) -> None:
    segment = list(range(1000, 1000 + length))
    lead = random.Random(length).sample(range(500), 40)
    assert feed(RepetitionWatch(), [*lead, *segment * 5]) == len(lead) + 4 * length


def test_a_segment_longer_than_512_is_no_cycle() -> None:
    assert feed(RepetitionWatch(), list(range(513)) * 3) is None


@pytest.mark.parametrize("seed", range(6))
def test_cycles_are_found_where_the_definition_says(seed: int) -> None:
    draw = random.Random(seed)
    tokens: list[int] = []
    watch = RepetitionWatch()
    while len(tokens) < 300:
        piece = [draw.randrange(3) for _ in range(draw.randrange(1, 14))] * draw.randrange(1, 6)
        for token in piece:
            watch.append(token)
            tokens.append(token)
            assert watch.repeating == repeats_by_definition(tokens), len(tokens)


def test_quoting_again_what_the_thought_already_said_is_seen() -> None:
    draw = random.Random(1)
    text = [draw.randrange(50_000) for _ in range(3000)]
    found = feed(RepetitionWatch(), text + text)
    # 90 % of the last 2,000 runs of 32 tokens: 31 runs straddle the seam, then each one was there before
    assert found == 3000 + 31 + REUSE_WINDOW * 9 // 10


def test_looking_ahead_leaves_no_trace() -> None:
    draw = random.Random(2)
    touched, plain = RepetitionWatch(), RepetitionWatch()
    for _ in range(400):
        token = draw.randrange(4)
        touched.ahead([draw.randrange(4) for _ in range(7)])
        touched.append(token)
        plain.append(token)
        assert touched.repeating == plain.repeating
        assert touched._reused == plain._reused and touched._first_at == plain._first_at
        assert (touched._runs == plain._runs).all()


def test_the_guard_forces_the_close_and_says_so() -> None:
    rule = ReasoningRule(control(guard=True), PROMPT)
    rule.commit([*range(10)] * 4)
    assert forced(rule)
    rule.commit([CLOSE])
    assert rule.report.ended_by is ReasoningEnd.REPETITION
    assert next_effect(rule) == RowEffect(block=(OPEN,))
