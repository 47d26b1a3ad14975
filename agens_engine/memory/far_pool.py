"""The far pool: pooled K and V of the blocks that left the window, on the device or in host memory, layer by layer.

    resident layer   device pages ────────────────────────────────────────► gathered
    host layer       host pages ──► hot cache (verify steps) ─────────────► gathered
                              └───► staging (prompt chunks) ──────────────► gathered

A verify step reads only the blocks its rows selected, through a cache of recently used blocks per layer and sequence.
A prompt chunk stages the blocks its queries selected, of one layer at a time, in two tiles used in turn; a tile is
filled again only when the work on it is over (synchronous here; a device stream would copy one while it reads the
other). A pooled block never changes, so the cache needs no invalidation but at the start of a sequence. Where a block
lies never changes its values nor the arithmetic on them: results are bit-identical for every split and cache size.
Not measured on a GPU.
Test: tests/property/test_far_pool.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from agens_engine.memory.pages import PagedRows, PageTable
from agens_kernels.ref.attention import DECODE_ROWS, GATHER_FACTOR

FAR_TILE_BYTES = 32 << 20  # planner: constants.FAR_TILE_BYTES
TAG_WORDS = 2  # int32 words beside a cached block (planner: HOT_TAG_BYTES)

Pair = tuple[torch.Tensor, torch.Tensor]


class Claim(Protocol):
    """(plan line, shape, dtype) -> zeroed tensor out of that line; Arena.claim in an engine."""

    def __call__(self, line: str, shape: tuple[int, ...], dtype: torch.dtype = ..., /) -> torch.Tensor: ...


@dataclass
class FarCounts:
    """What host layers cost so far. Blocks count K and V together; a verify step counts once per sequence."""

    verify_steps: int = 0
    hits: int = 0
    misses: int = 0
    miss_bytes: int = 0
    staged_blocks: int = 0
    staged_bytes: int = 0

    def summary(self) -> dict[str, Any]:
        looked_up = self.hits + self.misses
        return {
            **vars(self),
            "hit_rate": self.hits / looked_up if looked_up else None,
            "miss_bytes_per_step": self.miss_bytes / self.verify_steps if self.verify_steps else 0.0,
        }


class HotCache:
    """Recently used far blocks of one layer and sequence.

    Policy: least recently used, by verify step. A block of the running step is never evicted by that step; blocks that
    find no place are read past the cache.

    rows   [2, n, Hkv, D] K and V
    tags   [n, 2] int32: block number + 1 (0: empty), the step that used it last
    """

    def __init__(self, rows: torch.Tensor, tags: torch.Tensor) -> None:
        self._rows, self._tags, self._step = rows, tags, 0

    def clear(self) -> None:
        self._tags.zero_()
        self._step = 0

    def fetch(self, blocks: torch.Tensor, source: tuple[PagedRows, PagedRows]) -> tuple[torch.Tensor, int]:
        """K and V [2, n, Hkv, D] of different blocks [n], and how many of them were not cached."""
        self._step += 1
        size = self._tags.shape[0]
        tag = (blocks + 1).int()
        held, place = self._tags[:, 0].sort()
        at = torch.searchsorted(held, tag).clamp_max(max(0, size - 1))
        hit = held[at] == tag if size else torch.zeros_like(tag, dtype=torch.bool)
        slots = place[at[hit]] if size else place
        self._tags[slots, 1] = self._step
        missed = blocks[~hit]
        if not missed.shape[0]:
            return self._rows[:, slots], 0
        rows = self._rows.new_empty((2, blocks.shape[0], *self._rows.shape[2:]))
        rows[:, hit] = self._rows[:, slots]
        room = min(missed.shape[0], size - slots.shape[0])
        oldest = self._tags[:, 1].topk(room, largest=False).indices
        for part, stored in enumerate(source):
            rows[part, ~hit] = read = stored.take(missed).to(rows.device)
            self._rows[part, oldest] = read[:room]
        self._tags[oldest, 0] = tag[~hit][:room]
        self._tags[oldest, 1] = self._step
        return rows, missed.shape[0]


class FarPool:
    """Far storage of all BCSA layers, by page, with what host layers need on the device.

    resident     the first so many layers lie on the device
    hot_blocks   cached blocks per host layer and sequence; 0: none
    blocks       most blocks of one sequence
    raises       PlanError when the plan's lines do not hold it
    """

    def __init__(
        self,
        claim: Claim,
        layers: tuple[int, ...],
        row: tuple[int, int],
        *,
        num_pages: int,
        page_blocks: int,
        blocks: int,
        topk: int,
        num_slots: int,
        resident: int,
        hot_blocks: int,
    ) -> None:
        self.counts = FarCounts()
        self.layers = layers
        self.storage: dict[int, Pair] = {}
        self.caches: dict[int, list[HotCache]] = {}
        self.tiles: torch.Tensor | None = None
        self._turn = 0
        for n, layer in enumerate(layers):
            line = "far.resident" if n < resident else "host.far_pool"
            shape = (num_pages, page_blocks, *row)
            self.storage[layer] = claim(line, shape), claim(line, shape)
        self.block_bytes = 2 * row[0] * row[1] * self.storage[layers[0]][0].element_size() if layers else 0
        # the same for every split, as the work is cut by it
        self.tile_blocks = tile_blocks(self.block_bytes, topk, blocks)
        hosted = layers[resident:]
        if not hosted:
            return
        self.tiles = claim("far.staging", (2, 2, self.tile_blocks, *row))
        hot = min(hot_blocks, blocks)
        for layer in hosted:
            if hot:
                rows = claim("far.hot_cache", (num_slots, 2, hot, *row))
                tags = claim("far.hot_cache", (num_slots, hot, TAG_WORDS), torch.int32)
            else:
                rows = self.tiles.new_empty((num_slots, 2, 0, *row))
                tags = self.tiles.new_empty((num_slots, 0, TAG_WORDS)).int()
            self.caches[layer] = [HotCache(rows[slot], tags[slot]) for slot in range(num_slots)]

    def stage(self, blocks: torch.Tensor, source: tuple[PagedRows, PagedRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy blocks [n] of a host layer into the tile whose turn it is: K and V, [n, Hkv, D] each."""
        assert self.tiles is not None
        tile, num = self.tiles[self._turn], blocks.shape[0]
        self._turn = 1 - self._turn
        self.counts.staged_blocks += num
        self.counts.staged_bytes += num * self.block_bytes
        k, v = (stored.take(blocks, tile[part, :num]) for part, stored in enumerate(source))
        return k, v

    def fetch(
        self, layer: int, slot: int, blocks: torch.Tensor, source: tuple[PagedRows, PagedRows]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks [n] of a host layer through its cache, counted: K and V, [n, Hkv, D] each."""
        rows, misses = self.caches[layer][slot].fetch(blocks, source)
        self.counts.verify_steps += layer == next(iter(self.caches))
        self.counts.hits += blocks.shape[0] - misses
        self.counts.misses += misses
        self.counts.miss_bytes += misses * self.block_bytes
        return rows[0], rows[1]

    def begin(self, slot: int) -> None:
        """Another sequence takes the slot: forget what its caches hold."""
        for caches in self.caches.values():
            caches[slot].clear()


def tile_blocks(block_bytes: int, topk: int, blocks: int) -> int:
    """Blocks of one staging tile: FAR_TILE_BYTES, at least what one query or a short pool needs, at most the pool."""
    return min(max(FAR_TILE_BYTES // max(1, block_bytes), GATHER_FACTOR * topk), blocks)


class PagedFar:
    """The far blocks of one layer and sequence (agens_kernels.ref.attention.FarBlocks, B = 1)."""

    def __init__(self, pool: FarPool, layer: int, slot: int, table: PageTable, block_keys: PagedRows) -> None:
        self._pool, self._layer, self._slot, self.block_keys = pool, layer, slot, block_keys
        k, v = pool.storage[layer]
        self.rows = PagedRows(k, table), PagedRows(v, table)
        self._hosted = layer in pool.caches

    @property
    def gather_blocks(self) -> int:
        return self._pool.tile_blocks

    def write(self, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Pooled rows of blocks start .. , each [n, Hkv, D]."""
        for stored, rows in zip(self.rows, (k, v), strict=True):
            stored.write(start, rows)

    def keys(self, start: int, stop: int) -> torch.Tensor:
        return self.block_keys.read(start, stop)[None]

    def first(self, num: int) -> Pair:
        if self._hosted:
            k, v = self._pool.stage(torch.arange(num, device=self._device()), self.rows)
        else:
            k, v = (stored.read(0, num) for stored in self.rows)
        return k[None], v[None]

    def _device(self) -> torch.device:
        assert self._pool.tiles is not None
        return self._pool.tiles.device

    def gather(self, index: torch.Tensor, step: int) -> Iterator[Pair]:
        if self._hosted and index.shape[1] > DECODE_ROWS:
            yield from self._staged(index, step)
            return
        if self._hosted:
            blocks, where = _distinct(index)
            k, v = self._pool.fetch(self._layer, self._slot, blocks, self.rows)
            for piece in where.split(step, 1):
                yield k[piece], v[piece]
            return
        for piece in index.clamp_min(0).split(step, 1):
            k, v = (stored.take(piece.flatten()).unflatten(0, piece.shape) for stored in self.rows)
            yield k, v

    def _staged(self, index: torch.Tensor, step: int) -> Iterator[Pair]:
        """As many queries at once as their different blocks fit a tile."""
        rest = index
        while rest.shape[1]:
            rows = rest.shape[1]
            blocks, where = _distinct(rest)
            while blocks.shape[0] > self._pool.tile_blocks:
                rows = max(step, rows // 2 // step * step)
                blocks, where = _distinct(rest[:, :rows])
            k, v = self._pool.stage(blocks, self.rows)
            for piece in where.split(step, 1):
                yield k[piece], v[piece]
            rest = rest[:, rows:]


def _distinct(index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The different block numbers of index, ascending, and where each entry is among them; -1 counts as any of them."""
    blocks, where = index.unique(return_inverse=True)
    if bool(blocks[0] < 0):
        blocks, where = blocks[1:], (where - 1).clamp_min(0)
    return blocks, where
