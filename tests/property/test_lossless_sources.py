"""Sampling stays lossless with the real draft sources: what verify steps commit is distributed as the target says.

A target whose next token depends on the last one, so that the exact joint distribution of two tokens can be enumerated
with the sampler itself; the copy source, a random MTP head and a random DFlash2 drafter with its own q, alone and in
one chain. The negative controls lie about q, or use the right q for another slot, and must be found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from agens_engine.core import DraftChain, DraftRun, SamplingParams, StepResult
from agens_engine.model.config import parse_config
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.sampling.sampler import SequenceSampler
from agens_engine.sampling.seeds import RequestStream
from agens_engine.speculate.build import SOURCE_NAMES, build_sources
from agens_engine.speculate.drafting import SlotFiller, StepTime
from agens_engine.speculate.source import Ask, CommittedRows, DraftSource, SequenceView
from agens_engine.speculate.verify import VerifyItem, verify_batch
from tests.drafterkit import CONV_SELECTOR, random_dflash2, random_ends, random_mtp
from tests.modelkit import tiny_config
from tests.property.test_verify_distribution import chi_square, chi_square_limit

VOCAB, USABLE = 13, 12  # the last id is the drafter's mask and has no token
PROMPT = [7, 1, 2, 3, 4, 5, 8, 0, 1, 2, 3]  # the copy source proposes 4, 5
NUM_ROUNDS, FEW_ROUNDS, AT_ONCE = 20_000, 2_000, 500
MASK = UnusedTokens(VOCAB, [USABLE])
TARGET = parse_config(tiny_config(vocab_size=VOCAB), {})
SETTINGS = {
    "temperature 1": SamplingParams(),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "top-p": SamplingParams(temperature=0.6, top_p=0.8),
    "top-k": SamplingParams(top_k=4),
    "penalties": SamplingParams(
        temperature=0.6, presence_penalty=0.7, frequency_penalty=-0.6, repetition_penalty=1.3, top_p=0.95
    ),
}
SOURCES = [("copy",), ("mtp",), ("dflash",), SOURCE_NAMES]


@dataclass
class Round:
    """One request's view at its first verify step."""

    request_id: str
    sampling: SamplingParams
    stream: RequestStream
    token_ids: list[int] = field(default_factory=lambda: list(PROMPT))
    prompt_len: int = len(PROMPT)
    num_output_tokens: int = 0


class Shares:
    """A policy that lets every source of a chain have a part: 1 copied token, 1 of the head, the rest of the block."""

    def begin(self, seq: SequenceView) -> None:
        """Nothing is learned."""

    def limits(self, seq: SequenceView, sources: Sequence[str], num_slots: int) -> dict[str, int]:
        return {name: num_slots if len(sources) == 1 or name == "dflash" else 1 for name in sources}

    def observe(self, seq: SequenceView, result: StepResult, seconds: Mapping[str, float], step: StepTime) -> None:
        """Nothing is learned."""

    def end(self, seq: SequenceView) -> None:
        """Nothing is kept."""

    def summary(self) -> dict[str, Any]:
        return {}


class World:
    """The target's table, random drafters and the rows they know of the prompt."""

    def __init__(self, names: Sequence[str], seed: int = 5) -> None:
        rng = np.random.default_rng(seed)
        self.table = torch.from_numpy(rng.normal(0, 1.3, (VOCAB, VOCAB))).float()
        self.table[3, 4] = self.table[4, 5] = 1.0  # copies are often right
        gen = torch.Generator().manual_seed(seed)
        num = len(PROMPT) - 1
        self.hidden = torch.randn((num, 32), generator=gen)
        self.taps = torch.randn((num, 3 * 32), generator=gen)
        drafter = random_dflash2(
            seed,
            TARGET,
            vocab_size=VOCAB,
            dflash_config={
                "block_size": 8, "target_layer_ids": [0, 2, 3], "mask_token_id": USABLE,
                **CONV_SELECTOR, "output_multiplier": 0.15,
            },
        )  # fmt: skip
        self.sources: list[DraftSource] = build_sources(
            random_ends(seed, VOCAB, num_usable=USABLE),
            names=names,
            head=random_mtp(seed, TARGET, vocab_size=VOCAB),
            drafter=drafter,
            max_sequences=AT_ONCE,
            context_tokens=64,
        )
        self.filler = SlotFiller(self.sources, VOCAB, Shares())
        if names == ("mtp",):  # a random head guesses badly; its guesses get some probability
            (chain,) = self.chains([Round("first", SamplingParams(), RequestStream(0))])
            for token, following in pairwise([PROMPT[-1], *chain.token_ids]):
                self.table[token, following] += 4.0

    def logits(self, last_tokens: Sequence[int]) -> torch.Tensor:
        return self.table[list(last_tokens)].clone()

    def chains(self, rounds: Sequence[Round]) -> list[DraftChain]:
        """What the sources draft for each round, through the filler, as an engine does."""
        for seq in rounds:
            self.filler.begin(seq)
        next_ids = torch.tensor(PROMPT[1:])
        self.filler.commit([CommittedRows(seq, 0, self.hidden, self.taps, next_ids) for seq in rounds])
        drafted = self.filler.fill([Ask(seq, (), 7) for seq in rounds])
        for seq in rounds:
            self.filler.end(seq)
        return [d.chain for d in drafted]


