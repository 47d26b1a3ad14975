"""Token bytes to text, piece by piece, never splitting a character (case C1).

Bytes of an unfinished character are held until the rest arrives. Bytes that can no longer become a character turn into
U+FFFD, and so does what is still unfinished at the end; the text is the same as decoding all the bytes at once.
"""

from __future__ import annotations

import codecs


class Detokenizer:
    """One run of text. `push` takes the bytes of the next token; `finish` ends the run, ready for another."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_bytes: bytes) -> str:
        return self._decoder.decode(token_bytes)

    def finish(self) -> str:
        """What was held back: U+FFFD once for an unfinished character, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
