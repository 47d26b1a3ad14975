"""Where far blocks lie never changes an answer: every split of layers, every cache size, bit for bit."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agens_engine.memory import far_pool
from agens_engine.memory.far_pool import HotCache
from agens_engine.memory.pages import PagedRows, PagePool, PageTable
from agens_engine.memory.state import StatePool, unplanned
from agens_engine.model.batch import StepBatch
from agens_engine.model.volundr import Volundr
from tests.modelkit import CPU, fresh_logits, random_model

MIXERS = ["bcsa", "kda", "bcsa", "attn", "bcsa"]
LENGTH = 420
IDS = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(11)).tolist()


@cache
def model() -> Volundr:
    return random_model(3, mixer_types=MIXERS, num_hidden_layers=5)


@torch.inference_mode()
def answers(sizes: list[int], resident: int, hot: int) -> tuple[list[torch.Tensor], StatePool]:
    """Logits of two sequences over their segments, side by side; after each verify step some rows are taken back."""
    net = model()
    pool = StatePool(
        net.state_shapes(), 2, unplanned(CPU), context_tokens=LENGTH, chunk_tokens=200, far_resident_layers=resident,
        hot_cache_blocks=hot,
    )  # fmt: skip
    states, out = [pool.create(), pool.create()], []
    for number, wanted in enumerate(sizes):
        size = min(wanted, LENGTH - states[0].num_tokens)  # the text may be over
        if size == 0:
            break
        parts = [
            (state, ids[state.num_tokens : state.num_tokens + size]) for state, ids in zip(states, IDS, strict=True)
        ]
        hidden, _ = net(StepBatch(parts, CPU))
        out.append(net.logits(hidden))
        for state in states:
            state.commit(size if size > 8 else max(1, (number * 5) % (size + 1)))
    pool.check(states)
    return out, pool


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 8, 8, 31, 60]), min_size=2, max_size=8),
    resident=st.integers(0, 2),
    hot=st.sampled_from([0, 1, 2, 5, 16, 1000]),
    tile_bytes=st.sampled_from([1, 1 << 25]),
)
def test_every_split_and_cache_size_gives_the_same_bits(
    sizes: list[int], resident: int, hot: int, tile_bytes: int
) -> None:
    sizes = [100, *sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_pool, "FAR_TILE_BYTES", tile_bytes)
        expected, _ = answers(sizes, 3, 0)
        got, pool = answers(sizes, resident, hot)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert pool.far is not None and pool.far.counts.staged_blocks + pool.far.counts.misses > 0


def test_the_answers_are_right() -> None:
    """The comparison above would also hold between equal mistakes: against one pass over the text, nothing kept."""
    logits, _ = answers([120, 200, 60], 0, 4)
    whole = [torch.cat([part.chunk(2)[row] for part in logits]) for row in range(2)]
    for ids, got in zip(IDS, whole, strict=True):
        assert float((got - fresh_logits(model(), ids[:380])).abs().max()) < 1e-3


def test_counts_say_what_crossed_the_bus() -> None:
    """Without a cache every selected block is a miss; with room for all of them only the first sight of one is."""
    sizes = [200, *[1] * 12]
    _, bare = answers(sizes, 0, 0)
    _, cached = answers(sizes, 0, 1000)
    assert bare.far is not None and cached.far is not None
    a, b = bare.far.counts, cached.far.counts
    assert a.hits == 0 and a.misses == 12 * 2 * 3 * 3  # steps, sequences, layers, blocks
    assert b.hits + b.misses == a.misses and b.hits > 0
    assert a.miss_bytes == a.misses * 2 * 2 * 16 * 4
    assert a.verify_steps == b.verify_steps == 24
    assert cached.stats()["far_pool"]["hit_rate"] == b.hits / a.misses
    _, resident = answers(sizes, 3, 0)
    assert resident.stats()["far_pool"]["misses"] == 0


def test_prefill_stages_each_block_once_per_chunk_when_a_tile_holds_them() -> None:
    _, pool = answers([200, 200], 0, 0)
    assert pool.far is not None
    counts, blocks = pool.far.counts, (399 - 8 - 1) // 2 + (199 - 8 - 1) // 2 + 2
    assert 0 < counts.staged_blocks <= 2 * 3 * blocks
    assert counts.staged_bytes == counts.staged_blocks * 2 * 2 * 16 * 4


def lru_cache(size: int) -> tuple[HotCache, tuple[PagedRows, PagedRows]]:
    pages = PagePool(1, 40)
    table = PageTable(pages, CPU)
    table.reserve(40)
    source = (
        PagedRows(torch.arange(40.0).view(1, 40, 1, 1), table),
        PagedRows(-torch.arange(40.0).view(1, 40, 1, 1), table),
    )
    return HotCache(torch.zeros(2, size, 1, 1), torch.zeros(size, 2, dtype=torch.int32)), source


def test_the_least_recently_used_block_goes_first() -> None:
    cache, source = lru_cache(3)
    misses = []
    for blocks in ([1, 2], [3], [1], [4], [1, 3], [2], [1], [4]):
        rows, missed = cache.fetch(torch.tensor(blocks), source)
        assert rows[:, :, 0, 0].tolist() == [[float(n) for n in blocks], [-float(n) for n in blocks]]
        misses.append(missed)
    # 4 replaces 2, then 2 replaces 4, then 4 replaces 3
    assert misses == [2, 1, 0, 1, 0, 1, 0, 1]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 6),
    steps=st.lists(st.sets(st.integers(0, 39), min_size=1, max_size=9), min_size=1, max_size=20),
)
def test_the_cache_follows_its_policy(size: int, steps: list[set[int]]) -> None:
    """Rows are right whatever happens, and what the step before used is still there where it fits."""
    cache, source = lru_cache(size)
    for number, blocks in enumerate(steps):
        wanted = torch.tensor(sorted(blocks))
        rows, missed = cache.fetch(wanted, source)
        assert torch.equal(rows[0, :, 0, 0], wanted.float()) and torch.equal(rows[1, :, 0, 0], -wanted.float())
        assert 0 <= missed <= len(blocks)
        if number and len(steps[number - 1]) <= size:  # everything of the step before is still there
            assert missed <= len(blocks - steps[number - 1])
        if not size:
            assert missed == len(blocks)
