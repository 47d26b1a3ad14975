"""POST /v1/completions: raw prompts (text or token ids), one JSON answer or chunks as server-sent events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from agens_engine.core import Request, StepEvent
from agens_engine.errors import RequestError
from agens_engine.server.answer import ChoiceAnswer, completion_logprobs, finish_reason
from agens_engine.server.fields import Fields, parse_body, wrong
from agens_engine.server.generation import EventStream, make_choices, output_budget
from agens_engine.server.host import HOST, REQUEST_ID, LoadedModel
from agens_engine.server.options import GenerationOptions, parse_options, token_ids
from agens_engine.server.sse import frame, stream_events
from agens_engine.server.usage import add_usage, timings_json, usage_json
from agens_engine.text.output import ContentDelta, OutputOptions, OutputParser

MAX_PROMPTS = 64
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class CompletionRequest:
    """prompts: token ids of each prompt. Choice c of prompt p has index p * n + c."""

    prompts: tuple[list[int], ...]
    options: GenerationOptions


async def completions(request: web.Request) -> web.StreamResponse:
    model = request.app[HOST].require()
    body = await request.read()
    parsed, requests = await asyncio.to_thread(lambda: prepare_completion(Fields(parse_body(body)), model))
    reply = _CompletionReply(model, parsed, requests)
    async with model.generator.open(requests) as stream:
        if parsed.options.stream:
            return await stream_events(
                request, stream, reply, model.keep_alive_seconds, {"x-request-id": request[REQUEST_ID]}
            )
        return web.json_response(await reply.whole(stream))


def prepare_completion(fields: Fields, model: LoadedModel) -> tuple[CompletionRequest, list[Request]]:
    """From a request's fields to engine requests; takes a while for long prompts, so call it on a thread."""
    model.check_name(fields.text("model"))
    parsed = parse_completion(fields, model)
    reading = OutputOptions.plain(stops=parsed.options.stop)
    response_id = f"cmpl-{uuid.uuid4().hex}"
    requests: list[Request] = []
    for index, prompt in enumerate(parsed.prompts):
        budget = output_budget(
            len(prompt),
            parsed.options.max_tokens,
            model.engine.context_tokens,
            model.max_output_tokens,
            param="prompt" if len(parsed.prompts) == 1 else f"prompt[{index}]",
        )
        requests += make_choices(
            f"{response_id}-{index}",
            prompt,
            parsed.options,
            max_tokens=budget,
            end_token_ids=model.text.tokenizer.end_token_ids,
            new_watch=lambda: OutputParser(model.text.tokenizer, reading),
        )
    return parsed, requests


def parse_completion(fields: Fields, model: LoadedModel) -> CompletionRequest:
    """Read the body of /v1/completions; raises RequestError naming the field."""
    if fields.flag("echo"):
        fields.refuse("echo", "echo is not supported by this server; put the prompt before the answer yourself")
    if fields.text("suffix"):
        fields.refuse("suffix", "suffix is not supported by this server; leave it out")
    prompts = _prompts(fields, model)
    options = parse_options(fields, model.defaults, fields.whole("logprobs", low=0, high=MAX_LOGPROBS))
    best_of = fields.whole("best_of", low=1)
    if best_of is not None and best_of != options.n:
        fields.refuse("best_of", f"best_of must equal n ({options.n}) on this server, not {best_of}")
    if len(prompts) * options.n > MAX_PROMPTS:
        raise RequestError(
            f"{len(prompts)} prompts with n = {options.n} make {len(prompts) * options.n} answers; "
            f"at most {MAX_PROMPTS} are allowed in one request",
            param="prompt",
        )
    fields.warn_unread()
    return CompletionRequest(tuple(prompts), options)


