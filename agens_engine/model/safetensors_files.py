"""Which weight files a model folder has and what their headers say. Reads headers only, never tensor data.

Order of preference (spec volundr-weights.md, last table): an index and its shards, else model.safetensors, else every
*.safetensors of the folder. Everything a broken download can do to these files is refused here, with the file named.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agens_engine.errors import CheckpointError

DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_LFS_POINTER = b"version https://git-lfs"
_PARTIAL_SUFFIXES = (".incomplete", ".part", ".partial", ".tmp", ".crdownload", ".download", ".aria2")
_NUMBERED_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors$")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a file header declares it; `disk_name` is its name in that file."""

    disk_name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the folder's weight files, by name on disk.

    raises  CheckpointError: no weights, a missing, truncated or malformed file, an index that contradicts the shards,
            one tensor in two files
    """
    index = _find_index(folder)
    weight_map = _read_index(index) if index else {}
    files = _shards_of_index(folder, index, weight_map) if index else _files_without_index(folder)

    stored: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if (twin := stored.get(tensor.disk_name)) is not None:
                raise CheckpointError(
                    f"tensor {tensor.disk_name} is in two files, {twin.file.name} and {file.name} of {folder}; "
                    "the folder mixes two downloads: fetch the checkpoint again into an empty folder"
                )
            stored[tensor.disk_name] = tensor

    if index:
        _check_index(folder, index, weight_map, stored)
    return stored


def _find_index(folder: Path) -> Path | None:
    preferred = folder / "model.safetensors.index.json"
    if preferred.is_file():
        return preferred
    found = sorted(folder.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise CheckpointError(f"{folder} has {len(found)} index files ({_names(found)}); keep the one that is meant")
    return found[0] if found else None


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to file names; download the file again")
    if not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' is empty; download the file again")
    for name, shard in weight_map.items():
        if Path(shard).name != shard or shard in (".", ".."):
            raise CheckpointError(f"{index}: tensor {name} points outside the folder ({shard!r})")
    return weight_map


def _shards_of_index(folder: Path, index: Path, weight_map: dict[str, str]) -> list[Path]:
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.name} names {len(missing)} of {len(shards)} files that are not in {folder}: {', '.join(missing)}"
            f"{_partial_hint(folder)}; finish the download"
        )
    return [folder / shard for shard in shards]


def _files_without_index(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    files = sorted(p for p in folder.glob("*.safetensors") if p.is_file())
    if not files:
        others = sorted(p for pattern in ("*.gguf", "*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        hint = f" ({_names(others)} cannot be read: only safetensors is)" if others else ""
        raise CheckpointError(f"{folder} has no *.safetensors file{hint}{_partial_hint(folder)}")
    missing = _missing_numbers(files)
    if missing:
        raise CheckpointError(
            f"{folder} has no index and lacks {', '.join(missing)}{_partial_hint(folder)}; finish the download"
        )
    return files


def _missing_numbers(files: list[Path]) -> list[str]:
    """Names of the shards that a 00001-of-00003 numbering promises and the folder does not hold."""
    present = {p.name for p in files}
    missing: set[str] = set()
    for m in filter(None, (_NUMBERED_SHARD.match(name) for name in present)):
        width, total = len(m["number"]), int(m["total"])
        if total > 10_000:
            continue  # not a shard count
        promised = (f"{m['stem']}-{i:0{width}d}-of-{m['total']}.safetensors" for i in range(1, total + 1))
        missing.update(name for name in promised if name not in present)
    return sorted(missing)


def _check_index(folder: Path, index: Path, weight_map: dict[str, str], stored: dict[str, StoredTensor]) -> None:
    wrong = [
        f"{name} (in {stored[name].file.name}, index says {shard})" if name in stored else f"{name} (not in {shard})"
        for name, shard in sorted(weight_map.items())
        if name not in stored or stored[name].file.name != shard
    ]
    if wrong:
        raise CheckpointError(
            f"{index.name} of {folder} and its files disagree about {len(wrong)} tensors: {', '.join(wrong)}; "
            "download the index and the named files again"
        )


def read_header(file: Path) -> list[StoredTensor]:
    """Tensors that one safetensors file declares, in the order of their data.

    raises  CheckpointError when the file is shorter or longer than it declares, or is no safetensors file
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            start = f.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise CheckpointError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
            if len(start) < 8:
                raise CheckpointError(f"{file} has {size} bytes, a safetensors header at least 8; download it again")
            header_bytes = int.from_bytes(start[:8], "little")
            if header_bytes > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{file} is no safetensors file (its header would have {header_bytes} bytes)")
            if 8 + header_bytes > size:
                raise CheckpointError(
                    f"{file} is cut off inside its header: {8 + header_bytes} bytes declared, {size} present; "
                    "download it again"
                )
            f.seek(8)
            raw = f.read(header_bytes)
    except OSError as e:
        raise CheckpointError(f"{file} cannot be read: {e.strerror or e}") from e

    tensors, end = _parse_header(file, raw)
    declared = 8 + header_bytes + end
    if declared != size:
        what = "cut off" if size < declared else "longer than its header says"
        raise CheckpointError(f"{file} is {what}: {declared} bytes declared, {size} present; download it again")
    return tensors


