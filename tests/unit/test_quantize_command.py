"""`agens quantize` and `agens evaluate` on a very small model: what they write, refuse, resume and leave alone."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from agens_engine import engine_build, evaluation
from agens_engine import quantize as quantize_module
from agens_engine.cli import main
from agens_engine.errors import AgensError, UsageError
from agens_engine.evaluation import bits_per_weight, cut_windows, evaluate, linear_modules
from agens_engine.layerwise import Layerwise
from agens_engine.model.checkpoint import open_checkpoint
from agens_engine.model.loading import load_model
from agens_engine.quantize import QuantizeOptions, quantize
from agens_quant.hessian import WeightedStatistics
from tests.tinymodel import write_tiny_model

# Everything stays as it is but one small MLP: the whole path in a second or two.
ONE_MLP = (r"^(?!model\.layers\.5\.mlp)",)
TEXT = "The quick brown fox jumps over the lazy dog; 3 + 4 = 7. " * 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def calibration(source: Path) -> torch.Tensor:
    vocab = json.loads((source / "config.json").read_text(encoding="utf-8"))
    vocab = vocab.get("text_config", vocab)["vocab_size"]
    return torch.randint(0, vocab, (3, 32), generator=torch.Generator().manual_seed(0))


def digest(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir()) if f.is_file()}


def reachable(source: Path, keep: tuple[str, ...] = ONE_MLP) -> QuantizeOptions:
    """A target between the smallest and the largest, whatever this model's shapes take for scales."""
    with pytest.raises(UsageError, match=r"takes (\d+\.\d+) to (\d+\.\d+)") as caught:
        quantize(source, source.parent / "never", QuantizeOptions(bits=0.5, keep=keep), calibration(source))
    words = str(caught.value).split("takes ")[1].split()
    low, high = float(words[0]), float(words[2])
    assert low < high
    return QuantizeOptions(bits=low + 0.6 * (high - low), keep=keep)


def test_layerwise_is_the_model(source: Path) -> None:
    ids = calibration(source)
    model = load_model(source, device=torch.device("cpu"))
    with torch.no_grad():
        hidden, _ = model(model.fresh_batch(ids))
        expected = model.logits(hidden)
        with open_checkpoint(source) as checkpoint:
            whole = Layerwise(checkpoint)
            streams = whole.final_streams(ids)
            with whole.head() as head:
                found = head.logits(streams)
            assert all(p.device.type == "meta" for p in whole.model.parameters())
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_every_linear_but_the_indexers_gets_its_gradient(source: Path) -> None:
    """Also where the output does not hang on the streams: without it a linear would look free to damage."""
    ids = calibration(source)
    g = torch.Generator().manual_seed(1)
    with open_checkpoint(source) as checkpoint:
        model = Layerwise(checkpoint)
        assert model.config.engram is not None
        streams = model.embed(ids.reshape(-1))
        for index in range(model.config.num_layers):
            with model.layer(index) as step:
                linears = model.linears(index)
                found = {
                    n: WeightedStatistics.of(m.out_features, m.in_features, n.endswith(quantize_module.UNSEEN))
                    for n, m in linears.items()
                }
                with quantize_module._recording(linears, found):
                    gradient = torch.randn(streams.shape, generator=g)
                    quantize_module._pull_back(step, streams, ids, gradient)
                streams = step.run(streams, ids)
            for name, statistics in found.items():
                assert statistics.num_tokens == ids.numel(), name
                assert statistics.num_gradients == (0 if statistics.unseen else ids.numel()), name
                assert float(statistics.moments.trace()) > 0, name


