"""From a prompt to the engine and back: submit the choices of one API request, iterate their events, abort on leaving.

Every dialect uses this one path. The engine calls back on its own thread; events cross into the event loop here and
nowhere else. Leaving the `async with` block for any reason (answer complete, client gone, error) aborts what still
runs, so a seat can never be left behind by a handler.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from agens_engine.core import FinishReason, Grammar, OutputWatch, ReasoningControl, Request, StepEvent
from agens_engine.errors import ContextLengthError, EngineStoppedError
from agens_engine.server.errors import GenerationFailedError, OverloadedError
from agens_engine.server.options import GenerationOptions

log = logging.getLogger(__name__)

_SEED_SPAN = 2**63


class EngineLike(Protocol):
    """What the server needs from engine.Engine (or from a stand-in in tests)."""

    model_name: str
    context_tokens: int
    vocab_size: int
    max_sequences: int

    def submit(self, request: Request, on_event: Callable[[StepEvent], None]) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def shutdown(self, drain_seconds: float) -> None: ...
    def stats(self) -> dict[str, Any]: ...


def output_budget(prompt_tokens: int, asked: int | None, context_tokens: int, cap: int, *, param: str) -> int:
    """Tokens this answer may have: what was asked for, else the server's cap; never more than the context has left.

    raises   ContextLengthError when nothing is left
    """
    room = context_tokens - prompt_tokens
    if room < 1:
        raise ContextLengthError(prompt_tokens, context_tokens, param=param)
    return min(room, cap if asked is None else asked)


def make_choices(
    request_id: str,
    prompt_ids: Sequence[int],
    options: GenerationOptions,
    *,
    max_tokens: int,
    end_token_ids: frozenset[int],
    new_watch: Callable[[], OutputWatch],
    reasoning: ReasoningControl | None = None,
    grammar: Grammar | None = None,
) -> list[Request]:
    """`options.n` engine requests over one prompt. A given seed is counted up, so the choices differ and repeat.

    An answer with a grammar always ends where its grammar does: ignore_eos cannot make it go on.
    """
    goes_on = options.ignore_eos and grammar is None
    stops = options.stop_token_ids | (frozenset() if goes_on else end_token_ids)
    choices = []
    for index in range(options.n):
        sampling = options.sampling
        if sampling.seed is not None and index:
            sampling = replace(sampling, seed=(sampling.seed + index) % _SEED_SPAN)
        choices.append(
            Request(
                request_id=f"{request_id}-{index}",
                prompt_ids=prompt_ids,
                sampling=sampling,
                max_tokens=max_tokens,
                stop_token_ids=stops,
                watch=new_watch(),
                speculation=options.speculation,
                draft_sources=options.draft_sources,
                reasoning=reasoning,
                grammar=grammar,
                cache_prompt=options.cache_prompt,
            )
        )
    return choices


class EventStream:
    """The choices of one API request as one stream of (choice index, StepEvent).

    async with EventStream(engine, requests) as stream:
        async for item in stream.events(): ...
    """

    def __init__(self, engine: EngineLike, requests: Sequence[Request], on_close: Callable[[], None]) -> None:
        self._engine = engine
        self._requests = list(requests)
        self._running: set[int] = set()
        self._queue: asyncio.Queue[tuple[int, StepEvent]] = asyncio.Queue()
        self._on_close = on_close

    async def __aenter__(self) -> EventStream:
        """Submit every choice; when the engine refuses one, the earlier ones are aborted and the error goes on."""
        loop = asyncio.get_running_loop()
        try:
            for index, request in enumerate(self._requests):
                self._engine.submit(request, self._callback(loop, index))
                self._running.add(index)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def abort(self) -> None:
        """Ask the engine to end every running choice; their last events still arrive."""
        for index in sorted(self._running):
            self._engine.abort(self._requests[index].request_id)

    async def events(self, idle_seconds: float | None = None) -> AsyncIterator[tuple[int, StepEvent] | None]:
        """Every event up to the last choice's last one; None each time nothing came for idle_seconds.

        raises   GenerationFailedError or the engine's own typed error when a choice failed, EngineStoppedError when
                 the engine ended it; the other choices are aborted by leaving the block
        """
        while self._running:
            try:
                async with asyncio.timeout(idle_seconds):
                    index, event = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            if event.finish_reason is not None:
                self._running.discard(index)
            _raise_if_failed(event)
            yield index, event

    def _callback(self, loop: asyncio.AbstractEventLoop, index: int) -> Callable[[StepEvent], None]:
        def on_event(event: StepEvent) -> None:
            try:
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))
            except RuntimeError:  # the event loop has ended; nobody is left to read this
                log.debug("event of %s came after the server had ended", event.request_id)

        return on_event

    def _close(self) -> None:
        self.abort()
        self._running.clear()
        self._on_close()


def _raise_if_failed(event: StepEvent) -> None:
    if event.finish_reason is FinishReason.ERROR:
        if event.error is not None and hasattr(event.error, "http_status"):
            raise event.error
        log.error("request %s failed in the engine", event.request_id, exc_info=event.error)
        raise GenerationFailedError("the engine failed on this request; the server's log has the details")
    if event.finish_reason is FinishReason.ABORT:
        raise EngineStoppedError("the server is shutting down and ended this request")


class Generator:
    """Opens event streams on one engine and knows which are open: the bound of the queue, and the hard stop."""

    def __init__(self, engine: EngineLike, max_waiting: int) -> None:
        self.engine = engine
        self._limit = engine.max_sequences + max_waiting
        self._open: dict[EventStream, int] = {}

    def open(self, requests: Sequence[Request]) -> EventStream:
        """A stream over these requests, to be entered with `async with`.

        raises   OverloadedError when they would not fit the queue
        """
        taken = sum(self._open.values())
        # a request larger than the whole queue is served when nothing else is there
        if taken and taken + len(requests) > self._limit:
            raise OverloadedError(
                f"{taken} generations are running or waiting and the limit is {self._limit}; try again later",
                code="queue_full",
            )
        stream = EventStream(self.engine, requests, lambda: self._forget(stream))
        self._open[stream] = len(requests)
        return stream

    def abort_all(self) -> None:
        for stream in list(self._open):
            stream.abort()

    def _forget(self, stream: EventStream) -> None:
        self._open.pop(stream, None)
