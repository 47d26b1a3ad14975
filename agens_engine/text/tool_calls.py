"""Tool calls out of call regions (spec serving.md, section 4), while they are being written.

    <|call|> <function=NAME> <parameter=ARG> VALUE </parameter> ... </function> <|/call|>
       token      text            text                 text          text         token

The region markers are tokens and are handled before this file; the inner tags are plain text and may arrive cut
anywhere (case A1). A call is announced as soon as its name is complete; each parameter is sent when it is complete,
because its JSON type can depend on all of it. The argument fragments of a call always concatenate to one valid JSON
object once the region is closed or `finish` was called, for any way of cutting the text, and non-streaming answers are
the joined stream.

A value that the schema wants as an object or a list is JSON, and a tag inside one of its strings is text: such a value
ends at the first tag outside a string. Where that leaves no JSON, the first tag of all ends it, as everywhere else.

A parameter given twice appears twice in that object; JSON readers take the last one, as the spec asks.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from agens_engine.text.tool_schema import ToolSchemas, json_kinds, to_json, value_json

_FUNCTION = "<function="
_PARAMETER = "<parameter="
_FUNCTION_END = "</function>"
_PARAMETER_END = "</parameter>"
_OUTSIDE_RE = re.compile(re.escape(_FUNCTION))
_INSIDE_RE = re.compile("|".join(map(re.escape, (_PARAMETER, _FUNCTION_END, _FUNCTION))))
# The first of these ends a value, also when its own closing tag was forgotten.
_VALUE_END_RE = re.compile("|".join(map(re.escape, (_PARAMETER_END, _PARAMETER, _FUNCTION_END))))
_JSON_KINDS = frozenset({"object", "array", "null"})
# A name ends at '>'; a newline before it means that the '>' was forgotten.
_NAME_END_RE = re.compile(r"[>\n]")
_LONGEST_TAG = max(map(len, (_FUNCTION, _PARAMETER, _FUNCTION_END, _PARAMETER_END)))


@dataclass(frozen=True)
class CallDelta:
    """A piece of one call: the first has id, name and arguments "", the others only arguments."""

    index: int
    id: str | None
    name: str | None
    arguments: str


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class _State(Enum):
    OUTSIDE = "outside"  # in the region, before <function=
    NAME = "name"
    INSIDE = "inside"  # between parameters
    KEY = "key"
    VALUE = "value"


_OPEN_CALL = frozenset({_State.INSIDE, _State.KEY, _State.VALUE})


class ToolCallParser:
    """Reads the text of all call regions of one answer.

    schemas  parameter schemas by function name (tool_schemas); a function that is not among them is returned all the
    same
    """

    def __init__(self, schemas: ToolSchemas, new_id: Callable[[], str] = new_call_id) -> None:
        self._schemas = schemas
        self._new_id = new_id
        self._state = _State.OUTSIDE
        self._buffer = ""
        self._scanned = 0  # the tag searched for does not start before this index of the buffer
        self._name = ""
        self._key = ""
        self._num_parameters = 0
        self._json: _JsonEnd | None = None  # set while a value that should be JSON is read
        self.num_calls = 0
        self.cut_off = False  # the last call was not finished by the model

    def feed(self, text: str) -> list[CallDelta]:
        self._buffer += text
        deltas: list[CallDelta] = []
        while self._advance(deltas):
            continue
        return deltas

    def close_region(self) -> list[CallDelta]:
        """The model closed the region: an open value is complete, an open call ends."""
        return self._close(value_is_complete=True)

    def finish(self, *, natural: bool) -> list[CallDelta]:
        """The answer ended.

        natural  True: the model ended it, so an open value is complete. False: it was cut (length, a stop string), so
                 an open value is left out and the call is marked `cut_off`; its complete parameters stay (case A10)
        """
        if not natural and self._state in _OPEN_CALL:
            self.cut_off = True
        return self._close(value_is_complete=natural)

    def _advance(self, deltas: list[CallDelta]) -> bool:
        """Consume up to the next tag; False when the buffer holds no further complete one."""
        if self._state is _State.OUTSIDE:
            if self._take(_OUTSIDE_RE, keep=False) is None:
                return False
            self._state = _State.NAME
        elif self._state is _State.NAME:
            taken = self._take(_NAME_END_RE, keep=True)
            if taken is None:
                return False
            deltas.extend(self._begin_call(taken[0].strip()))
        elif self._state is _State.INSIDE:
            taken = self._take(_INSIDE_RE, keep=False)
            if taken is None:
                return False
            deltas.extend(self._enter(taken[1]))
        elif self._state is _State.KEY:
            taken = self._take(_NAME_END_RE, keep=True)
            if taken is None:
                return False
            self._key = taken[0].strip()
            self._state = _State.VALUE
            self._json = _JsonEnd() if self._is_json() else None
            if taken[1] == "\n":  # the '>' was forgotten; the newline is the one before the value
                self._buffer = "\n" + self._buffer
        else:
            taken = self._take(_VALUE_END_RE, keep=True) if self._json is None else self._take_json(self._json)
            if taken is None:
                return False
            deltas.extend(self._end_value(*taken))
        return True

    def _end_value(self, text: str, tag: str) -> list[CallDelta]:
        deltas = self._parameter(text)
        self._state = _State.INSIDE
        return deltas if tag == _PARAMETER_END else [*deltas, *self._enter(tag)]

    def _is_json(self) -> bool:
        kinds = json_kinds(self._schemas.get(self._name, {}).get(self._key))
        return _JSON_KINDS.issuperset(kinds)

    def _take_json(self, end: _JsonEnd) -> tuple[str, str] | None:
        """Like _take, for a value that should be JSON: tags inside its strings do not end it."""
        found = end.find(self._buffer)
        return None if found is None else self._cut(found)

    def _cut(self, match: re.Match[str]) -> tuple[str, str]:
        before = self._buffer[: match.start()]
        self._buffer = self._buffer[match.end() :]
        self._scanned = 0
        return before, match.group()

    def _take(self, pattern: re.Pattern[str], *, keep: bool) -> tuple[str, str] | None:
        """Text before the next match, and the match; both leave the buffer. keep: text without a match stays in it."""
        match = pattern.search(self._buffer, self._scanned)
        if match is None:
            # Only a tag cut by the end of the buffer can still begin in the part already searched.
            if keep:
                self._scanned = max(self._scanned, len(self._buffer) - _LONGEST_TAG + 1)
            else:
                self._buffer = self._buffer[-_LONGEST_TAG + 1 :]
            return None
        return self._cut(match)

    def _enter(self, tag: str) -> list[CallDelta]:
        """A tag met between parameters."""
        if tag == _PARAMETER:
            self._state = _State.KEY
            return []
        ended = self._end_call()
        if tag == _FUNCTION:  # the closing tag of the call before was forgotten
            self._state = _State.NAME
        return ended

    def _begin_call(self, name: str) -> list[CallDelta]:
        if not name:
            self._state = _State.OUTSIDE
            return []
        self._state = _State.INSIDE
        self._name = name
        self._num_parameters = 0
        self.num_calls += 1
        return [CallDelta(self.num_calls - 1, self._new_id(), name, "")]

    def _parameter(self, text: str) -> list[CallDelta]:
        if not self._key:
            return []
        schema = self._schemas.get(self._name, {}).get(self._key)
        value = value_json(text.removeprefix("\n").removesuffix("\n"), schema)
        opening = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        return [CallDelta(self.num_calls - 1, None, None, f"{opening}{to_json(self._key)}: {value}")]

    def _end_call(self) -> list[CallDelta]:
        self._state = _State.OUTSIDE
        return [CallDelta(self.num_calls - 1, None, None, "}" if self._num_parameters else "{}")]

    def _close(self, *, value_is_complete: bool) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        # JSON whose string never ended: it was not JSON, so the first tag ends the value after all
        while value_is_complete and self._state is _State.VALUE and self._json is not None and self._json.first:
            deltas.extend(self._end_value(*self._cut(self._json.first)))
            deltas.extend(self.feed(""))
        if self._state is _State.VALUE and value_is_complete:
            deltas.extend(self._parameter(self._buffer))
        if self._state in _OPEN_CALL:
            deltas.extend(self._end_call())
        self._state = _State.OUTSIDE
        self._buffer = ""
        self._scanned = 0
        return deltas


class _JsonEnd:
    """Finds the tag that ends a JSON value in text that grows.

    first   the first tag, inside a string or not
    """

    def __init__(self) -> None:
        self.first: re.Match[str] | None = None
        self._scanned = 0
        self._in_string = False
        self._at = 0  # characters before this index have been read as JSON

    def find(self, text: str) -> re.Match[str] | None:
        """The tag that ends the value, once it is certain; `text` begins with what was given before."""
        while (match := _VALUE_END_RE.search(text, self._scanned)) is not None:
            self._read(text, match.start())
            self._scanned = match.end()
            if self.first is None:
                self.first = match
            if not self._in_string:
                return match if match is self.first or _is_json(text[: match.start()]) else self.first
        self._scanned = max(self._scanned, len(text) - _LONGEST_TAG + 1)
        return None

    def _read(self, text: str, end: int) -> None:
        """Follow the strings of the JSON up to `end`."""
        while (quote := text.find('"', self._at, end)) != -1:
            self._at = quote + 1
            if not self._in_string or _backslashes_before(text, quote) % 2 == 0:
                self._in_string = not self._in_string
        self._at = max(self._at, end)


def _backslashes_before(text: str, index: int) -> int:
    start = index
    while start and text[start - 1] == "\\":
        start -= 1
    return index - start


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def parse_calls(text: str, schemas: ToolSchemas, new_id: Callable[[], str] = new_call_id) -> list[dict[str, Any]]:
    """All calls in the text of one closed call region, in the API's form."""
    parser = ToolCallParser(schemas, new_id)
    return join_calls([*parser.feed(text), *parser.close_region()])


def join_calls(deltas: list[CallDelta]) -> list[dict[str, Any]]:
    """Streamed pieces to OpenAI's tool_calls: [{id, type, function: {name, arguments}}]."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call["id"] = delta.id or call["id"]
        call["function"]["name"] += delta.name or ""
        call["function"]["arguments"] += delta.arguments
    return [calls[index] for index in sorted(calls)]
