"""Conversations for tests of the session cache: engines with and without it, and one turn at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from agens_engine.core import FinishReason, Request, SamplingParams, StepEvent
from agens_engine.engine import Engine
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.model.volundr import Volundr
from agens_engine.speculate.build import SOURCE_NAMES, build_sources
from agens_engine.speculate.source import DraftSource
from tests.drafterkit import random_dflash2, random_mtp
from tests.unit.test_engine import Inbox

GREEDY = SamplingParams(temperature=0.0)
CONTEXT = 700
_numbers = itertools.count()


def session_engine(model: Volundr, *, session_bytes: int = 1 << 24, drafts: bool = False, **options: Any) -> Engine:
    """An engine of 4 seats on a small model; session_bytes 0: every run is cold. drafts: all three sources."""
    base = {"max_sequences": 4, "prefill_chunk_tokens": 64, "context_tokens": CONTEXT, **options}
    sources: Sequence[DraftSource] = base.pop("sources", ())
    if drafts:
        sources = build_sources(
            TargetEnds.of(model),
            names=SOURCE_NAMES,
            head=random_mtp(),
            drafter=random_dflash2(),
            max_sequences=base["max_sequences"],
            context_tokens=base["context_tokens"],
        )
    return Engine(model, session_bytes=session_bytes, sources=sources, **base)


def turn(engine: Engine, ids: list[int], count: int, **request: Any) -> tuple[list[int], StepEvent]:
    """One greedy answer of `count` tokens, fewer when a stop token of the request ends it, and its last event."""
    inbox, name = Inbox(), f"turn{next(_numbers)}"
    engine.submit(Request(name, ids, GREEDY, max_tokens=count, **request), inbox)
    inbox.wait(name)
    last = inbox.last(name)
    assert last is not None and last.finish_reason in (FinishReason.LENGTH, FinishReason.STOP), last
    return inbox.tokens(name), last


def close(engine: Engine) -> None:
    """Shut down and look for lost memory."""
    engine.shutdown()
    engine.check()
    assert engine.sessions.num_failed == 0
    assert engine.pool.slots_free == engine.max_sequences
    assert engine.pool.pages.pages_used == 0
    for source in engine.filler.sources:
        if hasattr(source, "memory"):
            source.memory.check()
