"""POST /v1/messages and count_tokens over a scripted engine: what Claude Code sends and reads."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from agens_engine.core import Request
from tests.dialectkit import COUNT_TOKENS, MESSAGES, events_of, joined_message, parse_events
from tests.serverkit import END, in_loop, post, running, says
from tests.textkit import byte_tokens, load_kit

USER: dict[str, Any] = {"role": "user", "content": "hello"}
LOOK = {
    "name": "look",
    "description": "looks",
    "input_schema": {"type": "object", "properties": {"where": {"type": "string"}, "days": {"type": "integer"}}},
}
PARAMETERS = '<parameter=where>\n"Köln"\n</parameter>\n<parameter=days>\n2\n</parameter>\n'
CALL = f"<|call|>\n<function=look>\n{PARAMETERS}</function>\n<|/call|>"
ARGUMENTS = {"where": '"Köln"', "days": 2}
THINK = {"thinking": {"type": "adaptive"}}


async def send(client: Any, **fields: Any) -> tuple[int, Any]:
    return await post(client, MESSAGES, {"max_tokens": 200, "messages": [USER], **fields})


def shape(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs between two of the same."""
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**{key: value for key, value in message.items() if key not in ("id", "timings")}, "content": content}


def prompt_of(request: Request) -> str:
    return load_kit()[0].decode(request.prompt_ids)


@pytest.mark.parametrize("per_step", [1, 2, 3, 5, 64])
def test_A2_whole_and_streamed_answers_say_the_same_and_partial_json_parses(per_step: int) -> None:
    async def go() -> None:
        said = f"hm, hm<|/think|>Let me look 🦊.\n{CALL}\n{CALL}{END}"
        body = {"max_tokens": 400, "messages": [USER], "tools": [LOOK], **THINK}
        async with running(says(said, per_step)) as (client, _):
            status, whole = await post(client, MESSAGES, body)
            events = await events_of(client, MESSAGES, body)
        assert status == 200, whole
        assert shape(joined_message(events)) == shape(whole)
        thought, text, first, second = whole["content"]
        assert thought["type"] == "thinking" and thought["thinking"] == "hm, hm" and thought["signature"]
        assert text["type"] == "text" and text["text"].startswith("Let me look 🦊.")
        assert [(b["type"], b["name"], b["input"]) for b in (first, second)] == [("tool_use", "look", ARGUMENTS)] * 2
        assert first["id"] != second["id"]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
        assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "fake")
        assert [event["type"] for event in events[:2]] == ["message_start", "ping"]

    in_loop(go)


@pytest.mark.parametrize("first", range(1, 40, 3))
def test_A2_name_and_first_argument_in_one_step(first: int) -> None:
    """Every way in which the call's head and its first argument can share a step."""

    def script(request: Request) -> list[list[int]]:
        ids = [token for step in says(f"{CALL}{END}")(request) for token in step]
        return [ids[:first], ids[first : first + 40], ids[first + 40 :]]

    async def go() -> None:
        async with running(script) as (client, _):
            body = {"max_tokens": 400, "messages": [USER], "tools": [LOOK]}
            message = joined_message(await events_of(client, MESSAGES, body))
        assert [block["input"] for block in message["content"]] == [ARGUMENTS]

    in_loop(go)


def test_call_without_arguments_has_an_empty_object_as_input() -> None:
    async def go() -> None:
        async with running(says(f"<|call|>\n<function=look>\n</function>\n<|/call|>{END}")) as (client, _):
            body = {"max_tokens": 400, "messages": [USER], "tools": [LOOK]}
            assert joined_message(await events_of(client, MESSAGES, body))["content"][0]["input"] == {}
            _, whole = await post(client, MESSAGES, body)
        assert whole["content"][0]["input"] == {}

    in_loop(go)


def test_usage_tells_cached_and_new_input_apart() -> None:
    async def go() -> None:
        async with running(says(f"a b<|/think|>yes{END}")) as (client, engine):
            _, whole = await send(client, **THINK)
            events = await events_of(client, MESSAGES, {"max_tokens": 9, "messages": [USER], **THINK})
        prompt_tokens = len(engine.requests[0].prompt_ids)
        expected = {
            "input_tokens": prompt_tokens - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 8,
            "output_tokens_details": {"thinking_tokens": 3},
        }
        assert whole["usage"] == joined_message(events)["usage"] == expected
        assert events[0]["message"]["usage"]["input_tokens"] == prompt_tokens

    in_loop(go)


