"""What ended an answer or its thought other than the model itself: the `limits` object of a choice.

An extension of the API, so that a client can tell its own max_tokens from the server's cap, and a thought that was
closed by the budget or by the repetition guard from one that the model finished.
"""

from __future__ import annotations

from typing import Any

from agens_engine.core import Request, StepEvent


def limits_json(request: Request, asked: int | None, cap: int, end: StepEvent) -> dict[str, Any]:
    """The limits of one choice and what they did.

    asked   max_tokens of the client; None: it did not say
    cap     the server's default for such requests
    end     the choice's last event
    """
    if asked == request.max_tokens:
        source = "request"
    else:
        source = "default" if asked is None and request.max_tokens == cap else "context"
    report = end.reasoning
    budget = request.reasoning.budget if request.reasoning is not None else None
    ended_by = report.ended_by.value if report is not None and report.ended_by is not None else None
    return {
        "max_tokens": request.max_tokens,
        "max_tokens_from": source,
        "reasoning_budget": budget,
        "reasoning_ended_by": ended_by,
    }
