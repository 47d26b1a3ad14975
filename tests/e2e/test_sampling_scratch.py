"""What sampling a verify step really allocates on the CPU stays inside the plan's line for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from agens_engine.core import DraftChain, DraftRun, SamplingParams
from agens_engine.planning import plan_run
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.sampling.sampler import SequenceSampler
from agens_engine.settings import Settings
from agens_engine.speculate.verify import Verdict, VerifyItem, verify_batch
from tests.memorykit import peak_bytes

VOCAB, ROWS = 768, 8  # the nano vocabulary; an anchor and 7 drafts


@dataclass(frozen=True)
class Case:
    """A request's settings. spread: how far the logits lie apart; drawn: the drafts come with a distribution."""

    params: SamplingParams
    spread: float = 1.0
    drawn: bool = False


CASES = {
    "plain": Case(SamplingParams(temperature=1.0)),
    "top_k": Case(SamplingParams(temperature=0.8, top_k=20)),
    "penalties": Case(SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5)),
    "min_p": Case(SamplingParams(temperature=1.0, min_p=0.05)),
    "whole rows sorted": Case(SamplingParams(temperature=1.0, top_p=0.999), spread=0.01),
    "logprobs": Case(SamplingParams(temperature=1.0, logprobs=20)),
    "drafts with q": Case(SamplingParams(temperature=1.0), drawn=True),
    "everything": Case(SamplingParams(temperature=1.0, top_p=0.999, min_p=1e-6, frequency_penalty=0.1), 0.01, True),
}


def chain(tokens: tuple[int, ...], drawn: bool) -> DraftChain:
    q = np.full((len(tokens), VOCAB), 1.0 / VOCAB, dtype=np.float32) if drawn else None
    return DraftChain((DraftRun("test", tokens, q),))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("sequences", [1, 8])
def test_a_sampled_verify_step_fits_its_line(case: Case, sequences: int) -> None:
    plan = plan_run(Settings.build({"model": "nano", "context_tokens": 512, "max_sequences": sequences}, environ={}))
    assert plan.sequences == sequences
    assert plan.bytes_of("logits.verify") == sequences * ROWS * VOCAB * 4
    unused = UnusedTokens(VOCAB)
    generator = torch.Generator().manual_seed(5)
    logits = case.spread * torch.randn((sequences * ROWS, VOCAB), generator=generator)
    drafts = tuple(range(100, 107))
    items = [
        VerifyItem(SequenceSampler(case.params, [1, 2, 3], unused), chain(drafts, case.drawn), i * ROWS)
        for i in range(sequences)
    ]
    verdicts: list[Verdict] = []
    peak = peak_bytes(lambda: verdicts.extend(verify_batch(logits, items, unused)))
    assert all(v.error is None and v.committed for v in verdicts) and len(verdicts) == sequences
    # scores, probabilities and the running sums of one sequence at least were seen: the measurement works
    assert ROWS * VOCAB * 16 <= peak <= plan.bytes_of("sampling.scratch")
