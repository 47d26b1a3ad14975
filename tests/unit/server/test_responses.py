"""POST /v1/responses over a scripted engine: items in, items and typed events out, nothing stored."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from agens_engine.core import Request
from tests.dialectkit import RESPONSES, events_of, joined_response
from tests.fake_engine import FakeEngine
from tests.serverkit import END, in_loop, post, running, says
from tests.textkit import load_kit

LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}, "days": {"type": "integer"}}},
}
PARAMETERS = '<parameter=where>\n"Köln"\n</parameter>\n<parameter=days>\n2\n</parameter>\n'
CALL = f"<|call|>\n<function=look>\n{PARAMETERS}</function>\n<|/call|>"
ARGUMENTS = {"where": '"Köln"', "days": 2}


def shape(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two of the same."""
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    return {
        **{key: value for key, value in response.items() if key not in ("id", "created_at", "timings")},
        "output": items,
    }


def prompt_of(request: Request) -> str:
    return load_kit()[0].decode(request.prompt_ids, skip_special=False)


@pytest.mark.parametrize("per_step", [1, 3, 7])
def test_A1_A6_whole_and_streamed_answers_say_the_same_in_items_of_the_order_written(per_step: int) -> None:
    async def go() -> None:
        said = f"hm, hm<|/think|>Let me look 🦊.\n{CALL}\n{CALL}{END}"
        body = {"input": "hello", "tools": [LOOK], "metadata": {"run": "7"}, "instructions": "Be brief."}
        async with running(says(said, per_step)) as (client, _):
            status, whole = await post(client, RESPONSES, body)
            events = await events_of(client, RESPONSES, body)
        assert status == 200
        assert shape(joined_response(events)) == shape(whole)
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
        thought, message, first, second = whole["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "hm, hm"}] and thought["summary"] == []
        assert message["role"] == "assistant" and message["content"][0]["text"].startswith("Let me look 🦊.")
        assert [json.loads(call["arguments"]) for call in (first, second)] == [ARGUMENTS] * 2
        assert first["call_id"] != second["call_id"] and all(item["status"] == "completed" for item in whole["output"])
        assert len({item["id"] for item in whole["output"]}) == 4

    in_loop(go)


def test_response_object_repeats_the_request_and_counts_tokens() -> None:
    async def go() -> None:
        body = {
            "model": "fake",
            "input": "hello",
            "instructions": "Be brief.",
            "metadata": {"run": "7"},
            "max_output_tokens": 50,
            "temperature": 0.5,
            "top_p": 0.9,
            "reasoning": {"effort": "low", "summary": "auto"},
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "store": False,
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "prompt_cache_key": "k",
            "client_metadata": {"a": "b"},
            "include": ["reasoning.encrypted_content"],
        }
        async with running(says(f"a b<|/think|>yes{END}")) as (client, engine):
            status, response = await post(client, RESPONSES, body)
        assert status == 200
        assert response["object"] == "response" and response["id"].startswith("resp_")
        assert response["status"] == "completed" and response["model"] == "fake"
        assert response["error"] is None and response["incomplete_details"] is None
        for key in (
            "instructions",
            "metadata",
            "max_output_tokens",
            "temperature",
            "top_p",
            "tool_choice",
            "reasoning",
        ):
            assert response[key] == body[key], key
        assert response["parallel_tool_calls"] is False and response["store"] is False and response["tools"] == []
        request = engine.requests[0]
        assert (request.max_tokens, request.sampling.temperature, request.sampling.top_p) == (50, 0.5, 0.9)
        prompt_tokens = len(request.prompt_ids)
        assert response["usage"] == {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 3},
            "output_tokens": 8,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": prompt_tokens + 8,
        }
        assert response["timings"]["verify_steps"] == 8

    in_loop(go)


