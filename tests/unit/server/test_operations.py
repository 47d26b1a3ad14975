"""/metrics, /slots, /apply-template, CORS, time limits and log lines."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from typing import Any

import pytest
from aiohttp import web

from agens_engine.core import Request
from agens_engine.errors import UsageError
from agens_engine.server import dialect
from agens_engine.server.host import ModelHost
from agens_engine.server.logs import JsonFormatter
from agens_engine.settings import Settings
from tests.fake_engine import Steps
from tests.serverkit import END, USER, chat, in_loop, parse_sse, post, running, says, stream
from tests.textkit import byte_tokens, load_kit

ENDLESS = byte_tokens(load_kit()[0], "a")
PATH = "/v1/chat/completions"
PAGE = "http://localhost:3000"


def endless(request: Request) -> Steps:
    return [ENDLESS]


async def figures(client: Any) -> dict[str, float]:
    """Every sample of /metrics by its name and labels; fails on a line that is not in the text format."""
    async with client.get("/metrics") as response:
        assert response.status == 200 and response.headers["Content-Type"].startswith("text/plain; version=")
        lines = (await response.text()).splitlines()
    found = {}
    for line in lines:
        if not line.startswith("#"):
            match = re.fullmatch(r'([a-z_]+(?:\{(?:[a-z_]+="[^"]*",?)+\})?) (\S+)', line)
            assert match is not None, line
            found[match[1]] = float(match[2])
    return found


def test_metrics_count_what_happened() -> None:
    async def go() -> None:
        async with running(says(f"x<|/think|>yz{END}", per_step=2)) as (client, _):
            status, body = await chat(client)
            assert status == 200
            await stream(client, PATH, {"messages": USER})
            await chat(client, temperature=-1)
            async with client.get("/nowhere") as response:
                assert response.status == 404
            found = await figures(client)
        usage = body["usage"]
        assert found['agens_requests_total{route="/v1/chat/completions",status="200"}'] == 2
        assert found['agens_requests_total{route="/v1/chat/completions",status="400"}'] == 1
        assert found['agens_requests_total{route="unmatched",status="404"}'] == 1
        assert found['agens_generations_total{reason="stop"}'] == 2
        assert found["agens_prompt_tokens_total"] == 2 * usage["prompt_tokens"]
        assert found["agens_output_tokens_total"] == 2 * usage["completion_tokens"]
        assert found["agens_cached_prompt_tokens_total"] == 2 * 3
        assert found["agens_queue_seconds_count"] == found["agens_time_to_first_token_seconds_count"] == 2
        assert found["agens_sequences_running"] == found["agens_sequences_waiting"] == 0

    in_loop(go)


def test_metrics_show_what_the_engine_says_and_nothing_else() -> None:
    line = {"place": "device", "planned_bytes": 100, "used_bytes": 60, "peak_bytes": 80}
    stats = {
        "running": 3,
        "waiting": 2,
        "queue": {"oldest_seconds": 4.5},
        "drafts": {
            "verify_steps": 10,
            "tokens_per_step": 2.5,
            "sources": {"mtp": {"proposed": 30, "accepted": 15}, "copy": {"proposed": 4, "accepted": 1}},
        },
        "memory": {"cap_bytes": 1000, "planned_bytes": 900, "measured_peak_bytes": None, "lines": {"kv.pages": line}},
        "sessions": {"hits": 7, "folder": "x"},
    }

    async def go() -> None:
        async with running(says(END)) as (client, _):
            before = await figures(client)
            host = ModelHost(Settings())
            host.metrics.observe_engine(lambda: stats)
            found = host.metrics.text().decode()
        assert not any("draft_tokens" in name or "agens_sessions" in name for name in before)
        for expected in (
            "agens_sequences_running 3.0",
            "agens_sequences_waiting 2.0",
            "agens_queue_oldest_seconds 4.5",
            'agens_draft_tokens_proposed_total{source="mtp"} 30.0',
            'agens_draft_tokens_accepted_total{source="copy"} 1.0',
            "agens_tokens_per_step 2.5",
            'agens_device_memory_bytes{figure="planned"} 900.0',
            'agens_plan_line_bytes{figure="used",line="kv.pages",place="device"} 60.0',
            'agens_sessions{figure="hits"} 7.0',
        ):
            assert expected in found.splitlines(), found
        assert "measured_peak" not in found and "folder" not in found

    in_loop(go)


def test_metrics_answer_while_loading() -> None:
    async def go() -> None:
        async with running(says(END), host=ModelHost(Settings())) as (client, _):
            assert (await chat(client))[0] == 503
            found = await figures(client)
        assert found['agens_requests_total{route="/v1/chat/completions",status="503"}'] == 1

    in_loop(go)


def test_slots_say_what_runs_and_no_word_of_it() -> None:
    async def go() -> None:
        async with running(endless, context_tokens=10**7, max_sequences=2) as (client, engine):
            engine.prefill_open.clear()
            secret = [{"role": "user", "content": "beta gamma secret"}]
            response = await client.post(PATH, json={"messages": secret, "max_tokens": 10**6, "stream": True})
            async with client.get("/slots") as answer:
                waiting = await answer.json()
            engine.prefill_open.set()
            while True:
                async with client.get("/slots") as answer:
                    raw = await answer.text()
                running_now = json.loads(raw)
                if running_now["slots"][0]["state"] == "generating":
                    break
            response.close()
            while engine.busy():
                await asyncio.sleep(0.005)
            async with client.get("/slots") as answer:
                after = await answer.json()
        assert waiting["max_sequences"] == 2 and waiting["waiting"] == 1
        (slot,) = waiting["slots"]
        assert slot["state"] == "waiting" and slot["generated_tokens"] == 0 and slot["max_tokens"] == 10**6
        assert slot["prompt_tokens"] == len(engine.requests[0].prompt_ids)
        assert running_now["slots"][0]["generated_tokens"] > 0 and running_now["slots"][0]["id"] == slot["id"]
        assert "gamma" not in raw and "secret" not in raw
        assert after["slots"] == []

    in_loop(go)


def test_apply_template_gives_the_text_of_the_prompt() -> None:
    async def go() -> None:
        async with running(says(END)) as (client, _):
            body = {"messages": USER, "enable_thinking": False}
            status, answer = await post(client, "/apply-template", body)
            assert status == 200
            asked = {"prompt": answer["prompt"], "add_special_tokens": False}
            assert (await post(client, "/tokenize", asked))[1]["tokens"] == (await post(client, "/tokenize", body))[1][
                "tokens"
            ]
            status, answer = await post(client, "/apply-template", {"messages": []})
            assert status == 400 and answer["error"]["param"] == "messages"

    in_loop(go)


def test_cors_is_off_by_default() -> None:
    async def go() -> None:
        async with running(says(f"x{END}")) as (client, _):
            async with client.options(PATH, headers=_preflight(PAGE)) as response:
                assert response.status == 405
                assert not any(name.lower().startswith("access-control") for name in response.headers)
            async with client.get("/v1/models", headers={"Origin": PAGE}) as response:
                assert response.status == 200 and "Access-Control-Allow-Origin" not in response.headers

    in_loop(go)


@pytest.mark.parametrize(("listed", "allowed"), [((PAGE,), PAGE), (("*",), "*"), (("https://other.example",), None)])
def test_cors_lets_the_listed_pages_call_streams_and_errors_included(listed: tuple[str, ...], allowed: str) -> None:
    async def go() -> None:
        async with running(says(f"x{END}"), cors_origins=frozenset(listed), api_key="key") as (client, _):
            async with client.options(PATH, headers=_preflight(PAGE)) as response:
                if allowed is None:
                    assert response.status == 401 and "Access-Control-Allow-Origin" not in response.headers
                else:
                    assert response.status == 204 and response.headers["Access-Control-Allow-Origin"] == allowed
                    assert "POST" in response.headers["Access-Control-Allow-Methods"]
                    assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
                    assert "Access-Control-Allow-Credentials" not in response.headers
            key = {"Origin": PAGE, "Authorization": "Bearer key"}
            for headers, body, status in (
                (key, {"messages": USER}, 200),
                (key, {"messages": USER, "stream": True}, 200),
                (key, {"messages": []}, 400),
                ({"Origin": PAGE}, {"messages": USER}, 401),
            ):
                async with client.post(PATH, json=body, headers=headers) as response:
                    await response.read()
                    assert response.status == status
                    assert response.headers.get("Access-Control-Allow-Origin") == allowed
                    assert response.headers["Vary"] == "Origin"

    in_loop(go)


def _preflight(origin: str) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }


@pytest.mark.parametrize("origin", [PAGE + "/", "localhost:3000", "http://", "http://a b"])
def test_origins_that_no_browser_sends_are_refused(origin: str) -> None:
    with pytest.raises(UsageError, match="origin such as"):
        Settings.build({"cors_origins": [origin]}, environ={})
    assert Settings.build({}, environ={"AGENS_CORS_ORIGINS": f"{PAGE}, *"}).cors_origins == {PAGE, "*"}


def test_an_answer_that_takes_too_long_is_ended_and_its_seat_freed() -> None:
    async def go() -> None:
        options: dict[str, Any] = {"context_tokens": 10**7, "request_timeout_seconds": 0.2}
        async with running(endless, **options) as (client, engine):
            status, body = await chat(client, max_tokens=10**6)
            assert status == 504 and body["error"]["code"] == "request_timeout"
            async with client.post(PATH, json={"messages": USER, "max_tokens": 10**6, "stream": True}) as response:
                payloads, done, _ = parse_sse(await response.read())
            assert response.status == 200 and done and payloads[-1]["error"]["code"] == "request_timeout"
            engine.prefill_open.clear()
            status, body = await post(client, "/v1/messages", {"messages": USER, "max_tokens": 5})
            assert status == 504 and body["error"]["type"] == "timeout_error"
            while engine.busy():
                await asyncio.sleep(0.005)
            assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
            found = await figures(client)
        assert found['agens_generations_total{reason="abort"}'] == 3
        assert found['agens_requests_total{route="/v1/messages",status="504"}'] == 1

    in_loop(go)


def test_a_body_that_does_not_arrive_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "_BODY_SECONDS", 0.1)

    async def go() -> None:
        async with running(says(END)) as (client, _):
            reader, writer = await asyncio.open_connection(client.host, client.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            head = await reader.readuntil(b"\r\n")
            assert b" 408 " in head
            writer.close()
            await writer.wait_closed()

    in_loop(go)


def test_a_reader_that_takes_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write of a full connection never returns; leaving it ends the handler, which aborts what it asked for."""

    async def never(self: web.StreamResponse, data: bytes) -> None:
        await asyncio.Event().wait()

    async def go() -> None:
        async with running(endless, context_tokens=10**7) as (client, engine):
            response = await client.post(PATH, json={"messages": USER, "max_tokens": 10**6, "stream": True})
            monkeypatch.setattr(web.StreamResponse, "write", never)
            while engine.busy():
                await asyncio.sleep(0.005)
            assert engine.aborted == [engine.requests[0].request_id]
            response.close()

    monkeypatch.setattr(dialect, "_WRITE_SECONDS", 0.1)
    monkeypatch.setattr(dialect, "_SMALL_BYTES", 0)  # as if something were still unsent
    in_loop(go)


