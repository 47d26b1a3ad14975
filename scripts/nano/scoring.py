"""Judges generated text against what the generator wanted. Pure functions; strict on purpose.

A scorer sees the text after the generation prompt with control tokens spelled out. It parses the text itself instead
of using the server's tolerant parsers, so that a malformed call counts as malformed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

THINK_END, CALL, CALL_END, TURN_END = "<|/think|>", "<|call|>", "<|/call|>", "<|agens_end|>"
CALL_FORM = re.compile(
    r"<\|call\|>\n<function=([^\n<>]+)>\n((?:<parameter=[^\n<>]+>\n.*?\n</parameter>\n)*)</function>\n<\|/call\|>",
    re.DOTALL,
)
PARAMETER_FORM = re.compile(r"<parameter=([^\n<>]+)>\n(.*?)\n</parameter>\n", re.DOTALL)
CONTROL = re.compile(r"<\|/?[A-Za-z_]+\|>")
Checks = dict[str, bool]


@dataclass(frozen=True)
class Output:
    """One generated turn, taken apart.

    finished    the turn ended with <|agens_end|> and nothing follows it
    reasoning   None when thinking was off or the block never closed
    content     text between the reasoning and the first call; None when the reasoning never closed
    calls       (name, raw parameter texts) of the well-formed calls
    well_formed finished, reasoning closed exactly once, and everything after the content is whole calls
    """

    finished: bool
    reasoning: str | None
    content: str | None
    calls: tuple[tuple[str, dict[str, str]], ...]
    well_formed: bool


def parse(text: str, *, thinking: bool) -> Output:
    """Take a generated turn apart, without forgiving anything."""
    body, mark, rest = text.partition(TURN_END)
    finished = bool(mark) and not rest.strip()
    reasoning = None
    if thinking:
        reasoning, closed, body = body.partition(THINK_END)
        if not closed:
            return Output(finished, None, None, (), False)
    before, opened, after = body.partition(CALL)
    calls, leftover = _calls(opened + after)
    clean = not CONTROL.search(before) and not CONTROL.search(reasoning or "")
    return Output(finished, reasoning, before, calls, finished and clean and not leftover)


def _calls(region: str) -> tuple[tuple[tuple[str, dict[str, str]], ...], str]:
    """Whole calls from the start of the region, and what is left once the next piece is not one."""
    calls = []
    while match := CALL_FORM.match(region):
        pairs = PARAMETER_FORM.findall(match[2])
        if CONTROL.search(match[2]) or len({key for key, _ in pairs}) != len(pairs):
            break
        calls.append((match[1], dict(pairs)))
        region = region[match.end() :]
    return tuple(calls), region


def score_tools(text: str, *, thinking: bool, tools: list[dict[str, Any]] | None, expect: Mapping[str, Any]) -> Checks:
    """well_formed, name, params, values and exact for calls; none (no call, right words) when no call is wanted."""
    output = parse(text, thinking=thinking)
    wanted = expect["calls"]
    if not wanted:
        return {"none": output.well_formed and not output.calls and output.content == expect["content"]}
    schemas = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools or []}
    same_count = len(output.calls) == len(wanted)
    pairs = list(zip(output.calls, wanted, strict=False))
    name = same_count and all(call[0] == want[0] for call, want in pairs)
    params = same_count and all(set(call[1]) == set(want[1]) for call, want in pairs)
    values = params and all(
        _same_value(call[1][key], value, schemas.get(want[0], {}).get(key, {}).get("type", "string"))
        for call, want in pairs
        for key, value in want[1].items()
    )
    checks = {
        "well_formed": output.well_formed and bool(output.calls),
        "name": name,
        "params": params,
        "values": values,
    }
    return {**checks, "exact": all(checks.values()) and output.content == ""}


def _same_value(raw: str, wanted: Any, declared: str) -> bool:
    """Whether the raw parameter text means the wanted value under its declared JSON type."""
    if declared == "string":
        return raw == wanted
    if declared == "boolean":
        return raw == ("true" if wanted else "false")
    try:
        return strictly_equal(json.loads(raw), wanted) or (declared == "number" and float(raw) == float(wanted))
    except ValueError:
        return False


def score_arithmetic(text: str, *, thinking: bool, expect: Mapping[str, Any]) -> Checks:
    """exact: the last number in the content is the result. What was thought or written before it does not count."""
    output = parse(text, thinking=thinking)
    if not output.well_formed or output.calls or output.content is None:
        return {"exact": False}
    numbers = re.findall(r"-?\d+(?:[.,]\d+)*", output.content)
    return {"exact": bool(numbers) and numbers[-1] == str(expect["result"])}


def score_json(text: str, *, thinking: bool, expect: Mapping[str, Any]) -> Checks:
    """valid: the content is one strict JSON value and nothing else; exact: the wanted value, types included."""
    output = parse(text, thinking=thinking)
    if not output.well_formed or output.calls or output.content is None:
        return {"valid": False, "exact": False}
    try:
        value = json.loads(output.content, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except ValueError:
        return {"valid": False, "exact": False}
    return {"valid": True, "exact": strictly_equal(value, expect["json"])}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def strictly_equal(a: Any, b: Any) -> bool:
    """Equality that keeps 1, 1.0 and true apart; the order of keys does not matter, the order of items does."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(strictly_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(strictly_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def score_python(text: str, *, thinking: bool, expect: Mapping[str, Any]) -> Checks:
    """compiles: the content is one fenced block that compiles and defines one function; exact: the wanted source."""
    output = parse(text, thinking=thinking)
    fence = re.fullmatch(r"```python\n(.*)\n```", output.content or "", re.DOTALL)
    if not output.well_formed or output.calls or fence is None:
        return {"compiles": False, "exact": False}
    code = fence[1]
    try:
        tree = ast.parse(code)
        compile(tree, "<generated>", "exec")
    except (SyntaxError, ValueError):
        return {"compiles": False, "exact": False}
    one_function = len(tree.body) == 1 and isinstance(tree.body[0], ast.FunctionDef)
    return {"compiles": one_function, "exact": one_function and code == expect["code"]}


def score_content(text: str, *, thinking: bool, expect: Mapping[str, Any]) -> Checks:
    """exact: the content is the wanted text, letter by letter (chat and copying)."""
    output = parse(text, thinking=thinking)
    return {"exact": output.well_formed and not output.calls and output.content == expect["content"]}


def score_agent(text: str, *, thinking: bool, expect: Mapping[str, Any]) -> Checks:
    """exact: the wanted last answer; uses_results: it holds every needed piece of the tool results."""
    output = parse(text, thinking=thinking)
    answered = output.well_formed and not output.calls and bool(output.content)
    content = output.content or ""
    return {
        "exact": answered and content == expect["content"],
        "uses_results": answered and all(piece in content for piece in expect["needs"]),
    }


def score(
    kind: str, text: str, *, thinking: bool, tools: list[dict[str, Any]] | None, expect: Mapping[str, Any]
) -> Checks:
    """The checks of one generated turn of a document of this kind."""
    if kind == "tools":
        return score_tools(text, thinking=thinking, tools=tools, expect=expect)
    scorers = {
        "arithmetic": score_arithmetic, "json": score_json, "python": score_python, "agent": score_agent,
        "chat": score_content, "copying": score_content,
    }  # fmt: skip
    return scorers[kind](text, thinking=thinking, expect=expect)
