"""The served OpenAPI document, tried out: nothing a client sends is a 5xx, nothing malformed is accepted, and every
answer is one that the document announces.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.openapikit import Document, Route, damaged
from tests.serverkit import END, in_loop, running, says

# Unlike a truncation, each of these is never a JSON object.
NO_JSON = [b"", b" ", b"{", b"[]", b"null", b'"x"', b'{"messages": [}', b"\xff\xfe", b'{"temperature": NaN}', b"{}{}"]


async def document_of(client: Any) -> dict[str, Any]:
    async with client.get("/openapi.json") as response:
        assert response.status == 200
        body: dict[str, Any] = await response.json()
    return body


def test_the_document_lists_exactly_the_routes() -> None:
    async def go() -> None:
        async with running(says(END)) as (client, _):
            document = await document_of(client)
            app = client.server.app
            served: dict[str, set[str]] = {}
            for route in app.router.routes():
                if route.method != "HEAD":
                    served.setdefault(route.resource.canonical, set()).add(route.method.lower())
        served.pop("/", None)  # the web page
        assert {path: set(item) for path, item in document["paths"].items()} == served

    in_loop(go)


def test_get_routes_answer_as_announced() -> None:
    async def go() -> None:
        async with running(says(END)) as (client, _):
            raw = await document_of(client)
            document = Document(raw)
            for path, item in raw["paths"].items():
                if "get" not in item or path == "/metrics":
                    continue
                for real in ("fake", "other") if "{name}" in path else ("",):
                    async with client.get(path.replace("{name}", real)) as response:
                        body = await response.json()
                    schema = item["get"]["responses"][str(response.status)]["content"]["application/json"]["schema"]
                    assert document.allows(schema, body), (path, body)

    in_loop(go)


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_no_5xx_and_no_malformed_body_accepted(count: int) -> None:
    async def go() -> None:
        seen = {"good": 0, "bad": 0, "accepted": 0}
        async with running(says(f"x<|/think|>y{END}", per_step=20), log_level="error") as (client, _):
            document = Document(await document_of(client))
            for seed in range(count):
                route = document.routes[seed % len(document.routes)]
                await _try(client, document, route, random.Random(seed), seen)
        # the run means something only while all three happen often
        assert min(seen.values()) > count // 10, seen

    in_loop(go)


async def _try(client: Any, document: Document, route: Route, rng: random.Random, seen: dict[str, int]) -> None:
    body = document.make(route.body, rng)
    if rng.random() < 0.5:
        body = damaged(body, rng)
    good = document.allows(route.body, body)
    async with client.post(route.path, data=json.dumps(body).encode()) as response:
        raw = await response.read()
        where = (route.path, body, response.status, raw[:300])
        assert response.status < 500, where
        assert str(response.status) in route.answers, where
        assert good or response.status >= 400, f"malformed, but accepted: {where}"
        if response.content_type == "application/json":
            assert document.allows(route.answers[str(response.status)], json.loads(raw)), where
        else:
            assert response.content_type == "text/event-stream" and raw.endswith(b"\n\n"), where
    seen["good" if good else "bad"] += 1
    seen["accepted"] += response.status == 200


def test_what_is_no_json_object_is_400_everywhere() -> None:
    async def go() -> None:
        async with running(says(END)) as (client, engine):
            document = Document(await document_of(client))
            for route in document.routes:
                for raw in NO_JSON:
                    async with client.post(route.path, data=raw) as response:
                        assert response.status == 400, (route.path, raw)
                        assert document.allows(route.answers["400"], await response.json())
            assert engine.requests == []

    in_loop(go)
