"""Which codes a 4-bit container really uses: low-bit builds keep 2- and 3-bit values in 4-bit containers.

A set of codes is a 16-bit mask (bit c: code c occurs). Masks of four codes at a time come from one table of 65,536
entries, so that a scan reads the packed words themselves and never unpacks them.
Source: spec volundr-weights.md, section 4. Nothing here trusts metadata.
"""

from __future__ import annotations

from functools import cache

import numpy as np

SAMPLE_ROWS = 16


@cache
def _masks_of_four() -> np.ndarray:
    """[65536] uint16: the set of the four nibbles of a half-word."""
    word = np.arange(1 << 16, dtype=np.uint32)
    masks = np.zeros(1 << 16, np.uint16)
    for shift in (0, 4, 8, 12):
        masks |= np.left_shift(np.uint16(1), ((word >> shift) & 15).astype(np.uint16))
    return masks


@cache
def popcounts() -> np.ndarray:
    """[65536] uint8 number of ones."""
    return np.unpackbits(np.arange(1 << 16, dtype=np.uint16).view(np.uint8)).reshape(-1, 16).sum(1).astype(np.uint8)


def codes_of(mask: int) -> list[int]:
    """The codes of a set, ascending."""
    return [c for c in range(16) if mask >> c & 1]


def group_masks(words: np.ndarray, num_groups: int) -> np.ndarray:
    """Sets of 4-bit codes by row and group.

    words    [N, W] uint32 of 8 codes each, no padding; W a multiple of num_groups
    returns  [N, num_groups] uint16
    """
    halves = words.view(np.uint16)
    sets = np.take(_masks_of_four(), halves, mode="wrap")
    return np.bitwise_or.reduce(sets.reshape(words.shape[0], num_groups, -1), axis=2)


def tensor_mask(words: np.ndarray, block_rows: int = 128) -> int:
    """The set of all 4-bit codes of [N, W] uint32 words, block by block; stops early once all 16 have been seen."""
    mask = 0
    for start in range(0, words.shape[0], block_rows):
        mask |= int(np.bitwise_or.reduce(group_masks(words[start : start + block_rows], 1), axis=None))
        if mask == 0xFFFF:
            break
    return mask


def sample_rows(words: np.ndarray) -> np.ndarray:
    """At most SAMPLE_ROWS rows, evenly spread: enough to dismiss nearly every ordinary 4-bit tensor."""
    step = max(1, words.shape[0] // SAMPLE_ROWS)
    return np.ascontiguousarray(words[::step][:SAMPLE_ROWS])


def choose_bits(mask: int) -> int:
    """Bits that index a set: 2 for up to four codes, 3 for up to eight, else 4."""
    count = int(mask).bit_count()
    return 2 if count <= 4 else 3 if count <= 8 else 4


def table_of(mask: int, bits: int, centre: int = 8) -> np.ndarray:
    """[2**bits] int8 values (code - centre) of a set in ascending order; unused entries repeat the last."""
    values = [c - centre for c in codes_of(mask)]
    return np.array(values + values[-1:] * ((1 << bits) - len(values)), np.int8)
