"""Keys and values of one sequence: full for the dense layer, window plus pooled far blocks for BCSA layers.

A cache is extended by the rows of a step before they are attended and hands out a KvView. Rows past the committed
length may be overwritten by the next step (rejected drafts); far blocks are pooled only from positions that can no
longer be rejected, because a block leaves the window only after window - 8 further positions.

All storage is claimed once, for the planned context and chunk size; a cache works on its slot's part of it.
Source: spec volundr-model.md section 7.3 and 9, drafters.md D.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agens_engine.core import NUM_VERIFY_ROWS
from agens_kernels.ref.attention import visible_far_blocks


@dataclass
class KvView:
    """What one layer may attend in this step. k, v [B, S, Hkv, D] for positions key_start .. key_start + S - 1.

    far_k, far_v [B, N, Hkv, D] pooled blocks 0 .. N - 1, block_keys [B, N, Di]; None in dense layers.
    """

    k: torch.Tensor
    v: torch.Tensor
    key_start: int = 0
    far_k: torch.Tensor | None = None
    far_v: torch.Tensor | None = None
    block_keys: torch.Tensor | None = None


@dataclass
class WindowStorage:
    """Storage of one BCSA layer for one slot: k, v [ring, Hkv, D]; index [C + 8, Di]; far_k, far_v [N, Hkv, D];
    block_keys [N', Di]."""

    k: torch.Tensor
    v: torch.Tensor
    index: torch.Tensor
    far_k: torch.Tensor
    far_v: torch.Tensor
    block_keys: torch.Tensor


class SlidingBuffer:
    """The most recent rows of a stream of positions, contiguous in fixed storage: positions base .. filled - 1.

    When a write does not fit behind the last one, the rows from `keep_from` on move to the front.
    """

    def __init__(self, storage: torch.Tensor) -> None:
        self.data = storage
        self.base = 0

    def write(self, start: int, rows: torch.Tensor, keep_from: int) -> None:
        """Store rows for positions start ..; everything at or after start is replaced, before keep_from forgotten."""
        stop = start + rows.shape[0]
        if stop - self.base > self.data.shape[0]:
            first = max(self.base, min(keep_from, start))
            kept = self.data[first - self.base : start - self.base]
            assert stop - first <= self.data.shape[0], f"rows {first}..{stop} exceed {self.data.shape[0]} positions"
            self.data[: kept.shape[0]] = kept.clone()
            self.base = first
        self.data[start - self.base : stop - self.base] = rows

    def read(self, start: int, stop: int) -> torch.Tensor:
        assert start >= self.base, f"position {start} has left the buffer, which begins at {self.base}"
        return self.data[start - self.base : stop - self.base]

    def save(self, stop: int) -> tuple[int, torch.Tensor]:
        return self.base, self.data[: max(0, stop - self.base)].clone()

    def load(self, saved: tuple[int, torch.Tensor]) -> None:
        self.base = saved[0]
        self.data[: saved[1].shape[0]] = saved[1]


class DenseKv:
    """Full K and V of a dense layer in storage [S, Hkv, D] each."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k, self.v = k, v

    def extend(self, first: int, k: torch.Tensor, v: torch.Tensor, index_key: torch.Tensor | None) -> KvView:
        """Store rows for positions first .. and return everything up to them. k, v [n, Hkv, D]."""
        stop = first + k.shape[0]
        self.k[first:stop] = k
        self.v[first:stop] = v
        return KvView(self.k[None, :stop], self.v[None, :stop])

    def save(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[:length].clone(), self.v[:length].clone()

    def load(self, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        for storage, rows in zip((self.k, self.v), saved, strict=True):
            storage[: rows.shape[0]] = rows


@dataclass
class SavedWindow:
    """A private copy of a WindowKv's contents."""

    pooled: int
    sliding: list[tuple[int, torch.Tensor]]
    blocks: list[torch.Tensor]


class WindowKv:
    """K and V of the last `window` positions, pooled K and V of the blocks that left, and their indexer keys.

    positions   0 ... C*pooled - 1 | C*pooled .... first - 1 | first ... (this step)
    held as     far_k, far_v       | raw k, v                | raw k, v
    """

    def __init__(self, window: int, compress: int, storage: WindowStorage) -> None:
        self.window, self.compress, self.pooled = window, compress, 0
        self._k, self._v = SlidingBuffer(storage.k), SlidingBuffer(storage.v)
        # indexer keys are needed one by one only until their block is complete
        self._index = SlidingBuffer(storage.index)
        self._far_k, self._far_v, self._block_keys = storage.far_k, storage.far_v, storage.block_keys

    def extend(self, first: int, k: torch.Tensor, v: torch.Tensor, index_key: torch.Tensor | None) -> KvView:
        """Store rows for positions first ..; returns the window of the first row onwards and all visible far blocks.

        k, v [n, Hkv, D]; index_key [n, Di].
        """
        assert index_key is not None
        stop = first + k.shape[0]
        visible = visible_far_blocks(stop - 1, self.window, self.compress)
        # what leaves the window and is old already is pooled first, so that its raw rows may be dropped
        self._pool(min(visible, first // self.compress))
        start = max(0, first - self.window + 1)
        keep_from = min(start, self.pooled * self.compress)
        self._k.write(first, k, keep_from)
        self._v.write(first, v, keep_from)
        self._store_block_keys(first, stop, index_key)
        self._pool(visible)
        n = self.pooled
        return KvView(
            self._k.read(start, stop)[None],
            self._v.read(start, stop)[None],
            start,
            self._far_k[None, :n],
            self._far_v[None, :n],
            self._block_keys[None, :n],
        )

    def _store_block_keys(self, first: int, stop: int, index_key: torch.Tensor) -> None:
        c = self.compress
        begin = first // c * c  # the block that position `first` belongs to may have begun in an earlier step
        head = self._index.read(begin, first) if begin < first else index_key[:0]
        complete = stop // c - begin // c
        if complete:
            rows = torch.cat((head, index_key))[: complete * c]
            self._block_keys[begin // c : stop // c] = rows.unflatten(0, (complete, c)).mean(1)
        # the next step may begin up to 8 rows earlier and needs the rows of its first block before that
        recent = max(first, stop - (NUM_VERIFY_ROWS + c))
        self._index.write(recent, index_key[recent - first :], stop - (NUM_VERIFY_ROWS + c))

    def _pool(self, visible: int) -> None:
        if visible <= self.pooled:
            return
        a, z = self.pooled * self.compress, visible * self.compress
        shape = (visible - self.pooled, self.compress)
        self._far_k[self.pooled : visible] = self._k.read(a, z).unflatten(0, shape).mean(1)
        self._far_v[self.pooled : visible] = self._v.read(a, z).unflatten(0, shape).mean(1)
        self.pooled = visible

    def save(self, length: int) -> SavedWindow:
        """A copy of everything the first `length` positions left behind."""
        sliding = [buffer.save(length) for buffer in (self._k, self._v, self._index)]
        blocks = [x[: self.pooled].clone() for x in (self._far_k, self._far_v)]
        return SavedWindow(self.pooled, sliding, [*blocks, self._block_keys[: length // self.compress].clone()])

    def load(self, saved: SavedWindow) -> None:
        self.pooled = saved.pooled
        for buffer, rows in zip((self._k, self._v, self._index), saved.sliding, strict=True):
            buffer.load(rows)
        for storage, blocks in zip((self._far_k, self._far_v, self._block_keys), saved.blocks, strict=True):
            storage[: blocks.shape[0]] = blocks
