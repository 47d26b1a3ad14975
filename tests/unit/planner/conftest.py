"""The shape card in its builds, and a writer of small checkpoints that consist of headers and zeros."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agens_planner import ModelShapes, Profile, load_profile
from agens_planner.card import read_card

CARD = Path(__file__).resolve().parents[3] / "agens_engine" / "assets" / "volundr-32b"
ELEMENT_BYTES = {"BF16": 2, "F32": 4, "I32": 4, "I64": 8, "F16": 2}


@cache
def card(build: str = "engine-2.82") -> ModelShapes:
    return read_card(CARD, build)


@pytest.fixture
def shapes() -> ModelShapes:
    return card()


@pytest.fixture
def shapes_of() -> Callable[[str], ModelShapes]:
    return card


@pytest.fixture
def profile16() -> Profile:
    return load_profile("16gb")


Tensors = dict[str, tuple[str, tuple[int, ...]]]


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * ELEMENT_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Two layers, kda then attn, hidden 8."""
    text = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 512,
        "attn_output_gate": True,
        "mixer_types": ["kda", "attn"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": False,
    }
    return {"model_type": "volundr", "text_config": text | changes}


def tiny_tensors() -> Tensors:
    def layer(i: int) -> Tensors:
        p = f"model.language_model.layers.{i}."
        return {
            p + "input_layernorm.weight": ("BF16", (8,)),
            p + "post_attention_layernorm.weight": ("BF16", (8,)),
            p + "mlp.gate_proj.weight": ("BF16", (16, 8)),
            p + "mlp.up_proj.weight": ("BF16", (16, 8)),
            p + "mlp.down_proj.weight": ("BF16", (8, 16)),
        }

    kda, attn = "model.language_model.layers.0.linear_attn.", "model.language_model.layers.1.self_attn."
    return {
        "model.language_model.embed_tokens.weight": ("BF16", (32, 8)),
        "model.language_model.norm.weight": ("BF16", (8,)),
        "lm_head.weight": ("BF16", (32, 8)),
        **layer(0),
        **layer(1),
        kda + "in_proj_qkv.weight": ("BF16", (16, 8)),
        kda + "in_proj_z.weight": ("BF16", (8, 8)),
        kda + "in_proj_b.weight": ("BF16", (2, 8)),
        kda + "conv1d.weight": ("BF16", (16, 1, 4)),
        kda + "out_proj.weight": ("BF16", (8, 8)),
        attn + "q_proj.weight": ("BF16", (16, 8)),
        attn + "k_proj.weight": ("BF16", (4, 8)),
        attn + "v_proj.weight": ("BF16", (4, 8)),
        attn + "o_proj.weight": ("BF16", (8, 8)),
    }


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """write_checkpoint(tensors=..., config=..., shards=...) -> folder"""

    def write(
        tensors: Tensors | None = None, config: dict[str, Any] | None = None, index: Mapping[str, str] | None = None
    ) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config or tiny_config()))
        tensors = tiny_tensors() if tensors is None else tensors
        if index is None:
            write_safetensors(folder / "model.safetensors", tensors)
            return folder
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(index)}))
        for shard in sorted(set(index.values())):
            if shard != "missing.safetensors":
                write_safetensors(folder / shard, {n: t for n, t in tensors.items() if index.get(n) == shard})
        return folder

    return write


@pytest.fixture
def tiny() -> Callable[[], tuple[Tensors, dict[str, Any]]]:
    return lambda: (tiny_tensors(), tiny_config())
