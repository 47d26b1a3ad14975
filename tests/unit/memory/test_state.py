"""Sequence memory: commit keeps exactly the accepted rows, snapshots are private copies, slots are never lost."""

from __future__ import annotations

import pytest
import torch

from agens_engine.errors import AgensError
from agens_engine.memory.kv import DenseKv, SlidingBuffer, WindowKv
from agens_engine.memory.state import KdaRows, SequenceState
from agens_engine.model.batch import StepBatch
from agens_engine.model.volundr import Volundr
from agens_kernels.ref import kda
from agens_kernels.ref.attention import visible_far_blocks
from tests.modelkit import CPU, fresh_logits, new_pool, random_model

pytestmark = pytest.mark.filterwarnings("error")
IDS = torch.randint(0, 96, (80,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def model() -> Volundr:
    return random_model()


@torch.inference_mode()
def run(model: Volundr, state: SequenceState, ids: list[int]) -> torch.Tensor:
    hidden, _ = model(StepBatch([(state, ids)], CPU))
    return model.logits(hidden)


def fingerprint(state: SequenceState) -> list[torch.Tensor]:
    """Everything the next step can read: recurrent state, ids, windows and the far blocks visible at this length."""
    state.flush()
    shapes, n = state.pool.shapes, state.num_tokens
    parts = [state.pool.states[:, state.slot], state.pool.tails[:, state.slot], torch.tensor(state.previous_ids)]
    for layer in shapes.window_layers:
        cache = state.kv[layer]
        assert isinstance(cache, WindowKv)
        blocks = visible_far_blocks(n, shapes.window, shapes.compress)
        parts += [buffer.read(n - shapes.window, n) for buffer in (cache.k, cache.v)]
        parts += [*cache.far.first(blocks), cache.far.keys(0, blocks)]
    for layer in shapes.dense_layers:
        dense = state.kv[layer]
        assert isinstance(dense, DenseKv)
        parts += [dense.k.read(0, n), dense.v.read(0, n)]
    return [part.clone() for part in parts]


@pytest.mark.parametrize("accepted", range(9))
@pytest.mark.parametrize("prefix", [3, 11, 40])
def test_rollback_leaves_no_trace(model: Volundr, prefix: int, accepted: int) -> None:
    """G12, G14: verify 8 rows, keep some, go on; logits equal those of a run that never saw the rejected rows."""
    pool = new_pool(model, 2)
    state = pool.create()
    run(model, state, IDS[:prefix])
    state.commit(prefix)
    wrong = [(token + 1) % 96 for token in IDS[prefix + accepted : prefix + 8]]
    run(model, state, IDS[prefix : prefix + accepted] + wrong)
    state.commit(accepted)
    assert state.num_tokens == prefix + accepted
    logits = run(model, state, IDS[prefix + accepted : prefix + accepted + 12])
    expected = fresh_logits(model, IDS[: prefix + accepted + 12])[prefix + accepted :]
    assert float((logits - expected).abs().max()) < 1e-3  # a rejected row that leaks moves logits by about 1


def test_rejecting_everything_restores_exact_bytes(model: Volundr) -> None:
    state = new_pool(model, 1).create()
    run(model, state, IDS[:20])
    state.commit(20)
    before = fingerprint(state)
    run(model, state, IDS[30:38])
    state.commit(0)
    assert all(torch.equal(a, b) for a, b in zip(before, fingerprint(state), strict=True))


def test_partial_commit_has_the_bytes_of_the_step_it_came_from(model: Volundr) -> None:
    """Keeping 5 of 8 rows gives the recurrence over those rows of that same step, bit for bit, in every KDA layer."""
    pool = new_pool(model, 1)
    state = pool.create()
    run(model, state, IDS[:20])
    state.commit(20)
    before = pool.states[:, state.slot].clone()
    run(model, state, IDS[20:28])
    pending = dict(state._pending)
    state.commit(5)
    assert torch.equal(pool.states[:, state.slot], before)  # deferred: nothing is stored yet
    state.flush()
    assert not state.deferred
    for index, rows in pending.items():
        q = torch.zeros_like(rows.k)
        a, b, c, d, e = (x[None, :5] for x in (q, rows.k, rows.v, rows.g, rows.beta))
        _, expected = kda.recurrent(a, b, c, d, e, before[index][None])
        assert torch.equal(pool.states[index, state.slot], expected[0])
        assert not torch.equal(rows.final, expected[0])
    assert state.previous_ids == IDS[23:25]


@pytest.mark.parametrize("accepted", range(1, 8))
def test_rollback_has_the_bytes_of_a_recurrence_that_never_saw_the_rejected_rows(model: Volundr, accepted: int) -> None:
    """The rows that are kept, one at a time and each committed whole, against a rollback to them out of 8."""
    pool, gen = new_pool(model, 2), torch.Generator().manual_seed(accepted)
    rolled, plain = pool.create(), pool.create()
    (heads, keys, values), (taps, channels) = pool.shapes.kda_state, pool.shapes.conv_tail
    rows = [
        KdaRows(
            u=torch.randn((8, channels), generator=gen),
            k=torch.randn((8, heads, keys), generator=gen),
            v=torch.randn((8, heads, values), generator=gen),
            g=-torch.rand((8, heads, keys), generator=gen),
            beta=torch.rand((8, heads), generator=gen),
            final=torch.randn((heads, keys, values), generator=gen),
        )
        for _ in pool.shapes.kda_layers
    ]
    pool.states[:] = torch.randn(pool.states[:, :1].shape, generator=gen)
    pool.tails[:] = torch.randn(pool.tails[:, :1].shape, generator=gen)
    rolled.begin(range(8))
    for index, record in enumerate(rows):
        rolled.keep(index, record)
    rolled.commit(accepted)
    for row in range(accepted):
        plain.begin([row])
        for index, r in enumerate(rows):
            u, k, v, g, beta = (x[row : row + 1] for x in (r.u, r.k, r.v, r.g, r.beta))
            _, final = kda.recurrent(
                k[None], k[None], v[None], g[None], beta[None], pool.states[index, plain.slot][None]
            )
            plain.keep(index, KdaRows(u, k, v, g, beta, final[0]))
        plain.commit(1)
    rolled.flush()
    for stored in (pool.states, pool.tails):
        assert stored[:, rolled.slot].numpy().tobytes() == stored[:, plain.slot].numpy().tobytes()
    assert rolled.previous_ids == plain.previous_ids and rolled.num_tokens == plain.num_tokens == accepted
    assert taps == pool.tails.shape[2]


@pytest.mark.parametrize("accepted", range(9))
def test_rollback_is_blind_to_what_was_rejected(model: Volundr, accepted: int) -> None:
    """Two runs that differ only in rejected drafts hold the same bytes everywhere, and so does their next step."""
    seen = []
    for wrong in (1, 2):
        state = new_pool(model, 1).create()
        run(model, state, IDS[:21])
        state.commit(21)
        drafts = [(token + wrong) % 96 for token in IDS[21 + accepted : 29]]
        run(model, state, IDS[21 : 21 + accepted] + drafts)
        state.commit(accepted)
        stored = fingerprint(state)
        seen.append([*stored, run(model, state, IDS[21 + accepted : 29 + accepted])])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_rollback_of_a_batch_is_replayed_together_by_the_next_step(model: Volundr) -> None:
    """Sequences that kept 0, 3, 3 and 8 of 8 rows; the next step replays them, each gets what it would get alone."""
    kept, alone, together = [0, 3, 3, 8], [], []
    for batched in (False, True):
        pool = new_pool(model, 4)
        states = [pool.create() for _ in kept]
        for i, state in enumerate(states):
            run(model, state, IDS[i : i + 20])
            state.commit(20)
            run(model, state, IDS[i + 20 : i + 28])
            state.commit(kept[i])
        parts = [(state, IDS[50 + i : 58 + i]) for i, state in enumerate(states)]
        if batched:
            with torch.inference_mode():
                hidden, _ = model(StepBatch(parts, CPU))
                together = list(model.logits(hidden).split(8))
            assert not any(state.deferred for state in states)
        else:
            alone = [run(model, state, ids) for state, ids in parts]
        for state in states:
            state.commit(1)
            state.flush()
    assert max(float((a - b).abs().max()) for a, b in zip(alone, together, strict=True)) < 1e-4


def test_snapshot_brings_the_stored_state_up_to_date(model: Volundr) -> None:
    pool = new_pool(model, 2)
    state, other = pool.create(), pool.create()
    run(model, state, IDS[:20])
    state.commit(20)
    run(model, state, IDS[20:28])
    state.commit(4)
    other.restore(state.snapshot())
    assert torch.equal(run(model, state, IDS[24:30]), run(model, other, IDS[24:30]))


def test_snapshot_is_private_and_restores(model: Volundr) -> None:
    pool = new_pool(model, 2)
    state = pool.create()
    run(model, state, IDS[:33])
    state.commit(33)
    snapshot = state.snapshot()
    expected = run(model, state, IDS[33:50])
    state.commit(17)
    other = pool.create()
    for _ in range(2):  # a snapshot can be used more than once
        other.restore(snapshot)
        assert torch.equal(run(model, other, IDS[33:50]), expected)
        other.commit(17)
    assert other.num_tokens == 50


def test_sequences_of_one_batch_do_not_touch_each_other(model: Volundr) -> None:
    pool = new_pool(model, 3)
    states = [pool.create() for _ in range(3)]
    parts = [IDS[:13], IDS[13:14], IDS[20:33]]
    with torch.inference_mode():
        hidden, _ = model(StepBatch(list(zip(states, parts, strict=True)), CPU))
        logits = model.logits(hidden).split([len(part) for part in parts])
    for part, got in zip(parts, logits, strict=True):
        assert float((got - fresh_logits(model, part)).abs().max()) < 1e-4


def test_slots_are_counted() -> None:
    pool = new_pool(random_model(), 2)
    a, b = pool.create(), pool.create()
    with pytest.raises(AgensError, match="all 2 sequence slots"):
        pool.create()
    pool.check([a, b])
    a.free()
    pool.check([b])
    with pytest.raises(AssertionError):
        pool.check([])
    fresh = pool.create()
    assert not fresh.pool.states[:, fresh.slot].any()


def test_sliding_buffer_keeps_what_it_is_told_to() -> None:
    buffer = SlidingBuffer(torch.empty(40, 1))
    position = 0
    for size in (7, 1, 1, 30, 2, 5, 1, 1, 30, 3):
        rows = torch.arange(position, position + size, dtype=torch.float32)[:, None]
        buffer.write(position, rows, keep_from=position - 10)
        position += size
        oldest = max(0, position - size - 10)
        assert buffer.read(oldest, position)[:, 0].tolist() == list(range(oldest, position))
    with pytest.raises(AssertionError):
        buffer.write(position, torch.zeros(31, 1), keep_from=position - 10)


@pytest.mark.parametrize("sizes", [[1], [8], [5, 1, 8, 2], [24], [24, 3]])
def test_storage_of_exactly_the_planned_size_is_enough(model: Volundr, sizes: list[int]) -> None:
    """Ring of window + chunk positions, far pool and block keys of the context: a full context runs and is right."""
    state = new_pool(model, context=80, chunk=24).create()
    logits: list[torch.Tensor] = []
    first = 0
    while first < 80:
        size = min(sizes[len(logits) % len(sizes)], 80 - first)
        logits.append(run(model, state, IDS[first : first + size]))
        state.commit(size)
        first += size
    assert float((torch.cat(logits) - fresh_logits(model, IDS)).abs().max()) < 1e-3