def test_input_items_render_like_the_chat_messages_they_stand_for() -> None:
    async def go() -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"days": 2}'}}
        chat = [
            {"role": "system", "content": "Be brief.\n\nBe kind."},
            {"role": "user", "content": "one two"},
            {"role": "assistant", "content": "Let me look.", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "it rains"},
            {"role": "user", "content": "mode changed"},
            {"role": "user", "content": "and now?"},
        ]
        items: list[dict[str, Any]] = [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "one "}, {"type": "input_text", "text": "two"}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"days": 2}', "namespace": "n"},
            {"type": "function_call_output", "call_id": "c1", "output": "it rains"},
            {"role": "developer", "content": "mode changed"},
            {"role": "user", "content": "and now?"},
        ]
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            assert (await post(client, "/v1/chat/completions", {"messages": chat}))[0] == 200
            status, answer = await post(client, RESPONSES, {"instructions": "Be brief.", "input": items})
        assert status == 200, answer
        assert list(engine.requests[0].prompt_ids) == list(engine.requests[1].prompt_ids)

    in_loop(go)


@pytest.mark.parametrize(
    "output",
    ["rain and wind", [{"type": "input_text", "text": "rain "}, {"type": "output_text", "text": "and wind"}]],
)
def test_I9_function_output_may_be_a_string_or_parts(output: Any) -> None:
    async def go() -> None:
        items = [
            {"role": "user", "content": "hello"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": output},
        ]
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            status, answer = await post(client, RESPONSES, {"input": items})
        assert status == 200, answer
        assert "<|result|>rain and wind<|/result|>" in prompt_of(engine.requests[0])

    in_loop(go)


def test_I10_codex_tools_are_flattened_or_skipped_and_calls_keep_their_namespace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go() -> None:
        tools = [
            {"type": "web_search"},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
            {"type": "namespace", "name": "mcp__sky__", "description": "d", "tools": [LOOK]},
            {"type": "function", "name": "plain", "parameters": {"type": "object", "properties": {}}, "strict": False},
        ]
        said = f"hm<|/think|>{CALL}<|call|>\n<function=plain>\n</function>\n<|/call|>{END}"
        async with running(says(said)) as (client, engine):
            with caplog.at_level(logging.WARNING):
                status, answer = await post(client, RESPONSES, {"input": "hello", "tools": tools})
            events = await events_of(client, RESPONSES, {"input": "hello", "tools": tools})
        assert status == 200, answer
        assert [(item["name"], item.get("namespace")) for item in answer["output"][1:]] == [
            ("look", "mcp__sky__"),
            ("plain", None),
        ]
        assert answer["output"][2]["arguments"] == "{}"
        assert shape(joined_response(events)) == shape(answer)
        prompt = prompt_of(engine.requests[0])
        assert '"look"' in prompt and '"plain"' in prompt and "apply_patch" not in prompt and "web_search" not in prompt
        assert "web_search" in caplog.text and "custom" in caplog.text

    in_loop(go)


def test_history_items_of_foreign_tools_are_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        foreign = [
            {"type": "web_search_call", "id": "ws", "status": "completed"},
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
        ]
        user = {"role": "user", "content": "hello"}
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            with caplog.at_level(logging.WARNING):
                status, _ = await post(client, RESPONSES, {"input": [user, *foreign]})
            await post(client, RESPONSES, {"input": [user]})
        assert status == 200 and "custom_tool_call_output" in caplog.text
        assert list(engine.requests[0].prompt_ids) == list(engine.requests[1].prompt_ids)

    in_loop(go)


def test_thoughts_come_back_through_encrypted_content_so_that_the_prefix_stays_equal() -> None:
    async def go() -> None:
        body: dict[str, Any] = {"input": [USER], "tools": [LOOK]}
        async with running(says(f"deep thought ü<|/think|>{CALL}{END}")) as (client, engine):
            _, plain = await post(client, RESPONSES, body)
            _, answer = await post(client, RESPONSES, {**body, "include": ["reasoning.encrypted_content"]})
            assert "encrypted_content" not in plain["output"][0]
            thought, call = answer["output"]
            # what a client keeps: everything but the text of the thought
            kept = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
            await post(client, RESPONSES, {**body, "input": [*body["input"], kept, call, result]})
            status, error = await post(
                client, RESPONSES, {**body, "input": [{**kept, "encrypted_content": "agens-thought:%%"}]}
            )
            foreign = {**kept, "encrypted_content": "gAAAA-of-another-server"}
            assert (await post(client, RESPONSES, {**body, "input": [*body["input"], foreign]}))[0] == 200
        first, follow_up = list(engine.requests[0].prompt_ids), list(engine.requests[2].prompt_ids)
        assert follow_up[: len(first)] == first
        assert prompt_of(engine.requests[2])[len(prompt_of(engine.requests[0])) :].startswith("deep thought ü")
        assert status == 400 and error["error"]["param"] == "input[0].encrypted_content"

    in_loop(go)


@pytest.mark.parametrize(
    ("effort", "same_as"), [("none", {"enable_thinking": False}), ("minimal", "low"), ("high", "high")]
)
def test_reasoning_effort_reaches_the_template(effort: str, same_as: Any) -> None:
    async def go() -> None:
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            status, body = await post(client, RESPONSES, {"input": "hello", "reasoning": {"effort": effort}})
            assert status == 200, body
            fields = same_as if isinstance(same_as, dict) else {"reasoning_effort": same_as}
            await post(client, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **fields})
        assert list(engine.requests[0].prompt_ids) == list(engine.requests[1].prompt_ids)

    in_loop(go)


