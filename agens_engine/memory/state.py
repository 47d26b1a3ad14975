"""The memory of one sequence: recurrent states, convolution tails, K/V caches, previous token ids.

A step runs on the committed state without changing it and leaves a pending record; `commit(n)` keeps the first n rows.
Fixed-size state lives in slots of one pool, so that sequences of a step can be gathered in one read.
Source: spec volundr-model.md section 9, drafters.md D.1 and D.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agens_engine.errors import AgensError
from agens_engine.memory.kv import DenseKv, WindowKv
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

    @property
    def recurrent_bytes(self) -> int:
        """float32 bytes of one slot."""
        heads, key_dim, value_dim = self.kda_state
        return 4 * len(self.kda_layers) * (heads * key_dim * value_dim + self.conv_tail[0] * self.conv_tail[1])


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


class StatePool:
    """Slots for the fixed-size state: states [L, slots, Hv, Dk, Dv] and tails [L, slots, K-1, ch], float32."""

    def __init__(self, shapes: StateShapes, num_slots: int, device: torch.device) -> None:
        self.shapes, self.num_slots, self.device = shapes, num_slots, device
        layers = len(shapes.kda_layers)
        self.states = torch.zeros((layers, num_slots, *shapes.kda_state), device=device)
        self.tails = torch.zeros((layers, num_slots, *shapes.conv_tail), device=device)
        self._free = list(range(num_slots - 1, -1, -1))

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
    kv: dict[int, DenseKv | WindowKv]


class SequenceState:
    """All memory of one sequence. `num_tokens` positions are committed; the next row goes to that position."""

    def __init__(self, pool: StatePool, slot: int) -> None:
        self.pool, self.slot = pool, slot
        self.num_tokens = 0
        shapes = pool.shapes
        self.previous_ids = [-1] * shapes.num_previous_ids
        self.kv: dict[int, DenseKv | WindowKv] = {}
        for layer in shapes.dense_layers:
            self.kv[layer] = DenseKv(shapes.kv_heads, shapes.head_dim, dtype=torch.float32, device=pool.device)
        for layer in shapes.window_layers:
            self.kv[layer] = WindowKv(
                shapes.window,
                shapes.compress,
                shapes.kv_heads,
                shapes.head_dim,
                shapes.index_dim,
                dtype=torch.float32,
                device=pool.device,
            )
        self._pending: dict[int, KdaRows] = {}
        self._pending_ids: list[int] = []

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
        """Keep the first num_rows pending rows and forget the rest; the state becomes that after the last kept row."""
        assert 0 <= num_rows <= len(self._pending_ids), f"{num_rows} of {len(self._pending_ids)} rows"
        if num_rows:
            self._commit_recurrent(num_rows)
            kept = self._pending_ids[:num_rows]
            if self.previous_ids:
                self.previous_ids = (self.previous_ids + kept)[-len(self.previous_ids) :]
            self.num_tokens += num_rows
        self._pending.clear()
        self._pending_ids = []

    def _commit_recurrent(self, num_rows: int) -> None:
        tail_rows = self.pool.shapes.conv_tail[0]
        whole = num_rows == len(self._pending_ids)
        for index, rows in self._pending.items():
            state, tail = self.pool.states[index, self.slot], self.pool.tails[index, self.slot]
            if whole:
                state.copy_(rows.final)
            else:
                k, v, g, beta = (x[None, :num_rows] for x in (rows.k, rows.v, rows.g, rows.beta))
                state.copy_(kda_ref.replay(k, v, g, beta, state[None])[0])
            if num_rows >= tail_rows:
                tail.copy_(rows.u[num_rows - tail_rows : num_rows])
            else:
                tail.copy_(torch.cat((tail, rows.u[:num_rows]))[num_rows:])

    # --- copies ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """A copy of the committed memory; nothing is shared with the live sequence."""
        return Snapshot(
            self.num_tokens,
            list(self.previous_ids),
            self.pool.states[:, self.slot].clone(),
            self.pool.tails[:, self.slot].clone(),
            {layer: cache.copy(self.num_tokens) for layer, cache in self.kv.items()},
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Become an exact copy of the snapshot; the snapshot stays usable."""
        self.num_tokens = snapshot.num_tokens
        self.previous_ids = list(snapshot.previous_ids)
        self.pool.states[:, self.slot] = snapshot.states
        self.pool.tails[:, self.slot] = snapshot.tails
        self.kv = {layer: cache.copy(snapshot.num_tokens) for layer, cache in snapshot.kv.items()}
        self._pending.clear()
        self._pending_ids = []

    def free(self) -> None:
        """Give the slot back. Using the sequence afterwards is a bug."""
        self.pool.release(self.slot)
        self.slot = -1
        self.kv.clear()
        self._pending.clear()

    @property
    def num_bytes(self) -> int:
        return self.pool.shapes.recurrent_bytes + sum(cache.num_bytes for cache in self.kv.values())
