"""Loading a quantised checkpoint both ways: same logits, exact bytes, bounded scratch, every bad input named."""

from __future__ import annotations

import logging
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agens_engine.errors import CheckpointError, UsageError
from agens_engine.model.checkpoint import open_checkpoint
from agens_engine.model.load_progress import LINE_SECONDS, QUIET_SECONDS, LoadProgress
from agens_engine.model.loading import load_model
from agens_engine.model.lowbit_linear import LowbitLinear
from agens_engine.model.packed_weights import survey_packed
from agens_engine.model.repack_cache import RepackCache
from agens_engine.model.volundr import Volundr
from agens_quant.compressed_tensors import pack_codes
from tests.modelkit import CPU, fresh_logits, logits_in_chunks
from tests.packedkit import edit_tensor, mixed, quantised_parts, write_quantised

IDS = [int(t) for t in torch.randint(0, 96, (60,), generator=torch.Generator().manual_seed(4))]
DOWN = "model.language_model.layers.1.mlp.down_proj"
GATE = "model.language_model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantised(tmp_path_factory.mktemp("models") / "mixed")


def load_packed(folder: Path, cache: RepackCache | None = None) -> Volundr:
    return load_model(folder, device=CPU, packed=survey_packed(folder, cache), cache=cache)


def lowbit(model: Volundr) -> dict[str, LowbitLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LowbitLinear)}


def test_logits_are_those_of_the_decoded_weights(folder: Path) -> None:
    decoded, packed = load_model(folder, device=CPU), load_packed(folder)
    formats = {str(m.format) for m in lowbit(packed).values()}
    assert {f.split()[0] for f in formats} == {"int2", "int3", "int4"}
    assert {f.split()[1] for f in formats} == {"g32", "g64", "g128"}
    assert any("zeros" in f for f in formats)
    assert not lowbit(decoded)
    wanted = fresh_logits(decoded, IDS)
    assert float(wanted.std()) > 0.1
    # sums run in another order: float32 rounding through four layers
    torch.testing.assert_close(fresh_logits(packed, IDS), wanted, rtol=1e-4, atol=1e-4)
    chunked = logits_in_chunks(packed, IDS, [25, 1, 8])
    torch.testing.assert_close(chunked, logits_in_chunks(decoded, IDS, [25, 1, 8]), rtol=1e-4, atol=1e-4)


def test_a_packed_head_gives_its_rows(folder: Path) -> None:
    decoded, packed = load_model(folder, device=CPU), load_packed(folder)
    assert isinstance(packed.lm_head, LowbitLinear)
    ids = torch.tensor([95, 0, 7])
    assert torch.equal(packed.head_rows(ids), decoded.head_rows(ids))


def test_the_survey_is_exact_and_leaves_out_what_no_module_can_run(folder: Path, tmp_path: Path) -> None:
    survey = survey_packed(folder)
    loaded = lowbit(load_packed(folder))
    assert {name.removesuffix(".weight"): spec.packed_bytes for name, spec in survey.items()} == {
        name: linear.nbytes for name, linear in loaded.items()
    }
    # an embedding is gathered from, never multiplied with: it is unpacked whatever the file holds
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    edit_quantised(other, "model.language_model.embed_tokens", 4, 64)
    assert survey_packed(other).keys() == survey.keys()
    assert load_packed(other).model.embed_tokens.weight.dtype == torch.float32


def edit_quantised(folder: Path, module: str, bits: int, group: int) -> None:
    """Store one more matrix in a container."""
    tensors = load_file(folder / "model.safetensors")
    parts, _ = quantised_parts(tensors.pop(f"{module}.weight").float(), bits, group, False)
    save_file(tensors | {f"{module}.{suffix}": part for suffix, part in parts.items()}, folder / "model.safetensors")


def set_at(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[5] = value
        return tensor

    return change


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "decoded"])
@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (f"{DOWN}.weight_scale", set_at(float("nan")), "weight_scale holds nan at row"),
        (f"{GATE}.weight_scale", set_at(float("-inf")), "weight_scale holds -inf at row"),
        (f"{DOWN}.weight_packed", lambda t: t.float(), "weight_packed is torch.float32; expected torch.int32"),
        (f"{DOWN}.weight_scale", lambda t: t.int(), "weight_scale is torch.int32; expected"),
        (f"{DOWN}.weight_packed", lambda t: t[:, :-3], "weight_packed has 45 words a row"),
        (f"{DOWN}.weight_packed", lambda t: t[:-1], "weight_packed is [255, 48], weight_shape says 256 rows"),
        (f"{DOWN}.weight_scale", lambda t: t[:, :-1].repeat(1, 7), "which do not divide the 384 input columns"),
        (f"{DOWN}.weight_shape", lambda t: t * 0, "weight_shape says [0, 0]"),
    ],
)
def test_bad_parts_are_named(
    folder: Path, tmp_path: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor], message: str, packed: bool
) -> None:
    folder = Path(shutil.copytree(folder, tmp_path / "bad"))
    edit_tensor(folder, part, change)
    module = part.rpartition(".")[0].replace("language_model.", "")
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_packed(folder) if packed else load_model(folder, device=CPU)
    assert "model.safetensors" in str(caught.value) and f"{module}.weight" in str(caught.value)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "decoded"])
