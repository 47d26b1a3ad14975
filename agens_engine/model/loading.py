"""From a model folder to a ready Volundr: config parsed, every tensor accounted for, weights widened to float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from agens_engine.errors import UsageError
from agens_engine.model.checkpoint import Checkpoint, open_checkpoint
from agens_engine.model.config import ModelConfig, expected_shapes, parse_config
from agens_engine.model.volundr import Volundr
from agens_planner import classify, weight_line

DTYPES = {"auto": torch.float32, "float32": torch.float32}
ONE_THREAD_BELOW = 512  # hidden size
Adopt = Callable[[str, torch.Tensor], torch.Tensor]
_HOST_LINES = {"embedding": "host.embedding", "engram_table": "host.engram_tables"}


def load_model(folder: str | Path, *, device: torch.device, dtype: str = "auto", adopt: Adopt | None = None) -> Volundr:
    """Load the text model of a folder.

    dtype    what weights and activations are computed in; only float32 so far
    adopt    called with (plan line, tensor) for every weight before it is used, to count it; may refuse
    raises   CheckpointError or ConfigError naming the file and the tensor, UsageError for a dtype that is not available
    """
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not available yet; this version computes in float32 (--dtype float32)")
    with open_checkpoint(folder) as checkpoint:
        config = _verified_config(checkpoint)
        with torch.device("meta"):
            model = Volundr(config)
        _fill(model, checkpoint, device, DTYPES[dtype], adopt)
    if device.type == "cpu" and config.hidden_size < ONE_THREAD_BELOW:
        # steps of a few milliseconds gain nothing from more threads, and lose much when the cores are busy elsewhere
        torch.set_num_threads(1)
    return model.requires_grad_(False).eval()


def check_model(folder: str | Path) -> None:
    """Read all headers and account for every tensor, without loading one. Raises as load_model does."""
    with open_checkpoint(folder) as checkpoint:
        _verified_config(checkpoint)


def _verified_config(checkpoint: Checkpoint) -> ModelConfig:
    config = parse_config(checkpoint.config, {name: entry.shape for name, entry in checkpoint.tensors.items()})
    checkpoint.verify(expected_shapes(config))
    return config


def plan_line(name: str) -> str:
    """The plan's line for an unpacked float32 weight."""
    kind = classify(name)
    assert kind is not None, name
    return _HOST_LINES.get(kind) or weight_line(kind, None, "float32")


def _fill(
    model: nn.Module, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, adopt: Adopt | None
) -> None:
    """Put each tensor where its name says; one tensor at a time, so the host holds no second copy of the model."""
    for name, _ in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        weight = checkpoint.read(name, dtype).to(device)
        if adopt is not None:
            weight = adopt(plan_line(name), weight)
        setattr(module, leaf, nn.Parameter(weight, requires_grad=False))


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
