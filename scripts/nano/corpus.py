"""The mix: which share of the training tokens each kind of document has, and an endless stream of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from scripts.nano.document import Document
from scripts.nano.kinds import agent, arithmetic, chat, copying, json_docs, mixed, python_code, tools
from scripts.nano.lexicon import Sampler

MAKERS: dict[str, Callable[[Sampler], Document]] = {
    "tools": tools.make,
    "copying": copying.make,
    "arithmetic": arithmetic.make,
    "agent": agent.make,
    "json": json_docs.make,
    "chat": chat.make,
    "python": python_code.make,
}
# percent of tokens
MIX: dict[str, float] = {"tools": 28, "copying": 20, "arithmetic": 20, "agent": 12, "json": 8, "chat": 7, "python": 5}
LOW_EFFORT_SHARE = 0.04
WANDERING_SHARE = 0.3  # of chat documents, see kinds/mixed.py


def make_document(s: Sampler, kind: str) -> Document:
    """One document of this kind; a few thinking ones ask for low effort, which changes only the prompt."""
    maker = mixed.make if kind == "chat" and s.chance(WANDERING_SHARE) else MAKERS[kind]
    document = maker(s)
    if document.enable_thinking and s.chance(LOW_EFFORT_SHARE):
        document.reasoning_effort = "low"
    return document


class Mixer:
    """Chooses the kind that is furthest behind its share of tokens.

    Call `next_kind`, make the document, then `count` its tokens. Deterministic, so a shard follows from its seed.
    """

    def __init__(self, mix: Mapping[str, float] | None = None) -> None:
        self.mix = MIX if mix is None else mix
        self.tokens = dict.fromkeys(self.mix, 0)

    def next_kind(self) -> str:
        return min(self.mix, key=lambda kind: self.tokens[kind] / self.mix[kind])

    def count(self, kind: str, num_tokens: int) -> None:
        self.tokens[kind] += num_tokens


def documents(s: Sampler, kinds: list[str], num: int) -> Iterator[Document]:
    """`num` documents, the kinds in turn."""
    for at in range(num):
        yield make_document(s, kinds[at % len(kinds)])