def test_every_request_is_one_log_line_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        async with running(says(f"x{END}")) as (client, _):
            async with client.post(PATH, json={"messages": USER}, headers={"x-request-id": "mine"}) as response:
                await response.read()
            async with client.get("/health"):
                pass

    with caplog.at_level(logging.INFO, logger="agens_engine.server.app"):
        in_loop(go)
    (record,) = [record for record in caplog.records if getattr(record, "request_id", None) == "mine"]
    line = json.loads(JsonFormatter().format(record))
    assert line["level"] == "info" and line["logger"] == "agens_engine.server.app"
    assert {key: line[key] for key in ("request_id", "method", "route", "status")} == {
        "request_id": "mine",
        "method": "POST",
        "route": PATH,
        "status": 200,
    }
    assert 0 <= line["seconds"] < 250 and "hello" not in json.dumps(line)
    assert not any("/health" in record.getMessage() for record in caplog.records), "polling fills the log"


def test_json_lines_carry_errors_and_any_text() -> None:
    try:
        raise ValueError("broken\nhere")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("agens", logging.ERROR, __file__, 1, 'text "%s"\n', ("Grüße",), info)
    raw = JsonFormatter().format(record)
    assert "\n" not in raw
    line = json.loads(raw)
    assert line["message"] == 'text "Grüße"\n' and "ValueError: broken" in line["error"]
    assert line["time"].startswith(time.strftime("%Y-", time.gmtime(record.created)))
