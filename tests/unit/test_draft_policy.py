"""The adaptive policy in simulated worlds, where acceptance and every cost are known: no clock is read."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product

import pytest

from agens_engine.core import DraftChain, DraftRun, SamplingParams, StepResult
from agens_engine.sampling.seeds import RequestStream
from agens_engine.speculate.drafting import MAX_DRAFTS, StepTime
from agens_engine.speculate.policy import COPY, DFLASH, MTP, AdaptivePolicy, StepCost

STEPS = 1500


@dataclass
class Seq:
    request_id: str = "a"
    token_ids: list[int] = field(default_factory=list)
    prompt_len: int = 0
    num_output_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: RequestStream = field(default_factory=lambda: RequestStream(0))


@dataclass
class World:
    """Seconds of a step (first row, each further row) and of the sources; chance that a draft is accepted."""

    row: float
    mtp_slot: float
    dflash_block: float
    p: dict[str, float]
    first_row: float = 1.0
    noise: float = 0.0

    def step(self, limits: dict[str, int], chance: random.Random) -> tuple[StepResult, float, dict]:
        runs, seconds, left, accepted, going = [], {}, MAX_DRAFTS, 0, True
        for name in (MTP, DFLASH):
            num = min(left, limits.get(name, 0), 4 if name == MTP else MAX_DRAFTS)
            if not num:
                continue
            left -= num
            runs.append(DraftRun(name, tuple(range(num))))
            seconds[name] = num * self.mtp_slot if name == MTP else self.dflash_block
            for _ in range(num):
                going = going and chance.random() < self.p[name]
                accepted += going
        chain = DraftChain(tuple(runs))
        forward = self.first_row + self.row * len(chain)
        forward *= 1.0 + self.noise * chance.random()
        return StepResult(chain, tuple(range(accepted + 1)), accepted), forward, seconds

    def best_rate(self) -> tuple[float, float]:
        """Tokens a second of the best fixed plan, and of plain decoding."""
        rates = {}
        for m, d in product(range(5), range(MAX_DRAFTS + 1)):
            chances = [self.p[MTP]] * m + [self.p[DFLASH]] * min(d, MAX_DRAFTS - m)
            tokens, reached = 1.0, 1.0
            for chance in chances:
                reached *= chance
                tokens += reached
            forward = (self.first_row + self.row * len(chances)) * (1.0 + self.noise / 2)
            rates[m, d] = tokens / (forward + m * self.mtp_slot + (self.dflash_block if d else 0.0))
        return max(rates.values()), rates[0, 0]


SEQ = Seq()


def adaptive_rate(world: World) -> tuple[float, AdaptivePolicy]:
    """Tokens a second over STEPS steps under the policy."""
    policy = AdaptivePolicy()
    policy.begin(SEQ)
    chance = random.Random(7)
    tokens = seconds = 0.0
    for _ in range(STEPS):
        limits = policy.limits(SEQ, [MTP, DFLASH], MAX_DRAFTS)
        result, forward, sources = world.step(limits, chance)
        tokens += len(result.committed)
        seconds += forward + sum(sources.values())
        policy.observe(SEQ, result, sources, StepTime(forward, 1, len(result.chain) + 1))
    return tokens / seconds, policy


@pytest.mark.parametrize(
    ("row", "mtp_slot", "dflash_block", "p_mtp", "p_dflash"),
    [
        (0.05, 0.05, 0.2, 0.95, 0.9),
        (0.05, 0.05, 0.2, 0.3, 0.2),
        (0.05, 0.2, 0.6, 0.8, 0.7),
        (0.30, 0.05, 0.2, 0.7, 0.5),
        (0.80, 0.10, 0.3, 0.4, 0.3),
        (0.02, 0.50, 0.1, 0.9, 0.85),
        (0.10, 0.05, 3.0, 0.6, 0.95),
        (0.05, 0.05, 0.2, 0.0, 0.0),
    ],
)
def test_close_to_the_best_fixed_plan(row, mtp_slot, dflash_block, p_mtp, p_dflash):
    world = World(row, mtp_slot, dflash_block, {MTP: p_mtp, DFLASH: p_dflash}, noise=0.3)
    got, _ = adaptive_rate(world)
    best, plain = world.best_rate()
    assert got >= 0.94 * best
    assert got >= 0.97 * plain, "drafting must not lose against plain decoding"


def test_useless_sources_are_left_out_and_rarely_tried_again():
    _, policy = adaptive_rate(World(0.3, 0.1, 0.5, {MTP: 0.0, DFLASH: 0.0}))
    for name in (MTP, DFLASH):
        decisions = policy.decisions[name]
        assert decisions.skipped > 0.9 * STEPS
        assert 1 <= decisions.retried <= 12


def test_a_source_that_becomes_good_is_taken_up_again():
    policy = AdaptivePolicy()
    policy.begin(SEQ)
    chance = random.Random(3)
    bad = World(0.3, 0.1, 0.5, {MTP: 0.0, DFLASH: 0.0})
    good = World(0.3, 0.1, 0.5, {MTP: 0.98, DFLASH: 0.98})
    used = 0
    for n in range(900):
        world = bad if n < 300 else good
        limits = policy.limits(SEQ, [MTP, DFLASH], MAX_DRAFTS)
        used += n >= 700 and bool(limits[MTP] or limits[DFLASH])
        result, forward, sources = world.step(limits, chance)
        policy.observe(SEQ, result, sources, StepTime(forward, 1, len(result.chain) + 1))
    assert used > 150


def test_decisions_are_per_sequence():
    policy = AdaptivePolicy()
    worlds = {
        "good": World(0.2, 0.05, 0.3, {MTP: 0.95, DFLASH: 0.9}),
        "bad": World(0.2, 0.05, 0.3, {MTP: 0.0, DFLASH: 0.0}),
    }
    seqs = {name: Seq(name) for name in worlds}
    chance = random.Random(5)
    for seq in seqs.values():
        policy.begin(seq)
    drafts = dict.fromkeys(worlds, 0)
    for _ in range(400):
        for name, world in worlds.items():
            result, forward, sources = world.step(policy.limits(seqs[name], [MTP, DFLASH], MAX_DRAFTS), chance)
            drafts[name] += len(result.chain)
            policy.observe(seqs[name], result, sources, StepTime(forward, 2, len(result.chain) + 2))
    assert drafts["good"] > 1200
    assert drafts["bad"] < 200
    for seq in seqs.values():
        policy.end(seq)
    assert not policy._sequences


def test_copies_that_are_refused_are_shortened():
    policy = AdaptivePolicy()
    policy.begin(SEQ)
    assert policy.limits(SEQ, [COPY], 7) == {COPY: 7}  # the first step
    for _ in range(60):
        chain = DraftChain((DraftRun(COPY, (1, 2, 3, 4, 5, 6, 7)),))
        policy.observe(SEQ, StepResult(chain, (9,), 0), {COPY: 0.0}, StepTime(3.0, 1, 8))
        policy.observe(SEQ, StepResult(DraftChain(), (9,), 0), {}, StepTime(1.0, 1, 1))
    assert policy.limits(SEQ, [COPY], 7)[COPY] < 2


def test_limits_never_exceed_what_is_left():
    policy = AdaptivePolicy()
    policy.begin(SEQ)
    for left in range(1, 8):
        limits = policy.limits(SEQ, [COPY, MTP, DFLASH], left)
        assert all(0 <= num <= left for num in limits.values())
        assert limits[MTP] <= 4


def test_step_cost_finds_the_line_through_noise_and_ignores_a_stall():
    cost, chance = StepCost(), random.Random(1)
    for _ in range(300):
        rows = chance.randint(1, 8)
        cost.add(rows, (1.0 + 0.1 * rows) * (0.9 + 0.2 * chance.random()))
    cost.add(1, 500.0)
    assert cost.of(1) == pytest.approx(1.1, rel=0.1)
    assert cost.of(8) == pytest.approx(1.8, rel=0.1)


def test_summary_counts_decisions():
    _, policy = adaptive_rate(World(0.05, 0.05, 0.2, {MTP: 0.9, DFLASH: 0.9}))
    summary = policy.summary()
    for name in (MTP, DFLASH):
        assert STEPS - 8 <= sum(summary["decisions"][name].values()) <= STEPS  # the first steps only look
    assert summary["step_seconds"]["8_rows"] > summary["step_seconds"]["1_row"] > 0
