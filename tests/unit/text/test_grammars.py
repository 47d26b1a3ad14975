"""Grammars over text: what the call form and the answer forms accept, and where a bad schema is named."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from agens_engine.core import FinishReason
from agens_engine.errors import RequestError
from agens_engine.text.call_grammar import CallPlan
from agens_engine.text.grammars import AnswerFormat, GrammarCompiler
from agens_engine.text.output import OutputOptions, OutputParser, collect
from tests.textkit import load_kit, mixed_tokens

TOKENIZER = load_kit()[0]
COMPILER = GrammarCompiler(TOKENIZER)
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
ANSWER = AnswerFormat("json", {**POINT, "additionalProperties": False}, "response_format.json_schema.schema")


def tool(name: str, properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "$defs": {"Point": POINT},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def call(name: str, **values: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<|call|>\n<function={name}>\n{body}</function>\n<|/call|>"


def accepts(answer: AnswerFormat | None, plan: CallPlan | None, text: str) -> bool:
    """Whether the grammar lets exactly this text through, and then the end."""
    grammar = COMPILER.compile(answer, plan)
    assert grammar is not None
    matcher, ids = grammar.matcher(), mixed_tokens(TOKENIZER, text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


VALUES: list[tuple[dict[str, Any], str, Any]] = [
    ({"type": "string"}, "Paris", "Paris"),
    ({"type": "string"}, "", ""),
    ({"type": "string"}, "two\nlines <b> 🦊", "two\nlines <b> 🦊"),
    ({"type": "string"}, "nullify", "nullify"),
    ({"type": "string", "enum": ["celsius", 'a "b" é']}, 'a "b" é', 'a "b" é'),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "🦊🦊🦊", "🦊🦊🦊"),
    ({"const": "on"}, "on", "on"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "integer", "minimum": 3}, "12", 12),
    ({"type": "int"}, "-4", -4),
    ({"type": "number"}, "1.5", 1.5),
    ({"type": "boolean"}, "true", True),
    ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
    ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
    ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
    ({"allOf": [{"$ref": "#/$defs/Point"}], "description": "where"}, '{"x": 1}', {"x": 1}),
    ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
    ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, "null", None),
    ({}, "anything", "anything"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_a_value_of_its_type_is_allowed_and_read_back(schema: dict[str, Any], text: str, value: Any) -> None:
    function = tool("f", {"v": schema})
    said = call("f", v=text)
    assert accepts(None, CallPlan((function,), required=True), said)
    parser = OutputParser(TOKENIZER, OutputOptions(tools=[function]))
    deltas = [delta for token in mixed_tokens(TOKENIZER, said) for delta in parser.push(token)[0]]
    [parsed] = collect([*deltas, *parser.finish(FinishReason.STOP)]).tool_calls
    assert json.loads(parsed["function"]["arguments"]) == {"v": value}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, "null"),  # would be read as null
        ({"type": "string"}, "a</parameter>b"),
        ({"type": "string"}, "a<parameter=b"),
        ({"type": "string"}, "a</function>"),
        ({"type": "string", "enum": ["celsius"]}, "kelvin"),
        ({"type": "string", "maxLength": 3}, "four"),
        ({"type": "string", "minLength": 3}, "ab"),
        ({"type": "integer"}, "1.5"),
        ({"type": "integer", "minimum": 3}, "2"),
        ({"type": "integer"}, " 5"),
        ({"type": "boolean"}, "yes"),
        ({"type": "array", "items": {"type": "integer"}}, '["a"]'),
        ({"$ref": "#/$defs/Point"}, '{"x": "1"}'),
        ({"$ref": "#/$defs/Point"}, "null"),
    ],
)
def test_a_value_of_another_type_is_not(schema: dict[str, Any], text: str) -> None:
    assert not accepts(None, CallPlan((tool("f", {"v": schema}),), required=True), call("f", v=text))


TWO = (tool("get", {"a": {"type": "string"}, "b": {"type": "integer"}}, ["a"]), tool("stop", {}))


@pytest.mark.parametrize(
    ("text", "required", "one", "auto_one"),
    [
        (call("get", a="x"), True, True, True),
        (call("get", a="x", b="1"), True, True, True),
        (call("stop"), True, True, True),
        ("\n\n" + call("stop"), True, True, True),
        (call("get", b="1"), False, False, False),  # a is required
        (call("other"), False, False, False),
        (call("stop", a="x"), False, False, False),
        (call("stop") + call("get", a="x"), True, False, False),
        (call("stop") + "\n" + call("get", a="x"), True, False, False),
        (call("stop").replace("</function>\n", "</function>\n<function=stop>\n</function>\n"), True, False, False),
        ("some text", False, False, True),
        ("", False, False, True),
        ("some text" + call("stop"), False, False, True),
        (call("stop") + "some text", False, False, False),
    ],
)
def test_who_may_call_what(text: str, required: bool, one: bool, auto_one: bool) -> None:
    assert accepts(None, CallPlan(TWO, required=True), text) is required
    assert accepts(None, CallPlan(TWO, required=True, parallel=False), text) is one
    assert accepts(None, CallPlan(TWO, required=False, parallel=False), text) is auto_one


def test_strict_tools_leave_the_text_free_and_hold_every_call() -> None:
    plan = CallPlan(TWO, required=False)
    assert accepts(None, plan, "a" + call("stop") + "b" + call("get", a="x") + "c")
    assert not accepts(None, plan, "a" + call("get", b="1"))


def test_D1_a_call_or_a_schema_answer_and_with_required_only_calls() -> None:
    for required in (False, True):
        plan = CallPlan(TWO, required=required)
        assert accepts(ANSWER, plan, call("get", a="x"))
        assert accepts(ANSWER, plan, '{"x": 1}') is not required
        assert not accepts(ANSWER, plan, "hello")
        assert not accepts(ANSWER, plan, '{"x": 1}' + call("stop"))


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (AnswerFormat("regex", r"\d+/[a-z]", "p"), ["12/a"], ["12", "12/ab", "/a"]),
        (AnswerFormat("choice", ["beta", 'a "b" \\ é\n'], "p"), ["beta", 'a "b" \\ é\n'], ["bet", "betab"]),
        (AnswerFormat("grammar", 'start: "a" start "b" | "c"', "p"), ["c", "aacbb"], ["aacb", ""]),
        (AnswerFormat("grammar", 'root ::= "x" [0-9]+', "p"), ["x12"], ["x", "12"]),
        (AnswerFormat("json", {"type": "object"}, "p"), ["{}", '{"a": [1, "b"]}'], ["[]", '{"a":', " {}"]),
        (AnswerFormat("json", {"type": "integer"}, "p"), ["5", "-17"], ["5.5", "05", "x"]),
    ],
)
def test_answer_forms(answer: AnswerFormat, good: list[str], bad: list[str]) -> None:
    for text, expected in itertools.chain(((t, True) for t in good), ((t, False) for t in bad)):
        assert accepts(answer, None, text) is expected, text


def test_control_tokens_are_never_text() -> None:
    grammar = COMPILER.compile(AnswerFormat("regex", ".*", "p"), None)
    assert grammar is not None
    for token in TOKENIZER.control_ids - TOKENIZER.end_token_ids:
        assert grammar.matcher().validate_tokens([token]) == 0


def test_white_space_inside_json_is_bounded() -> None:
    form = AnswerFormat("json", {"type": "array", "items": {"type": "integer"}}, "p")
    assert accepts(form, None, "[\n    1,\n    2\n]") and accepts(form, None, "[1, 2]")
    assert not accepts(form, None, "[1,  2]") and not accepts(form, None, "[1,\n\n2]")


FAULTS: list[tuple[Any, str, str]] = [
    ({"type": "objct"}, "s", "objct"),
    ({"properties": {"a": {"items": {"type": "strin"}}}}, "s.properties.a.items", "strin"),
    ({"anyOf": [{"type": "string"}, {"type": "nope"}]}, "s.anyOf[1]", "nope"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"minimum": "x"}}}, "s.properties.a", "minimum"),
    ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "s.properties.a", "/$defs/none"),
    ({"properties": [1]}, "s", "properties"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "s.properties.a", "uniqueItems"),
    ({"properties": {"a": {"type": "string", "pattern": "("}}}, "s.properties.a", "unclosed"),
]


@pytest.mark.parametrize(("schema", "path", "words"), FAULTS)
def test_a_bad_schema_is_refused_with_its_path(schema: Any, path: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.compile(AnswerFormat("json", schema, "s"), CallPlan(TWO, required=False))
    assert caught.value.param == path
    assert words in str(caught.value) and len(str(caught.value)) < 400


def test_a_schema_that_need_not_be_strict_may_ask_for_more_than_can_be_enforced() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert accepts(AnswerFormat("json", schema, "s", strict=False), None, "[1, 1]")


@pytest.mark.parametrize(
    ("kind", "value"), [("regex", "("), ("regex", "(?=a)b"), ("grammar", "nope"), ("grammar", "start: x")]
)
def test_bad_expressions_are_refused(kind: Any, value: str) -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.compile(AnswerFormat(kind, value, "structured_outputs.here"), None)
    assert caught.value.param == "structured_outputs.here"


def test_a_bad_tool_schema_is_refused_with_its_path() -> None:
    bad = tool("f", {"v": {"type": "object", "properties": {"q": {"type": "foo"}}}})
    with pytest.raises(RequestError) as caught:
        COMPILER.compile(None, CallPlan((TWO[0], bad), required=True))
    assert caught.value.param == "tools.f.parameters.properties.v.properties.q"


@pytest.mark.parametrize("name", ["a>b", "a\nb", " a"])
def test_a_name_that_no_call_can_carry_is_refused(name: str) -> None:
    for bad in (tool(name, {}), tool("f", {name: {"type": "string"}})):
        with pytest.raises(RequestError, match="cannot be written"):
            COMPILER.compile(None, CallPlan((bad,), required=True))


def test_a_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="nested"):
        COMPILER.compile(AnswerFormat("json", schema, "s"), None)


def test_the_same_grammar_is_compiled_once() -> None:
    first = COMPILER.compile(ANSWER, CallPlan(TWO, required=False))
    assert COMPILER.compile(ANSWER, CallPlan(TWO, required=False)) is first
    assert COMPILER.compile(None, None) is None
