"""The memory of one sequence: recurrent states, convolution tails, K/V caches, previous token ids.

A step runs on the committed state without changing it and leaves a pending record; `commit(n)` keeps the first n rows.

    step      reads state S_P                      records k, v, g, beta, u of its rows    final state of all rows
    commit    every row kept  ──► the recurrence's own final state becomes the state; nothing is left to do
              a prefix kept   ──► its records wait, the state in the pool is still S_P (deferred commit)
    next step replays the waiting records, batched over the sequences that wait, and writes each state once

So a verify step never stores a state it may have to take back, and rollback costs nothing. `flush` replays without a
step. Fixed-size state lives in slots of one pool, so that sequences of a step can be gathered in one read; what grows
with the context lies in pages (pages.py). Copies of a sequence: snapshot.py.
Source: spec volundr-model.md section 9, drafters.md D.1 and D.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agens_engine.core import NUM_VERIFY_ROWS
from agens_engine.errors import AgensError
from agens_engine.memory.far_pool import Claim, FarPool, PagedFar
from agens_engine.memory.kv import DenseKv, WindowKv, WindowStorage
from agens_engine.memory.pages import PagedRows, PagePool, PageTable, page_tokens_for
from agens_engine.memory.snapshot import Snapshot, load_snapshot, take_snapshot
from agens_kernels.ref import kda as kda_ref


@dataclass(frozen=True)
class StateShapes:
    """Sizes of one sequence's memory, in elements; layer tuples hold layer indices of the model."""

    kda_layers: tuple[int, ...]
    kda_state: tuple[int, int, int]  # Hv, Dk, Dv
    conv_tail: tuple[int, int]  # K - 1, channels
    window_layers: tuple[int, ...]
    dense_layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int
    compress: int
    topk: int
    index_dim: int
    num_previous_ids: int


@dataclass
class KdaRows:
    """One KDA layer's inputs for the pending rows of one sequence, enough to replay any prefix of them.

    u [n, ch] before the convolution; k, g [n, Hv, Dk]; v [n, Hv, Dv]; beta [n, Hv]; final [Hv, Dk, Dv] after all rows.
    """

    u: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    final: torch.Tensor

    def first(self, num_rows: int) -> KdaRows:
        """The first rows of the record; the final state is that of all rows and does not go along."""
        u, k, v, g, beta = (x[:num_rows] for x in (self.u, self.k, self.v, self.g, self.beta))
        return KdaRows(u, k, v, g, beta, self.final.new_empty(0))


def unplanned(device: torch.device) -> Claim:
    """A claim without a plan behind it: for tools that run one sequence and exit, and for tests."""

    def claim(line: str, shape: tuple[int, ...], dtype: torch.dtype | None = None, /) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return claim


