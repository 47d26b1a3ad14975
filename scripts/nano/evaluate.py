"""Scores nano on held-out prompts of its own generator, greedily, and prints a table and one last JSON line.

    python scripts/nano/evaluate.py --model agens_engine/assets/nano --per-kind 200 [--seed 7] [--show-wrong 2]

--model is a model folder or the trainer's checkpoint.pt. Prompts use verb-noun pairs, names, cities, made-up words and
number pairs that training never saw (lexicon.is_held). A rate r over n prompts is good to about 2 * sqrt(r(1-r)/n).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("", "kernels", "quant", "planner")]

from scripts.nano.corpus import MIX, make_document  # noqa: E402
from scripts.nano.dataset import MAX_DOCUMENT_TOKENS, load_tokenizer  # noqa: E402
from scripts.nano.document import Document  # noqa: E402
from scripts.nano.generation import Generate, greedy_backend, load_volundr  # noqa: E402
from scripts.nano.lexicon import Sampler  # noqa: E402
from scripts.nano.rendering import render_text  # noqa: E402
from scripts.nano.scoring import Checks, score  # noqa: E402

MAX_NEW_TOKENS = 320  # the longest wanted answer, a product of two-digit numbers, has about 190
Rates = dict[str, dict[str, list[bool]]]  # row -> check -> one entry per prompt


@dataclass(frozen=True)
class Case:
    """One held-out prompt and the document it was cut from."""

    document: Document
    prompt_ids: list[int]


def heldout_cases(seed: int, per_kind: int, kinds: Sequence[str] = tuple(MIX)) -> list[Case]:
    """`per_kind` prompts of every kind, each a document without its last assistant turn."""
    tokenizer = load_tokenizer()
    cases = []
    for kind in kinds:
        sampler = Sampler(seed, "heldout")
        found = 0
        while found < per_kind:
            document = make_document(sampler, kind)
            if len(tokenizer.encode(render_text(document)).ids) <= MAX_DOCUMENT_TOKENS:
                prompt = render_text(document, prompt_only=True)
                cases.append(Case(document, list(tokenizer.encode(prompt, add_special_tokens=False).ids)))
                found += 1
    return cases


def row_name(document: Document) -> str:
    """The table row a document counts in: its kind, with arithmetic split by operator and tools by need."""
    expect = document.expect
    if document.kind == "arithmetic":
        small = min(expect["a"], expect["b"]) < 10
        return {"+": "addition", "-": "subtraction"}.get(expect["op"], "multiplication" if small else "long mult.")
    if document.kind == "tools":
        return "tool call" if expect["calls"] else "no tool call"
    return document.kind


def evaluate(generate: Generate, cases: Sequence[Case], *, show_wrong: int = 0) -> Rates:
    """Generate for all cases and score each answer; prints up to show_wrong failed answers per row."""
    tokenizer = load_tokenizer()
    rates: Rates = defaultdict(lambda: defaultdict(list))
    shown: dict[str, int] = defaultdict(int)
    answers = generate([case.prompt_ids for case in cases])
    for case, ids in zip(cases, answers, strict=True):
        document = case.document
        text = tokenizer.decode(ids, skip_special_tokens=False)
        checks = score(
            document.kind, text, thinking=document.enable_thinking, tools=document.tools, expect=document.expect
        )
        row = row_name(document)
        _count(rates[row], checks)
        if not all(checks.values()) and shown[row] < show_wrong:
            shown[row] += 1
            asked = document.messages[-2]["content"]
            print(f"--- {row} {checks}\nasked: {asked!r}\nwanted: {document.expect}\ngot: {text!r}")
    return rates


def _count(row: dict[str, list[bool]], checks: Checks) -> None:
    for check, passed in checks.items():
        row[check].append(passed)


def table(rates: Rates) -> str:
    """One line per row: number of prompts, then each check as a rate."""
    lines = [f"{'row':<16}{'prompts':>8}  rates"]
    for row, checks in rates.items():
        num = len(next(iter(checks.values())))
        lines.append(f"{row:<16}{num:>8}  " + "  ".join(f"{c} {sum(v) / len(v):.3f}" for c, v in checks.items()))
    return "\n".join(lines)


def summary(rates: Rates) -> dict[str, dict[str, float]]:
    """Row -> check -> rate, with the number of prompts as "n"."""
    return {
        row: {"n": len(next(iter(checks.values()))), **{c: round(sum(v) / len(v), 4) for c, v in checks.items()}}
        for row, checks in rates.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="a model folder or a trainer's checkpoint.pt")
    parser.add_argument(
        "--per-kind", type=int, default=200, help="prompts per kind; arithmetic gets three times as many"
    )
    parser.add_argument("--kinds", default=",".join(MIX), help="comma-separated subset of the kinds")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--show-wrong", type=int, default=0, help="print so many failed answers per row")
    args = parser.parse_args()
    tokenizer = load_tokenizer()
    stops = frozenset(tokenizer.encode("<|agens_end|><|endoftext|>").ids)
    generate = greedy_backend(load_volundr(args.model), max_tokens=MAX_NEW_TOKENS, stop_ids=stops)
    began = time.perf_counter()
    cases = [
        case
        for kind in args.kinds.split(",")
        for case in heldout_cases(args.seed, args.per_kind * (3 if kind == "arithmetic" else 1), [kind])
    ]
    rates = evaluate(generate, cases, show_wrong=args.show_wrong)
    print(table(rates))
    seconds = round(time.perf_counter() - began, 1)
    print(
        json.dumps(
            {"model": str(args.model), "seed": args.seed, "prompts": len(cases), "seconds": seconds, **summary(rates)}
        )
    )


if __name__ == "__main__":
    main()