@pytest.mark.parametrize("keep", [ONE_MLP, pytest.param((), marks=pytest.mark.slow)], ids=["one MLP", "all"])
def test_a_build_loads_keeps_its_budget_and_leaves_the_source_alone(
    source: Path, tmp_path: Path, keep: tuple[str, ...]
) -> None:
    before = digest(source)
    options = reachable(source, keep)
    target = tmp_path / "build"
    result = quantize(source, target, options, calibration(source))
    assert digest(source) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["build"], "work folder and partial output are gone"
    assert result.bits_per_weight <= options.bits
    with open_checkpoint(target) as checkpoint, open_checkpoint(source) as original:
        quantised = [e.name for e in checkpoint.tensors.values() if e.layout is not None]
        wanted = {n for n in linear_modules(original) if not any(re.search(p, n) for p in keep)}
        assert {n.removesuffix(".weight") for n in quantised} <= wanted and quantised
        for entry in original.tensors.values():
            if entry.name not in quantised:
                assert torch.equal(checkpoint.read(entry.name), original.read(entry.name)), entry.name
        sizes = {n: original.entry(f"{n}.weight") for n in linear_modules(original)}
        kept = sum(8 * entry.nbytes for name, entry in sizes.items() if name not in wanted)
        weights = sum(math.prod(entry.shape) for entry in sizes.values())
        bits = bits_per_weight(checkpoint)
        assert kept / weights < bits <= options.bits + 1e-6, "what is kept counts at what it takes"
    load_model(target, device=torch.device("cpu"))
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert config["mixed_bits"] is True and set(config["bits_per_module"].values()) <= {2, 3, 4}
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_an_interrupted_run_resumes_to_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, ids = reachable(source), calibration(source)
    quantize(source, tmp_path / "whole", options, ids)
    run = quantize_module._Run
    backward, calls = run._backward, []

    def interrupted(self: quantize_module._Run, index: int) -> None:
        calls.append(index)
        if len(calls) == 2:
            raise KeyboardInterrupt
        backward(self, index)

    monkeypatch.setattr(run, "_backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "again", options, ids)
    assert not (tmp_path / "again").exists() and (tmp_path / "again.work").is_dir()
    monkeypatch.setattr(run, "_forward", lambda self: pytest.fail("the forward pass was done already"))
    quantize(source, tmp_path / "again", options, ids)
    assert calls[2:] == list(range(calls[0] - 1, -1, -1)), "the finished layer is not done again"
    assert digest(tmp_path / "again") == digest(tmp_path / "whole")
    assert not (tmp_path / "again.work").exists()


@pytest.mark.parametrize(
    ("module", "where"), [(engine_build, ".partial"), (quantize_module, ".work")], ids=["writing", "statistics"]
)
def test_a_full_disk_is_an_error_and_leaves_no_partial_output(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, where: str
) -> None:
    options = reachable(source)
    save = engine_build.save_tensors

    def full(file: Path, *rest: object, **more: object) -> None:
        if file.parent.name.endswith(where):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(file, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "save_tensors", full)
    with pytest.raises(AgensError, match="is full"):
        quantize(source, tmp_path / "build", options, calibration(source))
    assert not (tmp_path / "build").exists() and not (tmp_path / "build.partial").exists()
    monkeypatch.undo()
    quantize(source, tmp_path / "build", options, calibration(source))
    assert [p.name for p in tmp_path.iterdir()] == ["build"]


def test_the_seed_decides_and_nothing_else_does(source: Path, tmp_path: Path) -> None:
    options, ids = reachable(source), calibration(source)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        quantize(source, tmp_path / name, replace(options, seed=seed), ids)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    assert digest(tmp_path / "a")["model.safetensors"] != digest(tmp_path / "c")["model.safetensors"]


def test_what_cannot_be_done_is_refused(
    source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, binary, brief = tmp_path / "empty", tmp_path / "binary", tmp_path / "brief"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00\x80" * 50)
    brief.write_text("hi")
    (tmp_path / "there").mkdir()
    src, dst = str(source), str(tmp_path / "new")
    for arguments, words in (
        ([src, str(tmp_path / "there"), "--bits", "3", "--calibration", str(text)], "exists already"),
        ([src, str(source / "inside"), "--bits", "3", "--calibration", str(text)], "inside the source"),
        ([src, dst, "--bits", "1.5", "--calibration", str(text)], "out of reach"),
        ([src, dst, "--bits", "99", "--calibration", str(text)], "out of reach"),
        ([src, dst, "--bits", "3", "--calibration", str(empty)], "is empty"),
        ([src, dst, "--bits", "3", "--calibration", str(binary)], "not UTF-8"),
        ([src, dst, "--bits", "3", "--calibration", str(brief)], "tokens; at least"),
        ([src, dst, "--bits", "3", "--calibration", str(tmp_path / "none")], "cannot be read"),
        ([src, dst, "--bits", "3"], "--calibration is needed"),
        ([src, dst, "--bits", "3", "--calibration", str(text), "--group", "48"], "--group must be"),
        ([src, dst, "--bits", "3", "--calibration", str(text), "--keep", "("], "no regular expression"),
        ([src, dst, "--bits", "3", "--calibration", str(text), "--keep", "."], "nothing to quantise"),
    ):
        assert main(["quantize", *arguments]) == 2, arguments
        assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("new*"))


def test_evaluate_prints_the_promised_json(source: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(source), str(source), "--text", str(text), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"mean_kl", "p99_kl", "top1_agreement", "perplexity_ratio", "tokens", "bits_per_weight"} <= set(report)
    assert report["mean_kl"] == pytest.approx(0, abs=1e-6) and report["top1_agreement"] == 1
    assert report["perplexity_ratio"] == pytest.approx(1)
    assert main(["evaluate", str(source), str(source), "--text", str(text) + ".not"]) == 2


def test_evaluate_never_holds_full_logits(source: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Meter(evaluation.QualityMeter):
        def add(self, reference: torch.Tensor, candidate: torch.Tensor, following: torch.Tensor) -> None:
            seen.append(len(reference))
            super().add(reference, candidate, following)

    monkeypatch.setattr(evaluation, "QualityMeter", Meter)
    monkeypatch.setattr(evaluation, "CHUNK_ROWS", 16)
    result = evaluate(source, source, str(text))
    assert max(seen) <= 16 and sum(seen) == result.tokens


def test_windows_cover_the_text() -> None:
    assert [list(w.shape) for w in cut_windows(list(range(1100)))] == [[2, 512], [1, 76]]
    assert [list(w.shape) for w in cut_windows(list(range(513)))] == [[1, 512]]
    assert cut_windows([1]) == []
