"""Usage and timings of a finished request as JSON; the server's answers and `agens generate --json` share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agens_engine.core import Request, SourceCount, StepEvent, Timings
from agens_engine.text.output import OutputParser


@dataclass(frozen=True)
class Usage:
    """Tokens of one API request. `cached` are those of the prompt that were not computed again, `reasoning` those of
    the output that were thought."""

    prompt: int
    output: int
    cached: int
    reasoning: int

    def openai(self) -> dict[str, Any]:
        """As chat and completions write it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning},
        }

    def responses(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.output,
        }

    def anthropic(self) -> dict[str, Any]:
        """Here `input_tokens` counts only what was not in the cache."""
        return {
            "input_tokens": self.prompt - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.output,
            "output_tokens_details": {"thinking_tokens": self.reasoning},
        }


def count_usage(requests: Sequence[Request], ends: Mapping[int, StepEvent], choices_per_prompt: int) -> Usage:
    """Tokens of one API request from the last event of each choice. Choices share one prompt; prompts add up.

    ends   last events by choice index; choice c of prompt p has index p * choices_per_prompt + c
    """
    prompt = cached = output = reasoning = 0
    for index, event in ends.items():
        if index % choices_per_prompt == 0:
            prompt += event.prompt_tokens
            # the first choice tells what the cache gave this request; its siblings hit what it just wrote
            cached += event.cached_tokens
        output += event.completion_tokens
        watch = requests[index].watch
        reasoning += watch.num_reasoning_tokens if isinstance(watch, OutputParser) else 0
    return Usage(prompt, output, cached, reasoning)


def timings_json(last_events: Sequence[StepEvent]) -> dict[str, Any]:
    """Where the time went, seconds. Choices run side by side: times are the longest, steps and tokens are sums."""
    total = Timings()
    for event in last_events:
        timings = event.timings
        if timings is None:
            continue
        total.queue_seconds = max(total.queue_seconds, timings.queue_seconds)
        total.prefill_seconds = max(total.prefill_seconds, timings.prefill_seconds)
        total.decode_seconds = max(total.decode_seconds, timings.decode_seconds)
        total.verify_steps += timings.verify_steps
        total.decoded_tokens += timings.decoded_tokens
        for name, count in timings.sources.items():
            mine = total.sources.setdefault(name, SourceCount())
            mine.proposed += count.proposed
            mine.accepted += count.accepted
            mine.seconds += count.seconds
    return {
        "queue_seconds": total.queue_seconds,
        "prefill_seconds": total.prefill_seconds,
        "decode_seconds": total.decode_seconds,
        "verify_steps": total.verify_steps,
        "tokens_per_step": total.tokens_per_step,
        "sources": {
            name: {
                "proposed": count.proposed,
                "accepted": count.accepted,
                "seconds": count.seconds,
                # what this source alone adds to the one token that every step gives
                "tokens_per_step": count.accepted / total.verify_steps if total.verify_steps else 0.0,
            }
            for name, count in sorted(total.sources.items())
        },
    }
