"""Write a trained nano into the published layout: config.json and model.safetensors in bf16.

    python scripts/nano/export.py --run runs/nano [--out agens_engine/assets/nano]

The matrix that embeds and predicts while training is written twice, as embed_tokens and lm_head.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("", "kernels", "quant", "planner")]

from agens_engine.model.config import expected_shapes, parse_config  # noqa: E402

MAX_BYTES = 12 * 10**6


def export(checkpoint: Path, out: Path) -> int:
    """Returns the size of the weights file in bytes; raises ValueError when tensors do not fit the config."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    weights: dict[str, torch.Tensor] = saved["model"]
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    expected = expected_shapes(parse_config(saved["config"], {}))
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if found != expected:
        wrong = sorted(set(found.items()) ^ set(expected.items()))
        raise ValueError(f"the checkpoint does not fit its config: {wrong}")
    published = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value.bfloat16()
        for name, value in weights.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(published, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(saved["config"], indent=2) + "\n", encoding="utf-8")
    size = (out / "model.safetensors").stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"model.safetensors has {size} bytes, more than the {MAX_BYTES} the package allows")
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a trained nano into the published layout.")
    parser.add_argument("--run", type=Path, required=True, help="folder with checkpoint.pt")
    parser.add_argument("--out", type=Path, default=ROOT / "agens_engine" / "assets" / "nano")
    args = parser.parse_args()
    print(f"{args.out / 'model.safetensors'}: {export(args.run / 'checkpoint.pt', args.out):,} bytes")


if __name__ == "__main__":
    main()
