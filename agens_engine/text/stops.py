"""Stop strings: find the first one, cut exactly there, hold back no more text than needed (cases C3-C6).

An Aho-Corasick automaton walks the text one character at a time. Its state is the longest suffix of the text that is a
prefix of some stop string, so exactly that suffix is held back:

    text so far  [ ..... sent ..... | state ]      state = "" -> nothing held
                                     ^ a match can start here at the earliest

Work is O(1) per character, amortised, whatever the number of stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from agens_engine.errors import RequestError

MAX_STOP_STRINGS = 16


def parse_stops(value: Any, *, param: str = "stop") -> tuple[str, ...]:
    """The API's `stop` field (null, a string, or a list of strings) as a tuple without repeats.

    raises  RequestError for other types, an empty string, or more than MAX_STOP_STRINGS
    """
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(s, str) for s in items):
        raise RequestError(f"{param} must be a string or a list of strings", param=param)
    if len(items) > MAX_STOP_STRINGS:
        raise RequestError(f"{param} has {len(items)} strings, at most {MAX_STOP_STRINGS} are allowed", param=param)
    if any(s == "" for s in items):
        raise RequestError(f"{param} must not hold an empty string; leave it out for no stop string", param=param)
    return tuple(dict.fromkeys(items))


class StopSet:
    """The compiled stop strings of one request; walked by any number of StopMatchers.

    Node 0 is the root. depth[n] is the length of the prefix that node n stands for; longest_match[n] the length of the
    longest stop string ending there (0: none).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(s == "" for s in stops):
            raise RequestError("stop must not hold an empty string", param="stop")
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]
        self.longest_match = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self.next[node].get(char)
            if child is None:
                child = len(self.next)
                self.next[node][char] = child
                self.next.append({})
                self.depth.append(self.depth[node] + 1)
                self.fail.append(0)
                self.longest_match.append(0)
            node = child
        self.longest_match[node] = len(stop)

    def _link(self) -> None:
        """Fail links by breadth first search: the longest proper suffix of a node that is itself a node."""
        queue = deque(self.next[0].values())
        while queue:
            node = queue.popleft()
            if not self.longest_match[node]:
                self.longest_match[node] = self.longest_match[self.fail[node]]
            for char, child in self.next[node].items():
                self.fail[child] = self.step(self.fail[node], char)
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        while node and char not in self.next[node]:
            node = self.fail[node]
        return self.next[node].get(char, 0)


class StopMatcher:
    """Feed text, get what may be shown. After a hit everything further is dropped."""

    def __init__(self, stops: StopSet) -> None:
        self._stops = stops
        self._node = 0
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Text that is now certain to lie before any stop string; `hit` is set when one was found."""
        if self.hit is not None:
            return ""
        if len(self._stops.next) == 1:
            return text
        node = self._node
        for i, char in enumerate(text):
            node = self._stops.step(node, char)
            length = self._stops.longest_match[node]
            if length:
                seen = self._held + text[: i + 1]
                self.hit = seen[len(seen) - length :]
                self._held = ""
                return seen[: len(seen) - length]
        self._node = node
        seen = self._held + text
        cut = len(seen) - self._stops.depth[node]
        self._held = seen[cut:]
        return seen[:cut]

    def finish(self) -> str:
        """The run of text ended: release what was held, start afresh. `hit` stays."""
        held, self._held, self._node = self._held, "", 0
        return held
