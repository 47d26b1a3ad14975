"""A stand-in for engine.Engine with the same contract, which says what a script tells it to.

One worker thread, steps like the real one: take new requests, drop aborted ones, then one step for each that runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agens_engine.core import FinishReason, Request, SourceCount, StepEvent, Timings, TokenLogprob
from agens_engine.errors import ContextLengthError, EngineStoppedError

Steps = Sequence[Sequence[int]]
Script = Callable[[Request], Steps]


@dataclass
class _Running:
    request: Request
    on_event: Callable[[StepEvent], None]
    steps: list[Sequence[int]]
    said: list[int] = field(default_factory=list)
    num_steps: int = 0


class FakeEngine:
    """script: request -> the tokens of each step; the last step is repeated for ever, so scripts end with a stop token.

    prefill_open   cleared: requests stay in prefill (abort still works)
    step_seconds   pause after each round of steps
    fail_with      raised instead of the first step, for the requests whose prompt holds fail_token
    """

    def __init__(self, script: Script, *, context_tokens: int = 4096, max_sequences: int = 8) -> None:
        self.model_name = "alias"
        self.context_tokens = context_tokens
        self.vocab_size = 1000
        self.max_sequences = max_sequences
        self.script = script
        self.prefill_open = threading.Event()
        self.prefill_open.set()
        self.step_seconds = 0.0
        self.fail_token: int | None = None
        self.fail_with: BaseException = RuntimeError("device lost")
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self._lock = threading.Condition()
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._to_abort: set[str] = set()
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: Callable[[StepEvent], None]) -> None:
        with self._lock:
            if self._stopped:
                raise EngineStoppedError("the engine is shutting down")
            if len(request.prompt_ids) >= self.context_tokens:
                raise ContextLengthError(len(request.prompt_ids), self.context_tokens)
            self.requests.append(request)
            self._waiting.append(_Running(request, on_event, [list(step) for step in self.script(request)]))
            self._lock.notify_all()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._to_abort.add(request_id)
            self._lock.notify_all()

    def shutdown(self, drain_seconds: float) -> None:
        deadline = time.monotonic() + drain_seconds
        with self._lock:
            self._stopped = True
            while (self._running or self._waiting) and time.monotonic() < deadline:
                self._lock.wait(0.01)
            self._to_abort |= {r.request.request_id for r in (*self._waiting, *self._running)}
            self._lock.notify_all()
        self._thread.join(5.0)
        assert not self._thread.is_alive()

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {"running": len(self._running), "waiting": len(self._waiting), "memory": {"cap_bytes": 1024}}

    def busy(self) -> bool:
        return bool(self.stats()["running"] or self.stats()["waiting"])

    def _loop(self) -> None:
        while True:
            with self._lock:
                while not (self._waiting or self._running or self._stopped):
                    self._lock.wait()
                if self._stopped and not (self._waiting or self._running):
                    return
                if self.prefill_open.is_set():
                    self._running += self._waiting
                    self._waiting = []
                self._drop_aborted()
                batch = list(self._running)
            for running in batch:
                self._step(running)
            self.num_steps += 1
            with self._lock:
                self._lock.notify_all()
            time.sleep(self.step_seconds or 0.0005)

    def _drop_aborted(self) -> None:
        for group in (self._waiting, self._running):
            for running in [r for r in group if r.request.request_id in self._to_abort]:
                group.remove(running)
                self.aborted.append(running.request.request_id)
                self._end(running, [], [], FinishReason.ABORT)
        self._to_abort.clear()

    def _step(self, running: _Running) -> None:
        request = running.request
        if self.fail_token is not None and self.fail_token in request.prompt_ids:
            self._remove(running)
            event = StepEvent(request.request_id, finish_reason=FinishReason.ERROR, error=self.fail_with)
            running.on_event(event)
            return
        tokens = running.steps[min(running.num_steps, len(running.steps) - 1)]
        running.num_steps += 1
        deltas: list[Any] = []
        committed: list[int] = []
        reason: FinishReason | None = None
        for token in tokens:
            committed.append(token)
            running.said.append(token)
            ended = token in request.stop_token_ids
            if request.watch is not None and not ended:
                more, ended = request.watch.push(token)
                deltas += more
            if ended:
                reason = FinishReason.STOP
            elif len(running.said) >= request.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        if reason is None:
            running.on_event(StepEvent(request.request_id, committed, deltas, self._logprobs(request, committed)))
        else:
            self._remove(running)
            self._end(running, committed, deltas, reason)

    def _logprobs(self, request: Request, tokens: list[int]) -> list[TokenLogprob]:
        num_top = request.sampling.logprobs
        if num_top is None:
            return []
        top = [(token, -0.5 - token) for token in range(num_top)]
        return [TokenLogprob(token, -0.25, tuple(top)) for token in tokens]

    def _remove(self, running: _Running) -> None:
        with self._lock:
            if running in self._running:
                self._running.remove(running)

    def _end(self, running: _Running, committed: list[int], deltas: list[Any], reason: FinishReason) -> None:
        request = running.request
        if request.watch is not None:
            deltas = [*deltas, *request.watch.finish(reason)]
        event = StepEvent(
            request.request_id,
            committed,
            deltas,
            self._logprobs(request, committed),
            reason,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=len(running.said),
            cached_tokens=3,
            timings=Timings(0.0, 0.5, 1.5, running.num_steps, len(running.said), {"copy": SourceCount(4, 2, 0.1)}),
        )
        running.on_event(event)
