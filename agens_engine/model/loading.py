"""From a model folder to a ready Volundr: config parsed, every tensor accounted for, weights put where the plan wants.

    mapped file ──► decoded to float32 (several tensors at once) ──► adopted by the arena ──► nn.Parameter
                └─► repacked (one tensor at a time, all cores) into claimed storage ──► LowbitLinear

Nothing is held twice: beside the weights themselves there is scratch of at most 60 MiB a thread, MAX_READERS of them,
whatever the model's size.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from agens_engine.errors import UsageError
from agens_engine.memory.host_tables import pin_in_pieces
from agens_engine.model.checkpoint import Checkpoint, open_checkpoint
from agens_engine.model.config import ModelConfig, expected_shapes, parse_config
from agens_engine.model.load_progress import LoadProgress
from agens_engine.model.lowbit_linear import LowbitLinear
from agens_engine.model.packed_weights import MAX_READERS, repack_entry
from agens_engine.model.repack_cache import RepackCache
from agens_engine.model.volundr import Volundr
from agens_engine.model.weight_table import table_lines, weight_rows
from agens_planner import TensorSpec, classify, weight_line
from agens_quant.format import empty_blob

log = logging.getLogger(__name__)

DTYPES = {"auto": torch.float32, "float32": torch.float32}
ONE_THREAD_BELOW = 512  # hidden size
_HOST_LINES = {"embedding": "host.embedding", "engram_table": "host.engram_tables"}


class WeightMemory(Protocol):
    """Where weights go and are counted; memory/arena.py in an engine. Either may refuse with a PlanError."""

    def adopt(self, line: str, tensor: torch.Tensor) -> torch.Tensor: ...

    def claim(self, line: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor: ...


def load_model(
    folder: str | Path,
    *,
    device: torch.device,
    dtype: str = "auto",
    memory: WeightMemory | None = None,
    packed: Mapping[str, TensorSpec] | None = None,
    cache: RepackCache | None = None,
    map_tables: bool = False,
) -> Volundr:
    """Load the text model of a folder. Embedding and Engram tables stay in the type they are stored in.

    dtype    what weights and activations are computed in; only float32 so far
    memory   counts every weight against its plan line; None: nobody counts
    packed   the linears that stay packed, as survey_packed found them; None: all are decoded to float32
    cache    where repacked weights are kept between starts
    map_tables   tables are read from the mapped file, row by row, and take no memory of the plan
    raises   CheckpointError or ConfigError naming the file and the tensor, UsageError for a dtype that is not available
    """
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not available yet; this version computes in float32 (--dtype float32)")
    with open_checkpoint(folder) as checkpoint:
        config = _verified_config(checkpoint)
        with torch.device("meta"):
            model = Volundr(config)
        tables = host_tables(config)
        _fill(model, checkpoint, device, DTYPES[dtype], memory, packed or {}, cache, tables, map_tables)
    if device.type == "cpu" and config.hidden_size < ONE_THREAD_BELOW:
        # steps of a few milliseconds gain nothing from more threads, and lose much when the cores are busy elsewhere
        torch.set_num_threads(1)
    return model.requires_grad_(False).eval()


def check_model(folder: str | Path) -> ModelConfig:
    """Read all headers and account for every tensor, without loading one. Raises as load_model does."""
    with open_checkpoint(folder) as checkpoint:
        return _verified_config(checkpoint)


def _verified_config(checkpoint: Checkpoint) -> ModelConfig:
    config = parse_config(checkpoint.config, {name: entry.shape for name, entry in checkpoint.tensors.items()})
    checkpoint.verify(expected_shapes(config))
    return config


def plan_line(name: str, bits: Fraction | None = None) -> str:
    """The plan's line for a weight; bits None: unpacked, float32."""
    kind = classify(name)
    assert kind is not None, name
    return _HOST_LINES.get(kind) or weight_line(kind, bits, "float32")


def _fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    memory: WeightMemory | None,
    packed: Mapping[str, TensorSpec],
    cache: RepackCache | None,
    tables: frozenset[str],
    map_tables: bool,
) -> None:
    """Put each tensor where its name says, the packed ones first."""
    names = [name for name, _ in model.named_parameters()]
    held: dict[str, tuple[str, int]] = {}
    total = sum(checkpoint.entry(name).nbytes for name in names)
    with LoadProgress(f"loading {checkpoint.folder.name}", total) as progress:
        for name in (n for n in names if n in packed):
            linear = _lowbit(checkpoint, packed[name], memory, cache)
            held[name] = str(linear.format), linear.nbytes
            model.set_submodule(name.removesuffix(".weight"), linear)
            progress.advance(checkpoint.entry(name).nbytes)
        for name, weight in _decoded(checkpoint, (n for n in names if n not in packed), dtype, tables):
            if name not in tables:
                weight = weight.to(device)
            elif not map_tables:
                weight = weight.clone()
                if device.type == "cuda":
                    log.info("%s: %s", name, pin_in_pieces(weight))
            if memory is not None and not (map_tables and name in tables):
                weight = memory.adopt(plan_line(name), weight)
            held[name] = str(weight.dtype).removeprefix("torch."), weight.nbytes
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(weight, requires_grad=False))
            progress.advance(checkpoint.entry(name).nbytes)
    entries = (checkpoint.entry(name) for name in names)
    for line in table_lines(weight_rows((e.name, e.format, e.nbytes, *held[e.name]) for e in entries)):
        log.info("%s", line)


def _lowbit(
    checkpoint: Checkpoint, spec: TensorSpec, memory: WeightMemory | None, cache: RepackCache | None
) -> LowbitLinear:
    """One linear in the device layout, in storage of its plan line."""

    def allocate(nbytes: int) -> np.ndarray:
        if memory is None:
            return empty_blob(nbytes)
        claimed: np.ndarray = memory.claim(plan_line(spec.name, spec.bits), (nbytes,), torch.uint8).numpy()
        return claimed

    return LowbitLinear(repack_entry(checkpoint, spec, allocate, cache=cache))


def host_tables(config: ModelConfig) -> frozenset[str]:
    """Weights that are gathered by row and stay on the host; an embedding that is the head too is not one of them."""
    names = (name for name in expected_shapes(config) if classify(name) in _HOST_LINES)
    return frozenset(n for n in names if not (config.tie_embeddings and classify(n) == "embedding"))


def _decoded(
    checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype, tables: frozenset[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in the order of the names, decoded by as many threads as there are cores, a few tensors ahead.

    tables   these are given as views of the mapped file
    """
    readers = min(MAX_READERS, os.cpu_count() or 1)
    ahead: deque[tuple[str, Future[torch.Tensor]]] = deque()
    with ThreadPoolExecutor(readers) as pool:
        try:
            for name in names:
                ahead.append((name, pool.submit(checkpoint.read, name, None if name in tables else dtype)))
                if len(ahead) > readers:
                    done, future = ahead.popleft()
                    yield done, future.result()
            while ahead:
                done, future = ahead.popleft()
                yield done, future.result()
        finally:
            for _, future in ahead:
                future.cancel()


def pick_device(name: str) -> torch.device:
    """`auto` is the CPU: the float32 reference is all there is so far. Raises UsageError for an unusable device."""
    if name == "auto":
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name} is not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: this machine has no usable CUDA device; use --device cpu")
    return device
