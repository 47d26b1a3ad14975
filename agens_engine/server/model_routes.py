"""Routes about the model itself: /v1/models, /tokenize, /detokenize, /health, /props."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from aiohttp import web

from agens_engine.errors import RequestError
from agens_engine.server.chat_request import parse_chat, render_chat
from agens_engine.server.fields import Fields, parse_body, wrong
from agens_engine.server.host import HOST, LoadedModel
from agens_engine.server.options import token_ids


async def list_models(request: web.Request) -> web.Response:
    host = request.app[HOST]
    return web.json_response({"object": "list", "data": [_model_json(host.require(), host.created)]})


async def get_model(request: web.Request) -> web.Response:
    host = request.app[HOST]
    model = host.require()
    name = request.match_info["name"]
    model.check_name(name)
    return web.json_response(_model_json(model, host.created))


async def health(request: web.Request) -> web.Response:
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
        "default_sampling": asdict(model.defaults),
        "memory": engine.stats().get("memory"),
    }
    return web.json_response(body)


async def tokenize(request: web.Request) -> web.Response:
    """{prompt, add_special_tokens} or {messages, ...chat fields} -> {count, tokens, max_model_len}."""
    model = request.app[HOST].require()
    fields = Fields(parse_body(await request.read()))
    model.check_name(fields.text("model"))
    if fields.get("messages") is not None:
        chat = parse_chat(fields, model.defaults)
        ids = list((await asyncio.to_thread(render_chat, chat, model.text)).token_ids)
    else:
        prompt = fields.text("prompt")
        if prompt is None:
            raise RequestError("prompt is missing; give prompt (a string) or messages", param="prompt")
        ids = await asyncio.to_thread(
            model.text.tokenizer.encode,
            prompt,
            allow_control=True,
            add_special_tokens=fields.flag("add_special_tokens") is not False,
        )
    return web.json_response({"count": len(ids), "tokens": ids, "max_model_len": model.engine.context_tokens})


async def detokenize(request: web.Request) -> web.Response:
    """{tokens: [ids]} -> {prompt: text}, control tokens spelled out."""
    model = request.app[HOST].require()
    fields = Fields(parse_body(await request.read()))
    model.check_name(fields.text("model"))
    tokens = fields.get("tokens")
    if tokens is None:
        raise RequestError("tokens is missing; give a list of token ids", param="tokens")
    if not isinstance(tokens, list):
        raise wrong("tokens", "a list of token ids", tokens)
    ids = token_ids(tokens, "tokens", model.text.tokenizer.vocab_size)
    return web.json_response({"prompt": model.text.tokenizer.decode(ids, skip_special=False)})


def _model_json(model: LoadedModel, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "agens",
        "max_model_len": model.engine.context_tokens,
        "context_length": model.engine.context_tokens,
    }
