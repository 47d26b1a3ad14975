"""Server-sent events as bytes: frames, the keep-alive comment, the end mark, the headers of a stream.

A frame is `data: <one line of JSON>` and an empty line; a line that starts with a colon is a comment clients skip.
The encoder never writes a bare line break, so one frame is always one data line.
"""

from __future__ import annotations

import json
from typing import Any

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))  # json.dumps would make one for each frame
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # proxies that collect answers before passing them on would undo streaming
    "X-Accel-Buffering": "no",
}


def frame(payload: dict[str, Any], event: str | None = None) -> bytes:
    """One event as bytes; `event` names it for dialects that use event names."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {_ENCODER.encode(payload)}\n\n".encode()
