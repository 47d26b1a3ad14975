"""POST /v1/responses: one JSON answer, or the typed event sequence. Nothing is stored."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from agens_engine.core import FinishReason
from agens_engine.server.blocks import Block, BlockKind, BlockReply
from agens_engine.server.chat_request import chat_job
from agens_engine.server.errors import error_parts
from agens_engine.server.fields import Fields
from agens_engine.server.host import LoadedModel
from agens_engine.server.job import Job
from agens_engine.server.responses_request import ResponsesRequest, translate_response, wrap_thought
from agens_engine.server.sse import frame
from agens_engine.server.usage import timings_json

_ID_PREFIX = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}


def prepare_response(fields: Fields, model: LoadedModel) -> ResponsesReply:
    model.check_name(fields.text("model"))
    asked = translate_response(fields)
    job = chat_job(asked.chat.parse(model.defaults), model, f"resp_{uuid.uuid4().hex}")
    return ResponsesReply(job, asked, fields.values)


class ResponsesReply(BlockReply):
    """body: the request as sent; some of its fields are repeated in the response."""

    def __init__(self, job: Job, asked: ResponsesRequest, body: Mapping[str, Any]) -> None:
        super().__init__(job)
        self._asked = asked
        self._echo = _echo(job, body)
        self._sequence = 0
        self._ids: list[str] = []

    def first_frames(self) -> bytes:
        waiting = self._response("in_progress")
        return self._event("response.created", response=waiting) + self._event("response.in_progress", response=waiting)

    def opened(self, block: Block) -> bytes:
        item_id = self._id(block)
        item = self._item(block, "in_progress")
        frames = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind is not BlockKind.CALL:
            where = {"item_id": item_id, "output_index": block.index, "content_index": 0}
            frames += self._event("response.content_part.added", **where, part=_part(block.kind, ""))
        return frames

    def grown(self, block: Block, text: str) -> bytes:
        where = {"item_id": self._id(block), "output_index": block.index}
        if block.kind is BlockKind.CALL:
            return self._event("response.function_call_arguments.delta", **where, delta=text)
        where["content_index"] = 0
        if block.kind is BlockKind.REASONING:
            return self._event("response.reasoning_text.delta", **where, delta=text)
        return self._event("response.output_text.delta", **where, delta=text, logprobs=[])

    def closed(self, block: Block) -> bytes:
        """A call that was cut off gets no `done`: clients run a call when they see that (case A10)."""
        where: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        if block.kind is BlockKind.CALL:
            if not block.complete:
                return b""
            done = {"name": block.name, "arguments": block.text}
            frames = self._event("response.function_call_arguments.done", **where, **done)
        else:
            where["content_index"] = 0
            if block.kind is BlockKind.REASONING:
                frames = self._event("response.reasoning_text.done", **where, text=block.text)
            else:
                frames = self._event("response.output_text.done", **where, text=block.text, logprobs=[])
            frames += self._event("response.content_part.done", **where, part=_part(block.kind, block.text))
        item = self._item(block, _status(block.complete))
        return frames + self._event("response.output_item.done", output_index=block.index, item=item)

    def last_frames(self) -> bytes:
        response = self.final()
        return self._event(f"response.{response['status']}", response=response)

    def error_frames(self, error: BaseException) -> bytes:
        _, body = error_parts(error)
        failed = self._response("failed")
        failed["error"] = {"code": "server_error", "message": body["error"]["message"]}
        return self._event("response.failed", response=failed)

    def final(self) -> dict[str, Any]:
        end = self.ends[0]
        whole = end.finish_reason is FinishReason.STOP
        response = self._response(_status(whole))
        if not whole:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["output"] = [self._item(block, _status(block.complete)) for block in self.blocks]
        response["usage"] = self.usage().responses()
        response["timings"] = timings_json([end])
        response["limits"] = self.job.limits(0, end)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.job.response_id,
            "object": "response",
            "created_at": self.job.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.job.model.name,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **self._echo,
        }

    def _id(self, block: Block) -> str:
        if block.index == len(self._ids):
            self._ids.append(f"{_ID_PREFIX[block.kind]}_{uuid.uuid4().hex}")
        return self._ids[block.index]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        started = status != "in_progress"
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        if block.kind is BlockKind.CALL:
            item |= {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}
            if block.name in self._asked.namespaces:
                item["namespace"] = self._asked.namespaces[block.name]
            return item
        content = [_part(block.kind, block.text)] if started else []
        if block.kind is BlockKind.TEXT:
            return item | {"type": "message", "role": "assistant", "content": content}
        item |= {"type": "reasoning", "summary": [], "content": content}
        if self._asked.wraps_thoughts:
            item["encrypted_content"] = wrap_thought(block.text) if started else None
        return item

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._sequence
        self._sequence += 1
        return frame({"type": kind, "sequence_number": number, **fields}, event=kind)


def _status(complete: bool) -> str:
    return "completed" if complete else "incomplete"


def _part(kind: BlockKind, text: str) -> dict[str, Any]:
    if kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _echo(job: Job, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the request that clients find again in the response, with their defaults filled in."""

    def given(key: str, default: Any) -> Any:
        value = body.get(key)
        return default if value is None else value

    sampling = job.options.sampling
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": job.options.max_tokens,
        "metadata": given("metadata", {}),
        "parallel_tool_calls": given("parallel_tool_calls", True),
        "reasoning": {"effort": None, "summary": None} | given("reasoning", {}),
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}} | given("text", {}),
        "tool_choice": given("tool_choice", "auto"),
        "tools": given("tools", []),
        "top_p": sampling.top_p,
    }
