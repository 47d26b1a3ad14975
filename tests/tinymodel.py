"""A real checkpoint folder for tests of the whole path: the golden random weights, the tokenizer of textkit."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.textkit import write_model_dir

GOLDEN = Path(__file__).parent / "data" / "golden"


def write_tiny_model(folder: Path) -> Path:
    """What it says means nothing, but it says it through every part of the engine."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / name, folder / name)
    return write_model_dir(folder)
