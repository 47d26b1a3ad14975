"""Softmax attention of Volundr: causal over everything, or a window plus selected far blocks under one softmax.

Math    spec volundr-model.md section 7. For query position t: local keys p with t - W < p <= t; far blocks n with
        (n + 1) * C - 1 <= t - W, of which the topk best by indexer score; one softmax over both.

            0        4 n             4 n + 3      t - W      t - W + 1              t
            |--------[ far block n   ]------------|          [ window, W keys ......]
                                      up to C - 1 positions between the two are attended by neither

Layout  q [B, T, H, D]; k, v [B, S, Hkv, D] for positions key_start .. key_start + S - 1; far blocks through FarBlocks;
        the queries are at positions first .. first + T - 1. Selection: ref/block_select.py
Memory  queries and keys go in tiles, so that no [T, S] or [T, N] matrix larger than TILE_ELEMENTS exists
Test    tests/parity/test_attention.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Protocol

import torch

from agens_kernels.ref.block_select import select_blocks, visible_far_blocks

__all__ = ["FarBlocks", "TensorFar", "apply_rope", "causal_attention", "rope_tables", "select_blocks",
           "visible_far_blocks", "window_far_attention"]  # fmt: skip

TILE_ELEMENTS = 1 << 20
KEY_TILE_ROWS = 8192  # keys of a dense layer that are read at once (planner: REFERENCE_KEY_TILE_ROWS)
GATHER_FACTOR = 4  # a prompt chunk gathers the selected blocks once there are more than GATHER_FACTOR * topk of them
DECODE_ROWS = 8  # up to so many queries are a verify step, which never reads a block that none of them selected

ReadRows = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


class FarBlocks(Protocol):
    """The far blocks of one layer, wherever they lie. Values never depend on where that is."""

    @property
    def gather_blocks(self) -> int:
        """Most blocks that one piece of `gather` may name."""
        ...

    def keys(self, start: int, stop: int) -> torch.Tensor:
        """Indexer keys of blocks start .. stop - 1, [B, n, Di]."""
        ...

    def first(self, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pooled K and V of blocks 0 .. num - 1, each [B, num, Hkv, D]."""
        ...

    def gather(self, index: torch.Tensor, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V [B, t, K, Hkv, D] for each `step` queries of index [B, T, K] in turn; -1 gives any row."""
        ...


class TensorFar:
    """Far blocks that lie in tensors: far_k, far_v [B, N, Hkv, D], block_keys [B, N, Di]. Differentiable."""

    gather_blocks = 1 << 62

    def __init__(self, far_k: torch.Tensor, far_v: torch.Tensor, block_keys: torch.Tensor) -> None:
        self.far_k, self.far_v, self.block_keys = far_k, far_v, block_keys

    def keys(self, start: int, stop: int) -> torch.Tensor:
        return self.block_keys[:, start:stop]

    def first(self, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.far_k[:, :num], self.far_v[:, :num]

    def gather(self, index: torch.Tensor, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        which = torch.arange(index.shape[0], device=index.device)[:, None, None]
        for piece in index.clamp_min(0).split(step, 1):
            yield self.far_k[which, piece], self.far_v[which, piece]


def rope_tables(positions: torch.Tensor, dims: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, dims / 2] float32 for integer positions [T]; angles in float64, exact at any context length."""
    index = torch.arange(0, dims, 2, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64).unsqueeze(-1) * theta ** (-index / dims)
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * half dims of each head, pairs (i, i + half). x [T, H, D], cos [T, half]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, first: int) -> torch.Tensor:
    """Every query sees all keys up to its own position; keys start at position 0. Returns [B, T, H, D]."""
    return causal_attention_over(q, lambda a, z: (k[:, a:z], v[:, a:z]), first=first)


