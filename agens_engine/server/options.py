"""The request fields every dialect shares (how to sample, when to stop, how to answer): JSON -> GenerationOptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agens_engine.core import MAX_LOGIT_BIAS, SamplingParams
from agens_engine.errors import RequestError
from agens_engine.server.constraints import parse_answer_format
from agens_engine.server.fields import Fields, wrong
from agens_engine.text.grammars import AnswerFormat
from agens_engine.text.stops import parse_stops

MAX_CHOICES = 64
_SEED_LIMIT = 2**63

# Fields other servers know that would change the answer. Ignoring them would be a lie, so they are refused by name.
_NOT_SUPPORTED = (
    "prompt_logprobs",
    "functions",
    "function_call",
    "bad_words",
    "min_tokens",
)


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request gets for the fields it leaves out (settings first, then the checkpoint's generation_config)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    reasoning_budget: int | None = None
    reasoning_budget_soft_bias: float = 0.0
    repetition_guard: bool = True


@dataclass(frozen=True)
class GenerationOptions:
    """answer: the form that the answer's text must have, or None; the other names are those of core.Request."""

    sampling: SamplingParams
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    speculation: bool = True
    draft_sources: frozenset[str] | None = None
    stream: bool = False
    include_usage: bool = False
    answer: AnswerFormat | None = None
    reasoning_budget: int | None = None
    reasoning_soft_bias: float = 0.0
    repetition_guard: bool = True
    cache_prompt: bool = True


def parse_options(fields: Fields, defaults: SamplingDefaults, logprobs: int | None) -> GenerationOptions:
    """Read the shared fields.

    logprobs   already read by the dialect (chat and completions spell it differently)
    raises     RequestError naming the field
    """
    refuse_unsupported(fields)
    stream = fields.flag("stream") or False
    return GenerationOptions(
        sampling=_sampling(fields, defaults, logprobs),
        n=fields.whole("n", low=1, high=MAX_CHOICES) or 1,
        max_tokens=_max_tokens(fields),
        stop=parse_stops(fields.get("stop"), param=fields.name("stop")),
        stop_token_ids=frozenset(token_ids(fields.items("stop_token_ids") or [], fields.name("stop_token_ids"))),
        ignore_eos=fields.flag("ignore_eos") or False,
        speculation=fields.flag("speculation") is not False,
        draft_sources=_draft_sources(fields),
        stream=stream,
        include_usage=_include_usage(fields, stream),
        answer=parse_answer_format(fields),
        reasoning_budget=_reasoning_budget(fields, defaults.reasoning_budget),
        reasoning_soft_bias=_soft_bias(fields, defaults.reasoning_budget_soft_bias),
        repetition_guard=defaults.repetition_guard if (guard := fields.flag("repetition_guard")) is None else guard,
        cache_prompt=fields.flag("cache_prompt") is not False,
    )


def refuse_unsupported(fields: Fields) -> None:
    for key in _NOT_SUPPORTED:
        value = fields.get(key)
        if not _means_off(key, value):
            fields.refuse(key, f"{fields.name(key)} is not supported by this server yet; leave it out")


def _means_off(key: str, value: Any) -> bool:
    if key == "min_tokens" and isinstance(value, int):
        return value <= 0
    return value is None or value is False or value == []


def token_ids(values: Any, param: str, vocab_size: int | None = None) -> list[int]:
    """A JSON list of token ids, checked against the vocabulary where it is known."""
    if not isinstance(values, list):
        raise wrong(param, "a list of token ids", values)
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise wrong(f"{param}[{index}]", "a token id (a whole number of at least 0)", value)
        if vocab_size is not None and value >= vocab_size:
            raise wrong(f"{param}[{index}]", f"a token id below {vocab_size}", value)
    return values


def _sampling(fields: Fields, defaults: SamplingDefaults, logprobs: int | None) -> SamplingParams:
    def number(key: str, default: float) -> float:
        value = fields.number(key)
        return default if value is None else value

    top_k = fields.whole("top_k", low=-1)
    seed = fields.whole("seed", low=-_SEED_LIMIT, high=_SEED_LIMIT - 1)
    return SamplingParams(
        temperature=number("temperature", defaults.temperature),
        top_k=defaults.top_k if top_k is None else max(top_k, 0),  # -1 is how other servers say "off"
        top_p=number("top_p", defaults.top_p),
        min_p=number("min_p", defaults.min_p),
        presence_penalty=number("presence_penalty", 0.0),
        frequency_penalty=number("frequency_penalty", 0.0),
        repetition_penalty=number("repetition_penalty", defaults.repetition_penalty),
        logit_bias=_logit_bias(fields),
        seed=seed,
        logprobs=logprobs,
    )


def _logit_bias(fields: Fields) -> dict[int, float]:
    raw = fields.object("logit_bias") or {}
    entries = Fields(raw, fields.name("logit_bias"))
    bias: dict[int, float] = {}
    for key in raw:
        value = entries.number(key)
        # isdecimal alone lets digits of other scripts through
        if not (key.isascii() and key.isdecimal()) or len(key) > 9 or value is None:
            raise RequestError(
                f"logit_bias must map token ids, written as strings of digits, to numbers; found {key[:20]!r}",
                param="logit_bias",
            )
        bias[int(key)] = value
    return bias


def _max_tokens(fields: Fields) -> int | None:
    """The newer name wins when both are there."""
    older = fields.whole("max_tokens", low=1)
    newer = fields.whole("max_completion_tokens", low=1)
    return older if newer is None else newer


def _reasoning_budget(fields: Fields, default: int | None) -> int | None:
    """What is not an integer is ignored; 0 and below turn the server's default off (spec serving.md section 5)."""
    value = fields.get("reasoning_budget")
    if isinstance(value, bool) or not isinstance(value, int):
        value = default
    return value if value is not None and value > 0 else None


def _soft_bias(fields: Fields, default: float) -> float:
    value = fields.number("reasoning_budget_soft_bias")
    if value is None:
        return default
    if abs(value) > MAX_LOGIT_BIAS:
        raise wrong("reasoning_budget_soft_bias", f"between -{MAX_LOGIT_BIAS:g} and {MAX_LOGIT_BIAS:g}", value)
    return value


def _draft_sources(fields: Fields) -> frozenset[str] | None:
    raw = fields.items("draft_sources")
    if raw is None:
        return None
    for index, source in enumerate(raw):
        if not isinstance(source, str):
            raise wrong(f"draft_sources[{index}]", "a name of a draft source", source)
    return frozenset(raw)


def _include_usage(fields: Fields, stream: bool) -> bool:
    """Only streams are asked; a whole answer always has its usage, so the option is harmless there."""
    options = Fields(fields.object("stream_options") or {}, fields.name("stream_options"))
    return bool(options.flag("include_usage")) and stream
