"""Usage and timings of a finished request as JSON; the server's answers and `agens generate --json` share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agens_engine.core import SourceCount, StepEvent, Timings


def usage_json(last_events: Sequence[StepEvent]) -> dict[str, Any]:
    """Token counts of one API request from the last event of each choice; choices share one prompt.

    For several prompts, add the results up with `add_usage`.
    """
    prompt = max((event.prompt_tokens for event in last_events), default=0)
    completion = sum(event.completion_tokens for event in last_events)
    # the first choice tells what the cache gave this request; its siblings hit what it just wrote
    cached = last_events[0].cached_tokens if last_events else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def add_usage(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{key: sum(part[key] for part in parts) for key in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "prompt_tokens_details": {
            "cached_tokens": sum(part["prompt_tokens_details"]["cached_tokens"] for part in parts)
        },
    }


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
            name: {"proposed": count.proposed, "accepted": count.accepted, "seconds": count.seconds}
            for name, count in sorted(total.sources.items())
        },
    }
