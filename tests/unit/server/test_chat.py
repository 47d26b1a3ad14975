"""POST /v1/chat/completions over a scripted engine: whole and streamed answers say the same, in OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agens_engine.core import Request
from tests.fake_engine import Steps
from tests.serverkit import END, chat, in_loop, joined, running, says, stream
from tests.textkit import byte_tokens, load_kit

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
PARAMETERS = "<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
CALL = f"<|call|>\n<function=get_weather>\n{PARAMETERS}</function>\n<|/call|>"


def test_whole_answer_has_content_reasoning_usage_and_timings() -> None:
    async def go() -> None:
        async with running(says(f"two and two<|/think|>It is 4 🦊.{END}")) as (client, engine):
            status, body = await chat(client, model="fake", max_tokens=100, user="u", unheard_of=1)
        assert status == 200
        message = body["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "It is 4 🦊.", "reasoning_content": "two and two"}
        assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
        assert body["choices"][0]["finish_reason"] == "stop"
        request = engine.requests[0]
        completion = len(byte_tokens(load_kit()[0], "two and twoIt is 4 🦊.")) + 2
        assert body["usage"] == {
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": completion,
            "total_tokens": len(request.prompt_ids) + completion,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": len("two and two")},
        }
        timings = body["timings"]
        assert timings["prefill_seconds"] == 0.5 and timings["tokens_per_step"] == pytest.approx(1.0)
        assert timings["sources"]["copy"].items() >= {"proposed": 4, "accepted": 2, "seconds": 0.1}.items()

    in_loop(go)


@pytest.mark.parametrize("per_step", [1, 2, 3, 5, 8])
def test_A1_A3_A6_stream_joins_to_the_whole_answer_for_any_step_size(per_step: int) -> None:
    async def go() -> None:
        text = f'thinking "hard"\n<|/think|>Let me look.\n{CALL}\n{CALL}{END}'
        async with running(says(text, per_step)) as (client, _):
            _, body = await chat(client, tools=[WEATHER])
            payloads, _ = await stream(client, "/v1/chat/completions", {"messages": _user(), "tools": [WEATHER]})
        whole, streamed = body["choices"][0], joined(payloads)
        message = whole["message"]
        assert streamed["content"] == message["content"] and streamed["reasoning"] == message["reasoning_content"]
        said = [call["function"]["arguments"] for call in message["tool_calls"]]
        assert [call["arguments"] for call in streamed["calls"]] == said
        assert [json.loads(c["arguments"]) for c in streamed["calls"]] == [{"city": "Köln", "days": 2}] * 2
        assert [c["name"] for c in streamed["calls"]] == ["get_weather"] * 2
        assert streamed["finish"] == whole["finish_reason"] == "tool_calls"
        assert payloads[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}

    in_loop(go)


def test_B2_B5_call_inside_the_thought_is_returned_and_content_is_null() -> None:
    async def go() -> None:
        async with running(says(f"I need the weather.\n{CALL}{END}", 4)) as (client, _):
            _, body = await chat(client, tools=[WEATHER])
        message = body["choices"][0]["message"]
        assert message["content"] is None
        assert message["reasoning_content"].strip() == "I need the weather."
        assert message["tool_calls"][0]["function"]["name"] == "get_weather"

    in_loop(go)


def test_A8_tool_choice_none_neither_offers_nor_returns_calls() -> None:
    async def go() -> None:
        async with running(says(f"hm<|/think|>It rains.{CALL}{END}")) as (client, engine):
            _, body = await chat(client, tools=[WEATHER], tool_choice="none")
        message = body["choices"][0]["message"]
        assert message["content"] == "It rains." and "tool_calls" not in message
        assert body["choices"][0]["finish_reason"] == "stop"
        assert "get_weather" not in load_kit()[0].decode(engine.requests[0].prompt_ids)

    in_loop(go)


def test_A10_call_cut_by_the_length_limit_is_not_a_call_to_run() -> None:
    async def go() -> None:
        async with running(says(f"hm<|/think|>{CALL}{END}")) as (client, _):
            _, body = await chat(client, tools=[WEATHER], max_tokens=60)
            payloads, _ = await stream(
                client, "/v1/chat/completions", {"messages": _user(), "tools": [WEATHER], "max_tokens": 60}
            )
        assert body["choices"][0]["finish_reason"] == joined(payloads)["finish"] == "length"
        assert json.loads(joined(payloads)["calls"][0]["arguments"]) == {}

    in_loop(go)


def test_thinking_off_makes_everything_content() -> None:
    async def go() -> None:
        async with running(says(f"just this{END}")) as (client, engine):
            for fields in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
                _, body = await chat(client, **fields)
                message = body["choices"][0]["message"]
                assert message == {"role": "assistant", "content": "just this"}
        ids = list(engine.requests[-1].prompt_ids)
        assert ids[-1] == load_kit()[0].think_end_id

    in_loop(go)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"reasoning_effort": "low"}, 200),
        ({"chat_template_kwargs": {"reasoning_effort": "xhigh"}}, 200),
        ({"reasoning_effort": "high"}, 200),  # the template refuses it; it is an alias of xhigh
        ({"reasoning_effort": "enormous"}, 400),
        ({"reasoning_effort": 3}, 400),
        ({"chat_template_kwargs": {"preserve_thinking": False, "anything": [1, {"a": None}]}}, 200),
        ({"chat_template_kwargs": {"chat_template_kwargs": "x"}}, 200),
        ({"chat_template_kwargs": {"self": 1}}, 400),
        ({"chat_template_kwargs": {"messages": []}}, 400),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, 400),
    ],
)
def test_reasoning_effort_and_template_kwargs(fields: dict[str, Any], status: int) -> None:
    async def go() -> None:
        async with running(says(f"a<|/think|>b{END}")) as (client, _):
            got, body = await chat(client, **fields)
        assert got == status, body

    in_loop(go)


def test_I11_usage_only_when_asked_in_one_last_chunk_before_done() -> None:
    async def go() -> None:
        async with running(says(f"a<|/think|>b{END}")) as (client, _):
            body = {"messages": _user()}
            plain, _ = await stream(client, "/v1/chat/completions", body)
            asked, _ = await stream(client, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
            status, _ = await chat(client, stream_options={"include_usage": True})
        assert status == 200
        assert not any(payload.get("usage") for payload in plain)
        assert [bool(payload.get("usage")) for payload in asked] == [False] * (len(asked) - 1) + [True]
        assert asked[-1]["choices"] == [] and asked[-1]["usage"]["completion_tokens"] == 4
        assert all(payload["choices"] for payload in plain)
        assert plain[-1]["choices"][0]["finish_reason"] == "stop" and "timings" in plain[-1]

    in_loop(go)


def test_n_choices_get_consecutive_seeds_and_their_own_text() -> None:
    def script(request: Request) -> Steps:
        return [byte_tokens(load_kit()[0], f"seed {request.sampling.seed}"), list(request.stop_token_ids)]

    async def go() -> None:
        async with running(script) as (client, engine):
            fields: dict[str, Any] = {"n": 3, "seed": 7, "enable_thinking": False}
            _, body = await chat(client, **fields)
            payloads, _ = await stream(client, "/v1/chat/completions", {"messages": _user(), **fields})
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert texts == ["seed 7", "seed 8", "seed 9"]
        assert [joined(payloads, index)["content"] for index in range(3)] == texts
        assert body["usage"]["prompt_tokens"] == len(engine.requests[0].prompt_ids)
        assert body["usage"]["completion_tokens"] == 3 * 7

    in_loop(go)


def test_fields_reach_the_engine() -> None:
    async def go() -> None:
        async with running(says(f"x{END}")) as (client, engine):
            await chat(
                client,
                temperature=0.5,
                top_p=0.9,
                top_k=7,
                min_p=0.1,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                repetition_penalty=1.1,
                logit_bias={"5": -100},
                seed=11,
                stop_token_ids=[9],
                speculation=False,
                draft_sources=["copy"],
                max_tokens=5,
                max_completion_tokens=6,
            )
            await chat(client, ignore_eos=True, max_tokens=3)
            await chat(client)
        first, second, third = engine.requests
        s = first.sampling
        assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed) == (0.5, 0.9, 7, 0.1, 11)
        assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (0.5, -0.5, 1.1)
        assert s.logit_bias == {5: -100.0} and s.logprobs is None
        assert first.max_tokens == 6 and first.speculation is False and first.draft_sources == frozenset({"copy"})
        assert first.stop_token_ids == load_kit()[0].end_token_ids | {9}
        assert second.stop_token_ids == frozenset()
        # the checkpoint's generation_config fills what the request leaves out; the output is capped by the context
        assert (third.sampling.top_k, third.sampling.top_p, third.sampling.seed) == (20, 0.95, None)
        assert third.max_tokens == 4096 - len(third.prompt_ids) and third.speculation and third.draft_sources is None

    in_loop(go)


def test_settings_override_the_checkpoints_sampling_and_cap_the_output() -> None:
    async def go() -> None:
        async with running(says(f"x{END}"), temperature=0.0, top_k=1, max_output_tokens=17) as (client, engine):
            await chat(client)
        assert engine.requests[0].sampling.greedy and engine.requests[0].sampling.top_k == 1
        assert engine.requests[0].max_tokens == 17

    in_loop(go)


@pytest.mark.parametrize(("stop", "expected"), [("own fox", "The quick br"), (["zzz", "fox"], "The quick brown ")])
def test_C3_C5_stop_strings_cut_the_text(stop: Any, expected: str) -> None:
    async def go() -> None:
        async with running(says(f"The quick brown fox{END}", 3)) as (client, _):
            fields = {"enable_thinking": False, "stop": stop}
            _, body = await chat(client, **fields)
            payloads, _ = await stream(client, "/v1/chat/completions", {"messages": _user(), **fields})
        assert body["choices"][0]["message"]["content"] == joined(payloads)["content"] == expected
        assert body["choices"][0]["finish_reason"] == "stop"

    in_loop(go)


def test_C1_characters_are_never_split_between_chunks() -> None:
    async def go() -> None:
        async with running(says(f"ok 🦊東{END}")) as (client, _):
            payloads, _ = await stream(client, "/v1/chat/completions", {"messages": _user(), "enable_thinking": False})
        assert joined(payloads)["content"] == "ok 🦊東"
        assert not any("\ufffd" in json.dumps(payload, ensure_ascii=False) for payload in payloads)

    in_loop(go)


def test_H5_logprobs_come_for_every_token_streamed_or_not() -> None:
    async def go() -> None:
        async with running(says(f"né{END}", 2)) as (client, _):
            fields = {"enable_thinking": False, "logprobs": True, "top_logprobs": 2}
            _, body = await chat(client, **fields)
            payloads, _ = await stream(client, "/v1/chat/completions", {"messages": _user(), **fields})
        content = body["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content[:3]] == [[0x6E], [0xC3], [0xA9]]
        assert len(content) == body["usage"]["completion_tokens"] == 4
        assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] == -0.25 for entry in content)
        streamed = [e for p in payloads for c in p["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
        assert streamed == content

    in_loop(go)


def test_continue_final_message_ends_the_prompt_inside_it() -> None:
    async def go() -> None:
        async with running(says(f" dog{END}")) as (client, engine):
            messages = [*_user(), {"role": "assistant", "content": "The lazy"}]
            status, body = await chat(client, messages=messages, continue_final_message=True)
            refused, error = await chat(client, continue_final_message=True)
        assert status == 200 and body["choices"][0]["message"]["content"] == " dog"
        assert load_kit()[0].decode(engine.requests[0].prompt_ids).endswith("The lazy")
        assert refused == 400 and error["error"]["param"] == "continue_final_message"

    in_loop(go)


def test_I6_I7_I10_lenient_forms_are_accepted() -> None:
    async def go() -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
        tools = [
            {"type": "web_search"},
            {"type": "namespace", "name": "ns", "tools": [WEATHER]},
            {"type": "function", "name": "flat", "parameters": {"type": "object", "properties": {}}},
        ]
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            for empty in ({"content": None}, {"content": ""}, {}):
                messages = [
                    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
                    {"role": "assistant", "tool_calls": [call], "reasoning_content": "t", **empty},
                    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                ]
                status, body = await chat(client, messages=messages, tools=tools)
                assert status == 200, body
        prompts = {tuple(request.prompt_ids) for request in engine.requests}
        assert len(prompts) == 1
        text = load_kit()[0].decode(prompts.pop())
        assert "get_weather" in text and '"flat"' in text and "web_search" not in text

    in_loop(go)


def _user() -> list[dict[str, str]]:
    return [{"role": "user", "content": "hello"}]
