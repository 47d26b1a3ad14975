"""Small random drafters for tests, as checkpoints on disk, and a random target's two ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from agens_engine.model.config import ModelConfig, parse_config
from agens_engine.model.dflash2 import DFlash2
from agens_engine.model.dflash2_config import parse_dflash2_config
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.model.mtp import MtpHead
from agens_engine.model.mtp_config import parse_mtp_config
from tests.modelkit import tiny_config

TARGET = parse_config(tiny_config(), {})  # hidden 32, vocabulary 96, 4 layers
CONV_SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 12, "selector_top_k": 6}
Tensors = dict[str, torch.Tensor]


def dflash2_raw(*, features: Mapping[str, int] = CONV_SELECTOR, **changes: Any) -> dict[str, Any]:
    """A config.json; keyword arguments replace top-level keys, None removes one. features={}: plain DFlash."""
    raw: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 96,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 12,
        "use_sliding_window": True,
        "is_causal": False,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "dflash_config": {"block_size": 8, "target_layer_ids": [0, 2, 3], "mask_token_id": 95, **features},
    }
    raw.update(changes)
    return {key: value for key, value in raw.items() if value is not None}


def mtp_raw(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }
    raw.update(changes)
    return {key: value for key, value in raw.items() if value is not None}


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    gen = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
        offset = 1.0 if parameter.dim() == 1 and isinstance(model, DFlash2) else 0.0
        parameter.data = torch.randn(parameter.shape, generator=gen) * scale + offset
    return model.requires_grad_(False)


def random_dflash2(seed: int = 0, target: ModelConfig = TARGET, **raw: Any) -> DFlash2:
    model = DFlash2(parse_dflash2_config(dflash2_raw(**raw), {}, target))
    randomise(model, seed)
    return model


def random_mtp(seed: int = 0, target: ModelConfig = TARGET, **raw: Any) -> MtpHead:
    model = MtpHead(parse_mtp_config(mtp_raw(**raw), {}, target))
    randomise(model, seed)
    return model


def random_ends(seed: int = 0, vocab: int = 96, hidden: int = 32, num_usable: int | None = None) -> TargetEnds:
    gen = torch.Generator().manual_seed(seed)
    embedding, head = (torch.randn((vocab, hidden), generator=gen) for _ in range(2))
    return TargetEnds(
        embed=lambda ids: embedding[ids],
        head=lambda rows: rows @ head.T,
        head_rows=lambda ids: head[ids],
        num_usable=vocab if num_usable is None else num_usable,
    )


def write_folder(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def stored(model: torch.nn.Module, rename: Callable[[str], str] = str) -> Tensors:
    return {rename(name): parameter.data.clone() for name, parameter in model.named_parameters()}
