"""Which part of an answer is thought, which answer, which tool call (the "agens" split, spec serving.md section 3).

    prompt ends in <|think|>:  thought <|/think|> answer <|call|> call <|/call|> answer
                               ~~~~~~~            ~~~~~~          ~~~~

Only the model's own marker tokens change the state, and only where they belong; a tag spelled out in ordinary
characters is text (case B3). Markers arrive here as tokens, so no text is ever held back to look for them (cases B1,
B8).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Marker(Enum):
    THINK_START = "think_start"
    THINK_END = "think_end"
    CALL_START = "call_start"
    CALL_END = "call_end"


class Kind(Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # text inside a call region
    CALL_OPENED = "call_opened"
    CALL_CLOSED = "call_closed"


@dataclass(frozen=True)
class Piece:
    kind: Kind
    text: str = ""


ReasoningMode = Literal["split", "content", "show"]
CallMode = Literal["parse", "drop", "show"]


class RegionSplitter:
    """Sorts runs of text and markers into pieces.

    reasoning  "split"    thought and answer apart
               "content"  thinking is off: everything is answer, think markers are dropped
               "show"     nobody splits: think markers stay in the text (case B6; the caller passes them as text)
    calls      "parse"    call regions become CALL pieces
               "drop"     call regions vanish (tools listed but tool_choice none, case A8)
               "show"     the text inside stays where it is, only the markers vanish
    starts_in_reasoning  the prompt ended inside an open thought
    calls_in_reasoning   a call before the thought is closed counts, and closes it (case B2); False: it stays thought

    White space between a marker and a call is layout, not answer: a run of content that is only white space and
    touches a call is dropped, so that an answer of thought and call has no content (case B5).
    """

    def __init__(
        self, *, reasoning: ReasoningMode, calls: CallMode, starts_in_reasoning: bool, calls_in_reasoning: bool = True
    ) -> None:
        self._calls = calls
        self._calls_in_reasoning = calls_in_reasoning
        splits = reasoning == "split"
        self._kind = Kind.REASONING if splits and starts_in_reasoning else Kind.CONTENT
        # A thought can open once, before any answer; a later <|think|> changes nothing.
        self._may_open = splits and not starts_in_reasoning
        self._blank: list[str] = []  # leading white space of the current content run
        self._in_blank = True
        self._after_call = False

    @property
    def in_reasoning(self) -> bool:
        return self._kind is Kind.REASONING

    def text(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._kind is Kind.CALL:
            return [] if self._calls == "drop" else [Piece(Kind.CALL, text)]
        if self._kind is Kind.CONTENT and self._in_blank:
            if text.isspace():
                self._blank.append(text)
                return []
            text = "".join(self._blank) + text
            self._blank.clear()
            self._in_blank = self._may_open = False
        return [Piece(self._kind, text)]

    def marker(self, marker: Marker) -> list[Piece]:
        if marker is Marker.THINK_START:
            if self._may_open and self._kind is Kind.CONTENT:
                self._enter(Kind.REASONING)
                self._may_open = False
            return []
        if marker is Marker.THINK_END:
            if self._kind is Kind.REASONING:
                self._enter(Kind.CONTENT)
                self._after_call = False
            return []
        if marker is Marker.CALL_START:
            return self._open_call()
        if self._kind is not Kind.CALL:
            return []
        self._enter(Kind.CONTENT)
        self._after_call = True
        return [] if self._calls == "drop" else [Piece(Kind.CALL_CLOSED)]

    def finish(self) -> list[Piece]:
        """The answer ended. White space that followed no call was answer after all."""
        blank = "".join(self._blank)
        self._blank.clear()
        if self._kind is Kind.CONTENT and blank and not self._after_call:
            return [Piece(Kind.CONTENT, blank)]
        return []

    def _open_call(self) -> list[Piece]:
        if self._kind is Kind.REASONING and not self._calls_in_reasoning:
            return []
        self._may_open = False
        if self._calls == "show":
            if self._kind is Kind.REASONING:
                self._enter(Kind.CONTENT)
            return []
        reopened = [Piece(Kind.CALL_CLOSED)] if self._kind is Kind.CALL else []
        self._enter(Kind.CALL)
        return [] if self._calls == "drop" else [*reopened, Piece(Kind.CALL_OPENED)]

    def _enter(self, kind: Kind) -> None:
        self._kind = kind
        self._blank.clear()
        self._in_blank = True
