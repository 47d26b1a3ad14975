"""The `openai` Python package's responses API against `agens serve` with the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.e2e.conftest import Server

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "name of the city"}},
        "required": ["city"],
    },
    "strict": False,
}
GREEDY: dict[str, Any] = {"model": "nano", "temperature": 0, "max_output_tokens": 400}


@pytest.fixture
def nano(nano_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{nano_server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_create_thinks_and_answers(nano: OpenAI) -> None:
    answer = nano.responses.create(input="What is 14 + 5?", metadata={"run": "7"}, **GREEDY)
    assert answer.status == "completed" and answer.metadata == {"run": "7"}
    thought, message = answer.output
    assert thought.type == "reasoning" and thought.content and "14" in thought.content[0].text
    assert message.type == "message" and answer.output_text and "<|" not in answer.output_text
    usage = answer.usage
    assert usage is not None and 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_stream_is_understood_and_says_what_create_says(nano: OpenAI) -> None:
    whole = nano.responses.create(input="What is 14 + 5?", **GREEDY)
    text, thought, kinds = "", "", []
    with nano.responses.stream(input="What is 14 + 5?", **GREEDY) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.reasoning_text.delta":
                thought += event.delta
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert final.output[0].type == "reasoning" and final.output[0].content
    assert thought == final.output[0].content[0].text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert whole.usage is not None and final.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_round_trip(nano: OpenAI, streamed: bool) -> None:
    """The client's own items go back as they came, with the output of the tool behind them."""
    items: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields: dict[str, Any] = {**GREEDY, "tools": [WEATHER], "include": ["reasoning.encrypted_content"], "store": False}
    if streamed:
        with nano.responses.stream(input=items, **fields) as stream:
            first = stream.until_done().get_final_response()
    else:
        first = nano.responses.create(input=items, **fields)
    call = first.output[-1]
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Paris"}
    items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    output = [{"type": "input_text", "text": "sunny, "}, {"type": "input_text", "text": "21 degrees"}]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    second = nano.responses.create(input=items, **fields)
    assert second.status == "completed" and second.output_text
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens - 4


def test_limit_gives_an_incomplete_response(nano: OpenAI) -> None:
    answer = nano.responses.create(input="What is 14 + 5?", **{**GREEDY, "max_output_tokens": 3})
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_errors_name_the_field(nano: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="not stored here") as caught:
        nano.responses.create(input="x", previous_response_id="resp_1", **GREEDY)
    assert caught.value.param == "previous_response_id"
    with pytest.raises(BadRequestError) as caught:
        nano.responses.create(input=[{"role": "user", "content": [{"type": "input_file"}]}], **GREEDY)
    assert caught.value.param == "input[0].content[0].type"
