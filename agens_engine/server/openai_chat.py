"""POST /v1/chat/completions: one JSON answer, or chunks as server-sent events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from agens_engine.core import Request, StepEvent
from agens_engine.server.answer import ChoiceAnswer, chat_logprobs, finish_reason, merge_deltas
from agens_engine.server.chat_request import ChatRequest, output_options, parse_chat, render_chat
from agens_engine.server.fields import Fields, parse_body
from agens_engine.server.generation import EventStream, make_choices, output_budget
from agens_engine.server.host import HOST, REQUEST_ID, LoadedModel
from agens_engine.server.sse import frame, stream_events
from agens_engine.server.usage import timings_json, usage_json
from agens_engine.text.output import ContentDelta, Delta, OutputParser, ReasoningDelta


async def chat_completions(request: web.Request) -> web.StreamResponse:
    model = request.app[HOST].require()
    body = await request.read()
    chat, requests = await asyncio.to_thread(lambda: prepare_chat(Fields(parse_body(body)), model))
    reply = _ChatReply(model, chat, requests)
    async with model.generator.open(requests) as stream:
        if chat.options.stream:
            return await stream_events(
                request, stream, reply, model.keep_alive_seconds, {"x-request-id": request[REQUEST_ID]}
            )
        return web.json_response(await reply.whole(stream))


def prepare_chat(fields: Fields, model: LoadedModel) -> tuple[ChatRequest, list[Request]]:
    """From a request's fields to engine requests; takes a while for long conversations, so call it on a thread."""
    model.check_name(fields.text("model"))
    chat = parse_chat(fields, model.defaults)
    prompt = render_chat(chat, model.text)
    budget = output_budget(
        len(prompt.token_ids),
        chat.options.max_tokens,
        model.engine.context_tokens,
        model.max_output_tokens,
        param="messages",
    )
    reading = output_options(chat, prompt)
    return chat, make_choices(
        f"chatcmpl-{uuid.uuid4().hex}",
        prompt.token_ids,
        chat.options,
        max_tokens=budget,
        end_token_ids=model.text.tokenizer.end_token_ids,
        new_watch=lambda: OutputParser(model.text.tokenizer, reading),
    )


class _ChatReply:
    """Writes the answer to one chat request in this dialect, whole or chunk by chunk."""

    def __init__(self, model: LoadedModel, chat: ChatRequest, requests: Sequence[Request]) -> None:
        self._model = model
        self._options = chat.options
        self._watches = [request.watch for request in requests]
        self._head = {
            "id": requests[0].request_id.rpartition("-")[0],
            "created": int(time.time()),
            "model": model.name,
        }
        self._last: dict[int, StepEvent] = {}

    async def whole(self, stream: EventStream) -> dict[str, Any]:
        answers = [ChoiceAnswer() for _ in range(self._options.n)]
        async for item in stream.events():
            if item is not None:
                index, event = item
                answers[index].add(event)
        last = [answer.last for answer in answers if answer.last is not None]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage_json(last),
            "timings": timings_json(last),
        }

    def first_frames(self) -> bytes:
        roles = [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._options.n)]
        return b"".join(frame(chunk) for chunk in roles)

    def event_frames(self, index: int, event: StepEvent) -> bytes:
        """The chunks of one step. Log-probabilities ride on the first of them."""
        chunks = [self._chunk(index, _delta_json(delta)) for delta in merge_deltas(event.deltas)]
        if self._options.sampling.logprobs is not None and event.logprobs:
            if not chunks:  # tokens that are not visible, or not yet
                chunks = [self._chunk(index, {})]
            chunks[0]["choices"][0]["logprobs"] = chat_logprobs(event.logprobs, self._model.text.tokenizer)
        if event.finish_reason is not None:
            self._last[index] = event
            final = self._chunk(index, {})
            final["choices"][0]["finish_reason"] = self._finish_reason(index, event)
            final["timings"] = timings_json([event])
            chunks.append(final)
        return b"".join(frame(chunk) for chunk in chunks)

    def last_frames(self) -> bytes:
        """The usage chunk, only when it was asked for (case I11)."""
        if not self._options.include_usage:
            return b""
        usage = usage_json([self._last[index] for index in sorted(self._last)])
        return frame({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage})

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _choice(self, index: int, answer: ChoiceAnswer) -> dict[str, Any]:
        assert answer.last is not None
        said = answer.collect()
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.reasoning is not None:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = said.tool_calls
        elif message["content"] is None:
            message["content"] = ""
        logprobs = None
        if self._options.sampling.logprobs is not None:
            logprobs = chat_logprobs(answer.logprobs, self._model.text.tokenizer)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(index, answer.last),
        }

    def _finish_reason(self, index: int, event: StepEvent) -> str:
        watch = self._watches[index]
        assert event.finish_reason is not None and isinstance(watch, OutputParser)
        return finish_reason(event.finish_reason, has_calls=watch.num_calls > 0, call_cut_off=watch.call_cut_off)


def _delta_json(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text}
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if delta.id is None:
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
