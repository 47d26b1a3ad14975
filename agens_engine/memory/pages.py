"""Pages: fixed runs of token positions, given out one by one, shared by reference, and rows that are stored by page.

One page id is a place in every per-token storage of every layer at once: dense K and V, block keys, far K and V.

    sequence   positions 0 ... 127 | 128 ... 255 | 256 ...          PageTable.pages [7, 3, 9]
    storage    [num_pages, rows of a page, ...]                      position 130 is row 2 of page 3

A page that is full never changes again but for the far blocks of its positions, which whoever passes the window first
writes with the same bytes as everybody else; so full pages may be shared, and the one still filling is always private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from agens_engine.errors import OutOfPages

PAGE_TOKENS = 128  # the boundary at which sessions are stored (planner: constants.PAGE_TOKENS)


def page_tokens_for(compress: int) -> int:
    """PAGE_TOKENS, rounded up to whole far blocks."""
    return -(-PAGE_TOKENS // compress) * compress


class PagePool:
    """Counts who holds which page; the pages' contents lie elsewhere.

    on_shortage   called with the number of missing pages before a request is refused; it may release some
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.on_shortage: Callable[[int], None] | None = None
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def pages_free(self) -> int:
        return len(self._free)

    @property
    def pages_used(self) -> int:
        return self.num_pages - len(self._free)

    def alloc(self, count: int = 1) -> list[int]:
        """`count` pages held once. Raises OutOfPages when there are not so many; then none was taken."""
        if count > len(self._free) and self.on_shortage is not None:
            self.on_shortage(count - len(self._free))
        if count > len(self._free):
            raise OutOfPages(count, len(self._free), self.num_pages, self.page_tokens)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page, which must be held already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer; a page without holders is free."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} released more often than it was held"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that exactly these lists of pages are held, each once per list, and all other pages are free."""
        expected = [0] * self.num_pages
        for pages in holders:
            for page in pages:
                expected[page] += 1
        wrong = {page: (n, m) for page, (n, m) in enumerate(zip(self._holders, expected, strict=True)) if n != m}
        assert not wrong, f"pages lost or shared wrongly, page -> (counted, found): {wrong}"
        assert sorted(self._free) == [page for page, n in enumerate(expected) if not n], "free list and counts differ"


class PageTable:
    """The pages of one sequence in order; grows lazily."""

    def __init__(self, pool: PagePool, device: torch.device) -> None:
        self.pool, self.pages = pool, list[int]()
        self._device = device
        self._tensor: torch.Tensor | None = None
        self.run = 0  # so many of the first pages lie one behind the other

    def reserve(self, num_tokens: int) -> None:
        """Hold pages for positions 0 .. num_tokens - 1. Raises OutOfPages, having taken none."""
        missing = -(-num_tokens // self.pool.page_tokens) - len(self.pages)
        if missing > 0:
            self._append(self.pool.alloc(missing))

    def adopt(self, pages: Sequence[int]) -> None:
        """Begin with pages that others hold too."""
        assert not self.pages, "only an empty table can adopt pages"
        self.pool.share(pages)
        self._append(pages)

    def clear(self) -> None:
        self.pool.release(self.pages)
        self.pages, self.run, self._tensor = [], 0, None

    def _append(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self.run == len(self.pages) and (not self.pages or page == self.pages[-1] + 1):
                self.run += 1
            self.pages.append(page)
        self._tensor = None

    def tensor(self) -> torch.Tensor:
        """[num pages] int64 page ids."""
        if self._tensor is None:
            self._tensor = torch.tensor(self.pages, dtype=torch.long, device=self._device)
        return self._tensor


class PagedRows:
    """One sequence's rows in a storage [num_pages, rows of a page, ...]; row r lies in the table's page r // rows."""

    def __init__(self, storage: torch.Tensor, table: PageTable) -> None:
        self._storage, self._table, self._per_page = storage, table, storage.shape[1]
        self._flat = storage.flatten(0, 1)

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Store rows start .. ; their pages must be held."""
        for at, piece in self._pieces(start, start + rows.shape[0]):
            self._flat[piece] = rows[at : at + piece.stop - piece.start]

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        row = start
        while row < stop:
            page, offset = divmod(row, self._per_page)
            size = min(self._per_page - offset, stop - row)
            place = self._table.pages[page] * self._per_page + offset
            yield row - start, slice(place, place + size)
            row += size

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows start .. stop - 1, [n, ...]: a view where their pages lie in a row, else a copy of the pages."""
        if stop <= start:
            return self._flat[:0]
        first, last = start // self._per_page, -(-stop // self._per_page)
        if last <= self._table.run:
            base = self._table.pages[0] * self._per_page
            return self._flat[base + start : base + stop]
        pages = self._storage.index_select(0, self._table.tensor()[first:last]).flatten(0, 1)
        return pages[start - first * self._per_page : stop - first * self._per_page]

    def take(self, index: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows by number: index [n] int64 -> [n, ...], on the storage's device or in `out`, wherever that is."""
        pages = self._table.tensor()
        place = pages[index.div(self._per_page, rounding_mode="floor")] * self._per_page + index % self._per_page
        if out is not None and out.device == self._flat.device:
            return torch.index_select(self._flat, 0, place, out=out)
        rows = self._flat.index_select(0, place.to(self._flat.device))
        return rows if out is None else out.copy_(rows)
