"""JSON on request: objects with given keys and values, lists, small nesting. Answers are compact valid JSON."""

from __future__ import annotations

import json
from typing import Any

from scripts.nano.document import Document, assistant, user
from scripts.nano.lexicon import Sampler

FIELDS: dict[str, str] = {
    "name": "name", "city": "city", "email": "email", "age": "small", "id": "int", "price": "decimal", "active": "bool",
    "path": "path", "url": "url", "title": "title", "date": "date", "count": "int", "color": "common", "code": "ident",
    "score": "small", "admin": "bool", "topic": "phrase", "owner": "name", "place": "city", "size": "small",
    "open": "bool",
    "tag": "word", "key": "word", "time": "clock", "user": "word",
}  # fmt: skip
OPENINGS = (
    "Give me JSON with ",
    "Write JSON with ",
    "JSON object with ",
    "Make a JSON object with ",
    "Return JSON: ",
    "As JSON: ",
)


def make(s: Sampler) -> Document:
    """expect["json"] is the value the answer must parse to."""
    how = s.rng.random()
    if how < 0.62:
        value = _object(s, s.between(1, 4))
        request = s.pick(OPENINGS) + _listed(s, value) + s.pick((".", ""))
        thought = "Keys: " + ", ".join(value) + "."
        return _close(s, request, value, thought)
    if how < 0.8:
        return _list(s)
    if how < 0.92:
        outer = s.pick(("user", "item", "data", "result", s.word()))
        inner = _object(s, s.between(1, 3))
        request = f"Give me JSON with {outer} holding {_listed(s, inner)}."
        return _close(s, request, {outer: inner}, f"Keys: {outer}, then " + ", ".join(inner) + ".")
    first = _object(s, 1)
    key = next(iter(first))
    rows = [first, {key: _value(s, FIELDS.get(key, "word"))}]
    request = f"Give me a JSON list of two objects with {key} {_say(rows[0][key])} and {_say(rows[1][key])}."
    return _close(s, request, rows, f"Keys: {key}.")


def _list(s: Sampler) -> Document:
    draw = s.pick(("word", "common", "name", "city", "int", "small", "email", "any"))
    items = [_value(s, draw) for _ in range(s.between(2, 5))]
    request = s.pick(
        ("Write a JSON list of {}.", "JSON array of {}", "Give me a JSON array with {}.", "Make a JSON list: {}")
    )
    return _close(s, request.format(", ".join(_say(item) for item in items)), items, "A list.")


def _close(s: Sampler, request: str, value: Any, thought: str) -> Document:
    thinking = s.chance(0.45)
    answer = json.dumps(value, ensure_ascii=False)
    turn = assistant(answer, thought=thought, thinking=thinking)
    return Document("json", [user(request), turn], None, thinking, expect={"json": value})


def _object(s: Sampler, num: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    while len(value) < num:
        if s.chance(0.12):
            value[s.word()] = s.anything()
        else:
            key = s.pick(list(FIELDS))
            value[key] = _value(s, FIELDS[key])
    return value


def _value(s: Sampler, draw: str) -> Any:
    if draw == "small":
        return s.between(1, 99)
    if draw == "int":
        return int(s.digits(1, 5))
    if draw == "decimal":
        return float(s.decimal())
    if draw == "bool":
        return s.chance(0.5)
    if draw == "any":
        return s.anything()
    text: str = getattr(s, draw)()
    return text


def _say(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _listed(s: Sampler, value: dict[str, Any]) -> str:
    glue = s.pick(("{} {}", "{} {}", "{}: {}", "{} = {}", "{} is {}"))
    parts = [glue.format(key, _say(v)) for key, v in value.items()]
    if len(parts) == 1:
        return parts[0]
    if s.chance(0.5):
        return ", ".join(parts)
    return ", ".join(parts[:-1]) + " and " + parts[-1]
