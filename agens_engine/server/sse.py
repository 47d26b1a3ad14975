"""Server-sent events: frames, headers, the keep-alive comment, and the loop that every streaming dialect shares.

A frame is `data: <one line of JSON>` and an empty line; a line that starts with a colon is a comment clients skip.
json.dumps never writes a bare line break, so one frame is always one data line.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Protocol

from aiohttp import web

from agens_engine.core import StepEvent
from agens_engine.server.errors import error_parts
from agens_engine.server.generation import EventStream

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Reply(Protocol):
    """One dialect's way to write a stream; each part returns ready frames, possibly none."""

    def first_frames(self) -> bytes: ...
    def event_frames(self, index: int, event: StepEvent) -> bytes: ...
    def last_frames(self) -> bytes: ...


def frame(payload: dict[str, Any], event: str | None = None) -> bytes:
    """One event as bytes; `event` names it for dialects that use event names."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


async def stream_events(
    request: web.Request, stream: EventStream, reply: Reply, keep_alive_seconds: float, headers: dict[str, str]
) -> web.StreamResponse:
    """Write a whole stream. The generations are already accepted, so what fails from here on becomes an error event.

    While nothing comes (a long prefill), a comment goes out every keep_alive_seconds so that proxies keep the
    connection; writing it also notices a client that is gone.
    """
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            # proxies that collect answers before passing them on would undo streaming
            "X-Accel-Buffering": "no",
            **headers,
        }
    )
    try:
        await response.prepare(request)
        await response.write(reply.first_frames())
        await response.write(await _write_events(response, stream, reply, keep_alive_seconds) + DONE)
        await response.write_eof()
    except ConnectionError:
        log.info("%s: the client went away during the stream", headers.get("x-request-id", "-"))
    return response


async def _write_events(
    response: web.StreamResponse, stream: EventStream, reply: Reply, keep_alive_seconds: float
) -> bytes:
    """Write frames as events come; returns the closing frames."""
    try:
        async for item in stream.events(keep_alive_seconds):
            frames = KEEP_ALIVE if item is None else reply.event_frames(*item)
            if frames:
                await response.write(frames)
        return reply.last_frames()
    except ConnectionError:
        raise
    except Exception as error:
        return frame(error_parts(error)[1])
