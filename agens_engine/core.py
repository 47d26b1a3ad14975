"""The nouns that travel between rooms. Plain data: no tensors of the model, no locks, no behaviour to speak of.

server -> engine      Request (token ids, sampling, an OutputWatch that reads the answer as it grows)
engine -> server      StepEvent, one per step in which the sequence committed tokens
scheduler -> engine   Segment lists; speculate -> engine   DraftChain
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from agens_engine.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

MAX_LOGIT_BIAS = 100.0  # of a request
NUM_VERIFY_ROWS = 8  # anchor + 7 draft slots (spec drafters.md, D.1)


class FinishReason(str, Enum):
    STOP = "stop"  # an end token, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context ran out
    ABORT = "abort"  # the client went away or the engine stopped
    ERROR = "error"  # this request failed; its neighbours did not


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Order of application: spec serving.md section 6.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0, penalties 0 and repetition_penalty 1 are off.
    logprobs: None for off, else how many alternatives to report beside the chosen token (0..20).
    seed: None draws fresh entropy for each request.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"{f.name} must be a finite number, not {value}", param=f.name)
        self._require(0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100")
        self._require(self.top_k >= 0, "top_k", "0 (off) or a positive integer")
        self._require(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        self._require(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        self._require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        self._require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        self._require(0.01 <= self.repetition_penalty <= 10.0, "repetition_penalty", "between 0.01 and 10")
        self._require(self.logprobs is None or 0 <= self.logprobs <= 20, "top_logprobs", "between 0 and 20")
        for token_id, bias in self.logit_bias.items():
            ok = isinstance(token_id, int) and token_id >= 0 and abs(bias) <= MAX_LOGIT_BIAS
            self._require(ok, "logit_bias", "token ids mapped to numbers between -100 and 100")

    def _require(self, ok: bool, name: str, allowed: str) -> None:
        if not ok:
            raise RequestError(f"{name} must be {allowed}, not {getattr(self, name, None)}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class OutputWatch(Protocol):
    """Reads one answer token by token, in order, on the engine's thread (text/output.py implements it).

    The engine does not know what the pieces mean; it forwards them in StepEvent.deltas.
    """

    def push(self, token_id: int) -> tuple[list[Any], bool]:
        """Take the next committed token; return what became visible and whether generation ends with this token."""
        ...

    def finish(self, reason: FinishReason) -> list[Any]:
        """Generation ended; return what was still held back."""
        ...


@dataclass(frozen=True)
class ReasoningControl:
    """The think markers of the model, and how long a thought may get (spec serving.md sections 5 and 6).

    call_start_id   a token that ends an open thought without closing it (a tool call), or None
    budget          most tokens of the thought, None for off; then <|/think|> is forced
    soft_bias       added to the logit of <|/think|> over the last fifth of the budget
    repetition_guard  also force <|/think|> when the thought goes round in circles
    """

    think_start_id: int
    think_end_id: int
    call_start_id: int | None = None
    budget: int | None = None
    soft_bias: float = 0.0
    repetition_guard: bool = False


class Grammar(Protocol):
    """What an answer must look like, compiled; any number of requests may share one (text/grammars.py makes it)."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end the answer; allowed exactly where the grammar accepts."""
        ...

    def matcher(self) -> Any:
        """A llguidance LLMatcher of one's own, at the beginning of the grammar."""
        ...


@dataclass
class Request:
    """One generation. `stop_token_ids` end it; the end tokens of the model are among them unless ignore_eos.

    reasoning     None: thoughts are neither counted nor limited
    grammar       None: anything may be said; else it holds from the first token, or from the end of an open thought
    cache_prompt  what earlier prompts left behind may serve this one, and what it leaves behind later ones
    image_keys    (first position, content hash) of each image in the prompt: prompts with other images share nothing
                  from there on
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    watch: OutputWatch | None = None
    speculation: bool = True
    draft_sources: frozenset[str] | None = None  # None: every source the engine has
    reasoning: ReasoningControl | None = None
    grammar: Grammar | None = None
    cache_prompt: bool = True
    image_keys: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """One emitted token's log-probability, natural log: after masks, penalties and bias, before temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


class ReasoningEnd(str, Enum):
    MODEL = "model"  # the model closed its thought
    CALL = "call"  # a tool call ended it
    BUDGET = "budget"  # forced: the budget was used up
    REPETITION = "repetition"  # forced: it went round in circles


@dataclass(frozen=True)
class ReasoningReport:
    """A request's thought: its tokens without the markers, and what ended it (None: still open, or never begun)."""

    num_tokens: int = 0
    ended_by: ReasoningEnd | None = None


@dataclass
class SourceCount:
    proposed: int = 0
    accepted: int = 0
    seconds: float = 0.0


@dataclass
class Timings:
    """Where one request's time went; seconds. `tokens_per_step` counts committed tokens per verify step."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    verify_steps: int = 0
    decoded_tokens: int = 0  # tokens that came out of verify steps (the first comes out of prefill)
    sources: dict[str, SourceCount] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> float:
        return self.decoded_tokens / self.verify_steps if self.verify_steps else 0.0


@dataclass
class StepEvent:
    """What one step gave one request. The last event has a finish_reason; an ERROR carries `error`."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    deltas: list[Any] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    # filled on the last event
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    timings: Timings | None = None
    reasoning: ReasoningReport | None = None


@dataclass(frozen=True)
class DraftRun:
    """Consecutive draft tokens from one source.

    token_ids   at most the slots asked for
    q           [n, V] float32 proposal distribution per token, or None: a point mass on the token
    """

    source: str
    token_ids: tuple[int, ...]
    q: "np.ndarray | None" = None


@dataclass(frozen=True)
class DraftChain:
    """Slots 1..n of a verify step, as the runs that filled them, in slot order."""

    runs: tuple[DraftRun, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(t for run in self.runs for t in run.token_ids)

    def __len__(self) -> int:
        return sum(len(run.token_ids) for run in self.runs)


@dataclass(frozen=True)
class StepResult:
    """Outcome of one verify step for one sequence, as draft sources see it.

    committed   tokens appended to the sequence, in order: accepted drafts, then the bonus token
    num_accepted  accepted drafts, len(committed) - 1 unless a stop cut the list
    """

    chain: DraftChain
    committed: tuple[int, ...]
    num_accepted: int
