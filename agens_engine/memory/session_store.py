"""The session store: snapshots of sequence memory by the exact tokens that led to them, least recently used out first.

    key     token ids 0 .. L - 1, and the content hashes of the images that begin among them
    entry   all of: recurrent states, convolution tails, previous ids, K/V (full pages shared with live sequences),
            drafter context. There are no half entries, so a hit has everything (case G3)

A snapshot's own copies count against the host budget; the pages it shares stay on the device until somebody needs them.
Then the least recently used entries go: to the host while the budget holds them, else away (to a file, where there are
session files). One thread, the engine's, uses a store.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agens_engine.memory.snapshot import Snapshot

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
Name = tuple[int, bytes]  # length and digest of a prefix


class Prefix:
    """The tokens of a prompt, as something to look stored prefixes up by.

    images   (first position, content hash) of each image: all image tokens share one id, their content counts
    """

    def __init__(self, token_ids: Sequence[int] | np.ndarray, images: Sequence[tuple[int, str]] = ()) -> None:
        self.ids = np.asarray(token_ids, dtype=np.int32)
        self.images = tuple(sorted(images))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes

    def cut(self, length: int) -> Prefix:
        """The first `length` tokens, copied."""
        return Prefix(self.ids[:length].copy(), [(at, image) for at, image in self.images if at < length])

    def equals(self, other: Prefix) -> bool:
        return self.images == other.images and np.array_equal(self.ids, other.ids)

    def names(self, lengths: Iterable[int]) -> Iterator[Name]:
        """The name of each of these prefixes, shortest first; one pass over the tokens."""
        digest, done = hashlib.blake2b(digest_size=16), 0
        for length in sorted(set(lengths)):
            assert length <= len(self), f"no prefix of {length} tokens in {len(self)}"
            digest.update(self.ids[done:length].tobytes())
            done = length
            whole = digest.copy()
            whole.update(repr([image for image in self.images if image[0] < length]).encode())
            yield length, whole.digest()

    @property
    def name(self) -> Name:
        return next(self.names([len(self)]))


@dataclass(eq=False)
class Entry:
    """One stored prefix. memory: a snapshot that shares pages, or all of it on the host; drafters: see SlotFiller."""

    prefix: Prefix
    memory: Snapshot | Tensors
    drafters: Tensors
    pinned: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.prefix)

    @property
    def num_bytes(self) -> int:
        """Host bytes that it holds."""
        own = self.memory.num_bytes if isinstance(self.memory, Snapshot) else size_of(self.memory)
        return own + size_of(self.drafters) + self.prefix.num_bytes


def size_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@dataclass
class StoreCounts:
    """What happened so far. refused: snapshots larger than the whole budget."""

    taken: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    moved_to_host: int = 0
    refused: int = 0


class SessionStore:
    """Entries in memory, at most budget_bytes of the host.

    on_evict   called with an entry that leaves memory, its tensors still usable; None: it is lost
    """

    def __init__(self, budget_bytes: int, on_evict: Callable[[Entry], None] | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.counts = StoreCounts()
        self.num_bytes = 0
        self._on_evict = on_evict
        self._entries: OrderedDict[Name, Entry] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Most recently used first."""
        return iter(list(reversed(self._entries.values())))

    def lengths(self, limit: int) -> set[int]:
        """Lengths of stored prefixes up to `limit` tokens."""
        return {length for length, _ in self._entries if length <= limit}

    def find(self, prompt: Prefix, limit: int) -> Entry | None:
        """The longest stored prefix of at most `limit` tokens; it becomes the most recently used."""
        for name in reversed(list(prompt.names(self.lengths(min(limit, len(prompt)))))):
            entry = self._entries.get(name)
            if entry is not None and entry.prefix.equals(prompt.cut(name[0])):
                self._entries.move_to_end(name)
                return entry
        return None

    def has(self, prefix: Prefix) -> bool:
        """Whether exactly this prefix is stored; if so it becomes the most recently used."""
        found = self.find(prefix, len(prefix))
        return found is not None and found.num_tokens == len(prefix)

    def put(self, entry: Entry) -> bool:
        """Take an entry in, dropping the least recently used ones for it; False: it alone is larger than the budget."""
        assert self._size(entry.memory) == entry.num_tokens, "a snapshot of other tokens"
        size = entry.num_bytes
        if size > self.budget_bytes:
            self.counts.refused += 1
            _release(entry)
            return False
        name = entry.prefix.name
        if name in self._entries:
            self._remove(name)
        while self.num_bytes + size > self.budget_bytes:
            self._evict(next(iter(self._entries)))
        self._entries[name] = entry
        self.num_bytes += size
        return True

    def make_room(self, num_bytes: int) -> None:
        """Evict until so many bytes fit, so that the budget holds even while a snapshot is being taken."""
        while self._entries and self.num_bytes + num_bytes > self.budget_bytes:
            self._evict(next(iter(self._entries)))

    def give_pages(self, is_enough: Callable[[], bool]) -> None:
        """Let go of device pages, the least recently used entry's first, until it is enough or none is left."""
        for name, entry in list(self._entries.items()):
            if is_enough():
                return
            if entry.pinned or not isinstance(entry.memory, Snapshot) or not entry.memory.pages:
                continue
            grown = self.num_bytes - entry.memory.num_bytes + entry.memory.host_bytes
            if grown > self.budget_bytes:
                self._evict(name)
                continue
            before = entry.num_bytes
            entry.memory = entry.memory.to_host()
            self.num_bytes += entry.num_bytes - before
            self.counts.moved_to_host += 1

    def drop(self, entry: Entry) -> None:
        """Forget an entry that turned out to be unusable."""
        self._remove(entry.prefix.name)

    def clear(self) -> None:
        for entry in self._entries.values():
            _release(entry)
        self._entries.clear()
        self.num_bytes = 0

    def snapshots(self) -> list[Snapshot]:
        """Those that share pages, for the pool's check."""
        return [entry.memory for entry in self._entries.values() if isinstance(entry.memory, Snapshot)]

    def check(self) -> None:
        """Assert that the bytes add up and are within the budget."""
        held = sum(entry.num_bytes for entry in self._entries.values())
        assert self.num_bytes == held <= self.budget_bytes, (self.num_bytes, held, self.budget_bytes)
        assert not any(entry.pinned for entry in self._entries.values()), "an entry stayed pinned"

    def _evict(self, name: Name) -> None:
        self.counts.evicted += 1
        entry = self._forget(name)
        try:
            if self._on_evict is not None:
                self._on_evict(entry)
        finally:
            _release(entry)

    def _remove(self, name: Name) -> None:
        _release(self._forget(name))

    def _forget(self, name: Name) -> Entry:
        entry = self._entries.pop(name)
        self.num_bytes -= entry.num_bytes
        return entry

    @staticmethod
    def _size(memory: Snapshot | Tensors) -> int:
        return memory.num_tokens if isinstance(memory, Snapshot) else int(memory["num_tokens"])


def _release(entry: Entry) -> None:
    if isinstance(entry.memory, Snapshot):
        entry.memory.release()