def _prompts(fields: Fields, model: LoadedModel) -> list[list[int]]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    raw = fields.get("prompt")
    if raw is None:
        raise RequestError("prompt is missing; give a string or a list of token ids", param="prompt")
    if isinstance(raw, str) or (isinstance(raw, list) and raw and not isinstance(raw[0], str | list)):
        return [_one_prompt(raw, "prompt", model)]
    if not isinstance(raw, list):
        raise wrong("prompt", "a string, a list of strings, or token ids", raw)
    if not raw:
        raise RequestError("prompt is an empty list; give at least one prompt", param="prompt")
    return [_one_prompt(prompt, f"prompt[{index}]", model) for index, prompt in enumerate(raw)]


def _one_prompt(raw: Any, param: str, model: LoadedModel) -> list[int]:
    tokenizer = model.text.tokenizer
    if isinstance(raw, str):
        ids = tokenizer.encode(raw, allow_control=True, add_special_tokens=True)
    elif isinstance(raw, list):
        ids = token_ids(raw, param, tokenizer.vocab_size)
    else:
        raise wrong(param, "a string or a list of token ids", raw)
    if not ids:
        raise RequestError(f"{param} is empty; the model needs at least one token to start from", param=param)
    return ids


class _CompletionReply:
    """Writes the answer to one completion request in this dialect, whole or chunk by chunk."""

    def __init__(self, model: LoadedModel, parsed: CompletionRequest, requests: Sequence[Request]) -> None:
        self._model = model
        self._options = parsed.options
        self._num_choices = len(requests)
        self._head = {
            "id": requests[0].request_id.rsplit("-", 2)[0],
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        self._last: dict[int, StepEvent] = {}
        self._offsets = [0] * self._num_choices

    async def whole(self, stream: EventStream) -> dict[str, Any]:
        answers = [ChoiceAnswer() for _ in range(self._num_choices)]
        async for item in stream.events():
            if item is not None:
                index, event = item
                answers[index].add(event)
                if event.finish_reason is not None:
                    self._last[index] = event
        choices = []
        for index, answer in enumerate(answers):
            choice = self._choice(index, answer.collect().content or "", answer.last)
            choices.append({**choice, "logprobs": self._logprobs(index, answer.logprobs)})
        return {
            **self._head,
            "choices": choices,
            "usage": self._usage(),
            "timings": timings_json([self._last[index] for index in sorted(self._last)]),
        }

    def first_frames(self) -> bytes:
        return b""

    def event_frames(self, index: int, event: StepEvent) -> bytes:
        text = "".join(delta.text for delta in event.deltas if isinstance(delta, ContentDelta))
        logprobs = self._logprobs(index, event.logprobs)
        frames = b""
        if text or (logprobs and logprobs["tokens"]):
            frames = frame({**self._head, "choices": [{**self._choice(index, text, None), "logprobs": logprobs}]})
        if event.finish_reason is not None:
            self._last[index] = event
            final = {**self._head, "choices": [self._choice(index, "", event)], "timings": timings_json([event])}
            frames += frame(final)
        return frames

    def last_frames(self) -> bytes:
        if not self._options.include_usage:
            return b""
        return frame({**self._head, "choices": [], "usage": self._usage()})

    def _choice(self, index: int, text: str, last: StepEvent | None) -> dict[str, Any]:
        reason = finish_reason(last.finish_reason, has_calls=False) if last and last.finish_reason else None
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, index: int, entries: list[Any]) -> dict[str, Any] | None:
        num_top = self._options.sampling.logprobs
        if num_top is None:
            return None
        tokenizer = self._model.text.tokenizer
        found, self._offsets[index] = completion_logprobs(entries, tokenizer, num_top, self._offsets[index])
        return found

    def _usage(self) -> dict[str, Any]:
        """Choices of one prompt share its tokens; different prompts add up."""
        n = self._options.n
        prompts = [range(first, first + n) for first in range(0, self._num_choices, n)]
        return add_usage([usage_json([self._last[i] for i in indices if i in self._last]) for indices in prompts])
