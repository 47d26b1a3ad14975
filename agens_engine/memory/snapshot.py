"""A copy of one sequence's memory: full pages by reference, the rest copied to host memory; or everything copied.

Tensors by name, each with the rows of all positions or, in a Snapshot, those behind its shared pages:

    num_tokens [1], previous_ids [M], pooled [window layers]       int64
    state.kda [L, Hv, Dk, Dv], state.conv [L, K-1, ch]             recurrent state
    kv.LAYER.k, .v [n, Hkv, D]                                     dense layers, by position
    block_keys.LAYER [n, Di], far.LAYER.k, .v [n, Hkv, D]          window layers, by far block
    ring.LAYER.k, .v, .index                                       window layers: the last rows before num_tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from agens_engine.memory.kv import DenseKv, WindowKv
from agens_engine.memory.pages import PagedRows, PagePool, PageTable


class Shapes(Protocol):
    """What of a StateShapes matters here."""

    @property
    def window_layers(self) -> tuple[int, ...]: ...

    @property
    def compress(self) -> int: ...


class Pool(Protocol):
    """What of a StatePool matters here."""

    context_tokens: int
    page_bytes: int
    pages: PagePool
    paged: dict[str, torch.Tensor]
    states: torch.Tensor
    tails: torch.Tensor

    @property
    def shapes(self) -> Shapes: ...


class State(Protocol):
    """What of a SequenceState matters here."""

    slot: int
    num_tokens: int
    previous_ids: list[int]
    kv: dict[int, DenseKv | WindowKv]
    table: PageTable

    @property
    def pool(self) -> Pool: ...

    def paged_rows(self, name: str) -> PagedRows: ...

    def reserve(self, num_tokens: int) -> None: ...


class Snapshot:
    """A sequence's memory after `num_tokens` tokens. Holds page references until `release`.

    pages   the full pages it shares, positions 0 .. len(pages) * page_tokens - 1
    """

    def __init__(self, pool: Pool, pages: tuple[int, ...], tensors: dict[str, torch.Tensor]) -> None:
        self._pool, self.pages, self.tensors = pool, pages, tensors
        self.num_tokens = int(tensors["num_tokens"])
        self.previous_ids: list[int] = tensors["previous_ids"].tolist()

    @property
    def num_bytes(self) -> int:
        """Host bytes of its own copies."""
        return sum(x.numel() * x.element_size() for x in self.tensors.values())

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages it keeps alive, which others may hold too."""
        return len(self.pages) * self._pool.page_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of what `to_host` gives."""
        shared = 0
        for name, total, _ in _paged_rows(self._pool, self.num_tokens, self.tensors["pooled"].tolist()):
            storage = self._pool.paged[name]
            shared += min(total, len(self.pages) * storage.shape[1]) * storage[0, 0].numel() * storage.element_size()
        return self.num_bytes + shared

    def release(self) -> None:
        """Give the page references back; nothing to do the second time. The copies go with the object."""
        self._pool.pages.release(self.pages)
        self.pages, self.tensors = (), {}

    def to_host(self) -> dict[str, torch.Tensor]:
        """Everything as CPU tensors that depend on no page; the snapshot is released."""
        assert self.tensors, "the snapshot was released"
        tensors = dict(self.tensors)
        pages = torch.tensor(self.pages, dtype=torch.long)
        for name, total, _ in _paged_rows(self._pool, self.num_tokens, tensors["pooled"].tolist()):
            storage = self._pool.paged[name]
            shared = storage.index_select(0, pages.to(storage.device)).flatten(0, 1)[:total]
            tensors[name] = torch.cat((shared.cpu(), tensors[name]))
        self.release()
        return tensors


def _paged_rows(pool: Pool, num_tokens: int, pooled: list[int]) -> Iterator[tuple[str, int, int]]:
    """(storage name, rows of a sequence of this length, tokens per row)."""
    shapes = pool.shapes
    far = dict(zip(shapes.window_layers, pooled, strict=True))
    for name in pool.paged:
        kind, layer = name.split(".")[:2]
        if kind == "kv":
            yield name, num_tokens, 1
        else:
            blocks = num_tokens // shapes.compress if kind == "block_keys" else far[int(layer)]
            yield name, blocks, shapes.compress


def _windows(state: State) -> Iterator[tuple[int, WindowKv]]:
    for layer in state.pool.shapes.window_layers:
        cache = state.kv[layer]
        assert isinstance(cache, WindowKv)
        yield layer, cache


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.to("cpu", copy=True).contiguous()


def take_snapshot(state: State) -> Snapshot:
    """What SequenceState.snapshot gives; the state must be flushed."""
    pool, length = state.pool, state.num_tokens
    pages = tuple(state.table.pages[: length // pool.pages.page_tokens])
    pooled = [cache.pooled for _, cache in _windows(state)]
    tensors = {
        "num_tokens": torch.tensor([length]),
        "previous_ids": torch.tensor(state.previous_ids, dtype=torch.long),
        "pooled": torch.tensor(pooled, dtype=torch.long),
        "state.kda": _copy(pool.states[:, state.slot]),
        "state.conv": _copy(pool.tails[:, state.slot]),
    }
    for layer, cache in _windows(state):
        tensors |= {f"ring.{layer}.{part}": _copy(rows) for part, rows in cache.save(length).items()}
    for name, total, per_row in _paged_rows(pool, length, pooled):
        rows = state.paged_rows(name)
        shared = len(pages) * pool.pages.page_tokens // per_row
        tensors[name] = _copy(rows.read(min(total, shared), total))
    pool.pages.share(pages)
    return Snapshot(pool, pages, tensors)


def load_snapshot(state: State, source: Snapshot | Mapping[str, torch.Tensor]) -> None:
    """Fill a state that holds nothing; see SequenceState.restore."""
    pool = state.pool
    pages, tensors = (source.pages, source.tensors) if isinstance(source, Snapshot) else ((), source)
    windows = dict(_windows(state))
    length = int(_get(tensors, "num_tokens", (1,), torch.long))
    pooled = _get(tensors, "pooled", (len(windows),), torch.long).tolist()
    previous = _get(tensors, "previous_ids", (len(state.previous_ids),), torch.long).tolist()
    if not 0 <= length <= pool.context_tokens:
        raise ValueError(f"num_tokens: {length} tokens do not fit a context of {pool.context_tokens}")
    states, tails = pool.states[:, state.slot], pool.tails[:, state.slot]
    states.copy_(_get(tensors, "state.kda", tuple(states.shape), states.dtype))
    tails.copy_(_get(tensors, "state.conv", tuple(tails.shape), tails.dtype))
    state.table.adopt(pages)
    state.reserve(length)
    for name, total, per_row in _paged_rows(pool, length, pooled):
        storage = pool.paged[name]
        first = min(total, len(pages) * pool.pages.page_tokens // per_row)
        rows = _get(tensors, name, (total - first, *storage.shape[2:]), storage.dtype)
        state.paged_rows(name).write(first, rows.to(storage.device))
    for (layer, cache), blocks in zip(windows.items(), pooled, strict=True):
        saved = {part: _get(tensors, f"ring.{layer}.{part}", None, states.dtype) for part in ("k", "v", "index")}
        for part, buffer in (("k", cache.k), ("v", cache.v), ("index", cache.index)):
            rows = saved[part]
            if rows.shape[1:] != buffer.data.shape[1:] or rows.shape[0] > min(length, buffer.data.shape[0]):
                raise ValueError(f"ring.{layer}.{part}: {list(rows.shape)} does not fit {list(buffer.data.shape)}")
        cache.load(saved, length, blocks)
    state.num_tokens, state.previous_ids = length, previous


def _get(
    tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...] | None, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of this shape (None: any) and type; raises ValueError naming the key."""
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(f"{name}: the snapshot has no such tensor")
    if tensor.dtype != dtype or (shape is not None and tuple(tensor.shape) != shape):
        wanted = "" if shape is None else f" {list(shape)}"
        raise ValueError(f"{name}: {list(tensor.shape)} {tensor.dtype}, expected{wanted} {dtype}")
    return tensor
