"""Writes the prompt suites of `agens bench` (agens_engine/assets/suites/NAME.json) from held-out documents.

    python scripts/nano/make_suites.py

Every assistant turn of a document becomes one case: the conversation before it, for a model to continue. Words, names
and numbers are of the held-out split, which neither nano nor its drafters were trained on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from scripts.nano.corpus import make_document  # noqa: E402
from scripts.nano.document import Document, Message  # noqa: E402
from scripts.nano.lexicon import Sampler  # noqa: E402

TARGET = ROOT / "agens_engine" / "assets" / "suites"
SEED = 31  # evaluate.py uses 7
CASES = 24


@dataclass(frozen=True)
class Suite:
    """kind is the generator of the documents, wanted picks among them."""

    kind: str
    about: str
    wanted: Callable[[Document], bool]


def _long_copy(document: Document) -> bool:
    asked, said = document.messages[-2]["content"], document.messages[-1]["content"]
    return len(said) >= 60 and said in asked


SUITES = {
    "chat": Suite("chat", "short conversations", lambda d: True),
    "code": Suite("python", "small Python functions", lambda d: True),
    "thinking": Suite("arithmetic", "sums with the working in the thought", lambda d: d.enable_thinking),
    "tools": Suite("tools", "one question with tools at hand", lambda d: bool(d.expect["calls"])),
    "agent": Suite("agent", "conversations of several tool calls and results", lambda d: True),
    "json": Suite("json", "objects and lists in JSON", lambda d: True),
    "copy": Suite("copying", "text to be repeated word for word, once more than before", _long_copy),
}


def cases(suite: Suite) -> Iterator[dict[str, Any]]:
    sampler = Sampler(SEED, "heldout")
    while True:
        document = make_document(sampler, suite.kind)
        if not suite.wanted(document):
            continue
        turns = [i for i, message in enumerate(document.messages) if message["role"] == "assistant"]
        for turn in turns[-1:] if suite.kind == "copying" else turns:
            messages = [_as_sent(message) for message in document.messages[:turn]]
            if suite.kind == "copying":  # asked, answered, and asked again
                messages = [*messages, document.messages[turn], messages[-1]]
            case: dict[str, Any] = {"messages": messages, "enable_thinking": document.enable_thinking}
            if document.tools:
                case["tools"] = document.tools
            if document.enable_thinking and document.reasoning_effort is not None:
                case["reasoning_effort"] = document.reasoning_effort
            yield case


def _as_sent(message: Message) -> Message:
    """The message as clients send it: arguments of calls as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for number, call in enumerate(message["tool_calls"])
    ]
    return {**message, "tool_calls": calls}


def main() -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, suite in SUITES.items():
        found = cases(suite)
        body = {"about": suite.about, "cases": [next(found) for _ in range(CASES)]}
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).replace('{"messages"', '\n{"messages"')
        (TARGET / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
