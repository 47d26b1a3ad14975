"""Small models for tests: random checkpoints of any Volundr shape, the golden one, and a runner over segments."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from agens_engine.memory.state import StatePool, unplanned
from agens_engine.model.batch import StepBatch
from agens_engine.model.config import ModelConfig, expected_shapes, parse_config
from agens_engine.model.loading import load_model
from agens_engine.model.volundr import Volundr

DATA = Path(__file__).parent / "data"
CPU = torch.device("cpu")


def tiny_config(**text: Any) -> dict[str, Any]:
    """config.json of a very small Volundr with every block kind; keyword arguments replace text keys."""
    base: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "mixer_types": ["kda", "bcsa", "kda", "attn"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "kda_gate_rank": 8,
        "bcsa_window": 8,
        "bcsa_compress": 2,
        "bcsa_topk": 3,
        "engram_layers": [0],
        "engram_orders": [2, 3],
        "engram_rows": 61,
        "engram_dim": 8,
        "mhc_streams": 4,
    }
    return {"model_type": "volundr", "text_config": {**base, **text}}


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """float32 weights by name, scaled so that every block moves the output."""
    gen = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        fan_in = shape[-1] if len(shape) > 1 else 4
        value = torch.randn(shape, generator=gen) * (1.5 * fan_in**-0.5)
        if name.endswith("conv1d.weight"):
            value = torch.randn(shape, generator=gen) * 0.5
        if name.endswith(("mhc.norm.weight", "linear_attn.norm.weight", "engram.norm.weight")) or ".mhc." in name:
            value = value + 1.0 if name.endswith(("norm.weight", "post_static")) else value
        if "embed_tokens" in name:
            value = torch.randn(shape, generator=gen)
        weights[name] = value
    return weights


def random_model(seed: int = 0, **text: Any) -> Volundr:
    config = parse_config(tiny_config(**text), {})
    model = Volundr(config)
    model.load_state_dict(random_weights(config, seed))
    return model.requires_grad_(False).eval()


def write_checkpoint(folder: Path, seed: int = 0, **text: Any) -> Path:
    """A bf16 checkpoint in the published layout: config.json and one model.safetensors."""
    raw = tiny_config(**text)
    weights = random_weights(parse_config(raw, {}), seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value.bfloat16()
        for name, value in weights.items()
    }
    save_file(renamed, folder / "model.safetensors")
    return folder


@cache
def golden_model() -> Volundr:
    return load_model(DATA / "golden", device=CPU)


def new_pool(model: Volundr, slots: int = 1, context: int = 600, chunk: int = 600) -> StatePool:
    """Sequence memory without a plan behind it."""
    return StatePool(model.state_shapes(), slots, unplanned(CPU), context_tokens=context, chunk_tokens=chunk)


@torch.inference_mode()
def logits_in_chunks(model: Volundr, ids: list[int], sizes: list[int]) -> torch.Tensor:
    """[T, V] logits, the ids run as committed segments of these sizes (the last size repeats)."""
    state = new_pool(model).create()
    out: list[torch.Tensor] = []
    first = 0
    while first < len(ids):
        size = sizes[min(len(out), len(sizes) - 1)]
        part = ids[first : first + size]
        hidden, _ = model(StepBatch([(state, part)], CPU))
        out.append(model.logits(hidden))
        state.commit(len(part))
        first += len(part)
    return torch.cat(out)


@torch.inference_mode()
def fresh_logits(model: Volundr, ids: list[int]) -> torch.Tensor:
    hidden, _ = model(model.fresh_batch(torch.tensor([ids])))
    return model.logits(hidden)
