"""Routes for whoever runs the server: /health, /props, /slots, /metrics, /openapi.json."""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from agens_engine.server.host import HOST
from agens_engine.server.model_routes import INPUT_MODALITIES
from agens_engine.server.openapi import openapi_document

_METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


async def health(request: web.Request) -> web.Response:
    """200 once the model is loaded and until it stops; 503 with the reason otherwise."""
    status, body = request.app[HOST].health()
    return web.json_response(body, status=status)


async def props(request: web.Request) -> web.Response:
    """What this server runs: limits, sampling defaults, and the memory plan beside what was used."""
    model = request.app[HOST].require()
    engine = model.engine
    body = {
        "model": model.name,
        "context_length": engine.context_tokens,
        "max_sequences": engine.max_sequences,
        "max_output_tokens": model.max_output_tokens,
        "input_modalities": list(INPUT_MODALITIES),
        "default_sampling": asdict(model.defaults),
        "memory": engine.stats().get("memory"),
    }
    return web.json_response(body)


async def slots(request: web.Request) -> web.Response:
    """What every generation under way does, without a word of it."""
    model = request.app[HOST].require()
    stats = model.engine.stats()
    body = {
        "max_sequences": model.engine.max_sequences,
        "running": stats.get("running"),
        "waiting": stats.get("waiting"),
        "slots": model.generator.slots(),
    }
    return web.json_response(body)


async def metrics(request: web.Request) -> web.Response:
    """The Prometheus text format; answers while the model is loading, too."""
    return web.Response(body=request.app[HOST].metrics.text(), headers={"Content-Type": _METRICS_TYPE})


async def openapi(request: web.Request) -> web.Response:
    return web.json_response(openapi_document())
