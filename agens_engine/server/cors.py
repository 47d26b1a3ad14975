"""Which web pages of other origins may call this server: none, unless cors_origins lists them (or `*`).

Without a list no header is ever sent, and browsers keep other pages from reading answers. Credentials are never
allowed: keys travel in headers that the page sets itself.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from aiohttp import hdrs, web

from agens_engine.server.auth import Handler

ANY_ORIGIN = "*"
_METHODS = "GET, POST, OPTIONS"
_USUAL_HEADERS = "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta"
_PREFLIGHT_SECONDS = "600"


def add_cors(app: web.Application, origins: Set[str]) -> None:
    """Mark every answer, streams included, for the origins on the list; does nothing for an empty list."""
    if not origins:
        return

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add("Vary", "Origin")
        allowed = _allowed(request, origins)
        if allowed is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = "x-request-id, retry-after"

    app.on_response_prepare.append(mark)


def preflight_middleware(origins: Set[str]) -> Any:
    """Answers a browser's question before the real request; it carries no key, so this comes before the key check."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not asks or _allowed(request, origins) is None:
            return await handler(request)
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, _USUAL_HEADERS),
            hdrs.ACCESS_CONTROL_MAX_AGE: _PREFLIGHT_SECONDS,
        }
        return web.Response(status=204, headers=headers)

    return answer


def _allowed(request: web.Request, origins: Set[str]) -> str | None:
    """The value of Access-Control-Allow-Origin, or None where the origin may not read answers."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return None
    if ANY_ORIGIN in origins:
        return ANY_ORIGIN
    return origin if origin in origins else None
