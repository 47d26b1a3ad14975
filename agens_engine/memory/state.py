"""The memory of one sequence: recurrent states, convolution tails, K/V caches, previous token ids.

A step runs on the committed state without changing it and leaves a pending record; `commit(n)` keeps the first n rows.

    step      reads state S_P                      records k, v, g, beta, u of its rows    final state of all rows
    commit    every row kept  ──► the recurrence's own final state becomes the state; nothing is left to do
              a prefix kept   ──► its records wait, the state in the pool is still S_P (deferred commit)
    next step replays the waiting records, batched over the sequences that wait, and writes each state once

So a verify step never stores a state it may have to take back, and rollback costs nothing. `flush` replays without a
step. Fixed-size state lives in slots of one pool, so that sequences of a step can be gathered in one read.
Source: spec volundr-model.md section 9, drafters.md D.1 and D.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agens_engine.core import NUM_VERIFY_ROWS
from agens_engine.errors import AgensError
from agens_engine.memory.kv import DenseKv, WindowKv, WindowStorage
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


Claim = Callable[[str, tuple[int, ...]], torch.Tensor]  # (plan line, shape) -> zeroed float32 tensor


def unplanned(device: torch.device) -> Claim:
    """A claim without a plan behind it: for tools that run one sequence and exit, and for tests."""
    return lambda line, shape: torch.zeros(shape, device=device)


class StatePool:
    """All sequence memory of an engine: claimed once for num_slots sequences of context_tokens, given out by slot.

    states   [L, slots, Hv, Dk, Dv], tails [L, slots, K-1, ch]: float32; a step gathers its rows in one read
    raises   PlanError when the plan's lines do not hold it
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
    ) -> None:
        self.shapes, self.num_slots = shapes, num_slots
        self.context_tokens = context_tokens
        layers = len(shapes.kda_layers)
        if layers:
            self.states = claim("state.kda", (layers, num_slots, *shapes.kda_state))
            self.tails = claim("state.conv", (layers, num_slots, *shapes.conv_tail))
        else:
            self.states = self.tails = torch.empty((0, num_slots))
        self._storage = self._claim_kv(claim, chunk_tokens, far_resident_layers)
        self._free = list(range(num_slots - 1, -1, -1))

    def _claim_kv(
        self, claim: Claim, chunk_tokens: int, far_resident: int | None
    ) -> dict[int, dict[str, torch.Tensor]]:
        """Layer -> part -> [slots, ...]; sizes as in the planner's sequence_lines.py."""
        s, slots, row = self.shapes, self.num_slots, (self.shapes.kv_heads, self.shapes.head_dim)
        rows = self.context_tokens + NUM_VERIFY_ROWS
        storage: dict[int, dict[str, torch.Tensor]] = {}
        for layer in s.dense_layers:
            storage[layer] = {part: claim("kv.dense", (slots, rows, *row)) for part in ("k", "v")}
        # a verify step needs room for its rows and one far block behind the window
        ring = min(s.window + max(chunk_tokens, s.compress + NUM_VERIFY_ROWS), rows)
        blocks = max(0, -(-(self.context_tokens - s.window) // s.compress))
        keys = -(-self.context_tokens // s.compress)
        for n, layer in enumerate(s.window_layers):
            far_line = "far.resident" if far_resident is None or n < far_resident else "host.far_pool"
            storage[layer] = {part: claim("kv.window", (slots, ring, *row)) for part in ("k", "v")}
            index_rows = s.compress + NUM_VERIFY_ROWS
            storage[layer]["index"] = claim("kv.index_tail", (slots, index_rows, s.index_dim))
            storage[layer]["block_keys"] = claim("kv.block_keys", (slots, keys, s.index_dim))
            for part in ("far_k", "far_v"):
                storage[layer][part] = (
                    claim(far_line, (slots, blocks, *row)) if blocks else self.states.new_empty((slots, 0, *row))
                )
        return storage

    def kv_of(self, slot: int) -> dict[int, DenseKv | WindowKv]:
        """Empty caches of every softmax layer on one slot's storage."""
        caches: dict[int, DenseKv | WindowKv] = {}
        for layer, parts in self._storage.items():
            own = {name: part[slot] for name, part in parts.items()}
            if layer in self.shapes.dense_layers:
                caches[layer] = DenseKv(own["k"], own["v"])
            else:
                caches[layer] = WindowKv(self.shapes.window, self.shapes.compress, WindowStorage(**own))
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
        return SequenceState(self, slot)

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

    def check(self, live: Sequence[SequenceState]) -> None:
        """Every slot is free or belongs to exactly one live sequence; raises AssertionError otherwise."""
        slots = [state.slot for state in live] + self._free
        assert sorted(slots) == list(range(self.num_slots)), f"slots lost or shared: {sorted(slots)}"


@dataclass
class Snapshot:
    """A private copy of a sequence's memory after `num_tokens` tokens."""

    num_tokens: int
    previous_ids: list[int]
    states: torch.Tensor
    tails: torch.Tensor
    kv: dict[int, Any]


class SequenceState:
    """All memory of one sequence. `num_tokens` positions are committed; the next row goes to that position."""

    def __init__(self, pool: StatePool, slot: int) -> None:
        self.pool, self.slot = pool, slot
        self.num_tokens = 0
        self.previous_ids = [-1] * pool.shapes.num_previous_ids
        self.kv = pool.kv_of(slot)
        self._pending: dict[int, KdaRows] = {}
        self._pending_ids: list[int] = []
        self.deferred: dict[int, KdaRows] = {}  # KDA layers whose stored state still lacks these rows

    # --- one step: begin, keep, commit -------------------------------------------------------------------------------

    def begin(self, ids: Sequence[int]) -> None:
        """Rows for these token ids are about to run at positions num_tokens .. ; drops whatever was not committed."""
        assert self.slot >= 0, "the sequence was freed"
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
        """A copy of the committed memory; nothing is shared with the live sequence."""
        self.flush()
        return Snapshot(
            self.num_tokens,
            list(self.previous_ids),
            self.pool.states[:, self.slot].clone(),
            self.pool.tails[:, self.slot].clone(),
            {layer: cache.save(self.num_tokens) for layer, cache in self.kv.items()},
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Become an exact copy of the snapshot; the snapshot stays usable."""
        self.num_tokens = snapshot.num_tokens
        self.previous_ids = list(snapshot.previous_ids)
        self.pool.states[:, self.slot] = snapshot.states
        self.pool.tails[:, self.slot] = snapshot.tails
        for layer, saved in snapshot.kv.items():
            self.kv[layer].load(saved)
        self._pending.clear()
        self.deferred.clear()
        self._pending_ids = []

    def free(self) -> None:
        """Give the slot back. Using the sequence afterwards is a bug."""
        self.pool.release(self.slot)
        self.slot = -1
        self.kv.clear()
        self._pending.clear()
        self.deferred.clear()
