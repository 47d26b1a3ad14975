"""POST /v1/completions: raw prompts (text or token ids), one JSON answer or chunks as server-sent events."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agens_engine.core import StepEvent
from agens_engine.errors import RequestError
from agens_engine.server.answer import ChoiceAnswer, completion_logprobs, finish_reason
from agens_engine.server.dialect import Reply
from agens_engine.server.fields import Fields, wrong
from agens_engine.server.host import LoadedModel
from agens_engine.server.job import Job, Prompt, make_job
from agens_engine.server.options import GenerationOptions, parse_options, token_ids
from agens_engine.server.sse import DONE, frame
from agens_engine.server.usage import timings_json
from agens_engine.text.output import ContentDelta, OutputOptions

MAX_PROMPTS = 64
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class CompletionRequest:
    """prompts: token ids of each prompt."""

    prompts: tuple[list[int], ...]
    options: GenerationOptions


def prepare_completion(fields: Fields, model: LoadedModel) -> CompletionReply:
    model.check_name(fields.text("model"))
    parsed = parse_completion(fields, model)
    reading = OutputOptions.plain(stops=parsed.options.stop)
    names = ["prompt"] if len(parsed.prompts) == 1 else [f"prompt[{index}]" for index in range(len(parsed.prompts))]
    prompts = [Prompt(ids, reading, name) for ids, name in zip(parsed.prompts, names, strict=True)]
    return CompletionReply(make_job(model, f"cmpl-{uuid.uuid4().hex}", prompts, parsed.options))


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


class CompletionReply(Reply):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._head = {
            "id": job.response_id,
            "object": "text_completion",
            "created": job.created,
            "model": job.model.name,
        }
        self._offsets = [0] * len(job.requests)

    def whole(self, answers: Sequence[ChoiceAnswer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            choice = self._choice(index, answer.collect().content or "", self.ends[index])
            choices.append({**choice, "logprobs": self._logprobs(index, answer.logprobs)})
        return {
            **self._head,
            "choices": choices,
            "usage": self.usage().openai(),
            "timings": timings_json(list(self.ends.values())),
        }

    def event_frames(self, index: int, event: StepEvent) -> bytes:
        text = "".join(delta.text for delta in event.deltas if isinstance(delta, ContentDelta))
        logprobs = self._logprobs(index, event.logprobs)
        frames = b""
        if text or (logprobs and logprobs["tokens"]):
            frames = frame({**self._head, "choices": [{**self._choice(index, text, None), "logprobs": logprobs}]})
        if event.finish_reason is not None:
            final = {**self._head, "choices": [self._choice(index, "", event)], "timings": timings_json([event])}
            frames += frame(final)
        return frames

    def last_frames(self) -> bytes:
        if not self.job.options.include_usage:
            return DONE
        return frame({**self._head, "choices": [], "usage": self.usage().openai()}) + DONE

    def _choice(self, index: int, text: str, last: StepEvent | None) -> dict[str, Any]:
        reason = finish_reason(last, self.job.watch(index)) if last else None
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        return choice if last is None else {**choice, "limits": self.job.limits(index, last)}

    def _logprobs(self, index: int, entries: list[Any]) -> dict[str, Any] | None:
        num_top = self.job.options.sampling.logprobs
        if num_top is None:
            return None
        tokenizer = self.job.model.text.tokenizer
        found, self._offsets[index] = completion_logprobs(entries, tokenizer, num_top, self._offsets[index])
        return found
