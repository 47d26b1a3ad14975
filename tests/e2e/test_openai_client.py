"""The `openai` Python package against `agens serve`: chat, streaming, tools, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.e2e.conftest import Server

USER: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "name of the city"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def tiny(tiny_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def nano(nano_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{nano_server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_models_and_chat(tiny: OpenAI) -> None:
    (model,) = tiny.models.list().data
    assert tiny.models.retrieve(model.id).id == model.id == "tiny"
    answer = tiny.chat.completions.create(model=model.id, messages=USER, max_tokens=8, seed=1)
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 8
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 0


def test_stream_joins_to_the_whole_answer_with_usage_last(tiny: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 20, "temperature": 0}
    fields["extra_body"] = {"ignore_eos": True, "enable_thinking": False}
    whole = tiny.chat.completions.create(**fields)
    text, usage = "", None
    with tiny.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            assert usage is None, "a chunk after the usage chunk"
            usage = chunk.usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None and usage == whole.usage


def test_completions_with_token_ids_and_logprobs(tiny: OpenAI) -> None:
    answer = tiny.completions.create(model="tiny", prompt=[[5, 6, 7], [8]], max_tokens=3, logprobs=2, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and len(logprobs.token_logprobs) <= 3
    with tiny.completions.create(model="tiny", prompt="beta", max_tokens=3, stream=True) as stream:
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] in ("stop", "length")


def test_errors_arrive_as_the_clients_own_types(tiny: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="use 'tiny'"):
        tiny.chat.completions.create(model="gpt-9", messages=USER)
    with pytest.raises(BadRequestError, match="messages") as caught:
        tiny.chat.completions.create(model="tiny", messages=[])
    assert caught.value.param == "messages"
    with pytest.raises(BadRequestError, match="holds 1024"), tiny.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "word " * 2000}], stream=True
    ):
        pass


def test_tools_declared_and_history_with_calls_are_accepted(tiny: OpenAI) -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    history: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer = tiny.chat.completions.create(model="tiny", messages=history, tools=[WEATHER], max_tokens=4)
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_nano_chats(nano: OpenAI) -> None:
    answer = nano.chat.completions.create(model="nano", messages=USER, max_tokens=400, temperature=0)
    message = answer.choices[0].message
    assert message.content and message.content.strip()


def test_nano_thinks_before_it_computes(nano: OpenAI) -> None:
    question: Any = [{"role": "user", "content": "What is 14 + 5?"}]
    choice = nano.chat.completions.create(model="nano", messages=question, max_tokens=400, temperature=0).choices[0]
    assert choice.finish_reason == "stop"
    # whether the number is right is the question of the scorer in scripts/, not of this test
    reasoning, content = getattr(choice.message, "reasoning_content", ""), choice.message.content
    assert "14" in reasoning and content
    assert any(character.isdigit() for character in content)
    assert "<|" not in reasoning + content


@pytest.mark.parametrize("streamed", [False, True])
def test_nano_calls_a_declared_tool(nano: OpenAI, streamed: bool) -> None:
    fields: dict[str, Any] = {
        "model": "nano",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [WEATHER],
        "tool_choice": "auto",
        "temperature": 0,
        "max_tokens": 400,
    }
    if not streamed:
        choice = nano.chat.completions.create(**fields).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        function: Any = choice.message.tool_calls[0]
        name, arguments = function.function.name, function.function.arguments
    else:
        name, arguments = "", ""
        with nano.chat.completions.create(**fields, stream=True) as stream:
            for chunk in stream:
                for piece in chunk.choices[0].delta.tool_calls or []:
                    assert piece.function is not None
                    name += piece.function.name or ""
                    arguments += piece.function.arguments or ""
    assert name == "get_weather"
    assert json.loads(arguments) == {"city": "Paris"}
