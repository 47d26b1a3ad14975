"""Drafter contexts and head caches over long sequences: windows, restarts, fixed storage, batches, NaN, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from agens_engine.model.dflash2 import DFlash2, DraftContext
from agens_engine.model.draft_kv import DraftKv, rows_for
from agens_kernels.ref.block_attention import block_attention, block_visibility
from agens_kernels.ref.grouped_conv import grouped_conv
from tests.drafterkit import random_dflash2, random_ends, random_mtp

ENDS = random_ends()
WINDOW = 12


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def taps(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((num, 96), generator=torch.Generator().manual_seed(seed))


def exact_block(model: DFlash2, rows: torch.Tensor, anchor: int, start: int = 0) -> torch.Tensor:
    """The block over all rows from `start` at once, no cache: mask from the definition. -> [T, C]."""
    num, length = rows.shape[0], model.config.block_size
    positions = torch.arange(num, num + length)
    where = torch.cat((torch.arange(start, num), positions))

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kind = model.config.layers[index]
        old_k, old_v = model.context_kv(index, model.features(rows[start:]), model.rope(torch.arange(start, num)))
        keys, values = torch.cat((old_k, k[0])), torch.cat((old_v, v[0]))
        gap = positions[:, None] - where
        seen = torch.ones_like(gap, dtype=torch.bool)
        if kind.window is not None:
            seen &= gap.abs() < kind.window
        if kind.causal:
            seen &= gap >= 0
        group = q.shape[2] // keys.shape[1]
        scores = torch.einsum("thd,shd->hts", q[0], keys.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
        probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", probs, values.repeat_interleave(group, 1))[None]

    x = model.embed_block(torch.tensor([anchor]), ENDS)
    return model(x, positions[None], attend)[0]


def extended(model: DFlash2, rows: torch.Tensor, sizes: list[int], context: DraftContext | None = None) -> DraftContext:
    context = model.new_context() if context is None else context
    for part in rows.split(sizes):
        model.extend([context], [part])
    return context


KINDS: dict[str, dict[str, Any]] = {
    "sliding": {},
    "sliding causal": {"is_causal": None},
    "full": {"layer_types": ["full_attention"] * 2},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "is_causal": None},
    "plain": {"features": {}, "layer_types": ["full_attention"] * 2},
    "window below the block": {"sliding_window": 5},
    "block of 16": {"features": {"block_size": 16}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [1, 11, 12, 13, 70])
def test_incremental_equals_one_shot(kind: str, num: int) -> None:
    model, rows = random_dflash2(**KINDS[kind]), taps(num)
    expected = exact_block(model, rows, 7)
    for sizes in ([num], [1] * num, [num // 2, num - num // 2]):
        context = extended(model, rows, sizes)
        got = model.block([context], torch.tensor([7]), ENDS)[0]
        assert float((got - expected).abs().max()) <= 2e-5
        again = model.block([context], torch.tensor([7]), ENDS)[0]
        assert torch.equal(got, again)  # a block leaves nothing behind


def test_a_long_run_in_fixed_storage() -> None:
    """300 steps of 1..8 committed rows with a block after each, in the storage the plan would give."""
    model = random_dflash2()
    room = [torch.full((2, rows_for(WINDOW), 2, 8), 1e30) for _ in range(2)]
    context, rows, done = model.new_context(room), taps(1400), 0
    for step in range(300):
        size = 1 + step * 5 % 8
        model.extend([context], [rows[done : done + size]])
        done += size
        got = model.block([context], torch.tensor([step % 96]), ENDS)[0]
        if step % 30 == 29:
            assert float((got - exact_block(model, rows[:done], step % 96, max(0, done - 40))).abs().max()) <= 2e-5
    assert context.length == done > 1000
    assert context.num_bytes == sum(r.numel() * 4 for r in room)


def test_memory_of_a_windowed_context_is_bounded() -> None:
    model = random_dflash2()
    context = extended(model, taps(4000), [1000] * 4)
    assert context.length == 4000 and context.num_bytes <= 2 * 2 * (2 * (2 * WINDOW + 8)) * 2 * 8 * 4
    full = extended(random_dflash2(**KINDS["full"]), taps(400), [100] * 4)
    assert full.num_bytes >= 400 * 2 * 2 * 2 * 8 * 4


def test_restart_knows_only_what_comes_after() -> None:
    model, rows = random_dflash2(), taps(60)
    context = extended(model, rows[:20], [20])
    context.restart(50)
    model.extend([context], [rows[50:]])
    assert (context.start, context.length) == (50, 60)
    got = model.block([context], torch.tensor([7]), ENDS)[0]
    assert float((got - exact_block(model, rows, 7, 50)).abs().max()) <= 2e-5
    context.restart(60)  # nothing known: the block sees itself
    got = model.block([context], torch.tensor([7]), ENDS)[0]
    assert float((got - exact_block(model, rows, 7, 60)).abs().max()) <= 2e-5


def test_sequences_do_not_touch_each_other() -> None:
    model = random_dflash2()
    contexts, rows = [model.new_context() for _ in range(3)], [taps(n, n) for n in (3, 40, 0)]
    model.extend(contexts, [r[: len(r) // 2] for r in rows])
    model.extend(contexts, [r[len(r) // 2 :] for r in rows])
    rows[1][:] = float("nan")  # inputs are not kept
    got = model.block(contexts, torch.tensor([1, 2, 3]), ENDS)
    for b, (num, seed) in enumerate(((3, 3), (40, 40), (0, 0))):
        assert float((got[b] - exact_block(model, taps(num, seed), b + 1)).abs().max()) <= 2e-5
    model.extend(contexts[:1], [torch.full((1, 96), float("nan"))])
    got = model.block(contexts, torch.tensor([1, 2, 3]), ENDS)
    walk = model.walk(model.candidates(got, ENDS), torch.tensor([1, 2, 3]))
    assert walk.ok.tolist() == [False, True, True]


def test_a_trainer_gets_gradients() -> None:
    model = random_dflash2()
    with torch.enable_grad():
        model.requires_grad_(True)
        exact_block(model, taps(9), 4).square().mean().backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert silent == [name for name, _ in model.named_parameters() if name.startswith("candidate_selector")]
    head = random_mtp()
    with torch.enable_grad():
        head.requires_grad_(True)
        hidden = torch.randn((2, 6, 32), generator=torch.Generator().manual_seed(0))
        head(hidden, torch.ones((2, 6), dtype=torch.long), ENDS).square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in head.parameters())


# --- the pieces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_grouped_conv_by_definition(kernel: int) -> None:
    gen = torch.Generator().manual_seed(0)
    x, base = torch.randn((2, 5, 12), generator=gen), torch.randn((kernel, 12), generator=gen)
    coefs = torch.randn((2, 5, kernel, 3), generator=gen)
    out = grouped_conv(x, base, coefs)
    for b, t, c in ((0, 0, 0), (0, 1, 5), (1, 4, 11), (1, 2, 7), (0, 3, 3)):
        expected = sum(
            float((base[tap, c] + coefs[b, t, tap, c // 4]) * x[b, t - tap, c]) for tap in range(kernel) if t >= tap
        )
        assert float(out[b, t, c]) == pytest.approx(expected, abs=1e-5)


def test_no_mask_only_where_everything_is_seen() -> None:
    for window, key_start, causal in ((None, 0, False), (30, 0, False), (20, 0, False), (4, 18, False), (9, 17, True)):
        mask = block_visibility(20, 8, key_start, 28 - key_start, window=window, causal=causal)
        gap = torch.arange(20, 28)[:, None] - torch.arange(key_start, 28)
        expected = (gap.abs() < (window or 10**9)) & ((gap >= 0) | torch.tensor(not causal))
        assert torch.equal(torch.ones_like(expected) if mask is None else mask, expected)
        assert (mask is None) == bool(expected.all())


def test_block_attention_ignores_hidden_values() -> None:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=gen) for shape in ((3, 4, 8), (6, 2, 8), (6, 2, 8)))
    visible = torch.ones((3, 6), dtype=torch.bool)
    visible[:, 4:] = False
    k[4:], v[4:] = 1e4, 7.0
    assert torch.allclose(block_attention(q, k, v, visible), block_attention(q, k[:4], v[:4]), atol=1e-6)


@pytest.mark.parametrize("window", [None, 6])
def test_draft_kv_against_a_list(window: int | None) -> None:
    """Random writes that move forward or overwrite the newest rows."""
    kv = DraftKv(1, 1, window, dtype=torch.float32, device=torch.device("cpu"))
    gen, rows, committed = torch.Generator().manual_seed(0), {}, 0
    for step in range(400):
        num, ahead = (int(n) for n in torch.randint(1, 8, (2,), generator=gen))
        for first, count in ((committed, num), (committed + num, ahead)):  # committed rows, then temporary ones
            value = torch.arange(count).float().view(-1, 1, 1) + 100 * step + first
            kv.write(first, value, -value)
            rows.update({first + i: float(value[i]) for i in range(count)})
        committed += num
        low = 0 if window is None else max(0, committed - window + 1)
        keys, values = kv.read(low, committed + ahead)
        assert keys.flatten().tolist() == [rows[i] for i in range(low, committed + ahead)]
        assert torch.equal(values, -keys)


# --- MTP cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 5, 20])
@pytest.mark.parametrize("sizes", [[40], [1] * 40, [17, 3, 1, 19]])
def test_a_windowed_head_sees_the_last_rows(window: int, sizes: list[int]) -> None:
    """A window over 40 rows equals a fresh cache that was only ever given those rows (positions do not matter)."""
    head, gen = random_mtp(), torch.Generator().manual_seed(0)
    hidden, ids = torch.randn((40, 32), generator=gen), torch.randint(0, 96, (40,), generator=gen)
    room = torch.full((2, rows_for(window), 2, 16), 1e30)
    cache = head.new_cache(window, room)
    for h, i in zip(hidden.split(sizes), ids.split(sizes), strict=True):
        head.commit([cache], [h], [i], ENDS)
        head.chain([cache], [7], ENDS)
    short = head.new_cache()
    short.restart(40 - window)
    head.commit([short], [hidden[-window:]], [ids[-window:]], ENDS)
    assert cache.newest is not None and short.newest is not None
    assert torch.allclose(cache.newest, short.newest, atol=1e-5)
    assert cache.num_bytes == room.numel() * 4
    if window < 20:
        whole = head.new_cache()
        head.commit([whole], [hidden], [ids], ENDS)
        assert whole.newest is not None and not torch.allclose(cache.newest, whole.newest, atol=1e-2)


def test_rejected_chains_leave_nothing() -> None:
    head, gen = random_mtp(), torch.Generator().manual_seed(0)
    hidden, ids = torch.randn((30, 32), generator=gen), torch.randint(0, 96, (30,), generator=gen)
    noisy, quiet = head.new_cache(), head.new_cache()
    for first, stop in ((0, 9), (9, 10), (10, 18), (18, 30)):
        for cache in (noisy, quiet):
            head.commit([cache], [hidden[first:stop]], [ids[first:stop]], ENDS)
        head.chain([noisy], [4], ENDS, given=[[1, 2, 3]])
        head.commit([noisy], [hidden[:0]], [ids[:0]], ENDS)  # nothing committed
    assert noisy.newest is not None and quiet.newest is not None
    assert torch.equal(noisy.newest, quiet.newest)
    for a, b in zip(noisy.kv.read(0, 30), quiet.kv.read(0, 30), strict=True):
        assert torch.equal(a, b)
    assert head.chain([noisy], [7], ENDS)[0].tokens == head.chain([quiet], [7], ENDS)[0].tokens


def test_batched_commits_and_chains_equal_single_ones() -> None:
    head, gen = random_mtp(), torch.Generator().manual_seed(0)
    sizes = [1, 9, 0, 4]
    hidden = [torch.randn((n, 32), generator=gen) for n in sizes]
    ids = [torch.randint(0, 96, (n,), generator=gen) for n in sizes]
    together = [head.new_cache() for _ in sizes]
    head.commit(together, hidden, ids, ENDS)
    wanted, given = [7, 2, 3, 0], [[], [5, 6], [], [8]]
    chains = head.chain(together, wanted, ENDS, given=given)
    assert [len(c.tokens) for c in chains] == [7, 2, 0, 0]  # the third has no committed row yet
    for b, size in enumerate(sizes):
        alone = head.new_cache()
        head.commit([alone], [hidden[b]], [ids[b]], ENDS)
        assert alone.length == together[b].length == size
        assert head.chain([alone], [wanted[b]], ENDS, given=[given[b]])[0].tokens == chains[b].tokens
    with pytest.raises(AssertionError, match="8 slots, a step has 7"):
        head.chain(together[:1], [5], ENDS, given=[[1, 2, 3]])


def test_a_head_with_nan_keeps_quiet() -> None:
    head = random_mtp()
    caches = [head.new_cache() for _ in range(2)]
    good = torch.ones((1, 32))
    head.commit(caches, [good, good * float("nan")], [torch.tensor([3])] * 2, ENDS)
    first, second = head.chain(caches, [3, 3], ENDS)
    assert first.ok and len(first.tokens) == 3
    assert not second.ok and second.tokens == () and second.hidden.shape == (0, 32)