def joint(world: World, params: SamplingParams) -> np.ndarray:
    """[USABLE, USABLE] exact probabilities of the first two tokens, by the sampler that serves requests."""
    found = np.zeros((USABLE, USABLE))
    for first in range(USABLE):
        logits = world.logits([PROMPT[-1], first])
        MASK.apply(logits)
        rows = SequenceSampler(params, PROMPT, MASK).process_rows(logits, (first,))
        assert rows.probs is not None
        p = rows.probs.double().numpy()
        found[first] = p[0][first] * p[1][:USABLE]
    return found / found.sum()


def pairs(world: World, params: SamplingParams, num_rounds: int, lie: str = "") -> tuple[np.ndarray, float]:
    """Counts of the first two committed tokens of each round, and the drafts accepted per round."""
    counts = np.zeros((USABLE, USABLE))
    num_accepted = 0
    for start in range(0, num_rounds, AT_ONCE):
        samplers = [SequenceSampler(replace(params, seed=i), PROMPT, MASK) for i in range(start, start + AT_ONCE)]
        rounds = [Round(str(i), params, s.stream) for i, s in enumerate(samplers)]
        chains = [_lied(chain, lie) for chain in world.chains(rounds)]
        items: list[VerifyItem] = []
        last_tokens: list[int] = []
        for sampler, chain in zip(samplers, chains, strict=True):
            items.append(VerifyItem(sampler, chain, len(last_tokens)))
            last_tokens += [PROMPT[-1], *chain.token_ids]
        verdicts = verify_batch(world.logits(last_tokens), items, MASK)
        answers = [list(v.committed) for v in verdicts]
        num_accepted += sum(v.num_accepted for v in verdicts)
        for sampler, answer in zip(samplers, answers, strict=True):
            sampler.commit(answer)
        short = [i for i, answer in enumerate(answers) if len(answer) < 2]
        again = [VerifyItem(samplers[i], DraftChain(), row) for row, i in enumerate(short)]
        for i, verdict in zip(
            short, verify_batch(world.logits([answers[i][-1] for i in short]), again, MASK), strict=True
        ):
            answers[i] += verdict.committed
        for answer in answers:
            counts[answer[0], answer[1]] += 1
    return counts, num_accepted / num_rounds


def _lied(chain: DraftChain, lie: str) -> DraftChain:
    """The same tokens with a q they were not drawn from."""
    if not lie:
        return chain
    runs = []
    for run in chain.runs:
        q = run.q
        if q is not None:
            # sharper than it was, as after a truncation that the drafter did not apply; or that of the next slot
            q = q**3 / (q**3).sum(1, keepdims=True) if lie == "sharper" else np.roll(q, 1, axis=0)
            q = np.maximum(q, 1e-9)
        runs.append(DraftRun(run.source, run.token_ids, q))
    return DraftChain(tuple(runs))


def _grid() -> list[Any]:
    """Every source and the chain under every setting in 20,000 rounds; by default the chain in a few."""
    whole = [pytest.param(n, s, NUM_ROUNDS, marks=pytest.mark.slow) for n in SOURCES for s in SETTINGS]
    return [*((SOURCE_NAMES, setting, FEW_ROUNDS) for setting in ("top-p", "penalties")), *whole]


@pytest.mark.parametrize(
    ("names", "setting", "num_rounds"), _grid(), ids=lambda x: "+".join(x) if isinstance(x, tuple) else str(x)
)
def test_lossless(names: Sequence[str], setting: str, num_rounds: int):
    world, params = World(names), SETTINGS[setting]
    counts, accepted = pairs(world, params, num_rounds)
    exact = joint(world, params)
    assert counts.sum() == num_rounds
    assert chi_square(counts.ravel(), exact.ravel()) < chi_square_limit(exact.size)
    assert accepted > 0.01, "drafts that are never accepted prove nothing"
    assert not any(world.filler.num_failures.values())


def test_the_chain_uses_every_source():
    world = World(SOURCE_NAMES)
    params = SETTINGS["temperature 1"]
    sampler = SequenceSampler(replace(params, seed=1), PROMPT, MASK)
    (chain,) = world.chains([Round("a", params, sampler.stream)])
    assert [(run.source, len(run.token_ids)) for run in chain.runs] == [("copy", 1), ("mtp", 1), ("dflash", 5)]
    assert [run.q is None for run in chain.runs] == [True, True, False]


@pytest.mark.parametrize("lie", ["sharper", "next slot"])
def test_lossless_negative_control(lie: str):
    world, params = World(("dflash",)), SETTINGS["temperature 1"]
    exact = joint(world, params)
    honest, _ = pairs(world, params, 2 * FEW_ROUNDS)
    lying, _ = pairs(world, params, 2 * FEW_ROUNDS, lie)
    assert chi_square(honest.ravel(), exact.ravel()) < chi_square_limit(exact.size)
    assert chi_square(lying.ravel(), exact.ravel()) > chi_square_limit(exact.size)
