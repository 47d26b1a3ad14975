"""Bodies that are legal enough to get past a first look: each is a 400 of the API's own form, never a 5xx."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serverkit import END, USER, in_loop, post, running, says

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
IMAGE_BEFORE_CALL = [
    {"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]},
    {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"},
    {"role": "assistant", "content": "x"},
]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": USER, "reasoning_budget": 5, "reasoning_budget_soft_bias": 1e308}, "soft_bias"),
        (CHAT, {"messages": USER, "repetition_penalty": 1e-38}, "repetition_penalty"),
        (RESPONSES, {"input": IMAGE_BEFORE_CALL}, "input[0]"),
        (RESPONSES, b'{"input": "hi", "metadata": {"a": 1e999}}', "finite"),
        (RESPONSES, b'{"stream": true, "input": "hi", "instructions": "a\xed\xa0\x80b"}', "UTF-8"),
        (CHAT, '{"messages": []}'.encode("utf-16"), "UTF-8"),
    ],
    ids=lambda value: None if isinstance(value, bytes | dict) else str(value),
)
def test_refused_with_a_reason(path: str, body: Any, named: str) -> None:
    async def go() -> None:
        async with running(says(END)) as (client, _):
            status, answer = await post(client, path, body)
            assert status == 400, answer
            assert named in str(answer["error"]), answer

    in_loop(go)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_body_that_cannot_be_decompressed(path: str) -> None:
    async def go() -> None:
        packed = {"content-encoding": "gzip"}
        async with running(says(END)) as (client, _), client.post(path, data=b"garbage", headers=packed) as response:
            assert response.status == 400, await response.text()

    in_loop(go)


def test_a_reasoning_budget_beside_the_dialects_own_form() -> None:
    async def go() -> None:
        async with running(says(END)) as (client, engine):
            body = {"messages": USER, "max_tokens": 9, "enable_thinking": True, "reasoning_budget": 3}
            status, answer = await post(client, MESSAGES, body)
            assert status == 200, answer
            assert answer["limits"]["reasoning_budget"] == 3

    in_loop(go)


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "high"])
def test_every_word_of_openai_for_effort(effort: str) -> None:
    async def go() -> None:
        async with running(says(END)) as (client, _):
            status, answer = await post(client, CHAT, {"messages": USER, "reasoning_effort": effort})
            assert status == 200, answer

    in_loop(go)


def test_a_key_with_a_line_break_at_its_end_lets_its_owner_in() -> None:
    async def go() -> None:
        async with running(says(END), api_key="abc\n") as (client, _):
            body = {"messages": USER}
            assert (await post(client, CHAT, body))[0] == 401
            assert (await post(client, CHAT, body, headers={"Authorization": "Bearer abc"}))[0] == 200

    in_loop(go)