def causal_attention_over(q: torch.Tensor, read: ReadRows, *, first: int) -> torch.Tensor:
    """causal_attention over K and V that are read in pieces: read(a, z) gives rows a .. z - 1, each [B, n, Hkv, D]."""
    batch, length, heads, _ = q.shape
    tile = max(1, TILE_ELEMENTS // max(1, batch * heads * (first + length)))
    out = []
    for start in range(0, length, tile):
        stop = min(length, start + tile)
        seen = first + stop
        pieces = [(a, min(a + KEY_TILE_ROWS, seen)) for a in range(0, seen, KEY_TILE_ROWS)]
        scores = torch.cat([_local_scores(q[:, start:stop], read(a, z)[0]) for a, z in pieces], -1)
        if stop - start > 1:
            position = torch.arange(first + start, first + stop, device=q.device)
            hidden = torch.arange(seen, device=q.device) > position.unsqueeze(-1)
            scores = scores.masked_fill(hidden, float("-inf"))
        probs = scores.softmax(-1)
        parts = [_weighted_values(probs[..., a:z], read(a, z)[1]) for a, z in pieces]
        out.append(reduce(torch.Tensor.add_, parts[1:], parts[0]) if len(parts) > 1 else parts[0])
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def window_far_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    first: int,
    key_start: int,
    far: FarBlocks,
    index_query: torch.Tensor,
    window: int,
    compress: int,
    topk: int,
    on_selection: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """BCSA for queries first .. first + T - 1; returns [B, T, H, D].

    index_query   [B, T, Di]: the indexer's query heads, averaged and scaled by Di^-1/2 (scores are linear in the heads)
    on_selection  called with (positions [T], mask [B, T, N] of the blocks each query attends); for tests
    """
    batch, length, heads, _ = q.shape
    positions = torch.arange(first, first + length, device=q.device)
    num_far = visible_far_blocks(first + length - 1, window, compress)
    near = _Window(k, v, positions, key_start, window)
    if num_far == 0:
        tile = near.tile(batch * heads, length, 0)
        parts = [near.alone(q[:, a : a + tile], slice(a, a + tile)) for a in range(0, length, tile)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    chosen = select_blocks(index_query, far.keys, positions, window=window, compress=compress, topk=topk)
    if on_selection is not None:
        on_selection(positions, _mask(chosen, num_far))
    if num_far > topk * (GATHER_FACTOR if length > DECODE_ROWS else 1):
        return _far_gathered(q, near, far, chosen)
    return _far_masked(q, near, far, chosen, num_far)


class _Window:
    """The local keys and values of a segment; `slice` arguments are rows of the segment."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, key_start: int, window: int) -> None:
        self.k, self.v, self.positions, self.key_start, self.window = k, v, positions, key_start, window
        self.first = int(positions[0])

    def tile(self, copies: int, length: int, far: int) -> int:
        """Rows whose local and `far` scores stay below TILE_ELEMENTS."""
        wide = max(self.window + 64, far)
        return max(1, min(length, TILE_ELEMENTS // (copies * wide), max(64, self.window)))

    def _bounds(self, rows: slice) -> tuple[int, int]:
        lo = max(self.key_start, self.first + rows.start - self.window + 1) - self.key_start
        return lo, self.first + min(rows.stop, self.positions.shape[0]) - self.key_start

    def scores(self, q: torch.Tensor, rows: slice) -> torch.Tensor:
        """[B, Hkv, G, t, n], -inf outside the window."""
        lo, hi = self._bounds(rows)
        keys = torch.arange(self.key_start + lo, self.key_start + hi, device=q.device)
        gap = self.positions[rows].unsqueeze(-1) - keys
        return _local_scores(q, self.k[:, lo:hi]).masked_fill((gap < 0) | (gap >= self.window), float("-inf"))

    def values(self, probs: torch.Tensor, rows: slice) -> torch.Tensor:
        """probs over the same keys -> [B, t, H, D]."""
        lo, hi = self._bounds(rows)
        return _weighted_values(probs, self.v[:, lo:hi])

    def alone(self, q: torch.Tensor, rows: slice) -> torch.Tensor:
        return self.values(self.scores(q, rows).softmax(-1), rows)


def _local_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled scores [B, Hkv, G, T, S] of q [B, T, H, D] against k [B, S, Hkv, D], H = Hkv * G."""
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = (q * dim**-0.5).view(batch, length, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    # the heads of a group are rows of one product: a broadcast over them would copy the keys for each
    scores = grouped.flatten(2, 3) @ k.permute(0, 2, 3, 1)
    return scores.unflatten(2, (heads // kv_heads, length))


def _weighted_values(probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """probs [B, Hkv, G, T, S] over v [B, S, Hkv, D] -> [B, T, H, D]."""
    out = probs.flatten(2, 3) @ v.permute(0, 2, 1, 3)
    return out.unflatten(2, probs.shape[2:4]).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _mask(chosen: torch.Tensor, num_far: int) -> torch.Tensor:
    """Block numbers [B, T, K], -1 for none -> mask [B, T, N]."""
    mask = torch.zeros((*chosen.shape[:2], num_far + 1), dtype=torch.bool, device=chosen.device)
    return mask.scatter_(-1, chosen.where(chosen >= 0, num_far), True)[..., :num_far]


def _far_masked(q: torch.Tensor, near: _Window, far: FarBlocks, chosen: torch.Tensor, num_far: int) -> torch.Tensor:
    """All far blocks scored, the unchosen ones masked: cheapest while there are few."""
    batch, length, heads, _ = q.shape
    far_k, far_v = far.first(num_far)
    tile = near.tile(batch * heads, length, num_far)
    out = []
    for start in range(0, length, tile):
        rows = slice(start, start + tile)
        query, local = q[:, rows], near.scores(q[:, rows], rows)
        hidden = ~_mask(chosen[:, rows], num_far)
        scores = _local_scores(query, far_k).masked_fill(hidden[:, None, None], float("-inf"))
        probs = torch.cat((local, scores), -1).softmax(-1)
        width = local.shape[-1]
        out.append(near.values(probs[..., :width], rows) + _weighted_values(probs[..., width:], far_v))
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def _far_gathered(q: torch.Tensor, near: _Window, far: FarBlocks, chosen: torch.Tensor) -> torch.Tensor:
    """Only the chosen blocks are read: [B, t, K, Hkv, D] at a time, t kept small."""
    batch, length, heads, dim = q.shape
    count, kv_heads = chosen.shape[-1], near.k.shape[2]
    query = (q * dim**-0.5).view(batch, length, kv_heads, heads // kv_heads, dim)
    step = min(near.tile(batch * heads, length, count), TILE_ELEMENTS // (batch * count * kv_heads * dim))
    step = max(1, min(step, far.gather_blocks // count))
    out = []
    for start, (keys, values) in zip(range(0, length, step), far.gather(chosen, step), strict=True):
        rows = slice(start, start + step)
        local = near.scores(q[:, rows], rows)
        scores = torch.einsum("bthgd,btkhd->bhgtk", query[:, rows], keys)
        scores = scores.masked_fill((chosen[:, rows] < 0)[:, None, None], float("-inf"))
        probs = torch.cat((local, scores), -1).softmax(-1)
        width = local.shape[-1]
        mixed = torch.einsum("bhgtk,btkhd->bthgd", probs[..., width:], values).flatten(2, 3)
        out.append(near.values(probs[..., :width], rows) + mixed)
    return out[0] if len(out) == 1 else torch.cat(out, 1)
