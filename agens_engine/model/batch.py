"""What one forward runs over: segments of sequences, or a block of fresh rows.

    StepBatch    segments (sequence state, token ids) of any lengths: prefill chunks, decode and verify rows alike
    FreshBatch   [B, T] token ids from position 0 with nothing kept: one-shot evaluation and training (differentiable)

Layers see the same four verbs either way: previous token ids, recurrent state in, recurrent rows out, K/V extended.
Recurrent layers work on groups of equally long segments; attention works on units, whose keys differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from agens_engine.memory.kv import DenseKv, WindowKv, WindowView
from agens_engine.memory.state import KdaRows, SequenceState
from agens_kernels.ref.attention import ReadRows, TensorFar, visible_far_blocks

Rows = slice | torch.Tensor


@dataclass(frozen=True)
class Group:
    """Rows of the flat step that form a [batch, length] block, batch-major. `first` is set where all begin alike."""

    rows: Rows
    batch: int
    length: int
    first: int
    members: tuple[int, ...]

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [batch, length, ...]"""
        return x[self.rows].unflatten(0, (self.batch, self.length))


class Batch(Protocol):
    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    recurrent_groups: tuple[Group, ...]
    attention_units: tuple[Group, ...]

    def previous_ids(self, group: Group) -> torch.Tensor: ...

    def recurrent(self, kda_index: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]: ...

    def keep_recurrent(self, kda_index: int, group: Group, rows: KdaRows) -> None: ...

    def extend_dense(self, layer: int, unit: Group, k: torch.Tensor, v: torch.Tensor) -> ReadRows: ...

    def extend_window(
        self, layer: int, unit: Group, k: torch.Tensor, v: torch.Tensor, index_key: torch.Tensor
    ) -> WindowView: ...


def scatter(parts: Iterable[tuple[Group, torch.Tensor]], num_rows: int) -> torch.Tensor:
    """Put [batch, length, ...] blocks back into flat rows [T, ...]."""
    blocks = list(parts)
    if len(blocks) == 1 and isinstance(blocks[0][0].rows, slice):
        return blocks[0][1].flatten(0, 1)
    first = blocks[0][1]
    out = first.new_empty((num_rows, *first.shape[2:]))
    for group, block in blocks:
        out[group.rows] = block.flatten(0, 1)
    return out


class StepBatch:
    """Segments of live sequences. Nothing is committed here; the states hold the rows as pending."""

    def __init__(self, segments: Sequence[tuple[SequenceState, Sequence[int]]], device: torch.device) -> None:
        self.states = [state for state, _ in segments]
        flat: list[int] = []
        positions: list[int] = []
        starts: list[int] = []
        for state, ids in segments:
            assert len(ids) > 0, "a segment needs at least one token"
            state.begin(ids)
            starts.append(len(flat))
            flat.extend(ids)
            positions.extend(range(state.num_tokens, state.num_tokens + len(ids)))
        self.ids = torch.tensor(flat, dtype=torch.long, device=device)
        self.positions = torch.tensor(positions, dtype=torch.long, device=device)
        lengths = [len(ids) for _, ids in segments]
        self.starts, self.lengths = starts, lengths
        self.attention_units = tuple(
            Group(slice(a, a + n), 1, n, self.states[i].num_tokens, (i,))
            for i, (a, n) in enumerate(zip(starts, lengths, strict=True))
        )
        self.recurrent_groups = tuple(self._group(n) for n in sorted(set(lengths)))

    def _group(self, length: int) -> Group:
        members = tuple(i for i, n in enumerate(self.lengths) if n == length)
        begin = self.starts[members[0]]
        if members == tuple(range(members[0], members[-1] + 1)):
            rows: Rows = slice(begin, begin + length * len(members))
        else:
            steps = torch.arange(length)
            rows = torch.cat([self.starts[i] + steps for i in members]).to(self.ids.device)
        return Group(rows, len(members), length, -1, members)

    def previous_ids(self, group: Group) -> torch.Tensor:
        ids = [self.states[i].previous_ids for i in group.members]
        return torch.tensor(ids, dtype=torch.long, device=self.ids.device)

    def recurrent(self, kda_index: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """Tails and committed states of a group; commits that the last step deferred are written first."""
        pool = self.states[group.members[0]].pool
        pool.replay(kda_index, [self.states[i] for i in group.members])
        slots = [self.states[i].slot for i in group.members]
        if len(slots) == 1:
            at = slice(slots[0], slots[0] + 1)
            return pool.tails[kda_index, at], pool.states[kda_index, at]
        return pool.tails[kda_index, slots], pool.states[kda_index, slots]

    def keep_recurrent(self, kda_index: int, group: Group, rows: KdaRows) -> None:
        for row, i in enumerate(group.members):
            fields = (rows.u, rows.k, rows.v, rows.g, rows.beta, rows.final)
            self.states[i].keep(kda_index, KdaRows(*(x[row] for x in fields)))

    def extend_dense(self, layer: int, unit: Group, k: torch.Tensor, v: torch.Tensor) -> ReadRows:
        cache = self.states[unit.members[0]].kv[layer]
        assert isinstance(cache, DenseKv)
        return cache.extend(unit.first, k[0], v[0])

    def extend_window(
        self, layer: int, unit: Group, k: torch.Tensor, v: torch.Tensor, index_key: torch.Tensor
    ) -> WindowView:
        cache = self.states[unit.members[0]].kv[layer]
        assert isinstance(cache, WindowKv)
        return cache.extend(unit.first, k[0], v[0], index_key[0])


class FreshBatch:
    """B rows of T tokens, all from position 0, all state zero, nothing kept."""

    def __init__(
        self, ids: torch.Tensor, *, num_previous: int, window: int, compress: int, shapes: "FreshShapes"
    ) -> None:
        batch, length = ids.shape
        self.ids = ids.reshape(-1)
        self.positions = torch.arange(length, device=ids.device).repeat(batch)
        group = Group(slice(0, batch * length), batch, length, 0, tuple(range(batch)))
        self.recurrent_groups: tuple[Group, ...] = (group,)
        self.attention_units: tuple[Group, ...] = (group,)
        self._num_previous, self._window, self._compress, self._shapes = num_previous, window, compress, shapes

    def previous_ids(self, group: Group) -> torch.Tensor:
        return self.ids.new_full((group.batch, self._num_previous), -1)

    def recurrent(self, kda_index: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.ids.device
        tail = torch.zeros((group.batch, *self._shapes.conv_tail), device=device)
        return tail, torch.zeros((group.batch, *self._shapes.kda_state), device=device)

    def keep_recurrent(self, kda_index: int, group: Group, rows: KdaRows) -> None:
        """Nothing outlives a fresh batch."""

    def extend_dense(self, layer: int, unit: Group, k: torch.Tensor, v: torch.Tensor) -> ReadRows:
        return lambda a, z: (k[:, a:z], v[:, a:z])

    def extend_window(
        self, layer: int, unit: Group, k: torch.Tensor, v: torch.Tensor, index_key: torch.Tensor
    ) -> WindowView:
        num_far = visible_far_blocks(unit.length - 1, self._window, self._compress)
        size = num_far * self._compress

        def pool(x: torch.Tensor) -> torch.Tensor:
            return x[:, :size].unflatten(1, (num_far, self._compress)).mean(2)

        return WindowView(k, v, 0, TensorFar(pool(k), pool(v), pool(index_key)))


@dataclass(frozen=True)
class FreshShapes:
    """Per-sequence sizes a FreshBatch fills with zeros (StateShapes has the same fields)."""

    conv_tail: tuple[int, int]
    kda_state: tuple[int, int, int]
