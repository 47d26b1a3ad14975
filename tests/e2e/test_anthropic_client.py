"""The `anthropic` Python package against `agens serve` with the embedded model: what Claude Code does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic, BadRequestError, NotFoundError

from tests.e2e.conftest import Server

WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "name of the city"}},
        "required": ["city"],
    },
}
SUM: Any = [{"role": "user", "content": "What is 14 + 5?"}]
THINK: Any = {"type": "enabled", "budget_tokens": 1024}
GREEDY: dict[str, Any] = {"model": "nano", "max_tokens": 400, "extra_body": {"temperature": 0}}


@pytest.fixture
def nano(nano_server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=nano_server.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_create_thinks_only_when_asked(nano: Anthropic) -> None:
    plain = nano.messages.create(messages=SUM, **GREEDY)
    assert [block.type for block in plain.content] == ["text"] and plain.stop_reason == "end_turn"
    deep = nano.messages.create(messages=SUM, thinking=THINK, **GREEDY)
    thought, text = deep.content
    assert thought.type == "thinking" and "14" in thought.thinking and thought.signature
    assert text.type == "text" and text.text and "<|" not in text.text
    details = deep.usage.output_tokens_details
    assert details is not None and 0 < details.thinking_tokens < deep.usage.output_tokens


def test_stream_is_understood_and_says_what_create_says(nano: Anthropic) -> None:
    fields: dict[str, Any] = {**GREEDY, "messages": SUM, "thinking": THINK, "system": "You are Agens nano by Blockway."}
    whole = nano.messages.create(**fields)
    with nano.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert text == final.content[-1].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_round_trip(nano: Anthropic, streamed: bool) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields: dict[str, Any] = {**GREEDY, "tools": [WEATHER], "thinking": THINK}
    if streamed:
        with nano.messages.stream(messages=messages, **fields) as stream:
            first = stream.get_final_message()
    else:
        first = nano.messages.create(messages=messages, **fields)
    call = first.content[-1]
    assert first.stop_reason == "tool_use" and call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": result}]
    second = nano.messages.create(messages=messages, **fields)
    assert second.stop_reason == "end_turn" and second.content[-1].type == "text"
    assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) > first.usage.input_tokens


def test_count_tokens_agrees_with_the_usage(nano: Anthropic) -> None:
    counted = nano.messages.count_tokens(model="nano", messages=SUM, tools=[WEATHER], system="Be brief.")
    answer = nano.messages.create(messages=SUM, tools=[WEATHER], system="Be brief.", **{**GREEDY, "max_tokens": 1})
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert answer.stop_reason == "max_tokens"


def test_stop_sequence_and_errors(nano: Anthropic, nano_server: Server) -> None:
    whole = nano.messages.create(messages=SUM, **GREEDY)
    text: str = whole.content[0].text  # type: ignore[union-attr]
    cut = nano.messages.create(messages=SUM, stop_sequences=[text[2:4]], **GREEDY)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", text[2:4])
    assert "".join(block.text for block in cut.content if block.type == "text") == text[: text.index(text[2:4])]
    with pytest.raises(NotFoundError, match="use 'nano'"):
        nano.messages.create(messages=SUM, **{**GREEDY, "model": "claude"})
    context = httpx2.get(f"{nano_server.url}/props").json()["context_length"]
    with pytest.raises(BadRequestError, match=f"prompt is too long: [0-9]+ tokens > {context} maximum"):
        nano.messages.create(messages=[{"role": "user", "content": "word " * context}], **GREEDY)


def test_E1_leaving_a_stream_frees_the_seat(nano: Anthropic, nano_server: Server) -> None:
    endless: dict[str, Any] = {**GREEDY, "max_tokens": 100_000, "extra_body": {"temperature": 0, "ignore_eos": True}}
    with nano.messages.stream(messages=SUM, **endless) as stream:
        assert next(iter(stream)).type == "message_start"
    while True:
        engine = httpx2.get(f"{nano_server.url}/health").json()["engine"]
        if engine["running"] == engine["waiting"] == 0:
            break
        time.sleep(0.05)  # a request that went on would run into the test's time limit
