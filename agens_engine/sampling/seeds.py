"""Random numbers of a request: a function of its seed and of a token's position, of nothing else.

Philox (Salmon et al., SC 2011) turns a key and a counter into four 64-bit words. The key comes from the seed, the
counter is the position of the token in the answer, and each of the four words serves one purpose (a lane). So a draw
does not depend on neighbours in the batch, on how many drafts a step had, or on how often a position was tried before.

Why a position's numbers may be used again after a rejection further left: past the first rejected draft they decided
nothing that was emitted, so what is emitted later is still independent of them.
"""

from __future__ import annotations

import secrets
from enum import IntEnum

import numpy as np

_BLOCK = 64  # positions generated at once
_NUM_WORDS = 4  # words per Philox counter


class Lane(IntEnum):
    """What a uniform number is used for; numbers of different lanes are independent."""

    DRAW = 0  # choose the token itself
    ACCEPT = 1  # accept or refuse a draft that came with a distribution
    DRAFT = 2  # free for draft sources that sample


class RequestStream:
    """The uniform numbers of one request.

    seed     None takes fresh entropy from the operating system; any integer is fine, neighbouring seeds are unrelated
    """

    def __init__(self, seed: int | None) -> None:
        entropy = secrets.randbits(128) if seed is None else seed & ((1 << 128) - 1)
        self._key = np.random.SeedSequence(entropy).generate_state(2, np.uint64)
        self._block_idx = -1
        self._block: np.ndarray = np.empty((0, _NUM_WORDS))

    def uniforms(self, first_idx: int, count: int, lane: Lane) -> np.ndarray:
        """[count] float64 in [0, 1) for answer positions first_idx, first_idx + 1, ..."""
        block_idx, offset = divmod(first_idx, _BLOCK)
        if offset + count <= _BLOCK:
            return self._words(block_idx)[offset : offset + count, lane]
        return np.array([self.uniform(i, lane) for i in range(first_idx, first_idx + count)])

    def uniform(self, idx: int, lane: Lane) -> float:
        """One number in [0, 1) for answer position idx."""
        block_idx, offset = divmod(idx, _BLOCK)
        return float(self._words(block_idx)[offset, lane])

    def _words(self, block_idx: int) -> np.ndarray:
        if block_idx != self._block_idx:
            philox = np.random.Philox(key=self._key, counter=block_idx * _BLOCK)
            words = philox.random_raw(_BLOCK * _NUM_WORDS).reshape(_BLOCK, _NUM_WORDS)
            self._block = (words >> np.uint64(11)) * 2.0**-53
            self._block_idx = block_idx
        return self._block
