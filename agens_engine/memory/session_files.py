"""Stored sessions on disk, so that a conversation goes on after a restart. Opt-in (`--session-dir`).

    DIR/<digest>-<tokens>.session    magic | header length u32 | JSON header | safetensors blob | blake2b of all before

The header says which engine format, model and dtype the bytes belong to and which prefix they continue. A file appears
under its name only when it is complete (written beside, synced, renamed). One that is cut short, damaged, or of another
model or version is named in a warning and never loaded; it is left where it is. A disk that is full costs the file.
Files are written by a thread of their own, so that no stream waits for the disk; a write holds the entry's bytes once
more while it lasts. What is in memory is written when it is evicted and when the engine stops: a crash loses the rest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import struct
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from agens_engine.errors import UsageError
from agens_engine.memory.session_store import Entry, Name, Prefix, Tensors
from agens_engine.memory.snapshot import Snapshot

log = logging.getLogger(__name__)

FORMAT_VERSION = 1  # raise it when what a snapshot holds, or how it is laid out, changes
_MAGIC = b"AGENSSESSION"
_DIGEST = 32
_MAX_HEADER = 1 << 22
_SAMPLE = 1 << 20
_IDS, _MEMORY, _DRAFTERS = "token_ids", "memory.", "drafters."
_QUEUED = 2  # files that may wait for the writer; more are not worth their memory


class _BadFileError(Exception):
    """Why a file cannot be used."""


class SessionFiles:
    """One folder of sessions of one model.

    model        fingerprint of the weights
    dtype        of the engine's memory
    limit_bytes  of the whole folder; the files written longest ago go first
    raises       UsageError when the folder cannot be made
    """

    def __init__(self, folder: str | Path, *, model: str, dtype: str, limit_bytes: int) -> None:
        self.folder = Path(folder).expanduser()
        self.limit_bytes = limit_bytes
        self._identity = {"version": FORMAT_VERSION, "model": model, "dtype": dtype}
        self.num_written = self.num_loaded = self.num_ignored = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--session-dir {folder} cannot be used: {error.strerror or error}") from error
        self._files: dict[Name, Path] = {}
        self._lock = threading.Lock()
        for file in sorted(self.folder.glob("*.session")):
            if (name := self._name_of(file)) is not None:
                self._files[name] = file
        self._queue: queue.Queue[tuple[Prefix, Tensors, Tensors] | None] = queue.Queue(_QUEUED)
        self._writer = threading.Thread(target=self._write_queued, name="session files", daemon=True)
        self._writer.start()

    def __len__(self) -> int:
        return len(self._files)

    def find(self, prompt: Prefix, limit: int) -> Name | None:
        """The name of the longest prefix on disk of at most `limit` tokens."""
        with self._lock:
            known = set(self._files)
        lengths = {length for length, _ in known if length <= min(limit, len(prompt))}
        return next((name for name in reversed(list(prompt.names(lengths))) if name in known), None)

    def load(self, name: Name, prompt: Prefix) -> Entry | None:
        """Read a file; None, with a warning, when it is not what its name says."""
        with self._lock:
            file = self._files.get(name)
        if file is None:
            return None
        try:
            entry = self._read(file)
            if not entry.prefix.equals(prompt.cut(name[0])):
                raise _BadFileError("it holds other tokens than its name says")
        except (OSError, _BadFileError) as error:
            self._ignore(file, error)
            with self._lock:
                self._files.pop(name, None)
            return None
        self.num_loaded += 1
        return entry

    def save_later(self, entry: Entry) -> None:
        """Hand an entry to the writer; left out when the writer is behind."""
        if entry.prefix.name in self._files or self._queue.full():
            return
        memory = entry.memory.to_host() if isinstance(entry.memory, Snapshot) else entry.memory
        self._queue.put((entry.prefix, memory, entry.drafters))

    def close(self, entries: Iterable[Entry]) -> None:
        """Write what is still in memory, most recently used first as far as the limit goes, and end the thread."""
        self._queue.put(None)
        self._writer.join()
        left = self.limit_bytes
        for entry in entries:
            left -= entry.memory.host_bytes if isinstance(entry.memory, Snapshot) else entry.num_bytes
            if left < 0:
                break
            if entry.prefix.name not in self._files:
                memory = entry.memory.to_host() if isinstance(entry.memory, Snapshot) else entry.memory
                self._write(entry.prefix, memory, entry.drafters)

    # --- one file ----------------------------------------------------------------------------------------------------

    def _write_queued(self) -> None:
        while (item := self._queue.get()) is not None:
            self._write(*item)

    def _write(self, prefix: Prefix, memory: Tensors, drafters: Tensors) -> None:
        length, digest = name = prefix.name
        target = self.folder / f"{digest.hex()}-{length}.session"
        header = {**self._identity, "num_tokens": length, "digest": digest.hex(), "images": prefix.images}
        text = json.dumps(header).encode()
        tensors = {_IDS: torch.from_numpy(prefix.ids)}
        tensors |= {_MEMORY + key: value.contiguous() for key, value in memory.items()}
        tensors |= {_DRAFTERS + key: value.contiguous() for key, value in drafters.items()}
        head = _MAGIC + struct.pack("<I", len(text)) + text
        temporary = ""
        try:
            blob = safetensors.torch.save(tensors)
            size = len(head) + len(blob) + _DIGEST
            if size > self.limit_bytes:
                log.warning("a session of %d tokens takes %d bytes, more than %s may hold", length, size, self.folder)
                return
            checksum = hashlib.blake2b(head, digest_size=_DIGEST)
            checksum.update(blob)
            self._make_room(size)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            with os.fdopen(handle, "wb") as file:
                for piece in (head, blob, checksum.digest()):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except Exception as error:  # a full disk, no memory for the copy: the writer goes on, the session is lost
            log.warning("a session of %d tokens could not be written below %s: %s", length, self.folder, error)
            if temporary:
                Path(temporary).unlink(missing_ok=True)
            return
        with self._lock:
            self._files[name] = target
        self.num_written += 1

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            sizes = [(file.stat(), name, file) for name, file in self._files.items() if file.exists()]
            total = sum(stat.st_size for stat, _, _ in sizes)
            for stat, name, file in sorted(sizes, key=lambda item: item[0].st_mtime):
                if total + num_bytes <= self.limit_bytes:
                    return
                file.unlink(missing_ok=True)
                del self._files[name]
                total -= stat.st_size

    def _name_of(self, file: Path) -> Name | None:
        """What a file says it holds; the checksum is looked at when it is loaded."""
        try:
            with file.open("rb") as stream:
                head = stream.read(len(_MAGIC) + 4)
                header = self._header(head, stream.read(_header_size(head)))
            return int(header["num_tokens"]), bytes.fromhex(header["digest"])
        except (OSError, _BadFileError) as error:
            self._ignore(file, error)
            return None

    def _read(self, file: Path) -> Entry:
        data = memoryview(file.read_bytes())
        if len(data) < len(_MAGIC) + 4 + _DIGEST:
            raise _BadFileError("it is cut short")
        body, checksum = data[:-_DIGEST], data[-_DIGEST:]
        if hashlib.blake2b(body, digest_size=_DIGEST).digest() != bytes(checksum):
            raise _BadFileError("its checksum is wrong: it is damaged or cut short")
        head = bytes(body[: len(_MAGIC) + 4])
        begin = len(head) + _header_size(head)
        header = self._header(head, bytes(body[len(head) : begin]))
        tensors = safetensors.torch.load(bytes(body[begin:]))
        images = [(int(at), str(image)) for at, image in header["images"]]
        parts: dict[str, Tensors] = {_MEMORY: {}, _DRAFTERS: {}}
        for key, value in tensors.items():
            for part, found in parts.items():
                if key.startswith(part):
                    found[key.removeprefix(part)] = value
        return Entry(Prefix(tensors[_IDS].numpy(), images), parts[_MEMORY], parts[_DRAFTERS])

    def _header(self, head: bytes, text: bytes) -> dict[str, Any]:
        if not head.startswith(_MAGIC) or len(text) < _header_size(head):
            raise _BadFileError("it is cut short or not a session file")
        try:
            header: dict[str, Any] = json.loads(text)
            bytes.fromhex(header["digest"])
            int(header["num_tokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise _BadFileError("its header cannot be read") from error
        for key, wanted in self._identity.items():
            if header.get(key) != wanted:
                raise _BadFileError(f"its {key} is {header.get(key)!r}, this engine's is {wanted!r}")
        return header

    def _ignore(self, file: Path, error: Exception) -> None:
        self.num_ignored += 1
        log.warning("session file %s is ignored: %s", file, error)


def fingerprint(model_folder: Path) -> str:
    """Says whether two model folders hold the same weights, without reading them whole.

    A hash of config.json and, of each weight file, the name, the size and the first, middle and last MiB (the first
    holds the tensor table with names, shapes and offsets).
    """
    found = hashlib.blake2b(digest_size=16)
    files = [model_folder / "config.json", *sorted(model_folder.glob("*.safetensors"))]
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.name} {size}\0".encode())
        with file.open("rb") as stream:
            for at in sorted({0, max(0, size // 2), max(0, size - _SAMPLE)}):
                stream.seek(at)
                found.update(stream.read(_SAMPLE))
    return found.hexdigest()


def _header_size(head: bytes) -> int:
    if len(head) < len(_MAGIC) + 4:
        raise _BadFileError("it is cut short")
    size: int = struct.unpack("<I", head[len(_MAGIC) :])[0]
    if size > _MAX_HEADER:
        raise _BadFileError("its header is too long")
    return size