@pytest.mark.parametrize(
    ("fields", "on"),
    [
        ({}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "enabled"}}, True),
        ({"enable_thinking": True}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_thinking_is_on_only_when_asked_for(fields: dict[str, Any], on: bool) -> None:
    async def go() -> None:
        async with running(says(f"x{END}")) as (client, engine):
            status, answer = await send(client, **fields)
        assert status == 200, answer
        last = engine.requests[0].prompt_ids[-1]
        assert last == (load_kit()[0].think_start_id if on else load_kit()[0].think_end_id)
        assert answer["content"][0]["type"] == ("thinking" if on else "text")

    in_loop(go)


def test_blocks_render_like_the_chat_messages_they_stand_for() -> None:
    async def go() -> None:
        calls = [
            {"id": f"t{i}", "type": "function", "function": {"name": "look", "arguments": {"days": i}}} for i in (1, 2)
        ]
        chat = [
            {"role": "system", "content": "Be brief.\nBe kind."},
            {"role": "user", "content": "one two"},
            {"role": "assistant", "content": "Let me look.", "reasoning_content": "hm", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "t1", "content": "it rains"},
            {"role": "tool", "tool_call_id": "t2", "content": ""},
            {"role": "user", "content": "and now?"},
            {"role": "user", "content": "mode changed"},
        ]
        cached = {"cache_control": {"type": "ephemeral"}}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two", **cached}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"days": 1}},
                    {"type": "tool_use", "id": "t2", "name": "look", "input": {"days": 2}, **cached},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": False},  # out of order (case I14)
                    {"type": "text", "text": "and now?"},
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "it rains"}]},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "mode changed"}]},
        ]
        system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind.", **cached}]
        chat_tool = {
            "type": "function",
            "function": {"name": "look", "description": "looks", "parameters": LOOK["input_schema"]},
        }
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            assert (await post(client, "/v1/chat/completions", {"messages": chat, "tools": [chat_tool]}))[0] == 200
            status, answer = await send(client, system=system, messages=messages, tools=[LOOK], **THINK)
        assert status == 200, answer
        assert list(engine.requests[0].prompt_ids) == list(engine.requests[1].prompt_ids)

    in_loop(go)


def test_G15_the_changing_first_line_of_claude_code_never_reaches_the_prompt() -> None:
    async def go() -> None:
        def header(n: int) -> str:
            return f"x-anthropic-billing-header: cc_version=2.1.{n}; cc_entrypoint=cli; cch={n:05x};"

        rest = "You are a coder.\nx-anthropic-billing-header: is a line users may write about"
        systems: list[Any] = [
            [{"type": "text", "text": header(1)}, {"type": "text", "text": rest}],
            [{"type": "text", "text": header(2)}, {"type": "text", "text": rest}],
            f"{header(3)}\n{rest}",
            [{"type": "text", "text": f"{header(4)}\n{rest}"}],
            rest,
        ]
        async with running(says(f"x{END}")) as (client, engine):
            for system in systems:
                assert (await send(client, system=system))[0] == 200
            await send(client, system=[{"type": "text", "text": header(5)}])
            await send(client)
        prompts = [tuple(request.prompt_ids) for request in engine.requests]
        assert len(set(prompts[:5])) == 1
        assert "cch=" not in prompt_of(engine.requests[0]) and "users may write about" in prompt_of(engine.requests[0])
        assert prompts[5] == prompts[6]  # nothing else in it: as if there were no system prompt

    in_loop(go)


def test_stop_reasons() -> None:
    async def go() -> None:
        async with running(says(f"The quick brown fox{END}", 3)) as (client, engine):
            _, ended = await send(client)
            _, limited = await send(client, max_tokens=5)
            _, stopped = await send(client, stop_sequences=["zzz", "own fox"])
            events = await events_of(
                client, MESSAGES, {"max_tokens": 200, "messages": [USER], "stop_sequences": ["zzz", "own fox"]}
            )
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
        assert (limited["stop_reason"], limited["content"][0]["text"]) == ("max_tokens", "The q")
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "own fox")
        assert stopped["content"] == [{"type": "text", "text": "The quick br"}]
        assert shape(joined_message(events)) == shape(stopped)

    in_loop(go)


