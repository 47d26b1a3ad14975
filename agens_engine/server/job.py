"""One API request, ready for the engine: every dialect makes a Job of its JSON and writes its answer from one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agens_engine.core import ReasoningControl, Request, StepEvent
from agens_engine.server.generation import make_choices, output_budget
from agens_engine.server.host import LoadedModel
from agens_engine.server.limits import limits_json
from agens_engine.server.options import GenerationOptions
from agens_engine.text.call_grammar import CallPlan
from agens_engine.text.output import OutputOptions, OutputParser
from agens_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """reading: how the answers to it are read; param: the field it came from, for errors; calls: their grammar."""

    token_ids: Sequence[int]
    reading: OutputOptions
    param: str
    calls: CallPlan | None = None


@dataclass(frozen=True)
class Job:
    """requests: one for each choice; choice c of prompt p is requests[p * options.n + c]."""

    model: LoadedModel
    response_id: str
    options: GenerationOptions
    requests: tuple[Request, ...]
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time, seconds

    def watch(self, index: int) -> OutputParser:
        """The reader of one choice: complete once the choice's last event has come."""
        watch = self.requests[index].watch
        assert isinstance(watch, OutputParser)
        return watch

    def limits(self, index: int, end: StepEvent) -> dict[str, Any]:
        """The `limits` object of one choice; end: its last event."""
        return limits_json(self.requests[index], self.options.max_tokens, self.model.max_output_tokens, end)


def make_job(model: LoadedModel, response_id: str, prompts: Sequence[Prompt], options: GenerationOptions) -> Job:
    """`options.n` engine requests for each prompt.

    raises   ContextLengthError naming the prompt that leaves no room for an answer, RequestError for a form of the
             answer that makes no grammar
    """
    tokenizer = model.text.tokenizer
    requests: list[Request] = []
    for index, prompt in enumerate(prompts):
        budget = output_budget(
            len(prompt.token_ids),
            options.max_tokens,
            model.engine.context_tokens,
            model.max_output_tokens,
            param=prompt.param,
        )
        requests += make_choices(
            f"{response_id}-{index}",
            prompt.token_ids,
            options,
            max_tokens=budget,
            end_token_ids=tokenizer.end_token_ids,
            new_watch=lambda reading=prompt.reading: OutputParser(tokenizer, reading),  # type: ignore[misc]
            reasoning=_reasoning_control(tokenizer, prompt.reading, options),
            grammar=model.text.grammars.compile(options.answer, prompt.calls),
        )
    return Job(model, response_id, options, tuple(requests))


def _reasoning_control(tokenizer: Tokenizer, reading: OutputOptions, options: GenerationOptions) -> ReasoningControl:
    return ReasoningControl(
        tokenizer.think_start_id,
        tokenizer.think_end_id,
        call_start_id=tokenizer.call_start_id if reading.calls_in_reasoning else None,
        budget=options.reasoning_budget,
        soft_bias=options.reasoning_soft_bias,
        repetition_guard=options.repetition_guard,
    )
