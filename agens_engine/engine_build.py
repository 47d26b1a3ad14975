"""Writes an Engine build: 4-bit containers whose codes may come from smaller sets, every other tensor as it was.

    DST.partial/   filled shard by shard, then renamed to DST; removed whatever goes wrong

config.json gains a compressed-tensors `quantization_config` that any reader of the container understands, plus
`mixed_bits` and `bits_per_module` (published module name -> index bits) for planning. Nothing depends on the latter:
readers find the sets of codes by looking.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import safe_open
from torch import Tensor

from agens_engine.errors import AgensError
from agens_engine.model.checkpoint import Checkpoint, TensorEntry
from agens_engine.model.safetensors_files import StoredTensor

SHARD_BYTES = 1 << 30
_LEFT_OUT = (".py", ".safetensors", ".index.json")  # remote code is never copied, weights are written anew

Parts = Mapping[str, Tensor]


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """A full or broken disk becomes an AgensError that says where."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise AgensError(
                f"the disk that holds {folder} is full; free some space and run the same command again: "
                "finished layers are kept in the .work folder beside it"
            ) from error
        raise AgensError(f"cannot write below {folder}: {error.strerror or error}") from error


def save_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file under its final name only once it is complete."""
    temporary = file.with_name(file.name + ".tmp")
    data = safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()}, dict(metadata or {}))
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, file)


def read_stored(stored: StoredTensor) -> Tensor:
    """The bytes of one tensor of a weight file, as they are."""
    with safe_open(stored.file, framework="pt") as f:
        tensor: Tensor = f.get_tensor(stored.disk_name)
    return tensor


def write_build(
    checkpoint: Checkpoint, target: Path, quantised: Mapping[str, tuple[int, Parts]], summary: Mapping[str, Any]
) -> None:
    """Write the build and rename it to `target`.

    quantised  module -> (index bits, lazily read parts by suffix); a Mapping, so that one module is in memory at a time
    summary    group_size and whatever else quantization_config should say
    raises     AgensError for a disk that is full or a target that appeared meanwhile
    """
    partial = target.with_name(target.name + ".partial")
    with disk_errors(target.parent):
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            bits = _write_shards(checkpoint, partial, quantised)
            _write_config(checkpoint, partial, bits, summary)
            for file in sorted(checkpoint.folder.iterdir()):
                if file.is_file() and file.name != "config.json" and not file.name.endswith(_LEFT_OUT):
                    shutil.copyfile(file, partial / file.name)
            if target.exists():
                raise AgensError(f"{target} appeared while it was being made; nothing was overwritten")
            os.rename(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _write_shards(checkpoint: Checkpoint, folder: Path, quantised: Mapping[str, tuple[int, Parts]]) -> dict[str, int]:
    """Writes model.safetensors, or shards with an index; returns index bits by published module name."""
    shards: list[dict[str, str]] = []
    pending: dict[str, Tensor] = {}
    bits_by_module: dict[str, int] = {}

    def flush() -> None:
        name = f"shard-{len(shards):05d}.safetensors"
        save_tensors(folder / name, pending, {"format": "pt"})
        shards.append(dict.fromkeys(pending, name))
        pending.clear()

    sizes = 0
    for entry in _entries(checkpoint):
        module = entry.name.removesuffix(".weight")
        if entry.name.endswith(".weight") and module in quantised:
            bits, parts = quantised[module]
            published = _published(entry)
            bits_by_module[published] = bits
            tensors = {f"{published}.{suffix}": tensor for suffix, tensor in parts.items()}
        else:
            tensors = {stored.disk_name: read_stored(stored) for stored in entry.parts.values()}
        pending.update(tensors)
        sizes += sum(t.nbytes for t in tensors.values())
        if sizes >= SHARD_BYTES:
            flush()
            sizes = 0
    if pending or not shards:
        flush()
    _name_shards(folder, shards)
    return bits_by_module


def _name_shards(folder: Path, shards: list[dict[str, str]]) -> None:
    """The usual names, now that their number is known."""
    if len(shards) == 1:
        os.rename(folder / "shard-00000.safetensors", folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / f"shard-{number - 1:05d}.safetensors", folder / name)
        total += (folder / name).stat().st_size
        weight_map.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _write_config(checkpoint: Checkpoint, folder: Path, bits: Mapping[str, int], summary: Mapping[str, Any]) -> None:
    config = copy.deepcopy(checkpoint.config)
    if isinstance(config.get("text_config"), dict):
        config["text_config"].pop("quantization_config", None)
    group_size = summary["group_size"]
    ignore = [
        _published(entry)
        for entry in _entries(checkpoint)
        if entry.name.endswith(".weight") and len(entry.shape) == 2 and _published(entry) not in bits
    ]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignore,
        "mixed_bits": True,
        "bits_per_module": dict(bits),
        **summary,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _entries(checkpoint: Checkpoint) -> Iterator[TensorEntry]:
    for group in (checkpoint.tensors, checkpoint.mtp, checkpoint.vision):
        yield from group.values()


def _published(entry: TensorEntry) -> str:
    """The module's name as it is on disk."""
    stored = next(iter(entry.parts.values()))
    return stored.disk_name.rpartition(".")[0]
