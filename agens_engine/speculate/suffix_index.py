"""Most recent occurrence of every 3- to 8-token sequence of a growing text.

One hash table per length. A bucket is a chain of end positions, each the most recent occurrence of a different n-gram:

    head[slot] -> end position -> link[end position] -> ... -> -1

Adding a token replaces the older occurrence of its n-gram in the chain, so chains stay as short as the load allows (at
most one entry per slot on average) and a look-up is O(1). Candidates are compared token by token: a hash collision
costs time, never a wrong answer. (When a whole prompt is added at once, n-grams are told apart by a 64-bit hash; a
collision there, about one in 10^8 prompts of 262K tokens, hides an occurrence.)

Memory: capacity C is a power of two, at least the text's length; tokens 4 C bytes, and 4 C for head and 4 C for link at
each of the 6 lengths: 52 C bytes in all. So 52 to 104 bytes a token, and 13.6 MB for 262,144 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

MIN_MATCH = 3
MAX_MATCH = 8

_MIN_CAPACITY = 1024
_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, from the golden ratio
_FINISH = 0xD6E8FEB86659FD93
_POWERS = tuple(pow(_MULTIPLIER, i, 1 << 64) for i in range(MAX_MATCH))


class SuffixIndex:
    """The text and its index. n-grams that end at the newest token are looked up, not stored, until a token follows."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._num = 0
        self._allocate(max(_MIN_CAPACITY, len(token_ids)))
        self.extend(token_ids)

    def __len__(self) -> int:
        return self._num

    @property
    def num_bytes(self) -> int:
        """Bytes held by the tables."""
        return sum(t.nbytes for t in (self._tokens_np, *self._heads_np, *self._links_np))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens. Amortised O(1) per token; many tokens at once are indexed by whole-array operations."""
        first, self._num = self._num, self._num + len(token_ids)
        if self._num > self._capacity:
            old = self._tokens_np[:first].copy()
            self._allocate(self._num)
            self._tokens_np[:first] = old
            self._tokens_np[first : self._num] = token_ids
            self._build()
        elif len(token_ids) > self._num // 16 + MAX_MATCH:
            self._tokens_np[first : self._num] = token_ids
            self._build()
        else:
            for position, token_id in enumerate(token_ids, start=first):
                self._add_ending_at(position - 1)  # the n-grams ending there now have a continuation
                self._tokens[position] = token_id

    def find(self, suffix: Sequence[int], min_match: int = MIN_MATCH) -> tuple[int, int] | None:
        """Longest match of the end of `suffix` with the text before its newest token.

        suffix      the newest tokens, last one newest; only the last MAX_MATCH count
        min_match   shorter matches are ignored
        returns     (match length, end position of its most recent occurrence), or None; the end lies before the
                    text's newest token
        """
        suffix = list(suffix[-MAX_MATCH:])
        hashes = self._hashes(suffix)
        for length in range(len(suffix), max(min_match, MIN_MATCH) - 1, -1):
            gram = suffix[-length:]
            level = length - MIN_MATCH
            link = self._links[level]
            end = self._heads[level][self._slot(hashes[length - 1])]
            while end >= 0:
                if self._tokens[end - length + 1 : end + 1].tolist() == gram:
                    return length, end
                end = link[end]
        return None

    def tokens(self, first: int, last: int) -> list[int]:
        """The tokens at positions first .. last - 1 (fewer at the end of the text)."""
        return self._tokens[first : min(last, self._num)].tolist()

    def _allocate(self, num_tokens: int) -> None:
        self._capacity = 1 << (num_tokens - 1).bit_length()
        self._shift = 64 - (self._capacity.bit_length() - 1)
        num_levels = MAX_MATCH - MIN_MATCH + 1
        self._tokens_np = np.zeros(self._capacity, dtype=np.int32)
        self._heads_np = [np.full(self._capacity, -1, dtype=np.int32) for _ in range(num_levels)]
        self._links_np = [np.full(self._capacity, -1, dtype=np.int32) for _ in range(num_levels)]
        # memoryviews of the same memory: reading one element is several times faster than through numpy
        self._tokens = self._tokens_np.data
        self._heads = [t.data for t in self._heads_np]
        self._links = [t.data for t in self._links_np]

    def _hashes(self, gram: list[int]) -> list[int]:
        """Hash of the last 1, 2, .. len(gram) tokens."""
        hashes, h = [], 0
        for power, token_id in zip(_POWERS, reversed(gram), strict=False):
            h = (h + (token_id + 1) * power) & _MASK
            hashes.append(h)
        return hashes

    def _slot(self, h: int) -> int:
        return (((h ^ (h >> 32)) * _FINISH) & _MASK) >> self._shift

    def _add_ending_at(self, end: int) -> None:
        """Make `end` the most recent occurrence of the n-grams that end there."""
        newest = self._tokens[max(end - MAX_MATCH + 1, 0) : end + 1].tolist()
        hashes = self._hashes(newest)
        for length in range(MIN_MATCH, len(newest) + 1):
            level = length - MIN_MATCH
            head, link = self._heads[level], self._links[level]
            slot = self._slot(hashes[length - 1])
            gram = newest[-length:]
            before, older = -1, head[slot]
            while older >= 0 and self._tokens[older - length + 1 : older + 1].tolist() != gram:
                before, older = older, link[older]
            if older >= 0:  # unlink the older occurrence of this n-gram
                if before >= 0:
                    link[before] = link[older]
                else:
                    head[slot] = link[older]
            link[end] = head[slot]
            head[slot] = end

    def _build(self) -> None:
        """Index the whole text afresh, all ends but the newest token."""
        tokens = self._tokens_np[: self._num].astype(np.uint64) + np.uint64(1)
        hashes = np.zeros(self._num, dtype=np.uint64)  # [position] of the n-gram that ends there
        for length in range(1, MAX_MATCH + 1):
            hashes[length - 1 :] += tokens[: max(self._num - length + 1, 0)] * np.uint64(_POWERS[length - 1])
            if length >= MIN_MATCH:
                self._build_level(length, hashes[length - 1 : -1])

    def _build_level(self, length: int, hashes: np.ndarray) -> None:
        head, link = self._heads_np[length - MIN_MATCH], self._links_np[length - MIN_MATCH]
        head.fill(-1)
        if hashes.size == 0:
            return
        mixed = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(_FINISH)  # one-to-one; its top bits are the slot
        # Sorting groups equal n-grams, positions ascending, and inside each slot; torch sorts integers several times
        # faster than numpy does
        in_order_t, positions_t = torch.sort(torch.from_numpy(mixed.view(np.int64)), stable=True)
        in_order, positions = in_order_t.numpy(), positions_t.numpy()
        most_recent = np.append(in_order[1:] != in_order[:-1], True)
        slots = in_order[most_recent].view(np.uint64) >> np.uint64(self._shift)
        ends = (positions[most_recent] + (length - 1)).astype(np.int32)
        same_slot = slots[1:] == slots[:-1]
        link[ends[0]] = -1
        link[ends[1:]] = np.where(same_slot, ends[:-1], -1)
        last = np.append(~same_slot, True)
        head[slots[last]] = ends[last]
