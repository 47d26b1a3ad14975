"""Keys and values of one sequence: full for the dense layer, window plus pooled far blocks for BCSA layers.

A cache is extended by the rows of a step before they are attended and hands out what may be attended. Rows past the
committed length may be overwritten by the next step (rejected drafts); far blocks are pooled only from positions that
can no longer be rejected, because a block leaves the window only after window - 8 further positions.

    by page (pages.py)     dense K and V, block keys, far K and V (far_pool.py): grow with the context
    by slot                window ring, keys of the block that is still filling: fixed

Source: spec volundr-model.md section 7.3 and 9, drafters.md D.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from agens_engine.core import NUM_VERIFY_ROWS
from agens_engine.memory.far_pool import PagedFar
from agens_engine.memory.pages import PagedRows
from agens_kernels.ref.attention import FarBlocks, ReadRows, visible_far_blocks


@dataclass
class WindowView:
    """What one BCSA layer may attend. k, v [B, S, Hkv, D] for positions key_start ..; far: all visible far blocks."""

    k: torch.Tensor
    v: torch.Tensor
    key_start: int
    far: FarBlocks


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

    def load(self, start: int, rows: torch.Tensor) -> None:
        """Hold exactly these rows, for positions start .. ."""
        self.base = start
        self.data[: rows.shape[0]] = rows


class DenseKv:
    """Full K and V of a dense layer, by page."""

    def __init__(self, k: PagedRows, v: PagedRows) -> None:
        self.k, self.v = k, v

    def extend(self, first: int, k: torch.Tensor, v: torch.Tensor) -> ReadRows:
        """Store rows for positions first .. and return how to read everything up to them. k, v [n, Hkv, D]."""
        self.k.write(first, k)
        self.v.write(first, v)
        return lambda a, z: (self.k.read(a, z)[None], self.v.read(a, z)[None])


@dataclass
class WindowStorage:
    """Fixed storage of one BCSA layer for one slot: k, v [ring, Hkv, D]; index [C + 8, Di]."""

    k: torch.Tensor
    v: torch.Tensor
    index: torch.Tensor


class WindowKv:
    """K and V of the last `window` positions, pooled K and V of the blocks that left, and their indexer keys.

    positions   0 ... C*pooled - 1 | C*pooled .... first - 1 | first ... (this step)
    held as     far blocks         | raw k, v                | raw k, v
    """

    def __init__(self, window: int, compress: int, storage: WindowStorage, far: PagedFar) -> None:
        self.window, self.compress, self.pooled, self.far = window, compress, 0, far
        self.k, self.v = SlidingBuffer(storage.k), SlidingBuffer(storage.v)
        # indexer keys are needed one by one only until their block is complete
        self.index = SlidingBuffer(storage.index)

    def extend(self, first: int, k: torch.Tensor, v: torch.Tensor, index_key: torch.Tensor) -> WindowView:
        """Store rows for positions first ..; returns the window of the first row onwards and all visible far blocks.

        k, v [n, Hkv, D]; index_key [n, Di].
        """
        stop = first + k.shape[0]
        visible = visible_far_blocks(stop - 1, self.window, self.compress)
        # what leaves the window and is old already is pooled first, so that its raw rows may be dropped
        self._pool(min(visible, first // self.compress))
        start = max(0, first - self.window + 1)
        keep_from = min(start, self.pooled * self.compress)
        self.k.write(first, k, keep_from)
        self.v.write(first, v, keep_from)
        self._store_block_keys(first, stop, index_key)
        self._pool(visible)
        return WindowView(self.k.read(start, stop)[None], self.v.read(start, stop)[None], start, self.far)

    def _store_block_keys(self, first: int, stop: int, index_key: torch.Tensor) -> None:
        c = self.compress
        begin = first // c * c  # the block that position `first` belongs to may have begun in an earlier step
        head = self.index.read(begin, first) if begin < first else index_key[:0]
        complete = stop // c - begin // c
        if complete:
            rows = torch.cat((head, index_key))[: complete * c]
            self.far.block_keys.write(begin // c, rows.unflatten(0, (complete, c)).mean(1))
        # the next step may begin up to 8 rows earlier and needs the rows of its first block before that
        recent = max(first, stop - (NUM_VERIFY_ROWS + c))
        self.index.write(recent, index_key[recent - first :], stop - (NUM_VERIFY_ROWS + c))

    def _pool(self, visible: int) -> None:
        if visible <= self.pooled:
            return
        a, z = self.pooled * self.compress, visible * self.compress
        shape = (visible - self.pooled, self.compress)
        k, v = (buffer.read(a, z).unflatten(0, shape).mean(1) for buffer in (self.k, self.v))
        self.far.write(self.pooled, k, v)
        self.pooled = visible

    def save(self, length: int) -> dict[str, torch.Tensor]:
        """What the first `length` positions left in the fixed storage; views, not copies."""
        keep = min(max(0, length - self.window + 1), self.pooled * self.compress)
        return {
            "k": self.k.read(keep, length),
            "v": self.v.read(keep, length),
            "index": self.index.read(length // self.compress * self.compress, length),
        }

    def load(self, saved: Mapping[str, torch.Tensor], length: int, pooled: int) -> None:
        """Take over what `save` gave; the pages are somebody else's business."""
        self.pooled = pooled
        for name, buffer in (("k", self.k), ("v", self.v), ("index", self.index)):
            buffer.load(length - saved[name].shape[0], saved[name])
