"""A conversation over HTTP: follow-up turns report what they took from the session cache, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import Server, serving
from tests.e2e.test_server_http import post
from tests.serverkit import in_loop

SYSTEM = {"role": "system", "content": " ".join(["alpha beta gamma delta epsilon"] * 30)}


def conversation(url: str, **extra: Any) -> list[dict[str, Any]]:
    """The usage of two turns; the second resends the first with its answer."""
    usages: list[dict[str, Any]] = []

    async def go() -> None:
        messages = [SYSTEM, {"role": "user", "content": "alpha"}]
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                body = {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **extra}
                status, answer = await post(session, f"{url}/v1/chat/completions", body)
                assert status == 200, answer
                usages.append(answer["usage"])
                message = answer["choices"][0]["message"]
                kept = {key: message[key] for key in ("content", "reasoning_content") if message.get(key)}
                messages += [{"role": "assistant", **kept}, {"role": "user", "content": "beta"}]

    in_loop(go)
    return usages


def cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_usage_reports_cached_session_tokens(tiny_server: Server) -> None:
    first, second = conversation(tiny_server.url)
    assert first["prompt_tokens"] * 0.9 < cached(second) < second["prompt_tokens"]
    assert [cached(usage) for usage in conversation(tiny_server.url, cache_prompt=False)] == [0, 0]


@pytest.mark.slow
def test_sessions_survive_a_restart_of_the_server(tiny_model_dir: Path, tmp_path: Path) -> None:
    flags = ("--context", "1024", "--sequences", "2", "--session-dir", str(tmp_path))
    with serving(str(tiny_model_dir), *flags) as server:
        before = conversation(server.url)
    assert list(tmp_path.glob("*.session"))
    with serving(str(tiny_model_dir), *flags) as server:
        after = conversation(server.url)
    assert cached(before[0]) == 0 < cached(after[0]) and cached(after[1]) >= cached(before[1])
    with serving(str(tiny_model_dir), *flags, "--no-session-cache") as server:
        assert [cached(usage) for usage in conversation(server.url)] == [0, 0]
