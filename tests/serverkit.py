"""Runs the HTTP application over a FakeEngine in the test's own event loop, and reads event streams like a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from agens_engine.core import Request
from agens_engine.server.app import make_app
from agens_engine.server.host import ModelHost
from agens_engine.server.model_text import ModelText
from agens_engine.settings import Settings
from tests.fake_engine import FakeEngine, Script, Steps
from tests.textkit import load_kit, mixed_tokens

USER = [{"role": "user", "content": "hello"}]
END = "<|agens_end|>"


def model_text() -> ModelText:
    tokenizer, template = load_kit()
    return ModelText("fake", Path("kit"), tokenizer, template)


def says(text: str, per_step: int = 1) -> Script:
    """A script that says `text`, one token per byte and control token, `per_step` tokens in each step."""
    ids = mixed_tokens(load_kit()[0], text)

    def script(request: Request) -> Steps:
        return [ids[i : i + per_step] for i in range(0, len(ids), per_step)]

    return script


@asynccontextmanager
async def running(
    script: Script, *, host: ModelHost | None = None, **options: Any
) -> AsyncIterator[tuple[Any, FakeEngine]]:
    """(client, engine); options are settings."""
    settings = Settings(**options)
    engine = FakeEngine(
        script, context_tokens=settings.context_tokens or 4096, max_sequences=settings.max_sequences or 8
    )
    if host is None:
        host = ModelHost(settings)
        host.attach(engine, model_text())
    # like the real server, the test server cancels a handler whose client went away
    client = TestClient(TestServer(make_app(host)))
    await client.start_server()
    try:
        yield client, engine
    finally:
        await client.close()
        engine.shutdown(0.0)


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(250):  # far more than needed: a busy machine must not fail a test
            await test()

    asyncio.run(limited())


async def post(client: Any, path: str, body: Any, **options: Any) -> tuple[int, Any]:
    """Status and parsed JSON of a POST; a bytes body goes out as it is."""
    payload = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with client.post(path, **payload, **options) as response:
        return response.status, await response.json()


async def chat(client: Any, **fields: Any) -> tuple[int, Any]:
    return await post(client, "/v1/chat/completions", {"messages": USER, **fields})


def parse_sse(raw: bytes) -> tuple[list[Any], bool, int]:
    """(JSON payloads, whether [DONE] came last, number of comments); fails on anything that is not a proper frame."""
    payloads: list[Any] = []
    done = False
    comments = 0
    text = raw.decode("utf-8")
    assert text == "" or text.endswith("\n\n"), "the last frame is not closed"
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            assert "\n" not in block
            comments += 1
            continue
        assert not done, "something came after [DONE]"
        assert block.startswith("data: ") and "\n" not in block, f"not a one-line data frame: {block!r}"
        if block == "data: [DONE]":
            done = True
        else:
            payloads.append(json.loads(block.removeprefix("data: ")))
    return payloads, done, comments


async def stream(client: Any, path: str, body: dict[str, Any]) -> tuple[list[Any], int]:
    """Payloads and number of comments of a complete stream."""
    async with client.post(path, json={**body, "stream": True}) as response:
        raw = await response.read()
        assert response.status == 200, raw
        assert response.headers["Content-Type"].startswith("text/event-stream")
    payloads, done, comments = parse_sse(raw)
    assert done
    return payloads, comments


def joined(payloads: list[Any], index: int = 0) -> dict[str, Any]:
    """What a client that concatenates the chat deltas of one choice ends up with."""
    out: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "finish": None}
    for payload in payloads:
        for choice in payload["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            out["reasoning"] += delta.get("reasoning_content") or ""
            out["content"] += delta.get("content") or ""
            for piece in delta.get("tool_calls") or []:
                if piece["index"] == len(out["calls"]):
                    assert piece["id"] and piece["type"] == "function" and piece["function"]["arguments"] == ""
                    out["calls"].append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
                out["calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
            if choice["finish_reason"] is not None:
                assert out["finish"] is None
                out["finish"] = choice["finish_reason"]
    return out
