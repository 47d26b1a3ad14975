"""The one place that turns an exception into the API's error JSON, for answers and for events inside a stream.

OpenAI     {"error": {"message": what, limit, way out, "type": kind, "param": field or null, "code": reason or null}}
Anthropic  {"type": "error", "error": {"type": kind, "message": what, limit, way out}}
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web

from agens_engine.errors import AgensError, ContextLengthError, EngineStoppedError, NotFoundError, RequestError

log = logging.getLogger(__name__)

_TYPE_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


_ANTHROPIC_TYPE_OF_STATUS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AuthenticationError(RequestError):
    http_status = 401


class OverloadedError(RequestError):
    """Every seat and every place in the queue is taken; trying again later helps."""

    http_status = 429


class GenerationFailedError(AgensError):
    """The engine gave up on this request; its neighbours go on."""

    http_status = 500


class BodyTimeoutError(RequestError):
    """The client took too long to send its body."""

    http_status = 408


class RequestTimeoutError(AgensError):
    """The answer took longer than request_timeout_seconds; what was generated is gone, the seat is free."""

    http_status = 504


def error_parts(error: BaseException) -> tuple[int, dict[str, Any]]:
    """HTTP status and JSON body for any exception; unexpected ones are logged here and keep their details private."""
    if isinstance(error, RequestError):
        return error.http_status, _body(error.http_status, str(error), error.param, error.code or _code_of(error))
    if isinstance(error, AgensError) and (status := getattr(error, "http_status", None)) is not None:
        return status, _body(status, str(error), None, _CODES.get(type(error)))
    if isinstance(error, web.HTTPException):
        return error.status, _body(error.status, _http_message(error), None, _HTTP_CODES.get(error.status))
    log.error("internal error while serving a request", exc_info=error)
    return 500, _body(500, "internal error; the server's log has the details", None, "internal_error")


def anthropic_parts(error: BaseException) -> tuple[int, dict[str, Any]]:
    """The same in the form of the Messages API."""
    status, body = error_parts(error)
    message = body["error"]["message"]
    if isinstance(error, ContextLengthError):
        # clients of this API recognise a full context by these words, and then shorten the conversation
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.context_tokens} maximum; {message}"
    kind = _ANTHROPIC_TYPE_OF_STATUS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return status, {"type": "error", "error": {"type": kind, "message": message}}


def error_response(error: BaseException, status: int, body: dict[str, Any], request_id: str) -> web.Response:
    """The answer for what error_parts said, with the headers its status calls for."""
    headers = {"x-request-id": request_id}
    if status == 405 and isinstance(error, web.HTTPMethodNotAllowed):
        headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        headers["Retry-After"] = "1"
    response = web.json_response(body, status=status, headers=headers)
    if status == 413:
        # The rest of the body was not read, so the connection cannot be used again.
        response.force_close()
    return response


_CODES: dict[type[AgensError], str] = {
    EngineStoppedError: "engine_stopped",
    GenerationFailedError: "generation_failed",
    RequestTimeoutError: "request_timeout",
}
_HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed", 413: "request_too_large"}


def _code_of(error: RequestError) -> str | None:
    return "not_found" if isinstance(error, NotFoundError) else None


def _http_message(error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"method {error.method} is not allowed here; use {' or '.join(sorted(error.allowed_methods))}"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"{error.text}; shorten the request or raise max_body_bytes"
    if isinstance(error, web.HTTPNotFound):
        return "no such URL; the API lives under /v1, for example POST /v1/chat/completions"
    return error.text or error.reason


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = _TYPE_OF_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
