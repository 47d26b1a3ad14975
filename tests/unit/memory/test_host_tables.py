"""Host tables: stored as they are, widened by row, from memory or the mapped file; the plan counts what is held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agens_engine.memory.arena import Arena
from agens_engine.memory.host_tables import gather_rows, pin_in_pieces
from agens_engine.model.batch import StepBatch
from agens_engine.model.loading import load_model
from agens_engine.model.volundr import Volundr
from agens_engine.planning import PlanRequest, build_question, make_plan
from agens_planner import MemoryPlan
from tests.modelkit import CPU, fresh_logits, new_pool, write_checkpoint

IDS = torch.randint(0, 96, (60,), generator=torch.Generator().manual_seed(2)).tolist()


def plan_of(folder: Path, tables: str) -> MemoryPlan:
    request = PlanRequest(
        model=str(folder), profile="cpu", context="256", sequences="2", settings=(f"tables={tables}",)
    )
    return make_plan(build_question(request, environ={}))


def loaded(folder: Path, tables: str) -> tuple[Volundr, Arena]:
    plan = plan_of(folder, tables)
    arena = Arena.of_plan(plan, CPU)
    return load_model(folder, device=CPU, memory=arena, map_tables=plan.map_tables), arena


def widened(model: Volundr) -> Volundr:
    """All in float32, as if the tables had been decoded at load."""
    return model.float()


@pytest.mark.parametrize("tables", ["ram", "mmap"])
def test_answers_are_those_of_widened_tables(tmp_path: Path, tables: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    model, arena = loaded(folder, tables)
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    state = new_pool(model).create()
    with torch.inference_mode():
        hidden, _ = model(StepBatch([(state, IDS)], CPU))
        got = model.logits(hidden)
    expected = fresh_logits(widened(load_model(folder, device=CPU)), IDS)
    assert torch.equal(fresh_logits(model, IDS), expected)
    assert float((got - expected).abs().max()) < 1e-4
    arena.check()


def test_the_plan_counts_stored_bytes_and_mapping_costs_none(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    embedding, engram = 96 * 32 * 2, 2 * 61 * 8 * 2
    ram, mapped = plan_of(folder, "ram"), plan_of(folder, "mmap")
    assert (ram.bytes_of("host.embedding"), ram.bytes_of("host.engram_tables")) == (embedding, engram)
    assert (mapped.bytes_of("host.embedding"), mapped.bytes_of("host.engram_tables")) == (0, 0)
    assert mapped.map_tables and not ram.map_tables
    assert any("read from the checkpoint's files" in note for note in mapped.notes)
    _, arena = loaded(folder, "ram")
    held = {name: arena.lines[name].used_bytes for name in ("host.embedding", "host.engram_tables")}
    assert held == {"host.embedding": embedding, "host.engram_tables": engram}
    _, arena = loaded(folder, "mmap")
    assert "host.embedding" not in arena.lines


def test_mapped_tables_are_the_file(tmp_path: Path) -> None:
    """Nothing is copied: the table's memory lies in a mapping of the weight file."""
    folder = write_checkpoint(tmp_path / "m")

    def mapping(model: Volundr) -> str:
        address = model.model.embed_tokens.weight.data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, _, end = line.split()[0].partition("-")
            if int(begin, 16) <= address < int(end, 16):
                return line
        raise AssertionError("the table is nowhere")

    assert "model.safetensors" in mapping(loaded(folder, "mmap")[0])
    assert "model.safetensors" not in mapping(loaded(folder, "ram")[0])


def test_an_embedding_that_is_the_head_stays_a_float32_matrix(tmp_path: Path) -> None:
    import json

    from safetensors.torch import load_file, save_file

    folder = write_checkpoint(tmp_path / "m")
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["tie_word_embeddings"] = raw["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(raw))
    weights = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items() if k != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors")
    for tables in ("ram", "mmap"):
        model, arena = loaded(folder, tables)
        assert model.model.embed_tokens.weight.dtype == torch.float32
        assert arena.lines["host.embedding"].used_bytes == 96 * 32 * 4
        assert fresh_logits(model, IDS).isfinite().all()


def test_gathered_rows_are_exact_and_differentiable() -> None:
    table = torch.randn(50, 6).bfloat16()
    index = torch.tensor([[3, 3], [49, 0]])
    assert torch.equal(gather_rows(table, index, torch.empty(0)), table.float()[index])
    trained = torch.randn(5, 2, requires_grad=True)
    gather_rows(trained, torch.tensor([1, 1]), trained).sum().backward()
    assert trained.grad is not None and trained.grad[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("allowed", "pinned"), [(0, 0), (1, 1000), (2, 2000), (99, 2400)])
def test_pinning_goes_as_far_as_the_system_lets_it(allowed: int, pinned: int) -> None:
    table, asked = torch.zeros(600), list[tuple[int, int]]()

    def register(address: int, size: int) -> bool:
        asked.append((address - table.data_ptr(), size))
        return len(asked) <= allowed

    found = pin_in_pieces(table, register=register, piece=1000)
    assert (found.table_bytes, found.pinned_bytes) == (2400, pinned)
    assert asked == [(0, 1000), (1000, 1000), (2000, 400)][: allowed + 1]
    assert ("pageable" in str(found)) == (pinned < 2400)
