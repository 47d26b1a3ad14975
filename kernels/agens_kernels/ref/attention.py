"""Softmax attention of Volundr: causal over everything, or a window plus selected far blocks under one softmax.

Math    spec volundr-model.md section 7. For query position t: local keys p with t - W < p <= t; far blocks n with
        (n + 1) * C - 1 <= t - W, of which the topk best by indexer score; one softmax over both.

            0        4 n             4 n + 3      t - W      t - W + 1              t
            |--------[ far block n   ]------------|          [ window, W keys ......]
                                      up to C - 1 positions between the two are attended by neither

Layout  q [B, T, H, D]; k, v [B, S, Hkv, D] for positions key_start .. key_start + S - 1; far_k, far_v [B, N, Hkv, D];
        block_keys [B, N, Di]; the queries are at positions first .. first + T - 1
Memory  queries go in tiles, so that no [T, S] or [T, N] matrix larger than TILE_ELEMENTS exists
Test    tests/parity/test_attention.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch

TILE_ELEMENTS = 1 << 20
GATHER_FACTOR = 4  # gather the selected blocks once there are more than GATHER_FACTOR * topk of them


def visible_far_blocks(position: int, window: int, compress: int) -> int:
    """How many far blocks a query at this position may see (blocks 0 .. n - 1)."""
    return max(0, (position - window - (compress - 1)) // compress + 1)


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
    batch, length, heads, _ = q.shape
    tile = max(1, TILE_ELEMENTS // max(1, batch * heads * k.shape[1]))
    out = []
    for start in range(0, length, tile):
        stop = min(length, start + tile)
        seen = first + stop
        scores = _local_scores(q[:, start:stop], k[:, :seen])
        if stop - start > 1:
            position = torch.arange(first + start, first + stop, device=q.device)
            hidden = torch.arange(seen, device=q.device) > position.unsqueeze(-1)
            scores = scores.masked_fill(hidden, float("-inf"))
        out.append(_weighted_values(scores.softmax(-1), v[:, :seen]))
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def window_far_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    first: int,
    key_start: int,
    far_k: torch.Tensor,
    far_v: torch.Tensor,
    block_keys: torch.Tensor,
    index_query: torch.Tensor,
    window: int,
    compress: int,
    topk: int,
    on_selection: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """BCSA for queries first .. first + T - 1; returns [B, T, H, D].

    index_query   [B, T, Di]: the indexer's query heads, averaged and scaled by Di^-1/2 (scores are linear in the heads)
    on_selection  called per tile with (positions [t], mask [B, t, N] of the blocks each query attends); for tests
    """
    batch, length, heads, _ = q.shape
    wide = max(window + 64, far_k.shape[1])
    tile = max(1, min(length, TILE_ELEMENTS // (batch * heads * wide), max(64, window)))
    out = []
    for start in range(0, length, tile):
        stop = min(length, start + tile)
        lo = max(key_start, first + start - window + 1) - key_start
        hi = first + stop - key_start
        positions = torch.arange(first + start, first + stop, device=q.device)
        query = q[:, start:stop]
        scores = _local_scores(query, k[:, lo:hi])
        keys = torch.arange(key_start + lo, key_start + hi, device=q.device)
        gap = positions.unsqueeze(-1) - keys
        scores = scores.masked_fill((gap < 0) | (gap >= window), float("-inf"))
        num_far = visible_far_blocks(first + stop - 1, window, compress)
        if num_far == 0:
            out.append(_weighted_values(scores.softmax(-1), v[:, lo:hi]))
            continue
        chosen = select_blocks(
            index_query[:, start:stop], block_keys[:, :num_far], positions, window=window, compress=compress, topk=topk
        )
        if on_selection is not None:
            on_selection(positions, chosen)
        attend = _far_gathered if num_far > GATHER_FACTOR * topk else _far_masked
        out.append(attend(query, scores, v[:, lo:hi], far_k[:, :num_far], far_v[:, :num_far], chosen, topk))
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def select_blocks(
    index_query: torch.Tensor,
    block_keys: torch.Tensor,
    positions: torch.Tensor,
    *,
    window: int,
    compress: int,
    topk: int,
) -> torch.Tensor:
    """The topk best visible blocks of each query as a mask [B, T, N]; on equal scores the lowest index wins."""
    num = block_keys.shape[1]
    last = torch.arange(1, num + 1, device=positions.device) * compress - 1
    visible = last <= positions.unsqueeze(-1) - window  # [T, N]
    if num <= topk:
        return visible.expand(index_query.shape[0], -1, -1)
    with torch.no_grad():
        scores = (index_query @ block_keys.transpose(-1, -2)).masked_fill(~visible, float("-inf"))
        threshold = scores.topk(topk, -1).values[..., -1:]
        above = scores > threshold
        tied = (scores == threshold) & visible
        room = topk - above.sum(-1, keepdim=True)
        return above | (tied & (tied.cumsum(-1) <= room))


def _local_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled scores [B, Hkv, G, T, S] of q [B, T, H, D] against k [B, S, Hkv, D], H = Hkv * G."""
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    grouped = (q * dim**-0.5).view(batch, length, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    return grouped @ k.permute(0, 2, 3, 1).unsqueeze(2)


def _weighted_values(probs: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """probs [B, Hkv, G, T, S] over v [B, S, Hkv, D] -> [B, T, H, D]."""
    out = probs @ v.permute(0, 2, 1, 3).unsqueeze(2)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _far_masked(
    q: torch.Tensor,
    local: torch.Tensor,
    v: torch.Tensor,
    far_k: torch.Tensor,
    far_v: torch.Tensor,
    chosen: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """All far blocks scored, the unchosen ones masked: cheapest while there are few."""
    far = _local_scores(q, far_k).masked_fill(~chosen[:, None, None], float("-inf"))
    probs = torch.cat((local, far), -1).softmax(-1)
    near = local.shape[-1]
    return _weighted_values(probs[..., :near], v) + _weighted_values(probs[..., near:], far_v)


def _far_gathered(
    q: torch.Tensor,
    local: torch.Tensor,
    v: torch.Tensor,
    far_k: torch.Tensor,
    far_v: torch.Tensor,
    chosen: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """Only the chosen blocks are read: [B, T, topk, Hkv, D] at a time, T kept small by the caller's tile."""
    batch, length, heads, dim = q.shape
    kv_heads = far_k.shape[2]
    index = torch.full((batch, length, topk), -1, dtype=torch.long, device=q.device)
    b, t, n = chosen.nonzero(as_tuple=True)
    index[b, t, (chosen.cumsum(-1) - 1)[b, t, n]] = n
    valid, safe = index >= 0, index.clamp_min(0)
    which = torch.arange(batch, device=q.device)[:, None]
    query = (q * dim**-0.5).view(batch, length, kv_heads, heads // kv_heads, dim)
    near = local.shape[-1]
    step = max(1, TILE_ELEMENTS // (batch * topk * kv_heads * dim))
    out = []
    for a in range(0, length, step):
        z = min(length, a + step)
        keys = far_k[which[..., None], safe[:, a:z]]  # [B, t, K, Hkv, D]
        far = torch.einsum("bthgd,btkhd->bhgtk", query[:, a:z], keys)
        far = far.masked_fill(~valid[:, None, None, a:z], float("-inf"))
        probs = torch.cat((local[..., a:z, :], far), -1).softmax(-1)
        values = far_v[which[..., None], safe[:, a:z]]
        mixed = torch.einsum("bhgtk,btkhd->bthgd", probs[..., near:], values).flatten(2, 3)
        out.append(_weighted_values(probs[..., :near], v) + mixed)
    return torch.cat(out, 1)
