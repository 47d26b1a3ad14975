"""Snapshots: full pages shared, the rest copied; through host memory and back byte for byte; pages never lost."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agens_engine.errors import OutOfPages
from agens_engine.memory.pages import PAGE_TOKENS
from agens_engine.memory.state import SequenceState, StatePool
from agens_engine.model.batch import StepBatch
from agens_engine.model.volundr import Volundr
from tests.modelkit import CPU, new_pool, random_model

IDS = torch.randint(0, 96, (600,), generator=torch.Generator().manual_seed(9)).tolist()


@cache
def tiny() -> Volundr:
    return random_model()


@pytest.fixture
def model() -> Volundr:
    return tiny()


@torch.inference_mode()
def run(model: Volundr, state: SequenceState, num_rows: int, keep: int | None = None) -> torch.Tensor:
    first = state.num_tokens
    hidden, _ = model(StepBatch([(state, IDS[first : first + num_rows])], CPU))
    state.commit(num_rows if keep is None else keep)
    return model.logits(hidden)


def begun(model: Volundr, pool: StatePool, length: int) -> SequenceState:
    state = pool.create()
    while state.num_tokens < length:
        run(model, state, min(50, length - state.num_tokens))
    return state


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(x.numpy().tobytes() == b[name].numpy().tobytes() for name, x in a.items())


@pytest.mark.parametrize("length", [0, 1, 7, 127, 128, 129, 256, 300])
def test_both_forms_restore_the_same_bytes(model: Volundr, length: int) -> None:
    pool = new_pool(model, 3)
    state = begun(model, pool, length)
    shared, copied = state.snapshot(), state.snapshot()
    assert len(shared.pages) == length // PAGE_TOKENS
    size = copied.host_bytes
    tensors = copied.to_host()
    assert size == sum(x.numel() * x.element_size() for x in tensors.values())
    assert shared.num_bytes < size or not shared.pages
    expected = run(model, state, 20)
    by_reference, by_value = pool.create(), pool.create()
    by_reference.restore(shared)
    by_value.restore(tensors)
    first, second = by_reference.snapshot(), by_value.snapshot()
    assert same(first.to_host(), tensors) and same(second.to_host(), tensors)
    for other in (by_reference, by_value):
        assert other.num_tokens == length
        assert torch.equal(run(model, other, 20), expected)
    pool.check([state, by_reference, by_value], [shared])
    shared.release()
    shared.release()
    for live in (state, by_reference, by_value):
        live.free()
    pool.check([])
    assert pool.pages.pages_used == 0


def test_forks_share_full_pages_and_never_see_each_other(model: Volundr) -> None:
    """Two sequences go on differently from one snapshot, past the window, so that both pool blocks of shared pages."""
    pool = new_pool(model, 3)
    state = begun(model, pool, 260)
    snapshot = state.snapshot()
    before = pool.pages.pages_used
    a, b = pool.create(), pool.create()
    a.restore(snapshot)
    b.restore(snapshot)
    assert pool.pages.pages_used == before + 2  # one partial page each
    assert a.table.pages[:2] == b.table.pages[:2] == state.table.pages[:2]
    expected = run(model, state, 150)
    with torch.inference_mode():
        model(StepBatch([(b, IDS[:150])], CPU))
    b.commit(150)
    assert torch.equal(run(model, a, 150), expected)
    pool.check([state, a, b], [snapshot])


def test_a_snapshot_outlives_its_sequence(model: Volundr) -> None:
    pool = new_pool(model, 2)
    state = begun(model, pool, 300)
    snapshot = state.snapshot()
    expected = run(model, state, 9)
    state.free()
    filler = begun(model, pool, 300)  # takes the pages that came free
    other = pool.create()
    other.restore(snapshot)
    assert torch.equal(run(model, other, 9), expected)
    pool.check([filler, other], [snapshot])


def test_no_page_left_leaves_a_fresh_sequence(model: Volundr) -> None:
    pool = new_pool(model, 2, context=250)  # 6 pages
    state = begun(model, pool, 250)
    kept = [state.snapshot().to_host()]
    other = pool.create()
    held = pool.pages.alloc(pool.pages.pages_free)
    for _ in range(2):
        with pytest.raises(OutOfPages):
            other.restore(kept[0])
        assert other.num_tokens == 0 and not other.table.pages and not pool.states[:, other.slot].any()
    with pytest.raises(OutOfPages):
        run(model, other, 5)
    pool.pages.release(held)
    other.restore(kept[0])
    pool.check([state, other])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("state.kda", lambda x: x[:1]),
        ("kv.3.k", lambda x: x[:-1]),
        ("block_keys.1", lambda x: x.double()),
        ("ring.1.v", lambda x: torch.cat([x] * 90)),
        ("far.1.k", None),
        ("num_tokens", lambda x: x + 100_000),
    ],
)
def test_tensors_that_do_not_fit_are_named(model: Volundr, name: str, change: object) -> None:
    pool = new_pool(model, 2)
    tensors = begun(model, pool, 140).snapshot().to_host()
    if callable(change):
        tensors[name] = change(tensors[name])
    else:
        del tensors[name]
    other = pool.create()
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        other.restore(tensors)
    assert other.num_tokens == 0 and not other.table.pages


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(1, 60), st.booleans(), st.booleans()), min_size=2, max_size=8))
def test_going_through_snapshots_changes_nothing(cuts: list[tuple[int, bool, bool]]) -> None:
    """A sequence that is stored and taken up again between its steps, in either form, against one that never was."""
    net = tiny()
    pool = new_pool(net, 3)
    plain, moved = pool.create(), pool.create()
    for size, store, host in cuts:
        keep = max(1, size // 2) if size <= 8 else size
        assert torch.equal(run(net, plain, size, keep), run(net, moved, size, keep))
        if store:
            snapshot = moved.snapshot()
            moved.free()
            moved = pool.create()
            if host:
                moved.restore(snapshot.to_host())
            else:
                moved.restore(snapshot)
                snapshot.release()
    pool.check([plain, moved])