def test_A10_a_call_cut_by_the_limit_ends_with_max_tokens_and_json_that_parses() -> None:
    async def go() -> None:
        async with running(says(f"{CALL}{END}", 4)) as (client, _):
            for limit in range(4, 90, 7):
                body = {"max_tokens": limit, "messages": [USER], "tools": [LOOK]}
                _, whole = await post(client, MESSAGES, body)
                streamed = joined_message(await events_of(client, MESSAGES, body))
                assert whole["stop_reason"] == "max_tokens" and shape(streamed) == shape(whole)
                assert all(block["input"].items() <= ARGUMENTS.items() for block in whole["content"])

    in_loop(go)


def test_a_last_assistant_message_is_continued() -> None:
    async def go() -> None:
        async with running(says(f" dog{END}")) as (client, engine):
            status, answer = await send(client, messages=[USER, {"role": "assistant", "content": "The lazy"}])
        assert status == 200 and answer["content"] == [{"type": "text", "text": " dog"}]
        assert prompt_of(engine.requests[0]).endswith("The lazy")

    in_loop(go)


def test_fields_reach_the_engine() -> None:
    async def go() -> None:
        async with running(says(f"x{END}")) as (client, engine):
            status, answer = await send(
                client,
                model="fake",
                temperature=0.5,
                top_p=0.9,
                top_k=7,
                max_tokens=11,
                metadata={"user_id": "u"},
                context_management={"edits": []},
                output_config={"effort": "max"},
                seed=3,
            )
        assert status == 200, answer
        sampling = engine.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
        assert engine.requests[0].max_tokens == 11

    in_loop(go)


def test_tools_of_anthropics_servers_are_skipped_and_tool_choice_none_offers_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go() -> None:
        search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
        async with running(says(f"ok{CALL}{END}")) as (client, engine):
            with caplog.at_level(logging.WARNING):
                status, answer = await send(client, tools=[search, LOOK], tool_choice={"type": "auto"})
            _, silent = await send(client, tools=[LOOK], tool_choice={"type": "none"})
        assert status == 200 and answer["stop_reason"] == "tool_use" and "web_search" in caplog.text
        assert '"look"' in prompt_of(engine.requests[0]) and "web_search" not in prompt_of(engine.requests[0])
        assert '"look"' not in prompt_of(engine.requests[1])
        assert silent["content"] == [{"type": "text", "text": "ok"}] and silent["stop_reason"] == "end_turn"

    in_loop(go)


@pytest.mark.parametrize(
    ("mine", "chats"),
    [
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)
def test_forced_tools_are_treated_as_the_chat_route_treats_them(mine: Any, chats: Any) -> None:
    async def go() -> None:
        tool = {"type": "function", "function": {"name": "look", "parameters": LOOK["input_schema"]}}
        async with running(says(f"{CALL}{END}")) as (client, _):
            status, _ = await send(client, tools=[LOOK], tool_choice=mine)
            body = {"messages": [USER], "tools": [tool], "tool_choice": chats, "enable_thinking": False}
            assert (await post(client, "/v1/chat/completions", body))[0] == status

    in_loop(go)


def test_count_tokens_is_the_length_of_the_prompt() -> None:
    async def go() -> None:
        body = {"system": "Be brief.", "messages": [USER], "tools": [LOOK], "model": "fake", **THINK}
        async with running(says(f"x{END}")) as (client, engine):
            status, counted = await post(client, COUNT_TOKENS, body)
            await post(client, MESSAGES, {**body, "max_tokens": 5})
            refused, error = await post(client, COUNT_TOKENS, {"messages": []})
        assert status == 200 and counted == {"input_tokens": len(engine.requests[0].prompt_ids)}
        assert refused == 400 and error["type"] == "error" and "messages" in error["error"]["message"]

    in_loop(go)


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (block(type="document"), "messages[0].content[0].type"),
    (block(type="text"), "messages[0].content[0].text"),
    (block(type="tool_result", tool_use_id="t9", content="x"), "messages[0].content[0].tool_call_id"),
    (block(type="tool_result", content="x"), "messages[0].content[0].tool_use_id"),
    (block(type="tool_result", tool_use_id="t", content=5), "messages[0].content[0].content"),
    (block(type="image", source={"type": "file"}), "messages[0].content[0].source.type"),
    (block(type="image", source={"type": "base64", "media_type": "image/png", "data": "AA=="}), "--images on"),
    ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]}, "content[0].name"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"description": "nameless"}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": "warm"}, "temperature"),
    ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"properties": {"a": {"type": "thing"}}}}}},
        "output_config.format.schema.properties.a",
    ),
]


