"""Which quantised linears can stay packed, how large they then are, and how they get there from their containers.

survey_packed   before the plan: the exact size of each, found by looking at the codes (or in the repack cache)
repack_entry    at load: container words -> device layout, written straight into the buffer that the caller claims
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np

from agens_engine.errors import CheckpointError
from agens_engine.model.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from agens_engine.model.repack_cache import RepackCache
from agens_planner import TensorSpec, classify
from agens_quant.compressed_tensors import QuantFormatError
from agens_quant.format import DeviceFormat, PackedTensor
from agens_quant.repack import NotPackableError, device_format, repack_tensor

# Linears that the model only ever calls; other weights are read as tensors by some op and are unpacked at load.
PACKABLE_KINDS = frozenset({"mlp", "attention", "kda", "indexer", "engram", "head"})
MAX_READERS = 8  # threads that hold scratch at once, up to 60 MiB each when they decode


def survey_packed(folder: str | Path, cache: RepackCache | None = None) -> dict[str, TensorSpec]:
    """The linears of a model folder that can stay packed, by name, with their exact bytes in the device layout.

    raises  CheckpointError naming the file and the tensor
    """
    with open_checkpoint(folder) as checkpoint, ThreadPoolExecutor(MAX_READERS) as pool:
        entries = [entry for entry in checkpoint.tensors.values() if _candidate(entry)]
        found = pool.map(lambda entry: _survey(checkpoint, entry, cache), entries)
        return {spec.name: spec for spec in found if spec is not None}


def _candidate(entry: TensorEntry) -> bool:
    return entry.layout is not None and classify(entry.name) in PACKABLE_KINDS


def _survey(checkpoint: Checkpoint, entry: TensorEntry, cache: RepackCache | None) -> TensorSpec | None:
    assert entry.layout is not None
    header = cache.header(cache.key(checkpoint, entry)) if cache is not None else None
    form: DeviceFormat
    if header is not None:
        form, columns = header.format, header.padded_columns
    else:
        with checkpoint.naming(entry.name):
            try:
                form, columns = device_format(entry.layout, checkpoint.parts(entry.name))
            except NotPackableError:
                return None
    size = form.nbytes(entry.shape[0], columns)
    return TensorSpec(entry.name, entry.shape, Fraction(form.bits), form.group_size, form.zero_points, size)


def repack_entry(
    checkpoint: Checkpoint,
    spec: TensorSpec,
    allocate: Callable[[int], np.ndarray],
    *,
    cache: RepackCache | None = None,
    workers: int | None = None,
) -> PackedTensor:
    """One surveyed linear in the device layout, from the cache when it has a sound copy.

    allocate  gives the uint8 buffer for the surveyed number of bytes; called once
    raises    CheckpointError naming the file and the tensor, also when the file is not the one that was surveyed
    """
    entry = checkpoint.entry(spec.name)
    assert entry.layout is not None

    def claim(nbytes: int) -> np.ndarray:
        if nbytes != spec.packed_bytes:
            raise CheckpointError(f"{entry.file}: {spec.name} changed while the model was loading; start again")
        return allocate(nbytes)

    buffer: np.ndarray | None = None
    key = cache.key(checkpoint, entry) if cache is not None else ""
    if cache is not None:
        cached, buffer = cache.load(key, claim)
        if cached is not None:
            return cached
    target = buffer
    with checkpoint.naming(spec.name):
        packed = repack_tensor(
            entry.layout,
            checkpoint.parts(spec.name),
            workers=workers,
            allocate=claim if target is None else lambda nbytes: _reuse(target, nbytes),
        )
    if cache is not None:
        cache.store(key, packed)
    return packed


def _reuse(buffer: np.ndarray, nbytes: int) -> np.ndarray:
    """The buffer that a bad cache entry was read into, for the same tensor."""
    if nbytes != buffer.size:
        raise QuantFormatError("the repack cache and the file disagree about its size; empty the cache")
    return buffer
