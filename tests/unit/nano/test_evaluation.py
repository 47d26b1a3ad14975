"""The evaluation loop with made-up backends, and the greedy backend against the model's one-shot forward."""

from __future__ import annotations

from pathlib import Path

import torch

from scripts.nano.corpus import MIX
from scripts.nano.dataset import load_tokenizer, render
from scripts.nano.evaluate import evaluate, heldout_cases, summary, table
from scripts.nano.generation import greedy_backend, load_volundr

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden"


def test_perfect_answers_score_one_and_silence_scores_zero(capsys):
    cases = heldout_cases(seed=1, per_kind=12)
    assert [c.prompt_ids for c in cases] == [c.prompt_ids for c in heldout_cases(seed=1, per_kind=12)]
    tokenizer = load_tokenizer()
    wanted = [render(case.document, tokenizer)[0][len(case.prompt_ids) : -1] for case in cases]
    best = evaluate(lambda prompts: wanted, cases, show_wrong=3)
    assert all(all(all(v) for v in checks.values()) for checks in best.values())
    assert capsys.readouterr().out == ""
    end = tokenizer.encode("<|agens_end|>").ids
    worst = evaluate(lambda prompts: [end for _ in prompts], cases, show_wrong=1)
    assert not any(any(any(v) for v in checks.values()) for checks in worst.values())
    assert "wanted:" in capsys.readouterr().out
    assert set(summary(best)) >= set(MIX) - {"tools", "arithmetic"}
    assert sum(row["n"] for row in summary(best).values()) == len(cases)
    assert len(table(best).splitlines()) == len(best) + 1


def test_greedy_backend_equals_repeated_one_shot_forwards():
    model = load_volundr(GOLDEN)
    gen = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, model.config.vocab_size, (n,), generator=gen).tolist() for n in (3, 40, 17)]
    stops = frozenset({11})
    answers = greedy_backend(model, max_tokens=6, stop_ids=stops, batch_size=2)(prompts)
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = list(prompt)
            for token in answer:
                hidden, _ = model(model.fresh_batch(torch.tensor([ids])))
                assert int(model.logits(hidden[-1:]).argmax()) == token
                ids.append(token)
            assert len(answer) == 6 or answer[-1] in stops