@pytest.mark.parametrize("at", [30, 60])
def test_A10_an_answer_cut_by_the_limit_is_incomplete_and_its_call_is_never_done(at: int) -> None:
    async def go() -> None:
        body = {"input": "hello", "tools": [LOOK], "max_output_tokens": at}
        said = f"hm<|/think|>{CALL}{END}" if at == 60 else f"hm<|/think|>{'word ' * 20}{END}"
        async with running(says(said, 4)) as (client, _):
            _, whole = await post(client, RESPONSES, body)
            events = await events_of(client, RESPONSES, body)
        assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
        assert shape(joined_response(events)) == shape(whole)
        kinds = [event["type"] for event in events]
        if at == 60:
            assert "response.function_call_arguments.done" not in kinds
            assert kinds.count("response.output_item.done") == 1
            assert json.loads(whole["output"][1]["arguments"]).items() < ARGUMENTS.items()

    in_loop(go)


def test_an_empty_answer_is_a_completed_response_without_items() -> None:
    async def go() -> None:
        async with running(says(END)) as (client, _):
            _, whole = await post(client, RESPONSES, {"input": "hello"})
            assert joined_response(await events_of(client, RESPONSES, {"input": "hello"}))["output"] == []
        assert whole["status"] == "completed" and whole["output"] == []

    in_loop(go)


def test_a_failure_inside_the_stream_is_a_failed_response() -> None:
    async def go() -> None:
        async with running(says(f"x{END}")) as (client, engine):
            engine.fail_token = load_kit()[0].id_of("<|agens_start|>")
            status, body = await post(client, RESPONSES, {"input": "hello"})
            final = joined_response(await events_of(client, RESPONSES, {"input": "hello"}))
        assert status == 500 and body["error"]["code"] == "generation_failed"
        assert final["status"] == "failed" and final["error"]["code"] == "server_error"
        assert "device lost" not in json.dumps(final)

    in_loop(go)


