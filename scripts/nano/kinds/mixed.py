"""Chat sessions that wander: small talk between arithmetic, copying, JSON and Python, as people really try things."""

from __future__ import annotations

from scripts.nano.document import Document, Message, assistant, user
from scripts.nano.kinds import arithmetic, chat, copying, json_docs, python_code
from scripts.nano.lexicon import Sampler

MAX_CHARACTERS = 700  # of the earlier turns, so that the session stays well under the length limit
MAKERS = (chat.make, arithmetic.make, arithmetic.make, copying.make, json_docs.make, python_code.make)


def make(s: Sampler) -> Document:
    """A chat document whose earlier turns come from other kinds; the last turn is small talk."""
    thinking = s.chance(0.6)
    messages: list[Message] = []
    for _ in range(s.between(1, 3)):
        piece = MAKERS[s.between(0, len(MAKERS) - 1)](s)
        if piece.enable_thinking == thinking:
            messages += [m for m in piece.messages if m["role"] != "system"]
    while sum(len(str(m)) - 40 for m in messages) > MAX_CHARACTERS:
        messages = messages[2:]
    question, thought, answer = chat.exchange(s)
    messages += [user(question), assistant(answer, thought=thought, thinking=thinking)]
    return Document("chat", messages, None, thinking, expect={"content": answer})