class StatePool:
    """All sequence memory of an engine: claimed once for num_slots sequences of context_tokens.

    Slots hold what is fixed per sequence, pages what grows; with every slot at its full context all pages are in use.

    states               [L, slots, Hv, Dk, Dv], tails [L, slots, K-1, ch]: float32; a step gathers its rows in one read
    paged                storage by name, each [num_pages, rows of a page, ...]; see snapshot.py for the names
    far_resident_layers  far pools on the device; None: all
    hot_cache_blocks     cached far blocks per host layer and slot
    raises               PlanError when the plan's lines do not hold it
    """

    def __init__(
        self,
        shapes: StateShapes,
        num_slots: int,
        claim: Claim,
        *,
        context_tokens: int,
        chunk_tokens: int,
        far_resident_layers: int | None = None,
        hot_cache_blocks: int = 0,
    ) -> None:
        self.shapes, self.num_slots = shapes, num_slots
        self.context_tokens = context_tokens
        layers = len(shapes.kda_layers)
        if layers:
            self.states = claim("state.kda", (layers, num_slots, *shapes.kda_state))
            self.tails = claim("state.conv", (layers, num_slots, *shapes.conv_tail))
        else:
            self.states = self.tails = torch.empty((0, num_slots))
        page_tokens = page_tokens_for(shapes.compress)
        per_slot = -(-(context_tokens + NUM_VERIFY_ROWS) // page_tokens)
        self.pages = PagePool(num_slots * per_slot, page_tokens)
        self.paged: dict[str, torch.Tensor] = {}
        self._rings: dict[int, dict[str, torch.Tensor]] = {}
        self.far: FarPool | None = None
        self._claim_dense(claim)
        if shapes.window_layers:
            self._claim_windows(claim, chunk_tokens)
            resident = len(shapes.window_layers) if far_resident_layers is None else far_resident_layers
            self._claim_far(claim, per_slot, resident, hot_cache_blocks)
        self.page_bytes = sum(x[:1].numel() * x.element_size() for x in self.paged.values())
        self._free = list(range(num_slots - 1, -1, -1))

    # --- storage; sizes as in the planner's sequence_lines.py --------------------------------------------------------

    def _claim_dense(self, claim: Claim) -> None:
        row, pages = (self.shapes.kv_heads, self.shapes.head_dim), self.pages
        for layer in self.shapes.dense_layers:
            for part in ("k", "v"):
                self.paged[f"kv.{layer}.{part}"] = claim("kv.dense", (pages.num_pages, pages.page_tokens, *row))

    def _claim_windows(self, claim: Claim, chunk_tokens: int) -> None:
        s, slots, row = self.shapes, self.num_slots, (self.shapes.kv_heads, self.shapes.head_dim)
        # a verify step needs room for its rows and one far block behind the window
        written = max(chunk_tokens, s.compress + NUM_VERIFY_ROWS)
        ring = min(s.window + written, self.context_tokens + NUM_VERIFY_ROWS)
        keys = (self.pages.num_pages, self.pages.page_tokens // s.compress, s.index_dim)
        for layer in s.window_layers:
            parts = {part: claim("kv.window", (slots, ring, *row)) for part in ("k", "v")}
            parts["index"] = claim("kv.index_tail", (slots, s.compress + NUM_VERIFY_ROWS, s.index_dim))
            self._rings[layer] = parts
            self.paged[f"block_keys.{layer}"] = claim("kv.block_keys", keys)

    def _claim_far(self, claim: Claim, pages_per_slot: int, resident: int, hot_blocks: int) -> None:
        """Far pages, where the context ever leaves the window."""
        s, leaves = self.shapes, self.context_tokens > self.shapes.window
        blocks = self.pages.page_tokens // s.compress
        self.far = FarPool(
            claim if leaves else unplanned(self.states.device),
            s.window_layers,
            (s.kv_heads, s.head_dim),
            num_pages=self.pages.num_pages,
            page_blocks=blocks if leaves else 0,
            blocks=pages_per_slot * blocks if leaves else 0,
            topk=s.topk,
            num_slots=self.num_slots,
            resident=resident if leaves else len(s.window_layers),
            hot_blocks=hot_blocks,
        )
        if leaves:
            for layer, pair in self.far.storage.items():
                self.paged |= {f"far.{layer}.{part}": stored for part, stored in zip("kv", pair, strict=True)}

    def kv_of(self, slot: int, table: PageTable) -> dict[int, DenseKv | WindowKv]:
        """Empty caches of every softmax layer on one slot's storage and a sequence's pages."""
        s, caches = self.shapes, dict[int, DenseKv | WindowKv]()
        for layer in s.dense_layers:
            k, v = (PagedRows(self.paged[f"kv.{layer}.{part}"], table) for part in "kv")
            caches[layer] = DenseKv(k, v)
        for layer, parts in self._rings.items():
            assert self.far is not None
            keys = PagedRows(self.paged[f"block_keys.{layer}"], table)
            storage = WindowStorage(**{name: part[slot] for name, part in parts.items()})
            caches[layer] = WindowKv(s.window, s.compress, storage, PagedFar(self.far, layer, slot, table, keys))
        return caches

    @property
    def slots_free(self) -> int:
        return len(self._free)

    def create(self) -> SequenceState:
        """A fresh sequence: zero state, no tokens. Raises AgensError when every slot is taken."""
        if not self._free:
            raise AgensError(f"all {self.num_slots} sequence slots are in use; wait for one to finish")
        slot = self._free.pop()
        self.states[:, slot].zero_()
        self.tails[:, slot].zero_()
        if self.far is not None:
            self.far.begin(slot)
        return SequenceState(self, slot)

    def stats(self) -> dict[str, Any]:
        """Pages in use and what the far pool's host layers cost; cheap."""
        far = self.far.counts.summary() if self.far is not None else None
        used, total = self.pages.pages_used, self.pages.num_pages
        return {"pages_used": used, "pages": total, "page_tokens": self.pages.page_tokens, "far_pool": far}

    def replay(self, kda_index: int, sequences: Sequence[SequenceState]) -> None:
        """Write what a layer's deferred commits left open; sequences that kept equally many rows go together.

        The arithmetic is the recurrence's own, so the state is bit for bit what it was after those rows in their step.
        """
        waiting: dict[int, list[SequenceState]] = {}
        for sequence in sequences:
            if (rows := sequence.deferred.get(kda_index)) is not None:
                waiting.setdefault(rows.k.shape[0], []).append(sequence)
        for num_rows, members in waiting.items():
            slots = [sequence.slot for sequence in members]
            records = [sequence.deferred[kda_index] for sequence in members]
            k, v, g, beta = (torch.stack(x) for x in zip(*((r.k, r.v, r.g, r.beta) for r in records), strict=True))
            states = kda_ref.replay(k, v, g, beta, self.states[kda_index, slots])
            inputs = torch.cat((self.tails[kda_index, slots], torch.stack([r.u for r in records])), 1)
            self.states[kda_index, slots], self.tails[kda_index, slots] = states, inputs[:, num_rows:]
            for sequence in members:  # only now: a step that fails before this runs again and replays again
                del sequence.deferred[kda_index]

    def release(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} freed twice"
        self._free.append(slot)

    def check(self, live: Sequence[SequenceState], snapshots: Sequence[Snapshot] = ()) -> None:
        """Every slot is free or belongs to one live sequence, every page to those that hold it; else AssertionError."""
        slots = [state.slot for state in live] + self._free
        assert sorted(slots) == list(range(self.num_slots)), f"slots lost or shared: {sorted(slots)}"
        self.pages.check([*(state.table.pages for state in live), *(snapshot.pages for snapshot in snapshots)])


class SequenceState:
    """All memory of one sequence. `num_tokens` positions are committed; the next row goes to that position."""

    def __init__(self, pool: StatePool, slot: int) -> None:
        self.pool, self.slot = pool, slot
        self.num_tokens = 0
        self.previous_ids = [-1] * pool.shapes.num_previous_ids
        self.table = PageTable(pool.pages, pool.states.device)
        self.kv = pool.kv_of(slot, self.table)
        self._pending: dict[int, KdaRows] = {}
        self._pending_ids: list[int] = []
        self.deferred: dict[int, KdaRows] = {}  # KDA layers whose stored state still lacks these rows

    def reserve(self, num_tokens: int) -> None:
        """Hold pages for so many positions. Raises OutOfPages, having taken none."""
        most = self.pool.context_tokens + NUM_VERIFY_ROWS
        assert num_tokens <= most, f"{num_tokens} positions in a memory planned for {most}"
        self.table.reserve(num_tokens)

    def paged_rows(self, name: str) -> PagedRows:
        """This sequence's rows of a paged storage."""
        return PagedRows(self.pool.paged[name], self.table)

    # --- one step: begin, keep, commit -------------------------------------------------------------------------------

    def begin(self, ids: Sequence[int]) -> None:
        """Rows for these token ids are about to run at positions num_tokens .. ; drops whatever was not committed.

        raises  OutOfPages; the sequence is as before and may try again
        """
        assert self.slot >= 0, "the sequence was freed"
        self.reserve(self.num_tokens + len(ids))
        self._pending_ids = list(ids)
        self._pending.clear()

    def keep(self, kda_index: int, rows: KdaRows) -> None:
        """Remember what the kda_index-th KDA layer needs to commit a prefix of the pending rows."""
        self._pending[kda_index] = rows

    def commit(self, num_rows: int) -> None:
        """Keep the first num_rows pending rows and forget the rest.

        Where all of them are kept the recurrence's own final state is stored (prefill always comes this way, as its
        chunked form is not the replay's arithmetic); a kept prefix waits for the next step or `flush`.
        """
        assert 0 <= num_rows <= len(self._pending_ids), f"{num_rows} of {len(self._pending_ids)} rows"
        if num_rows:
            assert not self.deferred, "a step ran on a state that lacks rows"
            if num_rows == len(self._pending_ids):
                self._store_final(num_rows)
            else:
                self.deferred = {index: rows.first(num_rows) for index, rows in self._pending.items()}
            kept = self._pending_ids[:num_rows]
            if self.previous_ids:
                self.previous_ids = (self.previous_ids + kept)[-len(self.previous_ids) :]
            self.num_tokens += num_rows
        self._pending.clear()
        self._pending_ids = []

    def _store_final(self, num_rows: int) -> None:
        for index, rows in self._pending.items():
            self.pool.states[index, self.slot].copy_(rows.final)
            tail = self.pool.tails[index, self.slot]
            tail.copy_(torch.cat((tail, rows.u))[num_rows:])

    def flush(self) -> None:
        """Bring the stored state up to date: afterwards the pool holds all that was committed."""
        for index in list(self.deferred):
            self.pool.replay(index, [self])

    # --- copies ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The committed memory: full pages shared, everything else copied. Its owner must release it."""
        self.flush()
        return take_snapshot(self)

    def restore(self, source: Snapshot | Mapping[str, torch.Tensor]) -> None:
        """Become an exact copy of a snapshot or of what its `to_host` gave; the source stays usable.

        raises  OutOfPages; ValueError naming the key for tensors that do not fit. Then the sequence holds no tokens.
        """
        self.reset()
        try:
            load_snapshot(self, source)
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """As freshly created: no tokens, no pages, zero state."""
        self.table.clear()
        self.pool.states[:, self.slot].zero_()
        self.pool.tails[:, self.slot].zero_()
        if self.pool.far is not None:
            self.pool.far.begin(self.slot)
        self.kv = self.pool.kv_of(self.slot, self.table)
        self.num_tokens = 0
        self.previous_ids = [-1] * self.pool.shapes.num_previous_ids
        self._pending.clear()
        self.deferred.clear()
        self._pending_ids = []

    def free(self) -> None:
        """Give slot and pages back. Using the sequence afterwards is a bug."""
        self.table.clear()
        self.pool.release(self.slot)
        self.slot = -1
        self.kv.clear()
        self._pending.clear()
        self.deferred.clear()
