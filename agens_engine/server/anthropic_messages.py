"""POST /v1/messages and /v1/messages/count_tokens: one JSON answer, or the event sequence of this API."""

from __future__ import annotations

import json
import uuid
from typing import Any

from aiohttp import web

from agens_engine.server.answer import finish_reason
from agens_engine.server.blocks import Block, BlockKind, BlockReply
from agens_engine.server.chat_request import ChatRequest, chat_job, render_chat
from agens_engine.server.dialect import read_request
from agens_engine.server.errors import anthropic_parts
from agens_engine.server.fields import Fields
from agens_engine.server.host import LoadedModel
from agens_engine.server.messages_request import translate_message
from agens_engine.server.sse import frame
from agens_engine.server.usage import Usage, timings_json

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Clients send a thought back only with its signature, which is not checked here.
_SIGNATURE = "agens"


def prepare_message(fields: Fields, model: LoadedModel) -> MessagesReply:
    return MessagesReply(chat_job(_read(fields, model), model, f"msg_{uuid.uuid4().hex}"))


async def count_tokens(request: web.Request) -> web.Response:
    """The tokens that the same body would have as a prompt."""
    count = await read_request(
        request, lambda fields, model: len(render_chat(_read(fields, model), model.text).token_ids)
    )
    return web.json_response({"input_tokens": count})


def _read(fields: Fields, model: LoadedModel) -> ChatRequest:
    model.check_name(fields.text("model"))
    return translate_message(fields).parse(model.defaults)


class MessagesReply(BlockReply):
    keep_alive = frame({"type": "ping"}, event="ping")

    def first_frames(self) -> bytes:
        """What the cache gives is not known yet; the closing message_delta has the final counts."""
        prompt_tokens = len(self.job.requests[0].prompt_ids)
        message = self._message(Usage(prompt_tokens, 0, 0, 0))
        return _event("message_start", message=message) + self.keep_alive

    def opened(self, block: Block) -> bytes:
        return _event("content_block_start", index=block.index, content_block=_content(block, signature=""))

    def grown(self, block: Block, text: str) -> bytes:
        if block.kind is BlockKind.REASONING:
            delta = {"type": "thinking_delta", "thinking": text}
        elif block.kind is BlockKind.TEXT:
            delta = {"type": "text_delta", "text": text}
        else:
            delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", index=block.index, delta=delta)

    def closed(self, block: Block) -> bytes:
        frames = b""
        if block.kind is BlockKind.REASONING:
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            frames = _event("content_block_delta", index=block.index, delta=delta)
        return frames + _event("content_block_stop", index=block.index)

    def last_frames(self) -> bytes:
        ended = _event(
            "message_delta",
            delta=self._stop(),
            usage=self.usage().anthropic(),
            timings=timings_json([self.ends[0]]),
            limits=self.job.limits(0, self.ends[0]),
        )
        return ended + _event("message_stop")

    def error_frames(self, error: BaseException) -> bytes:
        return frame(anthropic_parts(error)[1], event="error")

    def final(self) -> dict[str, Any]:
        return {
            **self._message(self.usage()),
            **self._stop(),
            "content": [_content(block) for block in self.blocks],
            "timings": timings_json([self.ends[0]]),
            "limits": self.job.limits(0, self.ends[0]),
        }

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self.job.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.job.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage.anthropic(),
        }

    def _stop(self) -> dict[str, Any]:
        watch = self.job.watch(0)
        reason = _STOP_REASONS[finish_reason(self.ends[0], watch)]
        if reason == "end_turn" and watch.stop_hit is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": watch.stop_hit}
        return {"stop_reason": reason, "stop_sequence": None}


def _content(block: Block, *, signature: str = _SIGNATURE) -> dict[str, Any]:
    """A block of the answer as it stands; one that was just opened is empty and not signed yet."""
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": signature}
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": block.text}
    arguments = json.loads(block.text) if block.text else {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return frame({"type": kind, **fields}, event=kind)
