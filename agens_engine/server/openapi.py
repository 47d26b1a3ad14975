"""The OpenAPI document of this server, served at /openapi.json: what each route takes and answers.

It promises no more than is enforced: what breaks a schema is refused with 4xx (a property test holds it to that).
Null means absent, and fields it does not list are ignored, so every object is open.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from agens_engine import __version__
from agens_engine.server.openapi_answers import ANSWERS
from agens_engine.server.openapi_parts import ref
from agens_engine.server.openapi_requests import REQUESTS

_ERRORS = {
    400: "the request is wrong; `param` names the field",
    401: "the API key is missing or wrong",
    404: "no such model",
    408: "the body took too long to arrive",
    413: "the body is larger than the server allows",
    429: "every seat and every place in the queue is taken",
    503: "the model is loading, has failed, or the server is stopping",
    504: "the answer took longer than the server allows",
}
_READ_ERRORS = (401, 503)
_BODY_ERRORS = (400, 401, 404, 408, 413, 503)
_GENERATION_ERRORS = (*_BODY_ERRORS, 429, 504)


@cache
def openapi_document() -> dict[str, Any]:
    """The whole document; treat it as read-only."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Agens Engine",
            "version": __version__,
            "description": "OpenAI-style and Anthropic-style HTTP API over one loaded model.",
        },
        "security": [{"bearer": []}, {"header": []}, {}],
        "paths": {
            "/v1/chat/completions": _generation("Answer a conversation", "ChatRequest", "ChatCompletion"),
            "/v1/completions": _generation("Continue a text", "CompletionRequest", "Completion"),
            "/v1/responses": _generation("Answer input items (nothing is stored)", "ResponsesRequest", "Response"),
            "/v1/messages": _generation(
                "Answer a conversation, Anthropic style", "MessagesRequest", "Message", error="AnthropicError"
            ),
            "/v1/messages/count_tokens": _post(
                "Tokens of a conversation as a prompt", "MessagesRequest", "TokenCount", error="AnthropicError"
            ),
            "/v1/models": _get("The loaded model", "ModelList"),
            "/v1/models/{name}": _get("One model", "Model", errors=(401, 404, 503), parameters=[_NAME]),
            "/tokenize": _post("Text or messages to token ids", "TokenizeRequest", "Tokens"),
            "/detokenize": _post("Token ids to text", "DetokenizeRequest", "Prompt"),
            "/apply-template": _post("A conversation as the text of its prompt", "ChatRequest", "Prompt"),
            "/health": _health(),
            "/props": _get("Limits, defaults and the memory plan", "Props"),
            "/slots": _get("What every generation under way does", "Slots"),
            "/metrics": {"get": {"summary": "Prometheus metrics", "responses": {"200": _METRICS, **_errors((401,))}}},
            "/openapi.json": _get("This document", "Document", errors=(401,)),
        },
        "components": {
            "schemas": {**REQUESTS, **ANSWERS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_METRICS = {"description": "text format", "content": {"text/plain": {"schema": {"type": "string"}}}}


def _json(schema: str, what: str) -> dict[str, Any]:
    return {"description": what, "content": {"application/json": {"schema": ref(schema)}}}


def _errors(statuses: tuple[int, ...], schema: str = "Error") -> dict[str, Any]:
    return {str(status): _json(schema, _ERRORS[status]) for status in sorted(statuses)}


def _get(
    what: str, answer: str, *, errors: tuple[int, ...] = _READ_ERRORS, parameters: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": what, "responses": {"200": _json(answer, what), **_errors(errors)}}
    if parameters:
        operation["parameters"] = parameters
    return {"get": operation}


def _post(
    what: str, body: str, answer: str, *, errors: tuple[int, ...] = _BODY_ERRORS, error: str = "Error"
) -> dict[str, Any]:
    return {
        "post": {
            "summary": what,
            "requestBody": {"required": True, "content": {"application/json": {"schema": ref(body)}}},
            "responses": {"200": _json(answer, what), **_errors(errors, error)},
        }
    }


def _generation(what: str, body: str, answer: str, *, error: str = "Error") -> dict[str, Any]:
    """A route that generates: with `stream: true` its answer is a stream of server-sent events."""
    route = _post(what, body, answer, errors=_GENERATION_ERRORS, error=error)
    route["post"]["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return route


def _health() -> dict[str, Any]:
    answers = {"200": _json("Health", "ready"), "503": _json("Health", "loading, failed or stopping")}
    return {"get": {"summary": "Whether the model can be used", "security": [{}], "responses": answers}}
