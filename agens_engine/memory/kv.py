"""Keys and values of one sequence: full for the dense layer, window plus pooled far blocks for BCSA layers.

A cache is extended by the rows of a step before they are attended and hands out a KvView. Rows past the committed
length may be overwritten by the next step (rejected drafts); far blocks are pooled only from positions that can no
longer be rejected, because a block leaves the window only after window - 8 further positions.
Source: spec volundr-model.md section 7.3 and 9, drafters.md D.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agens_engine.core import NUM_VERIFY_ROWS
from agens_kernels.ref.attention import visible_far_blocks

FIRST_CAPACITY = 256  # positions; buffers double from here


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


class GrowingBuffer:
    """Rows [n, *row_shape] appended or overwritten by index; capacity doubles, so an append is O(1) amortised."""

    def __init__(
        self, row_shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device, capacity: int = 0
    ) -> None:
        self.data = torch.empty((capacity, *row_shape), dtype=dtype, device=device)

    def write(self, start: int, rows: torch.Tensor) -> None:
        stop = start + rows.shape[0]
        if stop > self.data.shape[0]:
            grown = self.data.new_empty((max(FIRST_CAPACITY, stop, 2 * self.data.shape[0]), *self.data.shape[1:]))
            grown[:start] = self.data[:start]
            self.data = grown
        self.data[start:stop] = rows

    def copy(self, length: int) -> GrowingBuffer:
        twin = GrowingBuffer(tuple(self.data.shape[1:]), dtype=self.data.dtype, device=self.data.device)
        twin.data = self.data[:length].clone()
        return twin

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


class SlidingBuffer:
    """The most recent rows of a stream of positions, contiguous: positions base .. base + filled - 1.

    Holds `keep` rows behind the newest write and shifts once its slack is used up: O(1) rows moved per write.
    """

    def __init__(self, row_shape: tuple[int, ...], keep: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.base = 0
        self.keep = keep
        self.data = torch.empty((0, *row_shape), dtype=dtype, device=device)

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Store rows for positions start ..; everything at or after start is replaced."""
        stop = start + rows.shape[0]
        if stop - self.base > self.data.shape[0]:
            self._make_room(start, stop)
        self.data[start - self.base : stop - self.base] = rows

    def _make_room(self, start: int, stop: int) -> None:
        first_kept = max(self.base, start - self.keep)
        kept = self.data[first_kept - self.base : start - self.base]
        needed = stop - first_kept
        if needed > self.data.shape[0]:
            grown = self.data.new_empty((needed + max(64, self.keep), *self.data.shape[1:]))
            grown[: kept.shape[0]] = kept
            self.data = grown
        else:
            self.data[: kept.shape[0]] = kept.clone()
        self.base = first_kept

    def read(self, start: int, stop: int) -> torch.Tensor:
        assert start >= self.base, f"position {start} has left the buffer, which begins at {self.base}"
        return self.data[start - self.base : stop - self.base]

    def copy(self) -> SlidingBuffer:
        twin = SlidingBuffer(tuple(self.data.shape[1:]), self.keep, dtype=self.data.dtype, device=self.data.device)
        twin.base, twin.data = self.base, self.data.clone()
        return twin

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


