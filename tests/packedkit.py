"""Random quantised Volundr checkpoints for tests: 2-, 3- and 4-bit values in 4-bit containers, several group sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agens_engine.model.config import parse_config
from agens_quant.compressed_tensors import pack_codes
from tests.modelkit import random_weights, tiny_config

# Codes that a tensor may use, by the bits that index them.
SETS: dict[int, tuple[int, ...]] = {2: (4, 7, 9, 12), 3: (1, 3, 6, 7, 8, 9, 11, 14), 4: tuple(range(16))}
WIDE = {"hidden_size": 256, "intermediate_size": 384}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
}
Recipe = Callable[[str, int], tuple[int, int, bool] | None]


def mixed(name: str, index: int) -> tuple[int, int, bool] | None:
    """(bits, group size, zero points) of the index-th linear: every combination of widths and groups comes up."""
    return 2 + index % 3, (32, 64, 128)[index // 3 % 3], index % 4 == 1


def quantised_parts(
    weight: torch.Tensor, bits: int, group: int, zeros: bool, seed: int = 0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Containers of the nearest codes of the set, and the weights they mean (float32)."""
    n, k = weight.shape
    allowed = torch.tensor(SETS[bits], dtype=torch.float32)
    zero = torch.full((n, k // group), 8.0)
    if zeros:
        zero += torch.randint(-2, 3, zero.shape, generator=torch.Generator().manual_seed(seed))
    grouped = weight.view(n, -1, group)
    scale = (grouped.abs().amax(2) / 5).bfloat16()
    scale[0] *= -1  # legal in symmetric exports
    wanted = grouped / scale.float().unsqueeze(2) + zero.unsqueeze(2)
    codes = allowed[torch.bucketize(wanted, (allowed[1:] + allowed[:-1]) / 2)]
    parts = {
        "weight_packed": torch.from_numpy(pack_codes(codes.reshape(n, k).numpy().astype(np.uint8), 4)),
        "weight_scale": scale,
        "weight_shape": torch.tensor([n, k]),
    }
    if zeros:
        parts["weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(pack_codes(zero.T.int().numpy(), 4).T))
    return parts, ((codes - zero.unsqueeze(2)) * scale.float().unsqueeze(2)).reshape(n, k)


def write_quantised(folder: Path, recipe: Recipe = mixed, seed: int = 0, **text: Any) -> Path:
    """A checkpoint whose linears with whole groups are quantised as the recipe says; the rest is bf16."""
    raw = tiny_config(**{**WIDE, **text}) | {"quantization_config": QUANTIZATION}
    tensors: dict[str, torch.Tensor] = {}
    index = 0
    for name, weight in random_weights(parse_config(raw, {}), seed).items():
        disk = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        linear = (weight.ndim == 2 and "_proj" in name) or name.endswith(("lm_head.weight", "idx_q.weight"))
        choice = recipe(name, index) if linear else None
        if choice is None or weight.shape[1] % choice[1]:
            tensors[disk] = weight.bfloat16()
            continue
        index += 1
        parts, _ = quantised_parts(weight, *choice, seed=index)
        tensors |= {disk.removesuffix("weight") + suffix: part for suffix, part in parts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def edit_tensor(folder: Path, disk_name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Rewrite one stored tensor."""
    tensors = load_file(folder / "model.safetensors")
    tensors[disk_name] = change(tensors[disk_name].clone()).contiguous()
    save_file(tensors, folder / "model.safetensors")
