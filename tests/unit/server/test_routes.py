"""/v1/models, /tokenize, /detokenize, /health, the API key, request ids, and frames as bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agens_engine.server.host import HostState, ModelHost
from agens_engine.server.sse import frame
from agens_engine.settings import Settings
from tests.serverkit import END, USER, chat, in_loop, model_text, parse_sse, post, running, says
from tests.textkit import load_kit


def test_F5_models_report_the_live_window() -> None:
    async def go() -> None:
        async with running(says(END), context_tokens=777) as (client, _):
            async with client.get("/v1/models") as response:
                body = await response.json()
            (model,) = body["data"]
            assert model["id"] == "fake" and model["max_model_len"] == model["context_length"] == 777
            async with client.get("/v1/models/fake") as response:
                assert await response.json() == model
            async with client.get("/v1/models/other/one") as response:
                assert response.status == 404

    in_loop(go)


def test_tokenize_and_detokenize_are_inverse() -> None:
    async def go() -> None:
        text = "Grüße <|call|> 🦊"
        async with running(says(END)) as (client, engine):
            asked = {"model": "fake", "prompt": text, "add_special_tokens": False}
            status, body = await post(client, "/tokenize", asked)
            assert status == 200 and body["count"] == len(body["tokens"]) and body["max_model_len"] == 4096
            assert load_kit()[0].id_of("<|call|>") in body["tokens"]
            status, back = await post(client, "/detokenize", {"tokens": body["tokens"]})
            assert (status, back) == (200, {"prompt": text})
            _, rendered = await post(client, "/tokenize", {"messages": USER})
            await chat(client)
            assert rendered["tokens"] == list(engine.requests[0].prompt_ids)
            assert (await post(client, "/tokenize", {"prompt": ""}))[1]["count"] == 0

    in_loop(go)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "5"}, "tokens"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [10**9]}, "tokens[0]"),
    ],
)
def test_token_routes_refuse_by_name(path: str, body: dict[str, object], param: str) -> None:
    async def go() -> None:
        async with running(says(END)) as (client, _):
            status, answer = await post(client, path, body)
            assert status == 400 and answer["error"]["param"] == param

    in_loop(go)


def test_health_follows_the_life_of_the_model() -> None:
    async def go() -> None:
        host = ModelHost(Settings())
        async with running(says(f"x{END}"), host=host) as (client, engine):

            async def look() -> tuple[int, str, int]:
                async with client.get("/health") as response:
                    body = await response.json()
                return response.status, body["status"], (await chat(client))[0]

            assert await look() == (503, "loading", 503)
            host.attach(engine, model_text())
            assert await look() == (200, "ok", 200)
            host.fail("device lost")
            assert await look() == (503, "failed", 503)
            host.stop()
            assert await look() == (503, "stopping", 503)

    in_loop(go)


def test_props_shows_limits_defaults_and_memory() -> None:
    async def go() -> None:
        async with running(says(END), context_tokens=512) as (client, engine):
            async with client.get("/props") as response:
                assert response.status == 200
                body = await response.json()
            assert body["context_length"] == engine.context_tokens == 512
            assert body["max_sequences"] == engine.max_sequences
            assert {"temperature", "top_p", "top_k"} <= body["default_sampling"].keys()
            assert body["memory"] == {"cap_bytes": 1024}

    in_loop(go)


def test_a_stop_during_loading_stays_a_stop() -> None:
    async def go() -> None:
        host = ModelHost(Settings())
        async with running(says(END), host=host) as (_, engine):
            host.stop()
            host.attach(engine, model_text())
            assert host.state is HostState.STOPPING

    in_loop(go)


def test_api_key_guards_everything_but_health() -> None:
    async def go() -> None:
        async with running(says(f"x{END}"), api_key="sésame") as (client, _):
            for header, expected in [
                (None, 401),
                ("Bearer wrong", 401),
                ("Basic sésame", 401),
                ("Bearer", 401),
                ("bearer sésame", 200),
            ]:
                headers = {} if header is None else {"Authorization": header}
                async with client.get("/v1/models", headers=headers) as response:
                    assert response.status == expected, header
                    body = await response.json()
                if expected == 401:
                    assert body["error"]["type"] == "authentication_error" and response.headers["WWW-Authenticate"]
            async with client.get("/health") as response:
                assert response.status == 200
            assert (await chat(client))[0] == 401

    in_loop(go)


def test_request_ids_are_kept_or_made() -> None:
    async def go() -> None:
        async with running(says(f"x{END}")) as (client, _):
            async with client.get("/health", headers={"x-request-id": "mine-1"}) as response:
                assert response.headers["x-request-id"] == "mine-1"
            async with client.get("/nowhere", headers={"x-request-id": "x" * 100}) as response:
                assert len(response.headers["x-request-id"]) == 32
            body = {"messages": USER, "stream": True}
            async with client.post("/v1/chat/completions", json=body, headers={"x-request-id": "s"}) as response:
                assert response.headers["x-request-id"] == "s"
                await response.read()

    in_loop(go)


@given(st.text())
def test_H19_any_text_is_one_frame_that_a_json_parser_reads_back(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    payloads, done, comments = parse_sse(frame({"text": text}) + b": c\n\n" + b"data: [DONE]\n\n")
    assert payloads == [{"text": text}] and done and comments == 1


def test_named_events_carry_their_name() -> None:
    raw = frame({"a": "é\n"}, event="delta").decode()
    head, data, *rest = raw.split("\n")
    assert head == "event: delta" and json.loads(data.removeprefix("data: ")) == {"a": "é\n"} and rest == ["", ""]
