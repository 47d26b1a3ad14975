"""Measures what drafting brings: every prompt of a suite without drafts and with them, in turn, in one process.

Both runs are greedy, so their tokens must be the same; `identical` says whether they were. Speed is decoded tokens over
the seconds of verify steps and drafting (prefill is the same work in both runs and not counted). The order of the two
runs alternates from prompt to prompt, so that a machine that slows down hurts both alike.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from agens_engine.core import NUM_VERIFY_ROWS, Timings
from agens_engine.errors import UsageError

SUITES = Path(__file__).resolve().parent / "assets" / "suites"
DEFAULT_SUITES = ("chat", "code", "thinking", "tools", "agent")
MAX_TOKENS = 256  # of one answer


@dataclass(frozen=True)
class Answer:
    """One greedy answer and where its time went."""

    token_ids: tuple[int, ...]
    timings: Timings


# (case of a suite, with drafts) -> answer; the case is a body of the chat API without sampling fields
Ask = Callable[[Mapping[str, Any], bool], Answer]


@dataclass
class Tally:
    """Sums over the answers of one suite in one of the two ways."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, timings: Timings) -> None:
        self.tokens += timings.decoded_tokens
        self.steps += timings.verify_steps
        self.seconds += timings.decode_seconds
        for name, count in timings.sources.items():
            source = self.sources.setdefault(name, {"proposed": 0, "accepted": 0, "seconds": 0.0})
            source["proposed"] += count.proposed
            source["accepted"] += count.accepted
            source["seconds"] += count.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


@dataclass
class SuiteResult:
    plain: Tally = field(default_factory=Tally)
    drafts: Tally = field(default_factory=Tally)
    different: list[int] = field(default_factory=list)  # cases whose two answers differ
    slots: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # source -> proposed/accepted of slots 1..7

    @property
    def ratio(self) -> float:
        plain = self.plain.tokens_per_second
        return self.drafts.tokens_per_second / plain if plain else 0.0

    def as_dict(self) -> dict[str, Any]:
        steps = max(self.drafts.steps, 1)
        sources = {
            name: {**count, "accepted_per_step": count["accepted"] / steps, **self.slots.get(name, {})}
            for name, count in self.drafts.sources.items()
        }
        return {
            "plain_tokens_per_second": self.plain.tokens_per_second,
            "tokens_per_second": self.drafts.tokens_per_second,
            "ratio": self.ratio,
            "tokens_per_step": self.drafts.tokens_per_step,
            "tokens": self.drafts.tokens,
            "identical": not self.different,
            "different_cases": self.different,
            "sources": sources,
        }


def suite_names() -> list[str]:
    return sorted(file.stem for file in SUITES.glob("*.json"))


def load_suite(name: str) -> list[dict[str, Any]]:
    """The cases of a suite that comes with the engine, or of a JSON file of the same form (a path with a dot or slash).

    raises   UsageError for an unknown name or a file that is not a suite
    """
    file = Path(name) if {"/", "."} & set(name) else SUITES / f"{name}.json"
    if not file.is_file():
        raise UsageError(f"there is no suite {name!r}; known: {', '.join(suite_names())}, or give a JSON file")
    try:
        cases = json.loads(file.read_text(encoding="utf-8"))["cases"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is not a suite: it needs an object with a list `cases`") from error
    if not isinstance(cases, list) or not cases or not all(isinstance(c, dict) and "messages" in c for c in cases):
        raise UsageError(f"{file} is not a suite: each of `cases` needs `messages`")
    return cases


def run_suite(
    cases: Sequence[Mapping[str, Any]],
    ask: Ask,
    slot_counts: Callable[[], Mapping[str, Mapping[str, Any]]],
    *,
    repeat: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> SuiteResult:
    """Ask every case both ways `repeat` times.

    slot_counts   the engine's running totals by source (DraftStats.summary()["sources"])
    progress      called with the number of finished cases
    """
    result = SuiteResult()
    before = _slots(slot_counts())
    for number, case in enumerate([*cases] * repeat):
        answers = {drafts: ask(case, drafts) for drafts in ((False, True) if number % 2 else (True, False))}
        result.plain.add(answers[False].timings)
        result.drafts.add(answers[True].timings)
        index = number % len(cases)
        if answers[False].token_ids != answers[True].token_ids and index not in result.different:
            result.different.append(index)
        progress(number + 1)
    for name, after in _slots(slot_counts()).items():
        earlier = before.get(name, {})
        result.slots[name] = {
            what: [a - b for a, b in zip(counts, earlier.get(what, [0] * len(counts)), strict=True)]
            for what, counts in after.items()
        }
    return result


def _slots(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    wanted = ("proposed_by_slot", "accepted_by_slot")
    return {name: {what: list(source[what]) for what in wanted} for name, source in sources.items()}


def environment(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
    }


def table(results: Mapping[str, SuiteResult]) -> Iterable[str]:
    """Lines for people: one a suite, then accepted drafts by source and slot."""
    yield f"{'suite':<10}{'plain tok/s':>12}{'drafts tok/s':>13}{'ratio':>7}{'tok/step':>10}{'tokens':>8}  identical"
    for name, r in results.items():
        yield (
            f"{name:<10}{r.plain.tokens_per_second:>12.1f}{r.drafts.tokens_per_second:>13.1f}{r.ratio:>7.2f}"
            f"{r.drafts.tokens_per_step:>10.2f}{r.drafts.tokens:>8}  {'yes' if not r.different else 'NO'}"
        )
    slots = "".join(f"{slot:>11}" for slot in range(1, NUM_VERIFY_ROWS))
    yield f"\n{'accepted/proposed in slot':<26}{slots}"
    for name, r in results.items():
        for source, counts in r.slots.items():
            pairs = zip(counts["accepted_by_slot"], counts["proposed_by_slot"], strict=True)
            cells = "".join(f"{f'{a}/{p}' if p else '-':>11}" for a, p in pairs)
            if sum(counts["proposed_by_slot"]):
                yield f"{f'{name} {source}':<26}{cells}"
