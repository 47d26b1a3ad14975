"""Typing of arguments: the table of spec serving.md, section 4, row by row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agens_engine.text.tool_schema import to_json, tool_schemas, value_json


def typed(text: str, type_name: Any) -> Any:
    return json.loads(value_json(text, {"type": type_name}), parse_constant=pytest.fail)


@pytest.mark.parametrize("type_name", ["string", "integer", "boolean", "object", "weird"])
def test_null_in_any_case_is_null(type_name: str) -> None:
    assert typed("null", type_name) is None and typed("NULL", type_name) is None


@pytest.mark.parametrize("schema", [None, {}, {"description": "x"}, {"enum": ["1", "2"]}, "no schema", {"type": None}])
def test_without_a_type_the_text_stays(schema: Any) -> None:
    assert value_json(" 1 ", schema) == '" 1 "'


@pytest.mark.parametrize("type_name", ["string", "STR", "text", "varchar", "char", "enum"])
def test_strings_stay(type_name: str) -> None:
    assert typed("12 \n", type_name) == "12 \n"


@pytest.mark.parametrize("type_name", ["integer", "int32", "uint8", "long", "short", "unsigned", "Integer"])
def test_integers(type_name: str) -> None:
    assert typed("12", type_name) == 12 and typed("-3", type_name) == -3 and typed(" 5\n", type_name) == 5
    for text in ("1.0", "1_000", "twelve", "", "٣", "9" * 5000):
        assert typed(text, type_name) == text


@pytest.mark.parametrize("type_name", ["number", "num", "float", "float64"])
def test_numbers(type_name: str) -> None:
    assert value_json("12", {"type": type_name}) == "12"
    assert value_json("12345678901234567890", {"type": type_name}) == "12345678901234567890"
    assert value_json("12.0", {"type": type_name}) == "12.0"
    assert typed("1e3", type_name) == 1000.0 and typed("-.5", type_name) == -0.5
    for text in ("nan", "inf", "Infinity", "1e999", "1_0.0", "x", "."):
        assert typed(text, type_name) == text


@pytest.mark.parametrize("type_name", ["boolean", "bool", "binary"])
def test_booleans_are_true_only_for_true(type_name: str) -> None:
    assert typed("TRUE", type_name) is True
    assert [typed(t, type_name) for t in ("false", "1", "yes", "")] == [False] * 4


@pytest.mark.parametrize("type_name", ["object", "array", "arr", "dict", "list[int]", "Dict"])
def test_json_then_python_literal_then_text(type_name: str) -> None:
    assert typed('{"a": [1, true]}', type_name) == {"a": [1, True]}
    assert typed("{'a': (1, True, None)}", type_name) == {"a": [1, True, None]}
    for text in ("{a: 1}", "{1, 2}", "b'x'", "[NaN]", "[1e999]", "[" * 100_000, "{(1, 2): 3}"):
        assert typed(text, type_name) == text


def test_other_types_are_python_literals_or_text() -> None:
    assert typed("[1, 2]", "tuple") == [1, 2] and typed("os.system('x')", "tuple") == "os.system('x')"


def test_odd_escapes_in_a_literal_warn_nobody() -> None:
    assert typed(r"['\d']", "array") == [r"\d"]


def test_unions_take_the_first_type_that_parses() -> None:
    assert typed("3", ["null", "integer", "string"]) == 3 and typed("x", ["integer", "string"]) == "x"
    assert typed("3", ["string", "integer"]) == "3"
    assert value_json("3.5", {"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "null"}]}) == "3.5"
    assert value_json("x", {"anyOf": [{"type": "boolean"}, {"type": "string"}]}) == '"x"'
    assert value_json("x", {"oneOf": [{"type": "integer"}, 7]}) == '"x"'


def test_half_a_surrogate_pair_stays_escaped() -> None:
    assert value_json('["\\ud83d"]', {"type": "array"}) == '["\\ud83d"]'
    assert to_json("é") == '"é"'


def test_tool_schemas_reads_both_forms_and_skips_the_unreadable() -> None:
    inner = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}
    assert tool_schemas([{"type": "function", "function": inner}]) == {"f": {"a": {"type": "integer"}}}
    assert tool_schemas([inner]) == tool_schemas([{"function": inner}])
    assert tool_schemas([{"type": "web_search"}, 3, {"function": {"name": "g", "parameters": None}}]) == {"g": {}}
    assert tool_schemas(None) == {}
