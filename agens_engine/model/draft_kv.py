"""Keys and values of one drafter layer for one sequence, by position.

Rows at or after the committed length may be written, read and overwritten freely: a drafter puts the rows of its
temporary block or chain there, and the next committed rows replace them. Nothing ever needs to be cut off.
"""

from __future__ import annotations

import torch

from agens_engine.core import NUM_VERIFY_ROWS

FIRST_CAPACITY = 64
MOVE_ROWS = 48  # rows written between two moves of a full storage's window to its front (planner: DRAFT_KV_MOVE_ROWS)


def rows_for(window: int, temporary: int = NUM_VERIFY_ROWS) -> int:
    """Storage rows with which a windowed DraftKv never has to grow.

    temporary   most rows of one write that is not final (a drafter's block); final writes are at most the window long
    """
    return window + NUM_VERIFY_ROWS + max(NUM_VERIFY_ROWS, temporary) + MOVE_ROWS


class DraftKv:
    """Rows of K and V, contiguous: all of them, or those within `window` positions of the newest.

        positions   start ......... base ................. newest write
        held        dropped       | yes, at least the last `window` and 8 more

    storage   [2, n, Hkv, D] with room for everything (rows_for; the context length without a window). None: storage of
              its own that doubles when full.
    """

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        window: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        storage: torch.Tensor | None = None,
    ) -> None:
        self.window, self._fixed = window, storage is not None
        self._rows = torch.empty((2, 0, kv_heads, head_dim), dtype=dtype, device=device) if storage is None else storage
        self.start = self._base = 0  # the first position written since the last restart, and the first one held

    def restart(self, position: int) -> None:
        """Forget every row; the next write is at `position`."""
        self.start = self._base = position

    def write(self, first: int, k: torch.Tensor, v: torch.Tensor, *, final: bool = False) -> None:
        """Store rows [n, Hkv, D] for positions first .. ; leaves no gap behind the rows already there.

        final   the rows are committed: later reads begin at most `window` before their end
        """
        assert first >= self._base, f"position {first} lies before the first one held, {self._base}"
        stop = first + k.shape[0]
        if stop - self._base > self._rows.shape[1]:
            self._make_room(first, stop, final)
        self._rows[0, first - self._base : stop - self._base] = k
        self._rows[1, first - self._base : stop - self._base] = v

    def _make_room(self, first: int, stop: int, final: bool) -> None:
        keep_from = self._base
        if self.window is not None:
            # a chain may have run 7 rows ahead when the row after the committed ones comes back for its window
            oldest = (stop if final else first) - self.window - NUM_VERIFY_ROWS
            keep_from = max(self._base, min(oldest, first))
        kept = self._rows[:, keep_from - self._base : first - self._base]
        needed = stop - keep_from
        if needed > self._rows.shape[1]:
            assert not self._fixed, f"{needed} rows for a storage of {self._rows.shape[1]}"
            grown = self._rows.new_empty((2, max(FIRST_CAPACITY, 2 * needed), *self._rows.shape[2:]))
            grown[:, : kept.shape[1]] = kept
            self._rows = grown
        else:
            self._rows[:, : kept.shape[1]] = kept.clone()
        self._base = keep_from

    def read(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views [stop - first, Hkv, D] of K and V; first must be within the window of the newest row."""
        assert first >= self._base, f"position {first} has been dropped; the first one held is {self._base}"
        rows = self._rows[:, first - self._base : stop - self._base]
        return rows[0], rows[1]

    def save(self, stop: int) -> dict[str, torch.Tensor]:
        """Copies on the CPU of the rows before `stop` that a later read may ask for, and where they begin."""
        first = self._base
        if self.window is not None:
            first = max(first, min(stop, stop - self.window - NUM_VERIFY_ROWS))
        rows = self._rows[:, first - self._base : stop - self._base]
        return {"rows": rows.to("cpu", copy=True).contiguous(), "at": torch.tensor([self.start, first])}

    def load(self, saved: dict[str, torch.Tensor]) -> bool:
        """Take in what `save` gave; False, with nothing changed, when it does not fit this storage."""
        rows, at = saved.get("rows"), saved.get("at")
        if rows is None or at is None or rows.dim() != 4 or rows.shape[2:] != self._rows.shape[2:]:
            return False
        if rows.dtype != self._rows.dtype or (self._fixed and rows.shape[1] > self._rows.shape[1]):
            return False
        start, first = at.tolist()
        self.restart(first)
        self.write(first, rows[0].to(self._rows.device), rows[1].to(self._rows.device), final=True)
        self.start = start
        return True

    @property
    def num_bytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()