class DenseKv:
    """Full K and V of the dense layer, [S, Hkv, D] each."""

    def __init__(self, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._k = GrowingBuffer((kv_heads, head_dim), dtype=dtype, device=device)
        self._v = GrowingBuffer((kv_heads, head_dim), dtype=dtype, device=device)

    def extend(self, first: int, k: torch.Tensor, v: torch.Tensor, index_key: torch.Tensor | None) -> KvView:
        """Store rows for positions first .. and return everything up to them. k, v [n, Hkv, D]."""
        self._k.write(first, k)
        self._v.write(first, v)
        stop = first + k.shape[0]
        return KvView(self._k.data[None, :stop], self._v.data[None, :stop])

    def copy(self, length: int) -> DenseKv:
        twin = DenseKv.__new__(DenseKv)
        twin._k, twin._v = self._k.copy(length), self._v.copy(length)
        return twin

    @property
    def num_bytes(self) -> int:
        return self._k.num_bytes + self._v.num_bytes


class WindowKv:
    """K and V of the last `window` positions, pooled K and V of the blocks that left, and their indexer keys.

    positions   0 ... C*pooled - 1 | C*pooled .... first - 1 | first ... (this step)
    held as     far_k, far_v       | raw k, v                | raw k, v
    """

    def __init__(
        self,
        window: int,
        compress: int,
        kv_heads: int,
        head_dim: int,
        index_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window, self.compress = window, compress
        keep = window + compress + NUM_VERIFY_ROWS
        self._k = SlidingBuffer((kv_heads, head_dim), keep, dtype=dtype, device=device)
        self._v = SlidingBuffer((kv_heads, head_dim), keep, dtype=dtype, device=device)
        # indexer keys are needed one by one only until their block is complete
        self._index = SlidingBuffer((index_dim,), compress + NUM_VERIFY_ROWS, dtype=dtype, device=device)
        self._far_k = GrowingBuffer((kv_heads, head_dim), dtype=dtype, device=device)
        self._far_v = GrowingBuffer((kv_heads, head_dim), dtype=dtype, device=device)
        self._block_keys = GrowingBuffer((index_dim,), dtype=dtype, device=device)
        self.pooled = 0

    def extend(self, first: int, k: torch.Tensor, v: torch.Tensor, index_key: torch.Tensor | None) -> KvView:
        """Store rows for positions first ..; returns the window of the first row onwards and all visible far blocks.

        k, v [n, Hkv, D]; index_key [n, Di].
        """
        assert index_key is not None
        stop = first + k.shape[0]
        self._k.write(first, k)
        self._v.write(first, v)
        self._store_block_keys(first, stop, index_key)
        self._pool(visible_far_blocks(stop - 1, self.window, self.compress))
        start = max(0, first - self.window + 1)
        n = self.pooled
        return KvView(
            self._k.read(start, stop)[None],
            self._v.read(start, stop)[None],
            start,
            self._far_k.data[None, :n],
            self._far_v.data[None, :n],
            self._block_keys.data[None, :n],
        )

    def _store_block_keys(self, first: int, stop: int, index_key: torch.Tensor) -> None:
        c = self.compress
        begin = first // c * c  # the block that position `first` belongs to may have begun in an earlier step
        head = self._index.read(begin, first) if begin < first else index_key[:0]
        complete = stop // c - begin // c
        if complete:
            rows = torch.cat((head, index_key))[: complete * c]
            self._block_keys.write(begin // c, rows.unflatten(0, (complete, c)).mean(1))
        recent = max(first, stop - self._index.keep)
        if recent > first:
            self._index.base = recent  # nothing older is needed any more
        self._index.write(recent, index_key[recent - first :])

    def _pool(self, visible: int) -> None:
        if visible <= self.pooled:
            return
        a, z = self.pooled * self.compress, visible * self.compress
        shape = (visible - self.pooled, self.compress)
        self._far_k.write(self.pooled, self._k.read(a, z).unflatten(0, shape).mean(1))
        self._far_v.write(self.pooled, self._v.read(a, z).unflatten(0, shape).mean(1))
        self.pooled = visible

    def copy(self, length: int) -> WindowKv:
        twin = WindowKv.__new__(WindowKv)
        twin.window, twin.compress, twin.pooled = self.window, self.compress, self.pooled
        twin._k, twin._v, twin._index = self._k.copy(), self._v.copy(), self._index.copy()
        twin._far_k, twin._far_v = self._far_k.copy(self.pooled), self._far_v.copy(self.pooled)
        twin._block_keys = self._block_keys.copy(length // self.compress)
        return twin

    @property
    def num_bytes(self) -> int:
        parts = (self._k, self._v, self._index, self._far_k, self._far_v, self._block_keys)
        return sum(part.num_bytes for part in parts)
