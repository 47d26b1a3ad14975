"""The API key: `Authorization: Bearer KEY` or `x-api-key: KEY`, compared in constant time.

/health stays open for supervisors, and the web page, which asks for the key and sends it itself.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from agens_engine.server.errors import AuthenticationError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPEN_PATHS = frozenset({"/", "/health"})


def api_key_middleware(api_key: str | None) -> Any:
    """An aiohttp middleware that asks for the key, or lets everything pass when there is none."""
    expected = api_key.strip().encode() if api_key else None  # a key file often ends with a line break

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None and request.path not in _OPEN_PATHS:
            _check(request, expected)
        return await handler(request)

    return check


def _check(request: web.Request, expected: bytes) -> None:
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    given = [bearer] if scheme.lower() == "bearer" else []
    given += request.headers.getall("x-api-key", [])
    # headers may carry bytes that are not UTF-8; aiohttp hands them over as surrogates
    if any(hmac.compare_digest(key.strip().encode(errors="surrogateescape"), expected) for key in given):
        return
    if scheme or given:
        raise AuthenticationError("the API key is wrong", code="invalid_api_key")
    raise AuthenticationError(
        "this server asks for an API key; send it as the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        code="missing_api_key",
    )
