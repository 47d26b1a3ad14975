"""Request bodies made from the OpenAPI document: good ones by its schemas, and the same with one place damaged.

Whether a body is good is not decided here but by jsonschema, which is an independent reader of the same document.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema

WORDS = ["", "x", "hello", "beta gamma", "Grüße 🦊", "<|call|>", "\n", '"', "auto", "[a-z]+", "0", "\ud83d"]
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    1.5,
    1e308,
    10**30,
    "",
    "x",
    "5",
    [],
    {},
    ["x"],
    {"x": 1},
    [None],
    [[]],
    {"type": "x"},
]
SKIPPED = ["web_search", "custom_tool", "local_shell_call", "web_search_call"]
# Small schemas that mean something to the grammar compiler; other objects come up by themselves.
JSON_SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "string", "maxLength": 5},
    {"anyOf": [{"type": "null"}, {"enum": ["x", 1]}]},
    {"$ref": "#/nowhere"},
    {"type": "thing"},
    {"type": ["string", 5]},
    {"properties": []},
]


@dataclass(frozen=True)
class Route:
    """One POST route: its path, the schema of its body, and the schema of its answer by status."""

    path: str
    body: dict[str, Any]
    answers: dict[str, dict[str, Any]]


class Document:
    """The parts of a served document that a client needs to try it out."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._components = document["components"]
        self.routes = [
            Route(path, item["post"]["requestBody"]["content"]["application/json"]["schema"], _answers(item["post"]))
            for path, item in document["paths"].items()
            if "post" in item
        ]
        self._validators: dict[str, Any] = {}

    def allows(self, schema: dict[str, Any], value: Any) -> bool:
        key = json.dumps(schema, sort_keys=True)
        if key not in self._validators:
            root = {**schema, "components": self._components}
            self._validators[key] = jsonschema.Draft202012Validator(root)
        return bool(self._validators[key].is_valid(value))

    def make(self, schema: dict[str, Any], rng: random.Random, depth: int = 0) -> Any:
        """A value that the schema most likely allows."""
        if "$ref" in schema:
            return self.make(self._components["schemas"][schema["$ref"].rpartition("/")[2]], rng, depth)
        if "anyOf" in schema:
            return self.make(rng.choice(schema["anyOf"]), rng, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kinds = schema.get("type", ["null", "string", "integer", "object"])
        kind = kinds if isinstance(kinds, str) else rng.choice(kinds)
        return getattr(self, f"_{kind}")(schema, rng, depth + 1)

    def _null(self, schema: dict[str, Any], rng: random.Random, depth: int) -> None:
        return None

    def _boolean(self, schema: dict[str, Any], rng: random.Random, depth: int) -> bool:
        return rng.random() < 0.5

    def _string(self, schema: dict[str, Any], rng: random.Random, depth: int) -> str:
        words = SKIPPED if "pattern" in schema or "not" in schema else WORDS
        low, high = schema.get("minLength", 0), schema.get("maxLength", 1000)
        return rng.choice([word for word in words if low <= len(word) <= high])

    def _integer(self, schema: dict[str, Any], rng: random.Random, depth: int) -> int:
        low, high = schema.get("minimum", -5), schema.get("maximum", max(schema.get("minimum", 0), 0) + 300)
        return rng.choice([low, high, rng.randint(low, min(high, low + 20))])

    def _number(self, schema: dict[str, Any], rng: random.Random, depth: int) -> float:
        low, high = schema.get("minimum", schema.get("exclusiveMinimum", -9) + 0.5), schema.get("maximum", 9)
        return rng.choice([low, high, round(rng.uniform(low, high), 3)])

    def _array(self, schema: dict[str, Any], rng: random.Random, depth: int) -> list[Any]:
        low = schema.get("minItems", 0)
        size = max(low, min(rng.choice([0, 1, 1, 2, 3]), 1 if depth > 4 else 3))
        return [self.make(schema.get("items", {}), rng, depth) for _ in range(size)]

    def _object(self, schema: dict[str, Any], rng: random.Random, depth: int) -> dict[str, Any]:
        properties = schema.get("properties")
        if properties is None:
            if "additionalProperties" in schema:
                return {str(rng.randrange(300)): self.make(schema["additionalProperties"], rng, depth)}
            return copy.deepcopy(rng.choice(JSON_SCHEMAS))
        wanted = set(schema.get("required", ()))
        rest = sorted(set(properties) - wanted)
        wanted |= set(rng.sample(rest, min(len(rest), rng.choice([0, 1, 2, 4]))))
        if schema.get("minProperties") and not wanted:
            wanted.add(rng.choice(rest))
        return {key: self.make(properties[key], rng, depth) for key in sorted(wanted)}


def damaged(body: Any, rng: random.Random) -> Any:
    """The body with one value replaced, removed or added somewhere."""
    body = copy.deepcopy(body)
    places = list(_places(body))
    holder, key = rng.choice(places) if places else (None, None)
    if holder is None:
        return rng.choice(ODD)
    if isinstance(holder, dict) and rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD))
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in list(entries):
        yield value, key
        yield from _places(entry)


def _answers(operation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for status, answer in operation["responses"].items():
        found[status] = answer["content"]["application/json"]["schema"]
    return found