USER = {"role": "user", "content": "hello"}
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [USER, {"role": "user", "content": 5}]}, "input[1].content"),
    ({"input": [{"role": "assistant", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "telepathy"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "input[1].arguments"),
    ({"input": [USER, {"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[1].name"),
    ({"input": [USER, {"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[1].call_id"),
    ({"input": [USER, {"type": "function_call_output", "call_id": "c9", "output": "x"}]}, "input[1].tool_call_id"),
    ({"input": [USER, {"type": "function_call_output", "call_id": "c9", "output": [3]}]}, "input[1].output[0]"),
    ({"input": [USER, {"type": "function_call_output", "call_id": "c9", "output": {}}]}, "input[1].output"),
    ({"input": "x", "instructions": 5}, "instructions"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "x", "conversation": "conv_1"}, "conversation"),
    ({"input": "x", "store": True}, "store"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "x", "metadata": 5}, "metadata"),
    ({"input": "x", "include": ["message.output_text.logprobs"]}, "include"),
    ({"input": "x", "top_logprobs": 3}, "top_logprobs"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "temperature": 3000}, "temperature"),
    ({"input": "x", "reasoning": 5}, "reasoning"),
    ({"input": "x", "reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "schema": []}}}, "text.format.schema"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}}, "text.format.strict"),
    (
        {
            "input": "x",
            "text": {"format": {"type": "json_schema", "schema": {"properties": {"a": {"type": "thing"}}}}},
        },
        "text.format.schema.properties.a",
    ),
    ({"input": [{"type": "reasoning", "content": "x", "encrypted_content": 5}]}, "input[0].encrypted_content"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"input": "x", "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"input": "x", "stream": "yes"}, "stream"),
]


def test_wrong_fields_are_refused_by_the_names_of_this_api() -> None:
    async def go() -> None:
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            for body, param in ERRORS:
                for stream in ({}, {"stream": True}) if "stream" not in body else ({},):
                    status, answer = await post(client, RESPONSES, {**body, **stream})
                    assert status == 400, (body, answer)
                    assert answer["error"]["param"] == param, (body, answer)
            assert engine.requests == []
            assert (await post(client, RESPONSES, {"input": ""}))[0] == 200  # an empty message, as in chat
            for key in ("previous_response_id", "store"):
                _, answer = await post(client, RESPONSES, {"input": "x", key: True})
                assert "not stored" in answer["error"]["message"]
            async with client.get(f"{RESPONSES}/resp_1") as response:
                assert response.status == 404

    in_loop(go)


def test_tools_nested_too_deeply_are_refused() -> None:
    async def go() -> None:
        tool: dict[str, Any] = LOOK
        for _ in range(400):
            tool = {"type": "namespace", "name": "n", "tools": [tool]}
        async with running(says(f"x<|/think|>y{END}")) as (client, _):
            status, body = await post(client, RESPONSES, {"input": "x", "tools": [tool]})
        assert status in (200, 400), body  # how deep is too deep depends on the interpreter

    in_loop(go)


def test_json_formats_are_treated_as_the_chat_route_treats_them() -> None:
    async def go() -> None:
        schema = {"name": "a", "schema": {"type": "object", "properties": {}}, "strict": True}
        async with running(says(f"x<|/think|>{{}}{END}")) as (client, _):
            for flat, nested in [
                ({"type": "json_object"}, {"type": "json_object"}),
                ({"type": "json_schema", **schema}, {"type": "json_schema", "json_schema": schema}),
            ]:
                mine = await post(client, RESPONSES, {"input": "x", "text": {"format": flat}})
                chats = await post(client, "/v1/chat/completions", {"messages": [USER], "response_format": nested})
                assert mine[0] == chats[0], mine
                if mine[0] == 400:
                    assert mine[1]["error"]["param"] == "text.format.type"

    in_loop(go)


def test_F1_F3_too_long_input_is_400_before_the_stream() -> None:
    async def go() -> None:
        async with running(says(f"x{END}"), context_tokens=200) as (client, engine):
            for stream in (False, True):
                status, body = await post(client, RESPONSES, {"input": "word " * 300, "stream": stream})
                assert status == 400 and body["error"]["code"] == "context_length_exceeded"
                assert body["error"]["param"] == "input"
            assert isinstance(engine, FakeEngine) and engine.requests == []

    in_loop(go)
