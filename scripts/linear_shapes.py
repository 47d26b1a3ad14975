"""The linears of Volundr 32B as the matmuls see them: name, [N, K] and how often, from the shape card in the package.

Used by compile_kernels.py and bench_matmul_gpu.py. Vision, embeddings and tables are not linears of a decode step; the
output head is. Each tensor counts by itself; fusing q, k, v or gate and up would change the launches, not the bytes.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

CARD = Path(__file__).resolve().parents[1] / "agens_engine" / "assets" / "volundr-32b"
PREFIX = "model.language_model.layers.{layer}."
MODULES = ("mlp.", "linear_attn.", "self_attn.")
NOT_LINEAR = ("norm", "conv1d")


@dataclass(frozen=True)
class LinearShape:
    name: str
    out_features: int
    in_features: int
    count: int

    @property
    def weights(self) -> int:
        return self.out_features * self.in_features


def linear_shapes() -> list[LinearShape]:
    """Every linear of the text model once per kind, largest first."""
    mixers = json.loads((CARD / "config.json").read_text())["text_config"]["mixer_types"]
    softmax = sum(mixer != "kda" for mixer in mixers)
    layers = {"all": len(mixers), "kda": mixers.count("kda"), "softmax": softmax, "bcsa": mixers.count("bcsa")}
    found = []
    for tensor in tomllib.loads((CARD / "card.toml").read_text())["tensors"]:
        name, shape = tensor["name"].removesuffix(".weight"), tensor["shape"]
        short = name.removeprefix(PREFIX)
        is_linear = short.startswith(MODULES) and name != tensor["name"] and len(shape) == 2
        if name == "lm_head" or (name != short and is_linear and not any(word in short for word in NOT_LINEAR)):
            found.append(LinearShape(short, shape[0], shape[1], layers[tensor["layers"]] if "layers" in tensor else 1))
    return sorted(found, key=lambda shape: -shape.weights * shape.count)
