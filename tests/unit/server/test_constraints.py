"""Fields that constrain an answer: what reaches the engine, what is refused, what the response says about limits."""

from __future__ import annotations

from typing import Any

import pytest

from agens_engine.core import ReasoningEnd, ReasoningReport, Request, SamplingParams, StepEvent
from agens_engine.server.limits import limits_json
from agens_engine.settings import Settings
from tests.fake_engine import FakeEngine
from tests.serverkit import END, chat, in_loop, joined, post, running, says, stream
from tests.textkit import load_kit, mixed_tokens

TOKENIZER = load_kit()[0]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
CALL = "<|call|>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n<|/call|>"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
BAD_LIST = {"type": "array", "items": {"type": "x"}}
NAMED = {"type": "function", "function": {"name": "f"}}


def accepts(request: Request, text: str) -> bool:
    assert request.grammar is not None
    matcher, ids = request.grammar.matcher(), mixed_tokens(TOKENIZER, text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


async def sent(client: Any, engine: FakeEngine, path: str = "", **fields: Any) -> Request:
    """What the engine got for these fields."""
    status, body = await (post(client, path, fields) if path else chat(client, **fields))
    assert status == 200, body
    return engine.requests[-1]


FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": SCHEMA_FORMAT}, ['{"a": 1}'], ["{}", CALL]),
    ({"response_format": {"type": "json_object"}}, ['{"b": []}'], ["[]"]),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ['{"a": 1}'], ["{}"]),
    ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 1}'], ["{}"]),
    ({"structured_outputs": {"json": '{"type": "integer"}'}}, ["5"], ["x"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["5"]),
    ({"structured_outputs": {"regex": "[ab]{2}", "structural_tag": None}}, ["ab"], ["a"]),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ["no"], ["maybe"]),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, ["x"], ["y"]),
    ({"guided_json": SCHEMA}, ['{"a": 1}'], ["{}"]),
    ({"guided_regex": "[ab]{2}"}, ["ab"], ["a"]),
    ({"guided_choice": ["yes", "no"]}, ["no"], ["maybe"]),
    ({"guided_grammar": 'root ::= "x"'}, ["x"], ["y"]),
    ({"json_schema": SCHEMA}, ['{"a": 1}'], ["{}"]),
    ({"grammar": 'root ::= "x"'}, ["x"], ["y"]),
]
CALLS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"tool_choice": "required"}, [CALL, CALL + CALL], ["text", ""]),
    ({"tool_choice": NAMED}, [CALL], ["text", CALL.replace("=f>", "=g>")]),
    ({"tool_choice": {"type": "function", "name": "g"}}, [CALL.replace("=f>", "=g>")], [CALL]),
    ({"parallel_tool_calls": False}, [CALL, "text", "text" + CALL], [CALL + CALL]),
    ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL], [CALL + CALL, "text"]),
    ({"response_format": SCHEMA_FORMAT}, [CALL, '{"a": 1}'], ["text"]),
    ({"response_format": SCHEMA_FORMAT, "tool_choice": "required"}, [CALL], ['{"a": 1}']),
    ({"response_format": SCHEMA_FORMAT, "tool_choice": "none"}, ['{"a": 1}'], [CALL]),
]


def test_every_form_reaches_the_engine_as_its_grammar() -> None:
    async def go() -> None:
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            for fields, good, bad in [*FORMS, *((fields | {"tools": TOOLS}, g, b) for fields, g, b in CALLS)]:
                request = await sent(client, engine, **fields)
                assert [accepts(request, text) for text in good] == [True] * len(good), fields
                assert [accepts(request, text) for text in bad] == [False] * len(bad), fields
                assert request.grammar is not None and request.grammar.end_token_ids == TOKENIZER.end_token_ids

    in_loop(go)


def test_completions_take_the_answer_forms() -> None:
    async def go() -> None:
        async with running(says(f"y{END}")) as (client, engine):
            for fields, good, bad in FORMS:
                request = await sent(client, engine, "/v1/completions", prompt="x", **fields)
                assert accepts(request, good[0]) and not accepts(request, bad[0])

    in_loop(go)


@pytest.mark.parametrize(
    "fields", [{}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {"response_format": {"type": "text"}}]
)
def test_without_a_form_there_is_no_grammar(fields: dict[str, Any]) -> None:
    async def go() -> None:
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            assert (await sent(client, engine, **fields)).grammar is None

    in_loop(go)


def test_a_strict_tool_holds_its_calls_to_the_schema() -> None:
    async def go() -> None:
        strict = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            request = await sent(client, engine, tools=strict)
            assert accepts(request, "text" + CALL + "text")
            assert not accepts(request, CALL.replace("1", "one"))

    in_loop(go)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"type": "x"}}}}}},
        "response_format.json_schema.schema.properties.a",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format.json_schema.schema"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": SCHEMA, "structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"guided_json": {"properties": {"a": {"type": "x"}}}}, "guided_json.properties.a"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_grammar": "nope"}, "guided_grammar"),
    ({"guided_json": SCHEMA, "response_format": SCHEMA_FORMAT}, "guided_json"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (
        {
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": '{"a'}],
            "continue_final_message": True,
            "response_format": SCHEMA_FORMAT,
        },
        "continue_final_message",
    ),
    (
        {
            "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": BAD_LIST}}}}],
            "tool_choice": "required",
        },
        "tools.f.parameters.properties.a.items",
    ),
]


