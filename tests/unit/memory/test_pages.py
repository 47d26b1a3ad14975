"""Pages: counted holders, lazy tables, rows that read back what was written wherever their pages lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agens_engine.errors import OutOfPages
from agens_engine.memory.pages import PagedRows, PagePool, PageTable, page_tokens_for

CPU = torch.device("cpu")


def test_page_tokens_are_whole_blocks() -> None:
    assert [page_tokens_for(c) for c in (1, 2, 3, 4, 8, 128, 200)] == [128, 128, 129, 128, 128, 128, 200]


def test_running_out_is_typed_and_takes_nothing() -> None:
    pool = PagePool(3, 128)
    held = pool.alloc(2)
    with pytest.raises(OutOfPages, match="2 pages of 128 tokens were asked for and 1 of 3 are free") as error:
        pool.alloc(2)
    assert error.value.missing_pages == 1 and error.value.http_status == 503
    pool.check([held])
    assert (pool.pages_free, pool.pages_used) == (1, 2)


def test_the_shortage_hook_may_free_pages() -> None:
    pool = PagePool(3, 128)
    stored = pool.alloc(2)
    asked: list[int] = []

    def evict(missing: int) -> None:
        asked.append(missing)
        pool.release(stored[:missing])

    pool.on_shortage = evict
    assert len(pool.alloc(2)) == 2
    assert asked == [1]


def test_misuse_is_our_bug() -> None:
    pool = PagePool(2, 128)
    page = pool.alloc()
    pool.release(page)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(page)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(page)
    kept = pool.alloc()
    with pytest.raises(AssertionError, match="lost or shared wrongly"):
        pool.check([])
    with pytest.raises(AssertionError, match="lost or shared wrongly"):
        pool.check([kept, kept])


class Holders(RuleBasedStateMachine):
    """Tables that grow, are forked and cleared; the counts always agree with who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, 4)
        self.tables: list[PageTable] = []

    @rule(tokens=st.integers(0, 30))
    def begin(self, tokens: int) -> None:
        table = PageTable(self.pool, CPU)
        try:
            table.reserve(tokens)
        except OutOfPages:
            assert not table.pages and -(-tokens // 4) > self.pool.pages_free
            return
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(1, 12))
    def grow(self, data: st.DataObject, more: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        before = list(table.pages)
        try:
            table.reserve(4 * len(before) + more)
        except OutOfPages:
            assert table.pages == before
        assert table.pages[: len(before)] == before

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(0, 5))
    def fork(self, data: st.DataObject, count: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        other = PageTable(self.pool, CPU)
        other.adopt(table.pages[:count])
        self.tables.append(other)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        table.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check([table.pages for table in self.tables])
        for table in self.tables:
            assert table.tensor().tolist() == table.pages
            run = table.pages[: table.run]
            assert run == list(range(run[0], run[0] + len(run))) if run else not table.pages


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    order=st.permutations(range(8)),
    writes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=8),
    reads=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8),
)
def test_rows_read_back(order: list[int], writes: list[tuple[int, int]], reads: list[tuple[int, int]]) -> None:
    """Against a plain tensor, with pages in any order, in part one behind the other."""
    pool = PagePool(8, 6)
    pool.alloc(8)
    table = PageTable(pool, CPU)
    table.adopt(order)
    rows, plain = PagedRows(torch.zeros(8, 6, 2), table), torch.zeros(48, 2)
    for number, (start, size) in enumerate(writes):
        value = torch.full((size, 2), float(number + 1)) + torch.arange(size)[:, None] / 16
        rows.write(start, value)
        plain[start : start + size] = value
    for a, b in reads:
        start, stop = min(a, b), max(a, b)
        assert torch.equal(rows.read(start, stop), plain[start:stop])
        index = torch.tensor([stop, start, 47])
        assert torch.equal(rows.take(index), plain[index])
        out = torch.empty(3, 2)
        rows.take(index, out)
        assert torch.equal(out, plain[index])
