"""One request inside the engine: its tokens, its memory, its sampler and where it is in its life.

    WAITING -> PREFILL -> DECODE -> finished (the engine forgets it)

token_ids holds prompt and answer; the last one is the anchor, the only token the target has not run through yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agens_engine.core import FinishReason, Request, SamplingParams, StepEvent, Timings, TokenLogprob
from agens_engine.memory.state import SequenceState
from agens_engine.sampling.sampler import SequenceSampler
from agens_engine.sampling.seeds import RequestStream
from agens_engine.speculate.stats import DraftStats

EventSink = Callable[[StepEvent], None]


@dataclass(eq=False)
class LiveSequence:
    """Satisfies speculate.SequenceView. `max_tokens` is already clamped to what the context has left.

    cached_tokens, computed_tokens   of the prompt: taken from a stored session, and run
    """

    request: Request
    sampler: SequenceSampler
    on_event: EventSink
    max_tokens: int
    token_ids: list[int]
    prompt_len: int
    state: SequenceState | None = None
    aborted: bool = False
    cached_tokens: int = 0
    computed_tokens: int = 0
    timings: Timings = field(default_factory=Timings)
    drafts: DraftStats = field(default_factory=DraftStats)
    submitted_at: float = field(default_factory=time.perf_counter)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def stream(self) -> RequestStream:
        return self.sampler.stream

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def prefill_left(self) -> int:
        """Prompt tokens that have not run yet; 0 once the sequence decodes."""
        done = self.state.num_tokens if self.state is not None else 0
        return max(0, self.prompt_len - done)

    def keep(self, tokens: tuple[int, ...]) -> tuple[int, FinishReason | None, list[object]]:
        """How many of these committed tokens the answer keeps, why it ends with them, and what became visible.

        Stop rules are applied token by token: what follows a stop is dropped (spec drafters.md D.4, case C10).
        """
        deltas: list[object] = []
        room = self.max_tokens - self.num_output_tokens
        for kept, token in enumerate(tokens[:room], start=1):
            if token in self.request.stop_token_ids:
                return kept, FinishReason.STOP, deltas
            if self.request.watch is not None:
                visible, stopped = self.request.watch.push(token)
                deltas.extend(visible)
                if stopped:
                    return kept, FinishReason.STOP, deltas
            if kept == room:
                return kept, FinishReason.LENGTH, deltas
        return len(tokens), None, deltas

    def summary(self, reason: FinishReason) -> str:
        """One line for the log: what the request was, and what each draft source gave."""
        steps = self.drafts.num_steps
        per_step = self.drafts.num_committed / steps if steps else 0.0
        text = f"request {self.request_id} ended ({reason.value}): {self.prompt_len} prompt tokens "
        text += f"({self.cached_tokens} cached), "
        text += f"{self.num_output_tokens} generated in {steps} verify steps ({per_step:.2f} a step)"
        for name, count in self.drafts.sources.items():
            text += f"; {name} {count.accepted}/{count.proposed} accepted"
        return text

    def event(
        self,
        tokens: tuple[int, ...] = (),
        deltas: Sequence[object] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        finish: FinishReason | None = None,
        error: BaseException | None = None,
    ) -> StepEvent:
        """A StepEvent for this request; the last one carries the counts and the timings."""
        event = StepEvent(self.request_id, list(tokens), list(deltas), list(logprobs), finish, error)
        if finish is not None:
            self.timings.sources = self.drafts.sources
            self.timings.verify_steps, self.timings.decoded_tokens = self.drafts.num_steps, self.drafts.num_committed
            event.prompt_tokens, event.completion_tokens = self.prompt_len, self.num_output_tokens
            event.cached_tokens = self.cached_tokens
            event.timings = self.timings
            event.reasoning = self.sampler.reasoning
        return event
