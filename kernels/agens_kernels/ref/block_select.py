"""Which far blocks a query attends: the topk best visible ones by indexer score, found in tiles.

Math    spec volundr-model.md section 7.3: score_n = index_query . block_key_n; the K highest of the visible blocks, on
        equal scores the lowest block
Layout  index_query [B, T, Di]; keys read in pieces [B, n, Di]; result [B, T, K] block numbers, ascending, -1 for none
Memory  a tile of SELECT_TILE_QUERIES x SELECT_TILE_BLOCKS scores (more blocks for fewer queries) and the best K so far:
        never a [T, N] matrix
Test    tests/parity/test_block_select.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch

SELECT_TILE_QUERIES = 64
SELECT_TILE_BLOCKS = 4096

_LOWEST = float("-inf")


def visible_far_blocks(position: int, window: int, compress: int) -> int:
    """How many far blocks a query at this position may see (blocks 0 .. n - 1)."""
    return max(0, (position - window - (compress - 1)) // compress + 1)


def select_blocks(
    index_query: torch.Tensor,
    keys: Callable[[int, int], torch.Tensor],
    positions: torch.Tensor,
    *,
    window: int,
    compress: int,
    topk: int,
) -> torch.Tensor:
    """The topk best visible blocks of each query.

    keys       keys(a, z) gives the keys of blocks a .. z - 1, [B, n, Di]
    positions  [T], consecutive
    returns    [B, T, min(topk, N)] int64, N the blocks visible to the last query; ascending, -1 behind the last one
    """
    batch, length, _ = index_query.shape
    num = visible_far_blocks(int(positions[-1]), window, compress)
    count = min(topk, num)
    # the first block whose last position is still inside the query's window
    limit = ((positions - window - (compress - 1)) // compress + 1).clamp_min(0)
    if num <= topk:
        blocks = torch.arange(num, device=positions.device)
        return blocks.where(blocks < limit.unsqueeze(-1), -1).expand(batch, -1, -1)
    best = index_query.new_full((batch, length, count), _LOWEST)
    chosen = torch.full((batch, length, count), -1, dtype=torch.long, device=index_query.device)
    queries = min(length, SELECT_TILE_QUERIES)
    tile = SELECT_TILE_BLOCKS * max(1, SELECT_TILE_QUERIES // max(8, queries))
    with torch.no_grad():
        for base in range(0, num, tile):
            block_keys = keys(base, min(num, base + tile)).transpose(-1, -2).contiguous()
            for start in range(0, length, queries):
                rows = slice(start, start + queries)
                scores = index_query[:, rows] @ block_keys
                if base + block_keys.shape[-1] > int(limit[start]):  # some of them are hidden from some of the queries
                    numbers = torch.arange(base, base + scores.shape[-1], device=scores.device)
                    scores = scores.masked_fill(numbers >= limit[rows].unsqueeze(-1), _LOWEST)
                best[:, rows], chosen[:, rows] = _merge(best[:, rows], chosen[:, rows], scores, base)
    return chosen


def _merge(
    best: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor, base: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of what was found so far and a tile's scores [B, t, n] of blocks base .. base + n - 1."""
    count, size = best.shape[-1], scores.shape[-1]
    if size <= count:
        at = torch.arange(size, device=scores.device).expand_as(scores)
    else:
        top, at = scores.topk(count + 1, -1)
        edge = top[..., count - 1]
        if bool(((edge == top[..., count]) & (edge > _LOWEST)).any()):  # equal scores: which of them topk took is open
            numbers = torch.arange(size, device=scores.device).expand_as(scores)
            scores, at = _lowest_of_equals(scores, numbers, count)
            at = at.clamp_min(0)  # padding: its score is the lowest
        else:
            at = at[..., :count].sort(-1).values
            scores = scores.gather(-1, at)
    return _lowest_of_equals(torch.cat((best, scores), -1), torch.cat((chosen, at + base), -1), count)


def _lowest_of_equals(scores: torch.Tensor, numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best of scores [..., n] whose block numbers ascend, in that order; scores of -inf are never taken."""
    threshold = scores.topk(count, -1).values[..., -1:]
    above = scores > threshold
    tied = (scores == threshold) & (scores > _LOWEST)
    room = count - above.sum(-1, keepdim=True)
    taken = above | (tied & (tied.cumsum(-1) <= room))
    slot = (taken.cumsum(-1) - 1).where(taken, count)  # what is not taken goes to a column that is cut off
    shape = (*scores.shape[:-1], count + 1)
    kept = scores.new_full(shape, _LOWEST).scatter_(-1, slot, scores)[..., :count]
    found = numbers.new_full(shape, -1).scatter_(-1, slot, numbers)[..., :count]
    return kept, found