def test_corrupt_three_bit_words_are_named(tmp_path: Path, packed: bool) -> None:
    """Ten values a word leave two bits unused; anything in them is damage."""
    folder = write_quantised(
        tmp_path / "bad", recipe=lambda name, i: (3, 128, False) if "layers.0.mlp.gate" in name else None
    )
    codes = torch.randint(0, 8, (384, 256)).numpy()
    words = torch.from_numpy(pack_codes(codes, 3, "padded"))
    edit_tensor(folder, f"{GATE}.weight_packed", lambda _: words)
    assert lowbit(load_packed(folder))["model.layers.0.mlp.gate_proj"].format.bits == 3
    words[7, 4] |= 1 << 30
    edit_tensor(folder, f"{GATE}.weight_packed", lambda _: words)
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight: weight_packed is corrupt: row 7, word 4"):
        load_packed(folder) if packed else load_model(folder, device=CPU)


def test_a_file_that_changes_between_survey_and_load_is_refused(folder: Path, tmp_path: Path) -> None:
    survey = survey_packed(folder)
    other = write_quantised(tmp_path / "b", recipe=lambda name, i: (4, 32, False))
    with pytest.raises(CheckpointError, match="changed while the model was loading"):
        load_model(other, device=CPU, packed=survey)


def test_eight_bit_containers_that_need_it_are_decoded(tmp_path: Path) -> None:
    folder = write_quantised(
        tmp_path / "eight", recipe=lambda name, i: (4, 128, False) if "layers.0.mlp" in name else None
    )
    codes = torch.randint(0, 256, (384, 256)).numpy()
    edit_tensor(folder, f"{GATE}.weight_packed", lambda _: torch.from_numpy(pack_codes(codes, 8)))
    assert set(lowbit(load_packed(folder))) == {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"}


def test_scratch_of_loading_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """numpy's allocations are traced, torch's weights are not: what is traced at most is scratch, for any depth."""

    def write(layers: int) -> Path:
        mixers = ["kda", "bcsa", "kda", "attn"] * (layers // 4)
        return write_quantised(tmp_path / str(layers), num_hidden_layers=layers, mixer_types=mixers)

    def scratch(path: Path, packed: bool) -> int:
        survey = survey_packed(path) if packed else None
        tracemalloc.start()
        try:
            load_model(path, device=CPU, packed=survey, memory=Claims())
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    shallow, deep = write(4), write(12)
    for packed in (True, False):
        small, large = scratch(shallow, packed), scratch(deep, packed)
        assert large < small + 2**20, (packed, small, large)  # objects of the modules, not their weights
        assert small < 8 * 2**20


class Claims:
    """Storage that counts, like an arena's."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}

    def adopt(self, line: str, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes[line] = self.bytes.get(line, 0) + tensor.nbytes
        return tensor

    def claim(self, line: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.adopt(line, torch.zeros(shape, dtype=dtype))


def test_the_table_names_kinds_formats_and_bytes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    claims = Claims()
    with caplog.at_level(logging.INFO, "agens_engine.model.loading"):
        load_model(folder, device=CPU, packed=survey_packed(folder), memory=claims)
    lines = [r.getMessage() for r in caplog.records]
    assert lines[0].split() == ["weights", "tensors", "in", "the", "file", "in", "memory"]
    assert any(re.match(r"mlp +\d+ +int4 g128 .*int4 g128 +\d", line) for line in lines), lines
    assert any(re.match(r"embedding +1 +bf16 +[\d.]+ KiB +bfloat16 ", line) for line in lines), lines
    with open_checkpoint(folder) as checkpoint:
        assert sum(int(line.split()[1]) for line in lines[1:]) == len(checkpoint.tensors)
    assert {"weights.mlp.w2", "weights.mlp.w3", "weights.mlp.w4", "weights.small.fp32"} <= claims.bytes.keys()


def test_progress_is_plain_lines_away_from_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with (
        caplog.at_level(logging.INFO, "agens_engine.model.load_progress"),
        LoadProgress("loading m", 10 * 10**9, terminal=False, clock=lambda: now[0]) as progress,
    ):
        progress.advance(10**9)
        assert not caplog.records  # quick loads say nothing
        now[0] = QUIET_SECONDS + 2
        progress.advance(3 * 10**9)
        progress.advance(10**9)
        now[0] += LINE_SECONDS
        progress.advance(10**9)
    assert [r.getMessage() for r in caplog.records] == [
        "loading m: 40 %, 4.0 of 10.0 GB, 1.00 GB/s, 6 s left",
        "loading m: 60 %, 6.0 of 10.0 GB, 0.43 GB/s, 9 s left",
    ]


def test_progress_is_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agens_engine.model.load_progress.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    with LoadProgress("loading m", 4 * 10**9, terminal=True) as progress:
        progress.advance(10**9)
        assert progress._bar is not None
        progress._bar.refresh()
    shown = capsys.readouterr().err
    assert re.search(r"loading m: +25%.*1\.00G/4\.00G .*<.*B/s", shown), shown


def test_the_recipe_covers_what_it_claims() -> None:
    combinations = {mixed("", i)[:2] for i in range(9)}  # type: ignore[index]
    assert combinations == {(b, g) for b in (2, 3, 4) for g in (32, 64, 128)}


def test_a_cache_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--repack-cache .*file cannot be used"):
        RepackCache(tmp_path / "file")