def test_wrong_fields_are_refused_in_this_apis_form_and_names() -> None:
    async def go() -> None:
        async with running(says(f"x{END}")) as (client, engine):
            for body, expected in ERRORS:
                for stream in (False, True):
                    status, answer = await send(client, **body, stream=stream)
                    assert status == 400, (body, answer)
                    assert answer["type"] == "error" and set(answer) == {"type", "error"}
                    assert set(answer["error"]) == {"type", "message"}
                    assert answer["error"]["type"] == "invalid_request_error"
                    assert expected in answer["error"]["message"], (body, answer)
            assert engine.requests == []

    in_loop(go)


def test_errors_of_every_status_have_this_apis_form() -> None:
    async def go() -> None:
        async with running(says(f"x{END}"), max_body_bytes=6000, context_tokens=300) as (client, engine):
            assert (await send(client, model="claude"))[1]["error"]["type"] == "not_found_error"
            status, body = await send(client, messages=[{**USER, "content": "word " * 400}], stream=True)
            assert status == 400 and body["error"]["message"].startswith("prompt is too long: ")
            assert "tokens > 300 maximum" in body["error"]["message"]
            status, body = await post(client, MESSAGES, b"x" * 7000)
            assert status == 413 and body["error"]["type"] == "request_too_large"
            status, body = await post(client, MESSAGES, b'{"temperature": NaN}')
            assert status == 400 and "NaN" in body["error"]["message"]
            async with client.get(MESSAGES) as response:
                assert response.status == 405 and (await response.json())["type"] == "error"
            engine.fail_token = load_kit()[0].id_of("<|agens_start|>")
            status, body = await send(client)
            assert status == 500 and body["error"]["type"] == "api_error"
            async with client.post(MESSAGES, json={"messages": [USER], "stream": True}) as response:
                assert response.status == 200
                last = parse_events(await response.read())[-1]
            assert last["type"] == "error" and last["error"]["type"] == "api_error"
            assert "device lost" not in json.dumps(last)

    in_loop(go)


def test_x_api_key_is_accepted_and_anthropic_headers_are_ignored() -> None:
    async def go() -> None:
        async with running(says(f"x{END}"), api_key="secret") as (client, _):
            for headers, expected in [
                ({}, 401),
                ({"x-api-key": "wrong"}, 401),
                ({"x-api-key": "secret", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}, 200),
                ({"x-api-key": "placeholder", "Authorization": "Bearer secret"}, 200),
                ({"x-api-key": "secret", "Authorization": "Bearer other"}, 200),
            ]:
                status, body = await post(client, f"{MESSAGES}?beta=true", {"messages": [USER]}, headers=headers)
                assert status == expected, (headers, body)
                if expected == 401:
                    assert body["error"]["type"] == "authentication_error"

    in_loop(go)


def test_pings_keep_the_stream_alive_during_a_long_prefill() -> None:
    async def go() -> None:
        async with running(says(f"x{END}"), keep_alive_seconds=0.02) as (client, engine):
            engine.prefill_open.clear()
            task = asyncio.create_task(events_of(client, MESSAGES, {"max_tokens": 5, "messages": [USER]}))
            while not engine.busy():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.1)
            engine.prefill_open.set()
            events = await task
        assert sum(event["type"] == "ping" for event in events) >= 3
        assert joined_message(events)["content"] == [{"type": "text", "text": "x"}]

    in_loop(go)


@pytest.mark.parametrize("path", [MESSAGES, "/v1/responses"])
@pytest.mark.parametrize("streamed", [True, False])
def test_E1_client_gone_frees_the_seat(path: str, streamed: bool) -> None:
    async def go() -> None:
        async with running(lambda request: [byte_tokens(load_kit()[0], "a")], context_tokens=10**7) as (client, engine):
            body = {"messages": [USER], "input": "x", "max_tokens": 10**6, "stream": streamed}
            task = asyncio.create_task(client.post(path, json=body))
            while engine.num_steps < 5:
                await asyncio.sleep(0.005)
            if streamed:
                (await task).close()
            else:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            while engine.busy():
                await asyncio.sleep(0.005)
            assert engine.aborted == [engine.requests[0].request_id]

    in_loop(go)
