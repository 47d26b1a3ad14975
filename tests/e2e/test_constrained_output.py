"""Grammars, forced calls and reasoning budgets with the embedded model, with drafts and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from agens_engine.commands.model import one_chat, opened, run_request
from agens_engine.core import FinishReason, ReasoningEnd, Request, StepEvent
from agens_engine.server.host import LoadedModel
from agens_engine.settings import Settings
from agens_engine.speculate.context_copy import ContextCopy
from agens_engine.text.output import Answer, OutputParser, collect

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "address": {"$ref": "#/$defs/address"},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "maxLength": 5}},
            "additionalProperties": False,
        }
    },
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
MAIL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "send_mail",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
                "body": {"type": "string", "minLength": 3, "maxLength": 40},
            },
            "required": ["to"],
        },
    },
}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.fixture(scope="module")
def nano() -> Iterator[LoadedModel]:
    settings = Settings.build({"model": "nano", "context_tokens": 1024, "draft_sources": ContextCopy.name})
    with opened(settings) as model:
        yield model


def run(nano: LoadedModel, ask: str, **fields: Any) -> tuple[Answer, StepEvent, Request]:
    options = {"temperature": 0, "max_tokens": 120, **fields}
    request = one_chat(nano, [{"role": "user", "content": ask}], options)
    events = list(run_request(nano.engine, request))
    return collect(delta for event in events for delta in event.deltas), events[-1], request


CASES: list[tuple[str, dict[str, Any]]] = [
    ("Return JSON: name: Kira and age: 85.", {"response_format": SCHEMA_FORMAT}),
    ("Give me a JSON list of two objects with name Kira and Bekro.", {"response_format": {"type": "json_object"}}),
    ("How much is 92 * 3?", {"response_format": SCHEMA_FORMAT, "enable_thinking": False}),
    ("What is the weather in Paris?", {"tools": [WEATHER, MAIL], "tool_choice": "required"}),
    ("Say hello", {"tools": [WEATHER, MAIL], "tool_choice": {"type": "function", "function": {"name": "send_mail"}}}),
    ("Return JSON: name: Kira and age: 85.", {"tools": [WEATHER], "response_format": SCHEMA_FORMAT}),
    ("Repeat this: 2026-12-01", {"structured_outputs": {"regex": r"\d{4}-\d{2}-\d{2}"}}),
    ("Repeat this: moon moon moon moon", {"guided_choice": ["moon moon", "moon sun"]}),
    ("How much is 92 * 3?", {"reasoning_budget": 6}),
    ("How much is 92 * 3?", {"reasoning_budget": 12, "reasoning_budget_soft_bias": 4.0}),
    ("What is the weather in Paris?", {"tools": [WEATHER], "parallel_tool_calls": False, "enable_thinking": False}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_drafts_change_nothing(nano: LoadedModel, case: int) -> None:
    ask, fields = CASES[case]
    plain, end, _ = run(nano, ask, **fields, speculation=False)
    drafted, drafted_end, _ = run(nano, ask, **fields)
    for answer in (plain, drafted):
        for call in answer.tool_calls:
            call["id"] = "fresh each time"
    assert drafted == plain
    assert (drafted_end.finish_reason, drafted_end.completion_tokens) == (end.finish_reason, end.completion_tokens)
    assert drafted_end.reasoning == end.reasoning


def test_drafts_were_made_and_accepted_under_a_grammar(nano: LoadedModel) -> None:
    """Otherwise the test above shows nothing."""
    ask = 'Repeat this: {"name": "Kira", "age": 85, "tags": ["red", "green", "red"], "address": {"zip": "12345"}}'
    _, end, _ = run(nano, ask, response_format=SCHEMA_FORMAT, enable_thinking=False)
    assert end.timings is not None
    count = end.timings.sources[ContextCopy.name]
    assert count.proposed > 0 and count.accepted > 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("thinking", [True, False])
def test_json_schema_answers_validate(nano: LoadedModel, seed: int, thinking: bool) -> None:
    answer, end, _ = run(
        nano,
        "Return JSON: name: Kira and age: 85.",
        response_format=SCHEMA_FORMAT,
        temperature=1.0,
        seed=seed,
        enable_thinking=thinking,
        reasoning_budget=30,
        max_tokens=300,
    )
    assert end.finish_reason is FinishReason.STOP, answer
    assert answer.content is not None
    jsonschema.validate(json.loads(answer.content), PERSON)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "send_mail"}}])
@pytest.mark.parametrize("seed", [0, 1])
def test_forced_calls_are_calls_with_valid_arguments(nano: LoadedModel, choice: Any, seed: int) -> None:
    answer, end, _ = run(
        nano,
        "Tell me a joke about the moon.",
        tools=[WEATHER, MAIL],
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0.8,
        seed=seed,
        reasoning_budget=40,
        max_tokens=300,
    )
    assert end.finish_reason is FinishReason.STOP, answer
    assert answer.content is None
    [call] = answer.tool_calls
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, MAIL)}
    if isinstance(choice, dict):
        assert call["function"]["name"] == "send_mail"
    jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])


@pytest.mark.parametrize("seed", range(4))
def test_D1_tools_and_a_schema_give_a_call_or_a_schema_answer(nano: LoadedModel, seed: int) -> None:
    answer, end, _ = run(
        nano,
        ["What is the weather in Paris?", "Return JSON: name: Kira and age: 85."][seed % 2],
        tools=[WEATHER],
        response_format=SCHEMA_FORMAT,
        temperature=0.8,
        seed=seed,
        reasoning_budget=40,
        max_tokens=300,
    )
    assert end.finish_reason is FinishReason.STOP, answer
    assert (answer.content is None) != (not answer.tool_calls)
    if answer.content is not None:
        jsonschema.validate(json.loads(answer.content), PERSON)
    for call in answer.tool_calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])


@pytest.mark.parametrize("budget", [1, 5, 64])
def test_a_budget_bounds_the_thought_and_an_answer_follows(nano: LoadedModel, budget: int) -> None:
    # a bias against closing, so that the thought would go on for ever
    close = str(nano.text.tokenizer.think_end_id)
    answer, end, request = run(
        nano,
        "How much is 92 * 3?",
        reasoning_budget=budget,
        logit_bias={close: -100, **{str(i): -100 for i in nano.text.tokenizer.end_token_ids}},
        repetition_guard=False,
        max_tokens=budget + 30,
    )
    assert isinstance(request.watch, OutputParser)
    assert request.watch.num_reasoning_tokens == budget
    assert end.reasoning is not None and end.reasoning.ended_by is ReasoningEnd.BUDGET
    assert answer.content


def test_the_guard_ends_a_thought_in_circles(nano: LoadedModel) -> None:
    close = str(nano.text.tokenizer.think_end_id)
    ends = {str(i): -100 for i in nano.text.tokenizer.end_token_ids}
    word = nano.text.tokenizer.encode("moon", allow_control=False)[0]
    fields: dict[str, Any] = {"logit_bias": {close: -100, str(word): 100, **ends}, "max_tokens": 100}
    _, end, _ = run(nano, "How much is 92 * 3?", **fields)
    assert end.reasoning is not None and end.reasoning.ended_by is ReasoningEnd.REPETITION
    assert end.reasoning.num_tokens == 32  # one token, over and over: four segments of eight
    _, end, _ = run(nano, "How much is 92 * 3?", **fields, repetition_guard=False)
    assert end.reasoning is not None and end.reasoning.ended_by is None
