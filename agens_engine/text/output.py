"""One answer, token by token, into what the client sees (implements core.OutputWatch).

    token ─► marker?  ─► bytes ─► characters ─► stop strings ─► thought / answer / call ─► deltas
             (by id, so before anything is cut into characters: case B8)

A stop string is looked for in the text between two special tokens, thoughts and calls included. Text from the match on
is dropped. Control tokens are never visible; only with `reasoning="show"` do the think markers stay in the text (case
B6). Streaming and non-streaming answers are the same deltas, joined by `collect`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agens_engine.core import FinishReason
from agens_engine.text.detokenizer import Detokenizer
from agens_engine.text.reasoning import CallMode, Kind, Marker, Piece, ReasoningMode, RegionSplitter
from agens_engine.text.stops import StopMatcher, StopSet
from agens_engine.text.tokenizer import Tokenizer
from agens_engine.text.tool_calls import CallDelta, ToolCallParser, join_calls, new_call_id
from agens_engine.text.tool_schema import tool_schemas


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of tool call number `index`: first id and name with arguments "" (case A3), then argument fragments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


@dataclass(frozen=True)
class OutputOptions:
    """How to read an answer; the modes are explained in reasoning.RegionSplitter.

    tools                the request's `tools`, for the types of arguments
    stops                stop strings (stops.parse_stops); one that spells a control token also works as a stop token
    starts_in_reasoning  from template.RenderedPrompt
    calls_in_reasoning   a call inside an unfinished thought counts
    include_stop         leave the matched stop string in the text
    """

    reasoning: ReasoningMode = "split"
    calls: CallMode = "parse"
    tools: Sequence[Any] | None = None
    stops: tuple[str, ...] = ()
    starts_in_reasoning: bool = False
    calls_in_reasoning: bool = True
    include_stop: bool = False
    new_call_id: Callable[[], str] = field(default=new_call_id, repr=False)

    @classmethod
    def plain(cls, *, stops: tuple[str, ...] = (), include_stop: bool = False) -> OutputOptions:
        """For raw completions: one text, nothing split or parsed."""
        return cls(reasoning="show", calls="show", stops=stops, include_stop=include_stop)


class OutputParser:
    """Reads one answer; not reusable. `push` each committed token in order, then `finish` once.

    stop_hit    the stop string that ended the answer, or None
    num_calls   tool calls announced so far
    num_reasoning_tokens  tokens of the thought so far, its markers not counted
    call_cut_off  the last call was not finished by the model: its missing parts were left out (finish_reason `length`)
    """

    def __init__(self, tokenizer: Tokenizer, options: OutputOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._detokenizer = Detokenizer()
        self._stops = StopMatcher(StopSet(options.stops))
        self._splitter = RegionSplitter(
            reasoning=options.reasoning,
            calls=options.calls,
            starts_in_reasoning=options.starts_in_reasoning,
            calls_in_reasoning=options.calls_in_reasoning,
        )
        self._calls = ToolCallParser(tool_schemas(options.tools), options.new_call_id)
        self._markers = {
            tokenizer.think_start_id: Marker.THINK_START,
            tokenizer.think_end_id: Marker.THINK_END,
            tokenizer.call_start_id: Marker.CALL_START,
            tokenizer.call_end_id: Marker.CALL_END,
        }
        shown = (tokenizer.think_start_id, tokenizer.think_end_id) if options.reasoning == "show" else ()
        self._shown_ids = frozenset(shown)
        self._stop_texts = {i: stop for stop in options.stops if (i := tokenizer.id_of(stop)) is not None}
        self._finished = False
        self.stop_hit: str | None = None
        self.num_reasoning_tokens = 0

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Control tokens that a stop string spells; `push` stops on them."""
        return frozenset(self._stop_texts)

    @property
    def in_reasoning(self) -> bool:
        return self._splitter.in_reasoning

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    @property
    def call_cut_off(self) -> bool:
        return self._calls.cut_off

    def push(self, token_id: int) -> tuple[list[Delta], bool]:
        """Take the next token; returns what became visible and whether a stop string or stop token ends the answer.

        The model's end tokens are invisible here; ending on them is the engine's business (ignore_eos).
        """
        if self.stop_hit is not None or self._finished:
            return [], True
        if token_id not in self._markers and self._splitter.in_reasoning:
            self.num_reasoning_tokens += 1
        if self._tokenizer.is_special(token_id) and token_id not in self._shown_ids:
            return self._push_special(token_id)
        if token_id in self._stop_texts:  # shown, but the client asked to end there
            return self._push_special(token_id)
        text = self._detokenizer.push(self._tokenizer.token_bytes(token_id))
        return self._read(self._visible(text)), self.stop_hit is not None

    def finish(self, reason: FinishReason) -> list[Delta]:
        """The answer ended: release held text and complete the JSON of an open call. A second call gives nothing."""
        if self._finished:
            return []
        self._finished = True
        pieces: list[Piece] = []
        cut = self.stop_hit is not None or reason is not FinishReason.STOP
        if self.stop_hit is None:
            pieces += self._end_run()
            cut = cut or self.stop_hit is not None
        deltas = self._read([*pieces, *self._splitter.finish()])
        if self._options.calls == "parse":
            deltas += _call_deltas(self._calls.finish(natural=not cut))
        return deltas

    def _push_special(self, token_id: int) -> tuple[list[Delta], bool]:
        pieces = self._end_run()
        if self.stop_hit is None and token_id in self._stop_texts:
            self.stop_hit = self._stop_texts[token_id]
        marker = self._markers.get(token_id)
        if self.stop_hit is None and marker is not None:
            pieces += self._splitter.marker(marker)
        return self._read(pieces), self.stop_hit is not None

    def _visible(self, text: str) -> list[Piece]:
        """Characters through the stop matcher."""
        shown = self._stops.feed(text)
        if self._stops.hit is not None:
            self.stop_hit = self._stops.hit
            if self._options.include_stop:
                shown += self._stops.hit
        return self._splitter.text(shown)

    def _end_run(self) -> list[Piece]:
        """A special token or the end: no character and no stop string reaches across it."""
        pieces = self._visible(self._detokenizer.finish())
        return pieces + self._splitter.text(self._stops.finish())

    def _read(self, pieces: Iterable[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if piece.kind is Kind.REASONING:
                deltas.append(ReasoningDelta(piece.text))
            elif piece.kind is Kind.CONTENT:
                deltas.append(ContentDelta(piece.text))
            elif piece.kind is Kind.CALL:
                deltas += _call_deltas(self._calls.feed(piece.text))
            elif piece.kind is Kind.CALL_CLOSED:
                deltas += _call_deltas(self._calls.close_region())
        return deltas


@dataclass(frozen=True)
class Answer:
    """A whole answer; None where there is nothing (case B5). tool_calls is in OpenAI's form and may be empty."""

    reasoning: str | None
    content: str | None
    tool_calls: list[dict[str, Any]]


def collect(deltas: Iterable[Delta]) -> Answer:
    """Join the deltas of one answer."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[CallDelta] = []
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        elif isinstance(delta, ContentDelta):
            content.append(delta.text)
        else:
            calls.append(CallDelta(delta.index, delta.id, delta.name, delta.arguments))
    return Answer("".join(reasoning) or None, "".join(content) or None, join_calls(calls))


def _call_deltas(deltas: Iterable[CallDelta]) -> list[Delta]:
    return [ToolCallDelta(d.index, d.id, d.name, d.arguments) for d in deltas]
