"""POST /v1/chat/completions: one JSON answer, or chunks as server-sent events."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from agens_engine.core import StepEvent
from agens_engine.server.answer import ChoiceAnswer, chat_logprobs, finish_reason, merge_deltas
from agens_engine.server.chat_request import chat_job, parse_chat
from agens_engine.server.dialect import Reply
from agens_engine.server.fields import Fields
from agens_engine.server.host import LoadedModel
from agens_engine.server.job import Job
from agens_engine.server.sse import DONE, frame
from agens_engine.server.usage import timings_json
from agens_engine.text.output import ContentDelta, Delta, ReasoningDelta


def prepare_chat(fields: Fields, model: LoadedModel) -> ChatReply:
    model.check_name(fields.text("model"))
    return ChatReply(chat_job(parse_chat(fields, model.defaults), model, f"chatcmpl-{uuid.uuid4().hex}"))


class ChatReply(Reply):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._with_logprobs = job.options.sampling.logprobs is not None
        self._head = {"id": job.response_id, "created": job.created, "model": job.model.name}

    def whole(self, answers: Sequence[ChoiceAnswer]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": self.usage().openai(),
            "timings": timings_json(list(self.ends.values())),
        }

    def first_frames(self) -> bytes:
        roles = [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self.job.requests))]
        return b"".join(frame(chunk) for chunk in roles)

    def event_frames(self, index: int, event: StepEvent) -> bytes:
        """The chunks of one step. Log-probabilities ride on the first of them."""
        chunks = [self._chunk(index, _delta_json(delta)) for delta in merge_deltas(event.deltas)]
        if self._with_logprobs and event.logprobs:
            if not chunks:  # tokens that are not visible, or not yet
                chunks = [self._chunk(index, {})]
            chunks[0]["choices"][0]["logprobs"] = chat_logprobs(event.logprobs, self.job.model.text.tokenizer)
        if event.finish_reason is not None:
            final = self._chunk(index, {})
            final["choices"][0]["finish_reason"] = finish_reason(event, self.job.watch(index))
            final["choices"][0]["limits"] = self.job.limits(index, event)
            final["timings"] = timings_json([event])
            chunks.append(final)
        return b"".join(frame(chunk) for chunk in chunks)

    def last_frames(self) -> bytes:
        """The usage chunk, only when it was asked for (case I11), and the end mark."""
        if not self.job.options.include_usage:
            return DONE
        usage = self.usage().openai()
        return frame({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}) + DONE

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _choice(self, index: int, answer: ChoiceAnswer) -> dict[str, Any]:
        said = answer.collect()
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.reasoning is not None:
            message["reasoning_content"] = said.reasoning
        if said.tool_calls:
            message["tool_calls"] = said.tool_calls
        elif message["content"] is None:
            message["content"] = ""
        logprobs = chat_logprobs(answer.logprobs, self.job.model.text.tokenizer) if self._with_logprobs else None
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(self.ends[index], self.job.watch(index)),
            "limits": self.job.limits(index, self.ends[index]),
        }


def _delta_json(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text}
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if delta.id is None:
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
