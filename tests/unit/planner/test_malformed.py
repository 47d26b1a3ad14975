"""Damaged configs and headers: one line with the folder or file and the key, never a Python error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agens_planner import PlannerInputError, checkpoint, load_profile, plan, read_checkpoint, read_drafter, read_mtp

Tiny = Callable[[], tuple[dict, dict]]
Write = Callable[..., Path]
GATE = "model.language_model.layers.0.mlp.gate_proj"


def refused(read: Callable[[], object], *parts: str) -> None:
    """The reader refuses in one line that names every part."""
    with pytest.raises(PlannerInputError) as error:
        read()
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


def pack_gate(tensors: dict[str, Any]) -> None:
    del tensors[f"{GATE}.weight"]
    tensors[f"{GATE}.weight_packed"] = ("I32", (16, 1))
    tensors[f"{GATE}.weight_scale"] = ("BF16", (16, 1))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"engram_layers": [0], "engram_orders": ["a"]}, ("engram_orders", "whole numbers")),
        ({"engram_layers": [None]}, ("engram_layers", "whole numbers")),
        ({"engram_layers": [True]}, ("engram_layers", "whole numbers")),
        ({"engram_layers": 3}, ("engram_layers", "must be a list")),
        ({"mixer_types": ["kda", ["attn"]]}, ("mixer_types", "words")),
        ({"mixer_types": None, "layer_types": [{}, {}]}, ("layer_types", "words")),
        ({"mixer_types": {"kda": 1}}, ("mixer_types", "must be a list")),
        ({"hidden_size": [8]}, ("hidden_size", "whole number")),
        ({"num_attention_heads": 0}, ("num_attention_heads", "at least 1")),
    ],
)
def test_text_keys(write_checkpoint: Write, tiny: Tiny, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    tensors, config = tiny()
    config["text_config"] |= change
    folder = write_checkpoint(tensors, config)
    refused(lambda: read_checkpoint(folder), str(folder), "config.json", *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"quantization_config": [1]}, ("quantization_config", "must be an object")),
        ({"quantization_config": "int4"}, ("quantization_config", "must be an object")),
        ({"text_config": 5}, ("text_config", "must be an object")),
        ({"quantization_config": {"config_groups": [1]}}, ("config_groups", "must be an object")),
        ({"quantization_config": {"config_groups": {"g": 1}}}, ("g must be an object",)),
        ({"quantization_config": {"config_groups": {"g": {"weights": 4}}}}, ("weights must be an object",)),
        ({"quantization_config": {"config_groups": {"g": {"weights": {"num_bits": "x"}}}}}, ("num_bits", "'x'")),
        ({"quantization_config": {"config_groups": {"g": {"weights": {"num_bits": 5}}}}}, ("num_bits 5", "known")),
        ({"quantization_config": {"config_groups": {"g": {"weights": {"group_size": "x"}}}}}, ("group_size", "'x'")),
        ({"quantization_config": {"config_groups": {"g": {"targets": [1]}}}}, ("targets", "words")),
        ({"quantization_config": {"config_groups": {"g": {"targets": ["re:("]}}}}, ("targets", "not valid")),
        ({"quantization_config": {"bits_per_module": [1]}}, ("bits_per_module", "must be an object")),
        ({"quantization_config": {"bits_per_module": {GATE: "x"}}}, ("bits_per_module", GATE, "'x'")),
        ({"quantization_config": {"bits_per_module": {GATE: -4}}}, ("bits_per_module", GATE, "-4")),
    ],
)
def test_quantisation_keys(write_checkpoint: Write, tiny: Tiny, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    tensors, config = tiny()
    pack_gate(tensors)
    folder = write_checkpoint(tensors, config | change)
    refused(lambda: read_checkpoint(folder), str(folder), "config.json", *parts)


def test_a_text_config_that_is_no_object_without_packed_tensors(write_checkpoint: Write, tiny: Tiny) -> None:
    tensors, config = tiny()
    folder = write_checkpoint(tensors, config | {"text_config": 5})
    refused(lambda: read_checkpoint(folder), str(folder), "text_config must be an object")


@pytest.mark.parametrize("shape", [(), (0, 8), (8, 0)])
@pytest.mark.parametrize("name", ["norm.weight", "layers.1.self_attn.q_proj.weight", "layers.1.self_attn.idx_k.weight"])
def test_tensors_without_rows(write_checkpoint: Write, tiny: Tiny, name: str, shape: tuple[int, ...]) -> None:
    tensors, config = tiny()
    full = f"model.language_model.{name}"
    folder = write_checkpoint(tensors | {full: ("BF16", shape)}, config)
    refused(lambda: read_checkpoint(folder), str(folder), full, str(list(shape)))


@pytest.mark.parametrize(
    ("packed", "scale"), [((), (16, 1)), ((16, 0), (16, 1)), ((16, 1), (16, 0)), ((0, 1), (0, 1)), ((16,), (16,))]
)
def test_packed_shapes(write_checkpoint: Write, tiny: Tiny, packed: tuple[int, ...], scale: tuple[int, ...]) -> None:
    tensors, config = tiny()
    pack_gate(tensors)
    tensors[f"{GATE}.weight_packed"], tensors[f"{GATE}.weight_scale"] = ("I32", packed), ("BF16", scale)
    folder = write_checkpoint(tensors, config)
    refused(lambda: read_checkpoint(folder), "model.safetensors", GATE, str(list(packed)))


@pytest.mark.parametrize("shape", [(), (8,), (8, 0), (8, 7), (2, 8, 8)])
def test_a_drafter_with_a_wrong_fc(write_checkpoint: Write, shape: tuple[int, ...]) -> None:
    config = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    folder = write_checkpoint({"fc.weight": ("BF16", shape)}, config)
    refused(lambda: read_drafter(folder), str(folder), "fc.weight")
    folder = write_checkpoint({"mtp.fc.weight": ("BF16", shape)}, config)
    refused(lambda: read_mtp(folder), str(folder), "fc.weight")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"layer_types": [1]}, ("layer_types", "words")),
        ({"dflash_config": 5}, ("dflash_config", "must be an object")),
        ({"text_config": 5, "num_attention_heads": "x"}, ("num_attention_heads", "'x'")),
    ],
)
def test_drafter_keys(write_checkpoint: Write, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    config = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    folder = write_checkpoint({"fc.weight": ("BF16", (8, 16))}, config | change)
    refused(lambda: read_drafter(folder), str(folder), *parts)


def test_kv_heads_of_drafters_follow_from_the_tensors(write_checkpoint: Write) -> None:
    config = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    tensors = {
        "layers.0.self_attn.k_proj.weight": ("BF16", (8, 8)),
        "layers.0.self_attn.q_norm.weight": ("BF16", (4,)),
    }
    drafter = read_drafter(write_checkpoint(tensors | {"fc.weight": ("BF16", (8, 16))}, config | {"sliding_window": 8}))
    assert (drafter.head_dim, drafter.kv_heads) == (4, 2)
    mtp = read_mtp(write_checkpoint({f"mtp.{n}": t for n, t in tensors.items()} | {"mtp.fc.weight": ("BF16", (8, 16))}))
    assert (mtp.head_dim, mtp.kv_heads) == (4, 1)  # the config's word counts before the tensors


def test_deep_nesting(write_checkpoint: Write, tiny: Tiny) -> None:
    folder = write_checkpoint()
    deep = "[" * 100_000 + "]" * 100_000
    for name in ("model.safetensors.index.json", "config.json"):
        (folder / name).write_text(f'{{"weight_map": {deep}}}')
        refused(lambda: read_checkpoint(folder), str(folder), name)
    (folder / "config.json").write_text(json.dumps(tiny()[1]))
    (folder / "model.safetensors.index.json").unlink()
    header = f'{{"a": {deep}}}'.encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(lambda: read_checkpoint(folder), str(folder), "model.safetensors")


@pytest.mark.parametrize(
    "fault",
    [TypeError("x"), ValueError("x"), IndexError("x"), AttributeError("x"), ZeroDivisionError("x"), KeyError("x")],
)
@pytest.mark.parametrize("read", [read_checkpoint, read_mtp, read_drafter])
def test_what_no_check_foresaw_still_names_the_folder(
    monkeypatch: pytest.MonkeyPatch, write_checkpoint: Write, read: Callable[[Path], object], fault: Exception
) -> None:
    def broken(*_: object) -> None:
        raise fault

    monkeypatch.setattr(checkpoint, "_specs", broken)
    folder = write_checkpoint()
    refused(lambda: read(folder), str(folder), type(fault).__name__)


def test_the_undamaged_folder_is_read(write_checkpoint: Write, tiny: Tiny) -> None:
    """What the damage above is done to can be planned."""
    tensors, config = tiny()
    assert plan(read_checkpoint(write_checkpoint(tensors, config)), load_profile("cpu")).fits
    pack_gate(tensors)
    assert plan(read_checkpoint(write_checkpoint(tensors, config)), load_profile("cpu")).fits
