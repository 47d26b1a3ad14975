"""The stack against other people's numbers (tests/data/golden/README.md): logits, streams, Engram rows, far blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agens_engine.commands.logits import compute_logits
from agens_engine.model.batch import StepBatch
from agens_engine.model.engram import engram_rows
from agens_engine.model.volundr import Volundr
from tests.modelkit import CPU, DATA, fresh_logits, golden_model, logits_in_chunks, new_pool

TOLERANCE = 2e-4
LENGTHS = (1, 7, 64, 96, 400)


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(DATA / "golden" / "golden.safetensors")


def difference(golden: dict[str, torch.Tensor], length: int, logits: torch.Tensor) -> float:
    """Largest absolute difference over the stored positions; asserts equal arg max."""
    if length == 400:
        logits = logits[golden["positions_400"].long()]
    stored = golden[f"logits_{length}"]
    assert torch.equal(logits.argmax(-1), stored.argmax(-1))
    return float((logits - stored).abs().max())


@pytest.mark.parametrize("length", LENGTHS)
def test_one_fresh_pass(golden: dict[str, torch.Tensor], length: int) -> None:
    ids = golden[f"ids_{length}"].tolist()
    assert difference(golden, length, fresh_logits(golden_model(), ids)) <= TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 37, 64, 400])
@pytest.mark.parametrize("length", LENGTHS)
def test_committed_chunks(golden: dict[str, torch.Tensor], length: int, chunk: int) -> None:
    ids = golden[f"ids_{length}"].tolist()
    assert difference(golden, length, logits_in_chunks(golden_model(), ids, [chunk])) <= TOLERANCE


def test_prefill_then_decode(golden: dict[str, torch.Tensor]) -> None:
    ids = golden["ids_400"].tolist()
    assert difference(golden, 400, logits_in_chunks(golden_model(), ids, [200, 1])) <= TOLERANCE


def test_the_logits_command_uses_the_same_path(golden: dict[str, torch.Tensor]) -> None:
    ids = golden["ids_96"].tolist()
    assert difference(golden, 96, torch.from_numpy(compute_logits(golden_model(), ids, 37))) <= TOLERANCE


def test_residual_streams(golden: dict[str, torch.Tensor]) -> None:
    model = golden_model()
    seen: dict[int, torch.Tensor] = {}
    model.on_layer = seen.__setitem__
    try:
        logits_in_chunks(model, golden["ids_7"].tolist(), [7])
    finally:
        model.on_layer = None
    stored = golden["streams_7"]
    assert len(seen) == len(stored)
    for layer, streams in seen.items():
        assert float((streams - stored[layer]).abs().max()) <= TOLERANCE, layer


@pytest.mark.parametrize("length", [7, 96])
@pytest.mark.parametrize("chunk", [1, 5, 96])
def test_engram_rows(golden: dict[str, torch.Tensor], length: int, chunk: int) -> None:
    model, ids = golden_model(), golden[f"ids_{length}"].tolist()
    state = new_pool(model).create()
    assert model.config.engram is not None
    rows = []
    for first in range(0, length, chunk):
        part = ids[first : first + chunk]
        rows.append(engram_rows(StepBatch([(state, part)], CPU), model.config.engram))
        state.commit(len(part))
    assert torch.equal(torch.cat(rows, 1), golden[f"engram_rows_{length}"].long())


@pytest.mark.parametrize("chunk", [400, 64, 7])
def test_selected_far_blocks(golden: dict[str, torch.Tensor], chunk: int) -> None:
    model = golden_model()
    chosen: dict[int, dict[int, list[int]]] = {3: {}, 6: {}}
    hooks: list[tuple[Any, int]] = [(model.model.layers[layer].self_attn, layer) for layer in chosen]

    def record(layer: int) -> Any:
        def on_selection(positions: torch.Tensor, mask: torch.Tensor) -> None:
            for row, position in enumerate(positions.tolist()):
                chosen[layer][position] = mask[0, row].nonzero()[:, 0].tolist()

        return on_selection

    for attention, layer in hooks:
        attention.on_selection = record(layer)
    try:
        logits_in_chunks(model, golden["ids_400"].tolist(), [chunk])
    finally:
        for attention, _ in hooks:
            attention.on_selection = None
    for layer, by_position in chosen.items():
        stored = golden[f"bcsa_blocks_400_layer{layer}"]
        for row, position in enumerate(golden["positions_400"].tolist()):
            expected = [n for n in stored[row].tolist() if n >= 0]
            assert by_position.get(position, []) == expected, (layer, position)


MISTAKES = {
    "far field dropped": ("bcsa_topk", 0.02),
    "window off by one": ("bcsa_window", 0.02),
    "Sinkhorn 9 iterations": ("mhc_sinkhorn_iters", 0.005),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_deliberate_mistake_is_seen(golden: dict[str, torch.Tensor], mistake: str) -> None:
    """The comparison above must be able to fail: a model with one wrong constant is far outside the tolerance."""
    import dataclasses

    right = golden_model()
    key, least = MISTAKES[mistake]
    config = right.config
    bcsa = config.bcsa
    assert bcsa is not None
    if key == "bcsa_topk":
        config = dataclasses.replace(config, bcsa=dataclasses.replace(bcsa, topk=1))
    elif key == "bcsa_window":
        config = dataclasses.replace(config, bcsa=dataclasses.replace(bcsa, window=bcsa.window + 1))
    else:
        config = dataclasses.replace(config, sinkhorn_iters=9)
    wrong = Volundr(config)
    wrong.load_state_dict(right.state_dict())
    logits = fresh_logits(wrong.requires_grad_(False), golden["ids_400"].tolist())
    off = (logits[golden["positions_400"].long()] - golden["logits_400"]).abs().max()
    assert float(off) > least
    assert np.isfinite(float(off))
