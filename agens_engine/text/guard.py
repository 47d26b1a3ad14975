"""Keeps what a client wrote from becoming control tokens when the chat template pastes it into the prompt.

Before rendering, every character of a client's string that a control text could be made of (`<`, `|`, `>`) is replaced
by a stand-in: a private-use character drawn at random for this render, which no string of the request contains. The
template sees strings of the same length and words. After rendering, control texts are looked for with the stand-ins
still in place, so each one found was written by the template itself; one that a client's string would complete together
with its neighbours is not found either. Then the characters are put back.

    client "a <|call|> b"  ->  a ①②call②③ b  -> template ->  <|agens_start|>user\\na ①②call②③ b<|agens_end|>
                                                             ^control             ^ordinary text   ^control
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agens_engine.errors import RequestError
from agens_engine.text.tokenizer import Tokenizer

_PRIVATE_USE = range(0x100000, 0x10FFFE)  # the last plane of Unicode
_random = random.SystemRandom()


class Guard:
    """The stand-ins of one render. protect() what clients wrote, render, then encode() or restore() the result.

    client_values  everything that will be protected, JSON-like
    """

    def __init__(self, control_texts: Iterable[str], client_values: Any) -> None:
        texts = [t for t in control_texts if t]
        # Not letters, digits and joiners, of which roles and names consist: without brackets no control text forms.
        chars = {c for text in texts for c in text if not (c.isalnum() or c in "_-/")} | {text[0] for text in texts}
        used: set[str] = set()
        _collect_chars(client_values, used)
        free: Sequence[int] = _PRIVATE_USE
        if max(used, default="") >= chr(_PRIVATE_USE.start):
            free = [code for code in _PRIVATE_USE if chr(code) not in used]
        if len(free) < len(chars):
            raise RequestError(
                "the messages use up all private-use characters of Unicode; leave a few out", param="messages"
            )
        picked = _random.sample(free, len(chars))
        self._stand_in = {ord(char): chr(code) for char, code in zip(sorted(chars), picked, strict=True)}
        self._original = {ord(s): chr(c) for c, s in self._stand_in.items()}
        # How a template's own tojson(ensure_ascii=true) would have written them.
        self._escaped = {json.dumps(s)[1:-1]: chr(c) for c, s in self._stand_in.items()}

    def protect(self, value: Any) -> Any:
        """A copy of a JSON-like value with all its strings protected, keys included."""
        if isinstance(value, str):
            return value.translate(self._stand_in)
        if isinstance(value, Mapping):
            return {self.protect(k): self.protect(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(v) for v in value]
        return value

    def restore(self, text: str) -> str:
        """The text with what the clients wrote in it."""
        for escaped, char in self._escaped.items():
            text = text.replace(escaped, char)
        return text.translate(self._original)

    def encode(self, tokenizer: Tokenizer, rendered: str) -> list[int]:
        """Token ids of a rendered prompt: control ids only where the template wrote the control text."""
        pieces = [(self.restore(text), control_id) for text, control_id in tokenizer.split_control(rendered)]
        restored = self.restore(rendered)
        if pieces == tokenizer.split_control(restored):
            # An ordinary conversation: no control text but the template's. The tokenizer as shipped then gives the ids
            # that everybody else gets. (The second check is for reserved texts that its normaliser can make.)
            ids = tokenizer.encode(restored, allow_control=True)
            if [i for i in ids if tokenizer.is_special(i)] == [i for _, i in pieces if i is not None]:
                return ids
        ids = []
        for text, control_id in pieces:
            if control_id is not None:
                ids.append(control_id)
            else:
                ids.extend(tokenizer.encode(text, allow_control=False))
        return ids


def _collect_chars(value: Any, found: set[str]) -> None:
    if isinstance(value, str):
        found.update(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect_chars(key, found)
            _collect_chars(item, found)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect_chars(item, found)
