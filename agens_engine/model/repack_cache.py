"""Repacked weights kept on disk, so that the next start reads the narrow layout instead of making it again. Opt-in.

    DIR/seen/<stamp>        the content key of a tensor that was read before under this file name, size and time
    DIR/tensors/<key>       "AGENSPACK" | header length u32 | JSON header | its blake2b | blob | its blake2b

The key is a hash of everything the result depends on: the stored bytes, how they are packed, the layout's version.
Entries appear under their names only when complete (written beside, synced, renamed), one tensor each: an interrupted
load goes on where it stopped. An entry that is damaged, foreign or unreadable is named in a warning and made again;
a disk that is full or read-only costs the cache, not the load.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from agens_engine.errors import UsageError
from agens_engine.model.checkpoint import Checkpoint, TensorEntry
from agens_quant.compressed_tensors import QuantFormatError
from agens_quant.format import DeviceFormat, PackedTensor

log = logging.getLogger(__name__)

LAYOUT_VERSION = 1  # raise it when agens_quant.format or the choice of formats changes
_MAGIC = b"AGENSPACK"
_DIGEST = 32
_MAX_HEADER = 1 << 16
_BLOCK = 1 << 22
Allocate = Callable[[int], np.ndarray]


class _BadEntryError(Exception):
    """Why an entry cannot be used."""


@dataclass(frozen=True)
class PackedHeader:
    """What a packed tensor is, without its bytes."""

    shape: tuple[int, int]
    padded_columns: int
    format: DeviceFormat
    exponent: int

    @property
    def nbytes(self) -> int:
        return self.format.nbytes(self.shape[0], self.padded_columns)


class RepackCache:
    """One folder of repacked tensors; several processes may share it. raises UsageError when it cannot be made."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._writable = True
        self._lock = threading.Lock()  # several loading threads may find the disk full at once
        try:
            for name in ("seen", "tensors"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--repack-cache {folder} cannot be used: {error.strerror or error}") from error

    def key(self, checkpoint: Checkpoint, entry: TensorEntry) -> str:
        """The content key; the bytes are hashed the first time only, as long as file name, size and time stay."""
        seen = self.folder / "seen" / self._stamp(entry)
        try:
            known = seen.read_text(encoding="ascii")
        except (OSError, ValueError):
            known = ""
        if len(known) == 2 * _DIGEST and set(known) <= set("0123456789abcdef"):
            return known
        found = _hash(f"{LAYOUT_VERSION} {entry.layout!r}")
        for suffix, tensor in sorted(checkpoint.parts(entry.name).items()):
            found.update(f"{suffix} {tensor.dtype} {list(tensor.shape)} ".encode())
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        key = found.hexdigest()
        self._write(seen, [key.encode()])
        return key

    def header(self, key: str) -> PackedHeader | None:
        """What the entry holds, its blob unread; None when there is no usable entry."""
        try:
            with self._open(key) as file:
                return _read_header(file, key)
        except FileNotFoundError:
            return None
        except (OSError, _BadEntryError) as error:
            self._warn(key, error)
            return None

    def load(self, key: str, allocate: Allocate) -> tuple[PackedTensor | None, np.ndarray | None]:
        """Read an entry into a buffer of allocate(bytes), asked for once the header has proved sound.

        returns  (tensor, None); when only the blob was bad (None, the buffer, to be filled some other way);
                 (None, None) without a usable entry
        """
        blob: np.ndarray | None = None
        try:
            with self._open(key) as file:
                header = _read_header(file, key)
                blob = allocate(header.nbytes)
                _read_blob(file, blob)
        except FileNotFoundError:
            return None, None
        except (OSError, _BadEntryError) as error:
            self._warn(key, error)
            return None, blob
        return PackedTensor(header.shape, header.padded_columns, header.format, header.exponent, blob), None

    def store(self, key: str, packed: PackedTensor) -> None:
        """Keep a tensor; a failing disk ends the writing, with a warning."""
        about = {
            "key": key,
            "shape": packed.shape,
            "padded_columns": packed.padded_columns,
            "exponent": packed.exponent,
            "format": asdict(packed.format),
        }
        text = json.dumps(about).encode()
        head = _MAGIC + struct.pack("<I", len(text)) + text
        blob = packed.blob.data
        self._write(self.folder / "tensors" / key, [head, _hash(head).digest(), blob, _hash(blob).digest()])

    def _open(self, key: str) -> IO[bytes]:
        return (self.folder / "tensors" / key).open("rb")

    @staticmethod
    def _stamp(entry: TensorEntry) -> str:
        """Names a tensor by where it lies; whatever rewrites the file changes its size or its time."""
        stamp = _hash(f"{LAYOUT_VERSION} {entry.layout!r}")
        for suffix, stored in sorted(entry.parts.items()):
            facts = stored.file.stat()
            place = f"{suffix} {stored.file.resolve()} {stored.disk_name} {facts.st_size} {facts.st_mtime_ns} "
            stamp.update(place.encode("utf-8", "surrogateescape"))
        return stamp.hexdigest()

    def _write(self, file: Path, pieces: Iterable[bytes | memoryview]) -> None:
        if not self._writable:
            return
        try:
            handle, name = tempfile.mkstemp(prefix=".", dir=file.parent)
            try:
                with os.fdopen(handle, "wb") as out:
                    for piece in pieces:
                        out.write(piece)
                    out.flush()
                    os.fsync(out.fileno())
                os.replace(name, file)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            with self._lock:
                first, self._writable = self._writable, False
            if first:
                log.warning("repack cache %s: %s; nothing more is written there", self.folder, error.strerror or error)

    def _warn(self, key: str, error: Exception) -> None:
        log.warning("repack cache: %s is not usable (%s); making it again", self.folder / "tensors" / key, error)


def _read_header(file: IO[bytes], key: str) -> PackedHeader:
    """Check everything about an entry but its blob."""
    start = file.read(len(_MAGIC) + 4)
    if len(start) < len(_MAGIC) + 4 or not start.startswith(_MAGIC):
        raise _BadEntryError("no entry of this cache")
    (length,) = struct.unpack("<I", start[len(_MAGIC) :])
    text = file.read(length) if length <= _MAX_HEADER else b""
    if _hash(start + text).digest() != file.read(_DIGEST):
        raise _BadEntryError("its header is damaged")
    try:
        about: dict[str, Any] = json.loads(text)
        n, k = (int(value) for value in about["shape"])
        form = DeviceFormat(**about["format"])
        header = PackedHeader((n, k), int(about["padded_columns"]), form, int(about["exponent"]))
        size = header.nbytes
    except (ValueError, KeyError, TypeError, QuantFormatError) as error:
        raise _BadEntryError(f"its header makes no sense: {error}") from error
    if about.get("key") != key:
        raise _BadEntryError("it belongs to another tensor")
    if os.fstat(file.fileno()).st_size != file.tell() + size + _DIGEST:
        raise _BadEntryError("its length is wrong")
    return header


def _read_blob(file: IO[bytes], blob: np.ndarray) -> None:
    """Fill the buffer block by block, hashing on the way."""
    found, view = _hash(b""), blob.data
    for start in range(0, len(view), _BLOCK):
        block = view[start : start + _BLOCK]
        if file.readinto(block) != len(block):  # type: ignore[attr-defined]
            raise _BadEntryError("it is cut off")
        found.update(block)
    if found.digest() != file.read(_DIGEST):
        raise _BadEntryError("its checksum is wrong")


def _hash(data: bytes | memoryview | str) -> hashlib.blake2b:
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=_DIGEST)
