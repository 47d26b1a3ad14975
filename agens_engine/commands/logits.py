"""`agens logits`: the model's logits for a list of token ids, to compare implementations.

The ids run through the same segments as a served prompt, in chunks of --chunk tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from agens_engine.errors import UsageError
from agens_engine.memory.state import StatePool, unplanned
from agens_engine.model.batch import StepBatch
from agens_engine.model.loading import load_model, pick_device
from agens_engine.model.volundr import Volundr
from agens_engine.model_files import resolve_model

DEFAULT_CHUNK_TOKENS = 512


def run_logits(
    model: str, ids_file: str, out: str, chunk: int | None = None, dtype: str = "float32"
) -> tuple[int, int]:
    """Write float32 logits [T, V] of the ids in ids_file (a JSON list) to the .npy file `out`; returns (T, V).

    raises   UsageError for a bad ids file, chunk or output path; CheckpointError for a bad model
    """
    if chunk is not None and chunk < 1:
        raise UsageError(f"--chunk must be at least 1, not {chunk}")
    target = Path(out)
    if not target.parent.is_dir():
        raise UsageError(f"--out {out}: the folder {target.parent} does not exist")
    ids = read_ids(ids_file)
    loaded = load_model(resolve_model(model), device=pick_device("auto"), dtype=dtype)
    vocab = loaded.config.vocab_size
    for position, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise UsageError(f"{ids_file}: id {token} at position {position} is outside the vocabulary 0..{vocab - 1}")
    limit = loaded.config.max_positions
    if len(ids) > limit:
        raise UsageError(f"{ids_file} has {len(ids)} ids, the model has {limit} positions; give at most {limit}")
    try:
        with open(target, "wb") as file:  # np.save with a name would add .npy behind the user's back
            logits = compute_logits(loaded, ids, chunk or DEFAULT_CHUNK_TOKENS)
            np.save(file, logits)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror or error}") from error
    return logits.shape[0], logits.shape[1]


def read_ids(ids_file: str) -> list[int]:
    """The token ids of a JSON list; raises UsageError saying what is wrong with the file."""
    try:
        ids = json.loads(Path(ids_file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--ids {ids_file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--ids {ids_file} is not JSON: {error}") from error
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UsageError(f"--ids {ids_file} must hold one non-empty JSON list of integers")
    return ids


@torch.inference_mode()
def compute_logits(model: Volundr, ids: list[int], chunk: int) -> np.ndarray:
    """float32 [T, V]; every chunk is run and committed like a prompt's."""
    device = model.model.norm.weight.device
    pool = StatePool(model.state_shapes(), 1, unplanned(device), context_tokens=len(ids), chunk_tokens=chunk)
    state = pool.create()
    out = np.empty((len(ids), model.config.vocab_size), np.float32)
    for first in range(0, len(ids), chunk):
        part = ids[first : first + chunk]
        hidden, _ = model(StepBatch([(state, part)], device))
        state.commit(len(part))
        out[first : first + len(part)] = model.logits(hidden).cpu().numpy()
    state.free()
    return out
