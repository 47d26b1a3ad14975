"""What one choice has said so far, and the JSON pieces that streaming and whole answers share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from agens_engine.core import FinishReason, StepEvent, TokenLogprob
from agens_engine.text.output import Answer, Delta, OutputParser, ToolCallDelta, collect
from agens_engine.text.tokenizer import Tokenizer

# JSON has no -Infinity; this stands for "impossible", as OpenAI's API does it
_LOWEST_LOGPROB = -9999.0


@dataclass
class ChoiceAnswer:
    """Gathers the events of one choice."""

    deltas: list[Delta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: StepEvent | None = None

    def add(self, event: StepEvent) -> None:
        self.deltas += event.deltas
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        if event.finish_reason is not None:
            self.last = event

    def collect(self) -> Answer:
        return collect(self.deltas)


def finish_reason(last: StepEvent, watch: OutputParser) -> str:
    """OpenAI's word for how a choice ended. A call that was cut off is never reported as a call to run (case A10)."""
    assert last.finish_reason is not None
    if last.finish_reason is FinishReason.STOP and watch.num_calls and not watch.call_cut_off:
        return "tool_calls"
    return last.finish_reason.value


def merge_deltas(deltas: list[Delta]) -> list[Delta]:
    """Join neighbours of one kind: a verify step commits several tokens, one frame is enough for them."""
    merged: list[Delta] = []
    for delta in deltas:
        before = merged[-1] if merged else None
        if isinstance(delta, ToolCallDelta):
            continues = isinstance(before, ToolCallDelta) and before.index == delta.index and delta.id is None
            # the opening piece stays alone: its arguments are "" so that clients start from an empty string (case A3)
            if continues and isinstance(before, ToolCallDelta) and before.id is None:
                merged[-1] = ToolCallDelta(delta.index, None, None, before.arguments + delta.arguments)
                continue
        elif type(before) is type(delta) and not isinstance(before, ToolCallDelta) and before is not None:
            merged[-1] = type(delta)(before.text + delta.text)
            continue
        merged.append(delta)
    return merged


def chat_logprobs(entries: list[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""
    return {
        "content": [
            {
                **_token_json(entry.token_id, entry.logprob, tokenizer),
                "top_logprobs": [_token_json(token, logprob, tokenizer) for token, logprob in entry.top],
            }
            for entry in entries
        ]
    }


def completion_logprobs(
    entries: list[TokenLogprob], tokenizer: Tokenizer, num_top: int, first_offset: int
) -> tuple[dict[str, Any], int]:
    """The `logprobs` object of a completion choice, and the offset in characters where the next token starts."""
    tokens = [_token_text(entry.token_id, tokenizer) for entry in entries]
    offsets, at = [], first_offset
    for token in tokens:
        offsets.append(at)
        at += len(token)
    tops = [{_token_text(t, tokenizer): _finite(lp) for t, lp in entry.top[:num_top]} for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": tops if num_top else None,
        "text_offset": offsets,
    }, at


def _token_json(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _finite(logprob: float) -> float:
    return max(float(logprob), _LOWEST_LOGPROB) if not math.isnan(logprob) else _LOWEST_LOGPROB
