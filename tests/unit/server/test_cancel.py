"""Clients that leave, engines that fail or stop: seats come back, neighbours go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from agens_engine.core import Request
from agens_engine.errors import AgensError, EngineStoppedError, OutOfPages
from tests.fake_engine import Steps
from tests.serverkit import END, USER, chat, in_loop, joined, parse_sse, running, says, stream
from tests.textkit import byte_tokens, load_kit

ENDLESS = byte_tokens(load_kit()[0], "a")
LONG = {"messages": USER, "max_tokens": 1_000_000, "enable_thinking": False}
PATH = "/v1/chat/completions"


def endless(request: Request) -> Steps:
    return [ENDLESS]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 5 seconds"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("streamed", [True, False])
def test_E1_client_gone_during_generation_frees_the_seat(streamed: bool) -> None:
    async def go() -> None:
        async with running(endless, context_tokens=10**7) as (client, engine):
            task = asyncio.create_task(client.post(PATH, json={**LONG, "stream": streamed}))
            if streamed:
                response = await task
                assert (await response.content.readany()).startswith(b"data: ")
                response.close()
            else:
                await until(lambda: engine.num_steps > 5)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not engine.busy())
            assert engine.aborted == [engine.requests[0].request_id]

    in_loop(go)


def test_E3_client_gone_during_prefill_frees_the_seat() -> None:
    async def go() -> None:
        async with running(endless, context_tokens=10**7) as (client, engine):
            engine.prefill_open.clear()
            response = await client.post(PATH, json={**LONG, "stream": True})
            await until(lambda: engine.busy())
            response.close()
            await until(lambda: not engine.busy())

    in_loop(go)


def test_E1_all_choices_of_a_lost_client_are_aborted() -> None:
    async def go() -> None:
        async with running(endless, context_tokens=10**7) as (client, engine):
            response = await client.post(PATH, json={**LONG, "stream": True, "n": 3})
            await until(lambda: engine.stats()["running"] == 3)
            response.close()
            await until(lambda: not engine.busy())
            assert sorted(engine.aborted) == sorted(r.request_id for r in engine.requests)

    in_loop(go)


def test_E4_a_cancelled_neighbour_changes_nothing() -> None:
    def script(request: Request) -> Steps:
        return says("neighbour" * 20 + END)(request) if request.max_tokens == 999 else endless(request)

    async def go() -> None:
        async with running(script, context_tokens=10**7) as (client, engine):
            engine.step_seconds = 0.002
            gone = await client.post(PATH, json={**LONG, "stream": True})
            stays = asyncio.create_task(stream(client, PATH, {**LONG, "max_tokens": 999}))
            await until(lambda: engine.stats()["running"] == 2)
            gone.close()
            payloads, _ = await stays
            assert joined(payloads)["content"] == "neighbour" * 20 and joined(payloads)["finish"] == "stop"
            assert len(engine.aborted) == 1

    in_loop(go)


def test_keep_alive_comments_during_a_long_prefill() -> None:
    async def go() -> None:
        async with running(says(f"x{END}"), keep_alive_seconds=0.02) as (client, engine):
            engine.prefill_open.clear()
            task = asyncio.create_task(stream(client, PATH, {"messages": USER}))
            await until(lambda: engine.busy())
            await asyncio.sleep(0.1)
            engine.prefill_open.set()
            payloads, comments = await task
            assert comments >= 2 and joined(payloads)["finish"] == "stop"

    in_loop(go)


def test_engine_failure_is_500_or_an_error_event_and_stays_with_its_request() -> None:
    async def go() -> None:
        async with running(says(f"x<|/think|>y{END}")) as (client, engine):
            engine.fail_token = load_kit()[0].id_of("<|result|>")
            poisoned = [*USER, {"role": "tool", "content": "r"}]
            neighbour = asyncio.create_task(chat(client))
            status, body = await chat(client, messages=poisoned)
            assert status == 500 and body["error"]["code"] == "generation_failed"
            assert "device lost" not in body["error"]["message"]
            async with client.post(PATH, json={"messages": poisoned, "stream": True}) as response:
                payloads, done, _ = parse_sse(await response.read())
            assert response.status == 200 and done
            assert payloads[-1]["error"]["type"] == "server_error"
            assert (await neighbour)[0] == 200

    in_loop(go)


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineStoppedError("the engine has failed"), "engine_stopped"), (OutOfPages(3, 1, 8, 16), None)],
)
def test_typed_engine_error_keeps_its_status_and_words(error: AgensError, code: str | None) -> None:
    async def go() -> None:
        async with running(says(f"x{END}")) as (client, engine):
            engine.fail_token = load_kit()[0].id_of("<|agens_start|>")
            engine.fail_with = error
            status, body = await chat(client)
            assert status == 503 and body["error"]["code"] == code and body["error"]["message"] == str(error)

    in_loop(go)


def test_shutdown_drains_then_ends_what_still_runs() -> None:
    async def go() -> None:
        async with running(endless, context_tokens=10**7) as (client, engine):
            whole = asyncio.create_task(chat(client, max_tokens=1_000_000))
            streamed = asyncio.create_task(_raw(client, {**LONG, "stream": True}))
            await until(lambda: engine.stats()["running"] == 2)
            await asyncio.to_thread(engine.shutdown, 0.05)
            status, body = await whole
            assert status == 503 and "shutting down" in body["error"]["message"]
            payloads, done, _ = parse_sse(await streamed)
            assert done and payloads[-1]["error"]["type"] == "service_unavailable_error"
            status, body = await chat(client)
            assert status == 503

    in_loop(go)


def test_a_full_queue_answers_429() -> None:
    async def go() -> None:
        async with running(endless, context_tokens=10**7, max_sequences=1, max_waiting=1) as (client, engine):
            first = await client.post(PATH, json={**LONG, "stream": True})
            second = await client.post(PATH, json={**LONG, "stream": True})
            status, body = await chat(client)
            assert status == 429 and body["error"]["code"] == "queue_full"
            first.close()
            second.close()
            await until(lambda: not engine.busy())
            third = await client.post(PATH, json={**LONG, "stream": True})
            assert third.status == 200
            third.close()

    in_loop(go)


async def _raw(client: Any, body: dict[str, Any]) -> bytes:
    async with client.post(PATH, json=body) as response:
        return await response.read()
