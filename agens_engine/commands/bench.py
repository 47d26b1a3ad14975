"""`agens bench`: plain decoding against drafting on the prompt suites (agens_engine/bench.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from agens_engine.bench import (
    DEFAULT_SUITES,
    MAX_TOKENS,
    Answer,
    environment,
    load_suite,
    run_suite,
    suite_names,
    table,
)
from agens_engine.commands.model import one_chat, opened, run_request
from agens_engine.errors import AgensError, UsageError
from agens_engine.server.host import LoadedModel
from agens_engine.settings import Settings


def run_bench(
    settings: Settings,
    suites: Sequence[str] = DEFAULT_SUITES,
    *,
    repeat: int = 1,
    cases: int | None = None,
    json_out: bool = False,
) -> dict[str, Any]:
    """Run the suites and print a table, or one JSON object (design section 7).

    cases    only the first so many of each suite
    raises   UsageError for a suite or number, AgensError when an answer with drafts differs from the plain one
    """
    if repeat < 1 or (cases is not None and cases < 1):
        raise UsageError("--repeat and --cases must be at least 1")
    if not suites:
        raise UsageError(f"--suite names no suite; known: {', '.join(suite_names())}")
    loaded = {name: load_suite(name)[:cases] for name in suites}
    results = {}
    with opened(settings) as model:
        if not settings.speculation:
            raise UsageError("agens bench compares drafting with plain decoding; leave --no-speculation out")
        ask = _asker(model)
        for case in next(iter(loaded.values()))[:2]:  # first uses of every kernel and buffer
            ask(case, True), ask(case, False)
        for name, suite in loaded.items():
            with tqdm(total=len(suite) * repeat, desc=name, file=sys.stderr, disable=None, leave=False) as bar:
                results[name] = run_suite(
                    suite,
                    ask,
                    lambda: model.engine.stats()["drafts"]["sources"],
                    repeat=repeat,
                    progress=lambda done, bar=bar: bar.update(done - bar.n),  # type: ignore[misc]
                )
        report: dict[str, Any] = {
            "suites": {name: result.as_dict() for name, result in results.items()},
            "policy": model.engine.stats().get("draft_policy"),
            "environment": environment(settings.model),
        }
    if json_out:
        print(json.dumps(report))
    else:
        print("\n".join(table(results)))
    wrong = [f"{name} {result.different}" for name, result in results.items() if result.different]
    if wrong:
        raise AgensError(f"answers with drafts differ from plain decoding in cases {'; '.join(wrong)}: this is a bug")
    return report


def _asker(model: LoadedModel) -> Any:
    def ask(case: Mapping[str, Any], drafts: bool) -> Answer:
        extra = {k: v for k, v in case.items() if k != "messages"}
        options = {**extra, "temperature": 0, "max_tokens": MAX_TOKENS, "speculation": drafts}
        request = one_chat(model, list(case["messages"]), options)
        tokens: list[int] = []
        last = None
        for last in run_request(model.engine, request):
            tokens += last.token_ids
        assert last is not None and last.timings is not None
        return Answer(tuple(tokens), last.timings)

    return ask