def test_what_makes_no_grammar_is_refused_by_name() -> None:
    async def go() -> None:
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            for fields, param in REFUSED:
                status, body = await chat(client, **fields)
                assert status == 400 and body["error"]["param"] == param, (fields, body)
            assert engine.requests == []

    in_loop(go)


def test_the_answer_ends_with_its_grammar_even_under_ignore_eos() -> None:
    async def go() -> None:
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            free = await sent(client, engine, ignore_eos=True, max_tokens=8)
            held = await sent(client, engine, ignore_eos=True, response_format=SCHEMA_FORMAT)
            assert free.stop_token_ids == frozenset() and held.stop_token_ids == TOKENIZER.end_token_ids

    in_loop(go)


@pytest.mark.parametrize(
    ("default", "fields", "budget"),
    [
        (None, {}, None),
        (None, {"reasoning_budget": 64}, 64),
        (50, {}, 50),
        (50, {"reasoning_budget": 64}, 64),
        (50, {"reasoning_budget": 0}, None),
        (50, {"reasoning_budget": -3}, None),
        (50, {"reasoning_budget": True}, 50),
        (50, {"reasoning_budget": 6.5}, 50),
        (50, {"reasoning_budget": "7"}, 50),
        (0, {}, None),
    ],
)
def test_the_budget_of_the_request_goes_before_the_servers(
    default: int | None, fields: dict[str, Any], budget: int | None
) -> None:
    async def go() -> None:
        async with running(says(f"x<|/think|>y{END}"), reasoning_budget=default) as (client, engine):
            for path, start in (("", fields), ("/v1/completions", {"prompt": "x", **fields})):
                request = await sent(client, engine, path, **start)
                assert request.reasoning is not None and request.reasoning.budget == budget
                assert request.reasoning.think_end_id == TOKENIZER.think_end_id

    in_loop(go)


def test_soft_bias_guard_and_cache_reach_the_engine() -> None:
    async def go() -> None:
        settings: dict[str, Any] = {"reasoning_budget_soft_bias": 1.5, "repetition_guard": False}
        async with running(says(f"x<|/think|>y{END}"), **settings) as (client, engine):
            first = await sent(client, engine)
            fields: dict[str, Any] = {"reasoning_budget_soft_bias": 3, "repetition_guard": True, "cache_prompt": False}
            second = await sent(client, engine, **fields)
        found = [(r.reasoning.soft_bias, r.reasoning.repetition_guard) for r in (first, second) if r.reasoning]
        assert found == [(1.5, False), (3.0, True)]
        assert (first.cache_prompt, second.cache_prompt) == (True, False)

    in_loop(go)


def test_settings_read_the_vendors_variables() -> None:
    vendor = {"VOLUNDR_REASONING_BUDGET": "300", "VOLUNDR_REASONING_BUDGET_SOFT_BIAS": "0.5"}
    read = Settings.build(environ=vendor)
    assert (read.reasoning_budget, read.reasoning_budget_soft_bias) == (300, 0.5)
    assert Settings.build(environ={**vendor, "AGENS_REASONING_BUDGET": "20"}).reasoning_budget == 20
    assert Settings.build(environ={"VOLUNDR_REASONING_BUDGET": ""}).reasoning_budget is None
    assert Settings.build(environ={}).repetition_guard is True


def test_the_response_says_where_the_limit_came_from() -> None:
    async def go() -> None:
        async with running(says(f"x<|/think|>y{END}"), max_output_tokens=100) as (client, _):
            for fields, source, tokens in (
                ({}, "default", 100),
                ({"max_tokens": 7}, "request", 7),
                ({"max_completion_tokens": 9}, "request", 9),
                ({"max_tokens": 100_000}, "context", None),
            ):
                _, body = await chat(client, **fields)
                limits = body["choices"][0]["limits"]
                assert limits["max_tokens_from"] == source and tokens in (None, limits["max_tokens"])
            payloads, _ = await stream(client, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
            assert joined(payloads)["finish"] == "stop"
            assert payloads[-1]["choices"][0]["limits"]["max_tokens_from"] == "default"

    in_loop(go)


def test_the_response_says_what_ended_the_thought() -> None:
    request = Request("r", [1], SamplingParams(), max_tokens=5)
    for ended_by, word in ((ReasoningEnd.REPETITION, "repetition"), (ReasoningEnd.BUDGET, "budget"), (None, None)):
        end = StepEvent("r", reasoning=ReasoningReport(3, ended_by))
        assert limits_json(request, None, 5, end)["reasoning_ended_by"] == word
    assert limits_json(request, None, 5, StepEvent("r"))["reasoning_ended_by"] is None
