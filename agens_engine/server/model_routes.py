"""Routes about the model itself: /v1/models, /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from agens_engine.errors import RequestError
from agens_engine.server.chat_request import parse_chat, render_chat
from agens_engine.server.dialect import read_request
from agens_engine.server.fields import Fields
from agens_engine.server.host import HOST, LoadedModel
from agens_engine.server.options import token_ids

INPUT_MODALITIES = ("text",)  # images are refused by name (text/messages.py) until the engine can see


async def list_models(request: web.Request) -> web.Response:
    host = request.app[HOST]
    return web.json_response({"object": "list", "data": [_model_json(host.require(), host.created)]})


async def get_model(request: web.Request) -> web.Response:
    host = request.app[HOST]
    model = host.require()
    name = request.match_info["name"]
    model.check_name(name)
    return web.json_response(_model_json(model, host.created))


async def tokenize(request: web.Request) -> web.Response:
    """{prompt, add_special_tokens} or {messages, ...chat fields} -> {count, tokens, max_model_len}."""

    def read(fields: Fields, model: LoadedModel) -> dict[str, Any]:
        model.check_name(fields.text("model"))
        if fields.get("messages") is not None:
            ids = render_chat(parse_chat(fields, model.defaults), model.text).token_ids
        else:
            prompt = fields.text("prompt")
            if prompt is None:
                raise RequestError("prompt is missing; give prompt (a string) or messages", param="prompt")
            with_special = fields.flag("add_special_tokens") is not False
            ids = model.text.tokenizer.encode(prompt, allow_control=True, add_special_tokens=with_special)
        return {"count": len(ids), "tokens": list(ids), "max_model_len": model.engine.context_tokens}

    return web.json_response(await read_request(request, read))


async def detokenize(request: web.Request) -> web.Response:
    """{tokens: [ids]} -> {prompt: text}, control tokens spelled out."""

    def read(fields: Fields, model: LoadedModel) -> dict[str, Any]:
        model.check_name(fields.text("model"))
        tokens = fields.get("tokens")
        if tokens is None:
            raise RequestError("tokens is missing; give a list of token ids", param="tokens")
        ids = token_ids(tokens, "tokens", model.text.tokenizer.vocab_size)
        return {"prompt": model.text.tokenizer.decode(ids, skip_special=False)}

    return web.json_response(await read_request(request, read))


async def apply_template(request: web.Request) -> web.Response:
    """The fields of a chat request -> {prompt: the text that the checkpoint's template makes of it}."""

    def read(fields: Fields, model: LoadedModel) -> dict[str, Any]:
        model.check_name(fields.text("model"))
        return {"prompt": render_chat(parse_chat(fields, model.defaults), model.text).text}

    return web.json_response(await read_request(request, read))


def _model_json(model: LoadedModel, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "agens",
        "max_model_len": model.engine.context_tokens,
        "context_length": model.engine.context_tokens,
        "input_modalities": list(INPUT_MODALITIES),
        "output_modalities": ["text"],
    }
