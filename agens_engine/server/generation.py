"""From a prompt to the engine and back: submit the choices of one API request, iterate their events, abort on leaving.

Every dialect uses this one path. The engine calls back on its own thread; events cross into the event loop here and
nowhere else. Leaving the `async with` block for any reason (answer complete, client gone, error) aborts what still
runs, so a seat can never be left behind by a handler.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

from agens_engine.core import FinishReason, Grammar, OutputWatch, ReasoningControl, Request, StepEvent
from agens_engine.errors import ContextLengthError, EngineStoppedError
from agens_engine.server.errors import GenerationFailedError, OverloadedError, RequestTimeoutError
from agens_engine.server.metrics import ServerMetrics
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


@dataclass
class Progress:
    """How far one generation is, for /slots; written on the engine's thread."""

    request: Request
    submitted_at: float = field(default_factory=time.monotonic)
    num_tokens: int = 0
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        """No word of the prompt or the answer. "waiting": no token yet, so queued or reading its prompt."""
        return {
            "id": self.request.request_id,
            "state": "generating" if self.num_tokens else "waiting",
            "prompt_tokens": len(self.request.prompt_ids),
            "generated_tokens": self.num_tokens,
            "max_tokens": self.request.max_tokens,
            "seconds": round(time.monotonic() - self.submitted_at, 3),
        }


class EventStream:
    """The choices of one API request as one stream of (choice index, StepEvent).

    async with EventStream(engine, requests) as stream:
        async for item in stream.events(): ...
    """

    def __init__(
        self,
        engine: EngineLike,
        requests: Sequence[Request],
        metrics: ServerMetrics,
        on_close: Callable[[], None],
        timeout_seconds: float = 0.0,
    ) -> None:
        self._engine = engine
        self._requests = list(requests)
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds  # 0: none
        self._deadline: float | None = None
        self.progress: list[Progress] = []
        self._running: set[int] = set()
        self._queue: asyncio.Queue[tuple[int, StepEvent] | None] = asyncio.Queue()
        self._heard_at = 0.0  # on the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._on_close = on_close

    async def __aenter__(self) -> EventStream:
        """Submit every choice; when the engine refuses one, the earlier ones are aborted and the error goes on."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + self._timeout_seconds if self._timeout_seconds else None
        self.progress = [Progress(request) for request in self._requests]
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
                 the engine ended it, RequestTimeoutError when the time is up; the other choices are aborted by leaving
                 the block
        """
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        self._arm(loop, idle_seconds)
        while self._running:
            item = await self._queue.get()
            self._heard_at = loop.time()
            if self._deadline is not None and self._heard_at >= self._deadline:
                raise RequestTimeoutError(
                    f"the answer took longer than the {self._timeout_seconds:g} seconds that this server allows "
                    "(request_timeout_seconds); ask for fewer tokens"
                )
            if item is not None:
                index, event = item
                if event.finish_reason is not None:
                    self._running.discard(index)
                _raise_if_failed(event)
            yield item

    def _arm(self, loop: asyncio.AbstractEventLoop, idle_seconds: float | None) -> None:
        """One timer for a whole stream, moved on when it fires: a timer for every event would cost more than its JSON.

        It puts None into the queue when nothing was read for idle_seconds, and when the time is up.
        """
        ends = [] if self._deadline is None else [self._deadline]
        if idle_seconds is not None:
            ends.append(self._heard_at + idle_seconds)
        if ends:
            self._timer = loop.call_at(min(ends), self._tick, loop, idle_seconds)

    def _tick(self, loop: asyncio.AbstractEventLoop, idle_seconds: float | None) -> None:
        late = self._deadline is not None and loop.time() >= self._deadline
        if late or (idle_seconds is not None and loop.time() >= self._heard_at + idle_seconds):
            self._queue.put_nowait(None)
            self._heard_at = loop.time()
        if not late:
            self._arm(loop, idle_seconds)

    def _callback(self, loop: asyncio.AbstractEventLoop, index: int) -> Callable[[StepEvent], None]:
        progress = self.progress[index]

        def on_event(event: StepEvent) -> None:
            self._count(progress, event)
            try:
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))
            except RuntimeError:  # the event loop has ended; nobody is left to read this
                log.debug("event of %s came after the server had ended", event.request_id)

        return on_event

    def _count(self, progress: Progress, event: StepEvent) -> None:
        """On the engine's thread: events of an abandoned request count as well."""
        if event.token_ids and not progress.num_tokens:
            self._metrics.first_token(time.monotonic() - progress.submitted_at)
        progress.num_tokens += len(event.token_ids)
        progress.ended = event.finish_reason is not None
        self._metrics.step(event)

    def _close(self) -> None:
        self.abort()
        self._running.clear()
        if self._timer is not None:
            self._timer.cancel()
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

    def __init__(
        self, engine: EngineLike, max_waiting: int, metrics: ServerMetrics, timeout_seconds: float = 0.0
    ) -> None:
        self.engine = engine
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds
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
        stream = EventStream(self.engine, requests, self._metrics, lambda: self._forget(stream), self._timeout_seconds)
        self._open[stream] = len(requests)
        return stream

    def slots(self) -> list[dict[str, Any]]:
        """What every generation under way does, oldest first."""
        return [progress.to_json() for stream in self._open for progress in stream.progress if not progress.ended]

    def abort_all(self) -> None:
        for stream in list(self._open):
            stream.abort()

    def _forget(self, stream: EventStream) -> None:
        self._open.pop(stream, None)
