"""Greedy batch decoding straight on the model code, for scoring checkpoints: no scheduler, no sampling, no server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from agens_engine.memory.state import StatePool, unplanned
from agens_engine.model.batch import StepBatch
from agens_engine.model.checkpoint import open_checkpoint
from agens_engine.model.config import parse_config
from agens_engine.model.volundr import Volundr

Generate = Callable[[list[list[int]]], list[list[int]]]


def load_volundr(path: Path) -> Volundr:
    """A model folder in the published layout, or the trainer's checkpoint.pt, as float32 on the CPU."""
    if path.suffix == ".pt":
        saved = torch.load(path, weights_only=True)
        config = parse_config(saved["config"], {})
        model = Volundr(replace(config, tie_embeddings="lm_head.weight" not in saved["model"]))
        model.load_state_dict(saved["model"])
        return model.eval()
    with open_checkpoint(path) as checkpoint:
        model = Volundr(parse_config(checkpoint.config, {name: e.shape for name, e in checkpoint.tensors.items()}))
        model.load_state_dict({name: checkpoint.read(name) for name in checkpoint.tensors})
    return model.eval()


def greedy_backend(model: Volundr, *, max_tokens: int, stop_ids: frozenset[int], batch_size: int = 64) -> Generate:
    """A generate function: prompts in, generated ids out (the stop token included), in the same order."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]]) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        longest = max(map(len, prompts))
        pool = StatePool(
            model.state_shapes(),
            batch_size,
            unplanned(torch.device("cpu")),
            context_tokens=longest + max_tokens,
            chunk_tokens=longest,
        )
        for start in range(0, len(prompts), batch_size):
            part = slice(start, start + batch_size)
            _decode(model, pool, prompts[part], answers[part], max_tokens, stop_ids)
        return answers

    return generate


def _decode(
    model: Volundr,
    pool: StatePool,
    prompts: list[list[int]],
    answers: list[list[int]],
    max_tokens: int,
    stop_ids: frozenset[int],
) -> None:
    """Fill the answer lists; every sequence leaves the batch when it is done."""
    live = [(pool.create(), answer) for answer in answers]
    rows = [list(prompt) for prompt in prompts]
    while live:
        batch = StepBatch([(state, ids) for (state, _), ids in zip(live, rows, strict=True)], torch.device("cpu"))
        hidden, _ = model(batch)
        last = torch.tensor([start + size - 1 for start, size in zip(batch.starts, batch.lengths, strict=True)])
        tokens = model.logits(hidden[last]).argmax(-1).tolist()
        going, next_rows = [], []
        for (state, answer), ids, token in zip(live, rows, tokens, strict=True):
            state.commit(len(ids))
            answer.append(token)
            if token in stop_ids or len(answer) == max_tokens:
                state.free()
            else:
                going.append((state, answer))
                next_rows.append([token])
        live, rows = going, next_rows