def _parse_header(file: Path, raw: bytes) -> tuple[list[StoredTensor], int]:
    """The tensors in data order and the end of the last one, relative to the data section."""
    try:
        header = json.loads(raw)
    except ValueError as e:  # covers malformed JSON and malformed UTF-8
        raise CheckpointError(f"{file} has a malformed safetensors header ({e}); download it again") from e
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a malformed safetensors header (no JSON object); download it again")

    placed: list[tuple[int, int, StoredTensor]] = []
    for name, entry in header.items():
        if name != "__metadata__":
            placed.append(_parse_entry(file, name, entry))
    placed.sort(key=lambda item: item[:2])
    position = 0
    for begin, end, tensor in placed:
        if begin != position:
            raise CheckpointError(
                f"{file}: data of tensor {tensor.disk_name} starts at byte {begin}, "
                f"the tensor before it ends at {position}; download it again"
            )
        position = end
    return [tensor for _, _, tensor in placed], position


def _parse_entry(file: Path, name: str, entry: Any) -> tuple[int, int, StoredTensor]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        well_formed = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(f"{file}: the header entry of tensor {name} is malformed; download it again")
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{file}: tensor {name} has dtype {dtype}; known are {', '.join(DTYPE_BYTES)}")
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != nbytes:
        raise CheckpointError(
            f"{file}: tensor {name} {list(shape)} {dtype} needs {nbytes} bytes, its header reserves {end - begin}"
        )
    return begin, end, StoredTensor(name, file, dtype, shape, nbytes)


def read_json_object(file: Path, error: type[CheckpointError] = CheckpointError) -> dict[str, Any]:
    """A JSON file whose top level is an object; `error` is raised with the file and the place otherwise."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise error(f"{file} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise error(f"{file} is not valid JSON ({e})") from e
    except RecursionError as e:
        raise error(f"{file} is not valid JSON (nested too deeply)") from e
    if not isinstance(value, dict):
        raise error(f"{file} must hold a JSON object, not a {type(value).__name__}")
    return value


def _partial_hint(folder: Path) -> str:
    hub_cache = folder / ".cache" / "huggingface" / "download"
    candidates = [*folder.iterdir(), *(hub_cache.rglob("*") if hub_cache.is_dir() else ())]
    partial = sorted(p for p in candidates if p.name.endswith(_PARTIAL_SUFFIXES))
    return f" (an unfinished download is there: {_names(partial)})" if partial else ""


def _names(paths: list[Path]) -> str:
    shown = ", ".join(p.name for p in paths[:3])
    return shown + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
