"""The real engine behind the real server, over HTTP, on a tiny random model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import Server
from tests.serverkit import USER, in_loop, joined, parse_sse

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    async with session.post(url, json=body) as response:
        return response.status, await response.json()


async def idle(session: aiohttp.ClientSession, server: Server) -> dict[str, Any]:
    """Engine statistics once nothing runs any more."""
    while True:
        async with session.get(f"{server.url}/health") as response:
            assert response.status == 200
            engine = (await response.json())["engine"]
        if engine["running"] == engine["waiting"] == 0:
            return dict(engine)
        await asyncio.sleep(0.02)


def test_greedy_is_the_same_streamed_whole_batched_and_with_or_without_drafts(tiny_server: Server) -> None:
    async def go() -> None:
        url = f"{tiny_server.url}/v1/completions"
        # a prompt that repeats itself gives the copy source something to draft
        body = {"prompt": "beta gamma delta beta gamma delta beta gamma", **GREEDY}
        async with aiohttp.ClientSession() as session:
            _, plain = await post(session, url, {**body, "speculation": False})
            batch = await asyncio.gather(*(post(session, url, body) for _ in range(4)))
            async with session.post(url, json={**body, "stream": True}) as response:
                payloads, done, _ = parse_sse(await response.read())
        assert done and plain["usage"]["completion_tokens"] == 16 and plain["choices"][0]["finish_reason"] == "length"
        text = plain["choices"][0]["text"]
        assert [status for status, _ in batch] == [200] * 4
        assert {answer["choices"][0]["text"] for _, answer in batch} == {text}
        assert "".join(payload["choices"][0]["text"] for payload in payloads) == text
        assert plain["timings"]["tokens_per_step"] == 1.0 and plain["timings"]["prefill_seconds"] > 0

    in_loop(go)


def test_seeded_sampling_repeats_and_I3_unseeded_differs(tiny_server: Server) -> None:
    async def go() -> None:
        url = f"{tiny_server.url}/v1/chat/completions"
        body = {"messages": USER, "temperature": 1.5, "top_k": 0, "max_tokens": 16, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            seeded = [(await post(session, url, {**body, "seed": 5}))[1]["choices"][0]["message"] for _ in range(2)]
            free = [(await post(session, url, body))[1]["choices"][0]["message"] for _ in range(2)]
        assert seeded[0] == seeded[1]
        assert free[0] != free[1]

    in_loop(go)


def test_H3_logprobs_do_not_depend_on_drafts(tiny_server: Server) -> None:
    async def go() -> None:
        url = f"{tiny_server.url}/v1/chat/completions"
        body = {"messages": USER, "logprobs": True, "top_logprobs": 3, **GREEDY}
        async with aiohttp.ClientSession() as session:
            found = [
                (await post(session, url, {**body, "speculation": on}))[1]["choices"][0]["logprobs"]["content"]
                for on in (True, False)
            ]
        assert len(found[0]) == 16
        assert [e["bytes"] for e in found[0]] == [e["bytes"] for e in found[1]]
        for with_drafts, without in zip(*found, strict=True):
            assert with_drafts["logprob"] == pytest.approx(without["logprob"], abs=1e-4)
            assert with_drafts["logprob"] < 0 and len(with_drafts["top_logprobs"]) == 3

    in_loop(go)


@pytest.mark.parametrize("streamed", [True, False])
def test_E1_a_client_that_leaves_frees_its_seat_and_disturbs_nobody(tiny_server: Server, streamed: bool) -> None:
    async def go() -> None:
        url = f"{tiny_server.url}/v1/chat/completions"
        endless = {"messages": USER, "max_tokens": 900, "ignore_eos": True, "stream": streamed}
        async with aiohttp.ClientSession() as session:
            before = await idle(session, tiny_server)
            _, alone = await post(session, url, {"messages": USER, **GREEDY})
            leaving = asyncio.create_task(session.post(url, json=endless))
            neighbour = asyncio.create_task(post(session, url, {"messages": USER, **GREEDY}))
            if streamed:
                response = await leaving
                await response.content.readany()
                response.close()
            else:
                await asyncio.sleep(0.3)
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
            _, beside = await neighbour
            after = await idle(session, tiny_server)
        assert beside["choices"][0]["message"] == alone["choices"][0]["message"]
        generated = after["generated_tokens"] - before["generated_tokens"]
        assert generated < 2 * 16 + 600, "the abandoned request ran on"
        assert after["slots_free"] == before["slots_free"]

    in_loop(go)


def test_bad_requests_leave_running_ones_untouched(tiny_server: Server) -> None:
    async def go() -> None:
        url = f"{tiny_server.url}/v1/chat/completions"
        async with aiohttp.ClientSession() as session:
            _, alone = await post(session, url, {"messages": USER, **GREEDY})
            running = asyncio.create_task(post(session, url, {"messages": USER, **GREEDY}))
            for bad in (b"{", b'{"messages": [], "temperature": NaN}', json.dumps({"messages": []}).encode()):
                async with session.post(url, data=bad) as response:
                    assert response.status == 400
            status, error = await post(session, url, {"messages": [{"role": "user", "content": "word " * 2000}]})
            assert status == 400 and error["error"]["code"] == "context_length_exceeded"
            _, answer = await running
        assert answer["choices"][0]["message"] == alone["choices"][0]["message"]

    in_loop(go)


def test_tool_and_effort_fields_pass_through_the_whole_path(tiny_server: Server) -> None:
    async def go() -> None:
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
        body = {"messages": USER, "tools": [tool], "reasoning_effort": "high", "n": 2, "stream": True, **GREEDY}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{tiny_server.url}/v1/chat/completions", json=body) as response,
        ):
            payloads, done, _ = parse_sse(await response.read())
        assert done
        assert joined(payloads, 0) == joined(payloads, 1) and joined(payloads, 0)["finish"] == "length"

    in_loop(go)


def test_H11_counting_with_drafts_is_counting_without(nano_server: Server) -> None:
    """Greedy, so token for token; the list repeats its form, which is what draft sources live on."""

    async def go() -> None:
        numbers = ", ".join(str(n) for n in range(1, 21))
        body = {"messages": [{"role": "user", "content": f"Repeat: {numbers}"}], "temperature": 0, "max_tokens": 200}
        async with aiohttp.ClientSession() as session:
            url = f"{nano_server.url}/v1/chat/completions"
            _, drafted = await post(session, url, body)
            _, plain = await post(session, url, {**body, "speculation": False})
        assert drafted["choices"][0]["message"] == plain["choices"][0]["message"]
        assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        assert sum(source["accepted"] for source in drafted["timings"]["sources"].values()) > 0
        assert plain["timings"]["sources"] == {}

    in_loop(go)
