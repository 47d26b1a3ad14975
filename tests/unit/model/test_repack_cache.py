"""The repack cache: a second load repacks nothing, an interrupted one goes on, and nothing bad is ever used."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agens_engine.model import packed_weights
from agens_engine.model.loading import load_model
from agens_engine.model.lowbit_linear import LowbitLinear
from agens_engine.model.packed_weights import survey_packed
from agens_engine.model.repack_cache import RepackCache
from tests.modelkit import CPU
from tests.packedkit import edit_tensor, write_quantised

LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "mixer_types": ["kda", "attn"]}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantised(tmp_path_factory.mktemp("models") / "m", **LAYERS)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often tensors were repacked and looked at."""
    calls = {"repack_tensor": 0, "device_format": 0}
    for name in calls:
        real = getattr(packed_weights, name)

        def counting(*args: Any, name: str = name, real: Callable[..., Any] = real, **options: Any) -> Any:
            calls[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(packed_weights, name, counting)
    return calls


def load(folder: Path, cache: Path | None) -> dict[str, torch.Tensor]:
    """All sections of all packed linears."""
    opened = RepackCache(cache) if cache is not None else None
    model = load_model(folder, device=CPU, packed=survey_packed(folder, opened), cache=opened)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, LowbitLinear)}
    return {f"{n}.{part}": tensor.clone() for n, m in linears.items() for part, tensor in m.named_buffers()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "tensors").iterdir())


def test_a_second_load_neither_looks_nor_repacks(original: Path, tmp_path: Path, counted: dict[str, int]) -> None:
    plain = load(original, None)
    num = counted["repack_tensor"]
    assert num == counted["device_format"] > 8
    assert same(load(original, tmp_path), plain) and len(entries(tmp_path)) == num
    counted.update(repack_tensor=0, device_format=0)
    assert same(load(original, tmp_path), plain)
    assert counted == {"repack_tensor": 0, "device_format": 0}


def test_a_copy_of_the_model_is_known_by_its_content(original: Path, tmp_path: Path, counted: dict[str, int]) -> None:
    plain = load(original, tmp_path / "cache")
    copy = Path(shutil.copytree(original, tmp_path / "copy", copy_function=shutil.copyfile))
    counted.update(repack_tensor=0, device_format=0)
    assert same(load(copy, tmp_path / "cache"), plain)
    assert counted == {"repack_tensor": 0, "device_format": 0}


def test_other_weights_under_the_same_name_are_not_confused(
    original: Path, tmp_path: Path, counted: dict[str, int]
) -> None:
    folder = Path(shutil.copytree(original, tmp_path / "m"))
    before = load(folder, tmp_path / "cache")
    counted.update(repack_tensor=0)
    part = "model.language_model.layers.0.mlp.gate_proj.weight_scale"
    edit_tensor(folder, part, lambda scale: scale * 2)
    os.utime(folder / "model.safetensors", ns=(1, 1))  # the size stays; the time tells
    after = load(folder, tmp_path / "cache")
    assert counted["repack_tensor"] == 1
    assert same(after, load(folder, None)) and not same(after, before)


def test_an_interrupted_load_goes_on_where_it_stopped(
    original: Path, tmp_path: Path, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RepackCache.store

    def stop_after_three(self: RepackCache, key: str, packed: Any) -> None:
        if len(entries(tmp_path)) == 3:
            raise KeyboardInterrupt
        real(self, key, packed)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RepackCache, "store", stop_after_three)
        load(original, tmp_path)
    assert len(entries(tmp_path)) == 3
    counted.update(repack_tensor=0)
    plain = load(original, tmp_path)
    assert counted["repack_tensor"] == len(entries(tmp_path)) - 3
    assert same(plain, load(original, None))


def flip(position: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        at = position % len(data)
        return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip(3), "no entry of this cache"),
        (flip(30), "its header is damaged"),
        (flip(2000), "its checksum is wrong"),
        (flip(-1), "its checksum is wrong"),
        (lambda data: data[:-100], "its length is wrong"),
        (lambda data: data + b"x", "its length is wrong"),
        (lambda data: data[:11], "no entry of this cache"),
        (lambda data: b"", "no entry of this cache"),
        (lambda data: b"GGUF" * 100, "no entry of this cache"),
    ],
)
def test_damaged_entries_are_named_and_made_again(
    original: Path,
    tmp_path: Path,
    counted: dict[str, int],
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
    reason: str,
) -> None:
    plain = load(original, tmp_path)
    victim = entries(tmp_path)[2]
    sound = victim.read_bytes()
    victim.write_bytes(damage(sound))
    counted.update(repack_tensor=0)
    with caplog.at_level(logging.WARNING):
        assert same(load(original, tmp_path), plain)
    assert counted["repack_tensor"] == 1
    warnings = [r.getMessage() for r in caplog.records]
    assert warnings and all(victim.name in text and reason in text for text in warnings)
    assert victim.read_bytes() == sound


def test_an_entry_of_another_tensor_is_foreign(
    original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = load(original, tmp_path)
    first, second = entries(tmp_path)[:2]
    shutil.copyfile(first, second)
    with caplog.at_level(logging.WARNING):
        assert same(load(original, tmp_path), plain)
    assert "it belongs to another tensor" in caplog.text
    assert first.read_bytes() != second.read_bytes()


def test_a_full_disk_costs_the_cache_not_the_load(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = RepackCache(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        model = load_model(original, device=CPU, packed=survey_packed(original, cache), cache=cache)
    assert any(isinstance(m, LowbitLinear) for m in model.modules())
    assert [r.getMessage() for r in caplog.records] == [
        f"repack cache {tmp_path}: No space left on device; nothing more is written there"
    ]
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]  # no half-written file either
