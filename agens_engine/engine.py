"""The loop: schedule, draft, forward, verify, commit. One worker thread owns the model and all sequence memory.

submit() and abort() may be called from any thread; events are delivered on the worker's thread. A request that fails
ends with FinishReason.ERROR and leaves its neighbours alone; when a whole forward fails, its sequences are tried one
by one, so that only the culprit is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from agens_engine.core import FinishReason, Request, StepResult, TokenLogprob
from agens_engine.errors import ContextLengthError, EngineStoppedError, RequestError
from agens_engine.memory.arena import Arena
from agens_engine.memory.session_files import SessionFiles
from agens_engine.memory.state import StatePool, unplanned
from agens_engine.model.volundr import Volundr
from agens_engine.sampling.request_rules import request_rules
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.sampling.sampler import SequenceSampler
from agens_engine.scheduler import QueueTimes, Scheduler, Work
from agens_engine.sequence import EventSink, LiveSequence
from agens_engine.sessions import Sessions
from agens_engine.speculate.drafting import MAX_DRAFTS, Drafted, DraftPolicy, SlotFiller, StepTime
from agens_engine.speculate.source import Ask, CommittedRows, DraftSource
from agens_engine.speculate.stats import DraftStats
from agens_engine.speculate.verify import Verdict
from agens_engine.step import StepRunner

log = logging.getLogger(__name__)

Ending = Callable[[], None]

# Lines for what steps take and give back; held for the engine's life. Their sizes are tested against real steps.
WORK_SPACE = (
    "activations.prefill", "activations.verify", "state.records", "state.ids", "sampling.scratch", "runtime.workspace",
    "runtime.unpack", "kv.tables", "host.io", "drafter.scratch", "mtp.scratch", "host.snapshots",
)  # fmt: skip


class Engine:
    """Serves requests on one model.

    unused_ids      ids that are never generated (embedding rows without a token)
    context_tokens  most tokens of prompt and answer together
    sources         draft sources in the order in which they fill slots; empty means one token per step
    policy          how much each source may draft; None: all that is left
    session_bytes   of the host for stored sessions, 0: none are stored; session_files: where they outlive the engine
    """

    def __init__(
        self,
        model: Volundr,
        *,
        model_name: str = "model",
        unused_ids: Iterable[int] = (),
        context_tokens: int | None = None,
        max_sequences: int = 8,
        prefill_chunk_tokens: int = 256,
        sources: Sequence[DraftSource] = (),
        policy: DraftPolicy | None = None,
        arena: Arena | None = None,
        far_resident_layers: int | None = None,
        hot_cache_blocks: int = 0,
        session_bytes: int = 0,
        session_files: SessionFiles | None = None,
    ) -> None:
        self.model, self.model_name = model, model_name
        self.vocab_size = model.config.vocab_size
        self.context_tokens = min(context_tokens or model.config.max_positions, model.config.max_positions)
        self.max_sequences = max_sequences
        self.device = model.model.norm.weight.device
        self.arena = arena
        if arena is not None:
            arena.reserve(WORK_SPACE)
        shapes = model.state_shapes()
        # a chunk begins at a far block's first position, so that running it again needs no rows it has replaced
        chunk = max(1, prefill_chunk_tokens // shapes.compress) * shapes.compress
        self.pool = StatePool(
            shapes,
            max_sequences,
            arena.claim if arena is not None else unplanned(self.device),
            context_tokens=self.context_tokens,
            chunk_tokens=chunk,
            far_resident_layers=far_resident_layers,
            hot_cache_blocks=hot_cache_blocks,
        )
        self.unused = UnusedTokens(self.vocab_size, unused_ids)
        self.filler = SlotFiller(sources, self.vocab_size, policy)
        self._policy = policy
        self.drafts = DraftStats()
        self.num_steps = self.num_finished = self.num_failed = self.prompt_tokens = self.generated_tokens = 0
        pages = self.pool.pages
        self._scheduler = Scheduler(
            max_sequences,
            chunk,
            num_pages=pages.num_pages,
            pages_of=lambda sequence: -(-(sequence.prompt_len + sequence.max_tokens) // pages.page_tokens),
        )
        self.sessions = Sessions(
            self.pool, self.filler, chunk_tokens=chunk, budget_bytes=session_bytes, files=session_files
        )
        self._queue = QueueTimes()
        self._runner = StepRunner(model, self.unused, arena)
        self._live: dict[str, LiveSequence] = {}
        self._incoming: list[LiveSequence] = []
        self._wake = threading.Condition()
        self._accepting = True
        self._stop_now = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- called from any thread --------------------------------------------------------------------------------------

    def submit(self, request: Request, on_event: EventSink) -> None:
        """Queue a request. Raises RequestError, ContextLengthError or EngineStoppedError; then nothing was queued."""
        prompt = list(request.prompt_ids)
        if not prompt:
            raise RequestError("the prompt is empty; at least one token is needed", param="prompt")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise RequestError(f"prompt token ids must lie in 0..{self.vocab_size - 1}", param="prompt")
        if len(prompt) >= self.context_tokens:
            raise ContextLengthError(len(prompt), self.context_tokens, param="prompt")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {request.max_tokens}", param="max_tokens")
        rules = request_rules(request, prompt, self.vocab_size)
        sampler = SequenceSampler(request.sampling, prompt, self.unused, rules)
        room = self.context_tokens - len(prompt)
        sequence = LiveSequence(request, sampler, on_event, min(request.max_tokens, room), prompt, len(prompt))
        with self._wake:
            if not self._accepting:
                raise EngineStoppedError(self._failure or "the engine is shutting down")
            if request.request_id in self._live:
                raise RequestError(f"a request with id {request.request_id!r} is already running", param="request_id")
            self._live[request.request_id] = sequence
            self._incoming.append(sequence)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """End a request at the next step boundary, whatever it is doing; unknown ids are ignored."""
        with self._wake:
            sequence = self._live.get(request_id)
            if sequence is not None:
                sequence.aborted = True
                self._wake.notify()

    def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for up to drain_seconds, abort the rest, end the thread."""
        deadline = time.monotonic() + drain_seconds
        with self._wake:
            self._accepting = False
            self._wake.notify()
            self._wake.wait_for(lambda: not self._live, timeout=max(0.0, deadline - time.monotonic()))
            self._stop_now = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        try:
            self.check()
        except AssertionError as error:
            log.error("memory is not as it should be at exit: %s", error)
        self.sessions.close()
        if self.arena is not None:
            log.info("%s", self.arena.summary())

    def stats(self) -> dict[str, Any]:
        """Counters for health and metrics; cheap, and safe while the engine runs."""
        return {
            "queue": self._queue.summary([*self._scheduler.waiting, *self._incoming]),
            "sessions": self.sessions.stats(),
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting) + len(self._incoming),
            "steps": self.num_steps,
            "finished": self.num_finished,
            "failed_requests": self.num_failed,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "slots_free": self.pool.slots_free,
            "drafts": {**self.drafts.summary(), "failures": dict(self.filler.num_failures)},
            "draft_policy": None if self._policy is None else self._policy.summary(),
            "memory": self.arena.report() if self.arena is not None else None,
            "sequence_memory": self.pool.stats(),
            "failed": self._failure,
        }

    def check(self) -> None:
        """Assert that no sequence memory is lost or shared. Call it while the engine is idle."""
        live = [s.state for s in self._scheduler.running if s.state is not None]
        self.pool.check(live, self.sessions.snapshots())
        self.sessions.check()
        if self.arena is not None:
            self.arena.check()

    # --- the worker --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_commands():
                    self._step(self._scheduler.next_step())
        except BaseException as error:  # a bug in the loop itself: say so, end every request, answer 503 from now on
            log.exception("the engine's loop failed")
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            with self._wake:
                self._accepting = False
                left = list(self._live.values())
            for sequence in left:
                self._end_at_exit(sequence)

    def _end_at_exit(self, sequence: LiveSequence) -> None:
        """The loop is over: every stream gets its last event, whatever state the failure left behind."""
        try:
            if self._failure is None:
                self._finish(sequence, FinishReason.ABORT)
            else:
                self._finish(sequence, FinishReason.ERROR, EngineStoppedError(f"the engine failed: {self._failure}"))
        except Exception:
            log.exception("request %s could not be ended cleanly", sequence.request_id)

    def _take_commands(self) -> bool:
        """Take in new requests and aborts, sleeping while there is nothing to do; False ends the loop."""
        with self._wake:
            self._wake.wait_for(lambda: self._incoming or self._stop_now or len(self._scheduler) or not self._accepting)
            if self._stop_now or (not self._accepting and not self._live):
                return False
            incoming, self._incoming = self._incoming, []
        for sequence in incoming:
            self._scheduler.add(sequence)
        for sequence in [*self._scheduler.waiting, *self._scheduler.running]:
            if sequence.aborted:
                self._finish(sequence, FinishReason.ABORT)
        for sequence in self._scheduler.admit():
            try:
                self._begin(sequence)
            except Exception as error:
                log.exception("request %s could not begin", sequence.request_id)
                self._finish(sequence, FinishReason.ERROR, error)
        return True

    def _begin(self, sequence: LiveSequence) -> None:
        """Give an admitted sequence its memory, filled as far as a stored session reaches."""
        sequence.timings.queue_seconds = time.perf_counter() - sequence.submitted_at
        self._queue.add(sequence.timings.queue_seconds)
        sequence.state = self.pool.create()
        self.filler.begin(sequence, sequence.request.draft_sources if sequence.request.speculation else frozenset())
        self.sessions.resume(sequence)

    def _step(self, work: list[Work]) -> None:
        """One step over all its segments; on failure, once more for each alone."""
        if not work:
            return
        started = time.perf_counter()
        self.num_steps += 1
        try:
            drafted = self._draft(work)
            drafted_at = time.perf_counter()
            ran = self._runner.run(work, drafted, self.filler.reads([item.sequence for item in work]))
        except Exception as error:
            if len(work) > 1:
                log.exception("a step over %d sequences failed; trying them one by one", len(work))
                for item in work:
                    self._step([item])
                return
            log.exception("request %s failed", work[0].sequence.request_id)
            self._finish(work[0].sequence, FinishReason.ERROR, error)
            return
        now = time.perf_counter()
        num_decoding = sum(not item.is_prefill for item in work)
        cost = StepTime(now - drafted_at, num_decoding, ran.num_rows, has_prefill=num_decoding < len(work))
        committed: list[CommittedRows] = []
        endings: list[tuple[LiveSequence, Ending | None]] = []
        for segment, (item, draft, verdict) in enumerate(zip(work, drafted, ran.verdicts, strict=True)):
            sequence, state = item.sequence, item.sequence.state
            assert state is not None
            first = state.num_tokens
            try:
                ending = self._commit(item, draft, verdict, now - started, cost)
                if sequence.state is None:
                    continue
                if ran.handed_over and (ending is None or self.sessions.wants(sequence)):
                    committed.append(ran.committed(segment, sequence, first, state.num_tokens - first))
                endings.append((sequence, ending))
            except Exception as error:
                log.exception("request %s failed after its step", sequence.request_id)
                self._finish(sequence, FinishReason.ERROR, error)
        self.filler.commit(committed)
        for sequence, ending in endings:
            self.sessions.remember(sequence, ended=ending is not None)
            if ending is not None:
                ending()

    def _draft(self, work: list[Work]) -> list[Drafted]:
        """One entry per segment; prompt chunks and sequences at their last token get no drafts."""
        asks = []
        for item in work:
            sequence = item.sequence
            slots = min(MAX_DRAFTS, sequence.max_tokens - sequence.num_output_tokens - 1)
            if not item.is_prefill and slots > 0:
                asks.append(Ask(sequence, (), slots))
        found = {ask.seq.request_id: drafted for ask, drafted in zip(asks, self.filler.fill(asks), strict=True)}
        return [found.get(item.sequence.request_id, Drafted()) for item in work]

    def _commit(
        self, item: Work, draft: Drafted, verdict: Verdict | None, seconds: float, cost: StepTime
    ) -> Ending | None:
        """Make the step's outcome part of the sequence: memory, tokens, statistics, the event to the client.

        seconds   of the whole step; cost: the same without drafting
        returns   what is left to do when the answer ends here, once the drafters have the step's rows too
        """
        sequence = item.sequence
        assert sequence.state is not None
        if item.is_prefill:
            sequence.state.commit(item.num_prompt_tokens)
            sequence.timings.prefill_seconds += seconds
            self.prompt_tokens += item.num_prompt_tokens
            sequence.computed_tokens += item.num_prompt_tokens
            self.sessions.computed_tokens += item.num_prompt_tokens
            assert sequence.state.num_tokens == sequence.cached_tokens + sequence.computed_tokens  # G6
            if verdict is None:
                return None
        else:
            sequence.timings.decode_seconds += seconds
        if verdict is None or verdict.error is not None:
            assert verdict is not None
            self._finish(sequence, FinishReason.ERROR, verdict.error)
            return None
        kept, finish, deltas = sequence.keep(verdict.committed)
        tokens = verdict.committed[:kept]
        if not item.is_prefill:
            sequence.state.commit(kept)  # the anchor and all kept tokens but the last, which is the next anchor
        sequence.token_ids.extend(tokens)
        sequence.sampler.commit(tokens)
        self.generated_tokens += kept
        if not item.is_prefill:
            result = StepResult(draft.chain, tokens, min(verdict.num_accepted, kept))
            sequence.drafts.record(result, draft.seconds)
            self.drafts.record(result, draft.seconds)
            self.filler.observe(sequence, result, draft, cost)
        if finish is None:
            sequence.on_event(sequence.event(tokens, deltas, verdict.logprobs[:kept]))
            return None
        if sequence.request.watch is not None:
            deltas.extend(sequence.request.watch.finish(finish))
        return partial(self._finish, sequence, finish, tokens=tokens, deltas=deltas, logprobs=verdict.logprobs[:kept])

    def _finish(
        self,
        sequence: LiveSequence,
        reason: FinishReason,
        error: BaseException | None = None,
        *,
        tokens: tuple[int, ...] = (),
        deltas: Sequence[object] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """Free the sequence's memory, forget it and send its last event."""
        self._scheduler.remove(sequence)
        try:
            if sequence.state is not None:
                sequence.state.free()
                sequence.state = None
                self.filler.end(sequence)
        finally:  # whatever is wrong with the memory, the stream gets its last event
            if reason is FinishReason.ERROR:
                self.num_failed += 1
            else:
                self.num_finished += 1
            log.info("%s", sequence.summary(reason))
            try:
                sequence.on_event(sequence.event(tokens, deltas, logprobs, finish=reason, error=error))
            except Exception:
                log.exception("the receiver of request %s failed on its last event", sequence.request_id)
            with self._wake:
                self._live.pop(sequence.request_id, None)
                self._wake.notify_all()
