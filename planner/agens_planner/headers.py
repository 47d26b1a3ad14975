"""Safetensors headers: which tensors a folder holds, their types and shapes, without reading a weight.

File layout: 8 bytes little-endian length N, N bytes of JSON {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from agens_planner.errors import PlannerInputError

_DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorHeader:
    """One stored tensor. dtype in safetensors' spelling (BF16, I32, ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def value_bytes(self) -> int:
        return _DTYPE_BYTES[self.dtype]


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file.

    raises  PlannerInputError naming the file when it is missing, cut short, not safetensors, or contradicts itself
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise PlannerInputError(f"{path}: not a safetensors file, or cut short ({size} bytes)")
            header = json.loads(file.read(length))
    except OSError as error:
        raise PlannerInputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise PlannerInputError(f"{path}: the safetensors header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise PlannerInputError(f"{path}: the safetensors header is not an object")
    return {
        name: _entry(path, name, entry, size - 8 - length) for name, entry in header.items() if name != "__metadata__"
    }


def _entry(path: Path, name: str, entry: object, data_bytes: int) -> TensorHeader:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]  # type: ignore[index]
        if not isinstance(dtype, str) or not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise PlannerInputError(f"{path}: the header entry of {name} is malformed") from error
    element = _DTYPE_BYTES.get(dtype)
    if element is not None and end - begin != math.prod(shape) * element:
        raise PlannerInputError(f"{path}: {name} claims shape {shape} of {dtype} but stores {end - begin} bytes")
    if end > data_bytes:
        raise PlannerInputError(f"{path}: cut short: {name} ends at byte {end} of {data_bytes}")
    return TensorHeader(name, dtype, tuple(shape), path.name)


def read_folder(folder: Path) -> dict[str, TensorHeader]:
    """All tensors of a checkpoint folder: through its index, else model.safetensors, else every *.safetensors file.

    raises  PlannerInputError: no weights, an index that names a shard or a tensor that is not there, a tensor twice
    """
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        return _read_indexed(folder, index_path)
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise PlannerInputError(f"{folder}: no *.safetensors file")
    found: dict[str, TensorHeader] = {}
    for path in files:
        for name, header in read_header(path).items():
            if name in found:
                raise PlannerInputError(f"{folder}: {name} is stored twice, in {found[name].file} and {header.file}")
            found[name] = header
    return found


def _read_indexed(folder: Path, index_path: Path) -> dict[str, TensorHeader]:
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlannerInputError(f"{index_path}: not a safetensors index with a weight_map") from error
    shards: dict[str, dict[str, TensorHeader]] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise PlannerInputError(f"{index_path.name} names {shard}, which is not in {folder}; download it again")
        shards[shard] = read_header(folder / shard)
    missing = sorted(name for name, shard in weight_map.items() if name not in shards[shard])
    if missing:
        raise PlannerInputError(
            f"{folder}: {index_path.name} lists {missing[0]} in {weight_map[missing[0]]}, which does not hold it "
            f"({len(missing)} such tensors); the download is incomplete or mixed"
        )
    return {name: shards[shard][name] for name, shard in weight_map.items()}
