"""Shapes read from folders: the golden checkpoint, quantised members, and what can be wrong with a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from agens_planner import PlannerInputError, classify, load_profile, normalise, plan, read_checkpoint, weight_line
from agens_planner.build import build_drafter
from agens_planner.card import read_card
from agens_planner.dims import Config, read_dims
from agens_planner.headers import read_folder, read_header
from agens_planner.shapes import TensorSpec

Tiny = Callable[[], tuple[dict, dict]]
Write = Callable[..., Path]
GATE = "model.language_model.layers.0.mlp.gate_proj"


def test_golden_checkpoint(golden_dir: Path) -> None:
    shapes = read_checkpoint(golden_dir)
    assert shapes.parameters == 2_138_176
    assert (shapes.dims.kda_layers, shapes.dims.bcsa_layers, shapes.dims.attn_layers) == (5, 2, 1)
    assert (shapes.dims.index_heads, shapes.dims.index_dim) == (4, 128)
    found = plan(shapes, load_profile("cpu"))
    assert found.context_tokens == 4096
    assert found.sequences == 8
    assert found.bytes_of("state.kda") == 8 * 5 * 6 * 32 * 32 * 4
    assert found.bytes_of("kv.dense") == 8 * 33 * 128 * 2 * 2 * 64 * 4  # 33 pages hold 4096 + 8
    # On a CPU the device lines count against the host as well, and nothing is pinned.
    assert found.bytes_of("host.device_lines") == found.planned_peak_bytes
    assert {x.place for x in found.host_lines} == {"host_pageable"}
    assert found.bytes_of("runtime.cuda_context") == 0


def test_quantised_and_plain_members_are_told_apart_per_tensor(write_checkpoint: Write, tiny: Tiny) -> None:
    tensors, config = tiny()
    del tensors[f"{GATE}.weight"]
    tensors[f"{GATE}.weight_packed"] = ("I32", (16, 1))
    tensors[f"{GATE}.weight_scale"] = ("BF16", (16, 1))
    tensors[f"{GATE}.weight_shape"] = ("I64", (2,))
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    found = plan(read_checkpoint(write_checkpoint(tensors, config)), load_profile("cpu"))
    # padded to one tile of 128 × 256 at 4 bits, two scale groups would be 8 columns wide each
    assert found.bytes_of("weights.mlp.w4") == 128 * 256 // 2 + 128 * (256 // 8) * 2
    assert found.bytes_of("weights.mlp.fp32") == (3 * 16 * 8 + 2 * 8 * 16) * 4


def test_bits_come_from_the_config_groups(write_checkpoint: Write, tiny: Tiny) -> None:
    tensors, config = tiny()
    del tensors[f"{GATE}.weight"]
    tensors[f"{GATE}.weight_packed"] = ("I32", (16, 2))  # 8 bits: 4 values a word
    tensors[f"{GATE}.weight_scale"] = ("BF16", (16, 1))
    weights = {"num_bits": 8, "group_size": 8, "type": "int"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": [r"re:.*gate_proj"], "weights": weights}},
    }
    shapes = read_checkpoint(write_checkpoint(tensors, config))
    packed = [g for g in shapes.groups if g.bits is not None]
    assert [(g.shape, g.bits, g.group) for g in packed] == [((16, 8), Fraction(8), 8)]


def test_a_drafter_with_full_layers_counts_the_whole_context() -> None:
    config = {
        "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 4, "sliding_window": 16, "block_size": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    drafter = build_drafter(config, [TensorSpec("model.encoder.fc.weight", (4, 12))], "here")
    assert (drafter.full_layers, drafter.taps, drafter.window) == (1, 3, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 16}, "embed_tokens.*shape"),
        ({"hidden_size": -8}, "hidden_size must be a whole number"),
        ({"num_hidden_layers": 3}, "mixer_types names 2 layers"),
        ({"mixer_types": ["kda", "mamba"]}, "unknown mixer 'mamba'"),
        ({"mixer_types": ["attn", "kda"]}, "is missing"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"intermediate_size": 32}, "gate_proj.*shape"),
        ({"linear_num_value_heads": 3}, "in_proj_qkv.*shape"),
        ({"engram_layers": [0], "engram_orders": []}, "engram_orders must be positive"),
        ({"engram_layers": [0], "engram_orders": [0, 2]}, "engram_orders must be positive"),
        ({"engram_layers": [0], "engram_rows": 8}, "engram_dim is missing"),
        ({"engram_layers": [2]}, "engram_layers \\[2\\] names a layer outside 0..1"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be a whole number of at least 2"),
        ({"mixer_types": "kda"}, "mixer_types must be a list"),
    ],
)
def test_contradictory_configs_are_one_clear_line(
    write_checkpoint: Write, tiny: Tiny, change: dict[str, Any], message: str
) -> None:
    tensors, config = tiny()
    config["text_config"] |= change
    with pytest.raises(PlannerInputError, match=message) as error:
        read_checkpoint(write_checkpoint(tensors, config))
    assert "\n" not in str(error.value)


def test_what_the_config_leaves_out_comes_from_the_tensors(golden_dir: Path, tmp_path: Path) -> None:
    """Every fallback of agens_engine/model/config.py: the plan is the same with and without the keys."""
    config = json.loads((golden_dir / "config.json").read_text())
    text = config.get("text_config", config)
    given = read_checkpoint(golden_dir, "m")
    assert given.dims.streams > 1 and given.dims.engram_layers > 0
    assert (text["engram_orders"], text["linear_conv_kernel_dim"]) == ([2, 3], 4)
    for name in ("mhc_streams", "engram_dim", "engram_rows", "engram_orders", "linear_conv_kernel_dim"):
        text.pop(name)
    for name in ("kda_gate_rank", "bcsa_indexer_dim", "bcsa_indexer_heads"):
        text.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "drafters"):
        (tmp_path / name).symlink_to(golden_dir / name)
    bare = read_checkpoint(tmp_path, "m")
    assert bare.dims == given.dims
    profile = load_profile("cpu")
    assert plan(bare, profile).lines == plan(given, profile).lines
    for name, value in (("mhc_streams", 7), ("engram_dim", 3), ("engram_rows", 5), ("bcsa_indexer_dim", 9)):
        wrong = config | {"text_config": text | {name: value}} if "text_config" in config else config | {name: value}
        (tmp_path / "config.json").write_text(json.dumps(wrong))
        with pytest.raises(PlannerInputError, match=f"{name} is {value}"):
            read_checkpoint(tmp_path)


def test_fallbacks_agree_with_the_engine(golden_dir: Path) -> None:
    """The engine's reading of the same bare config, size by size."""
    from agens_engine.model.config import parse_config

    config = json.loads((golden_dir / "config.json").read_text())
    text = config.get("text_config", config)
    for name in ("mhc_streams", "engram_dim", "engram_rows", "engram_orders", "linear_conv_kernel_dim"):
        text.pop(name)
    specs = {normalise(n): TensorSpec(n, h.shape) for n, h in read_folder(golden_dir).items()}
    dims = read_dims(Config(config, "here").text(), specs)
    engine = parse_config(config, {n: s.shape for n, s in specs.items()})
    assert engine.kda is not None and engine.bcsa is not None and engine.engram is not None
    assert (dims.streams, dims.kda_conv, dims.kv_heads) == (
        engine.num_streams,
        engine.kda.conv_kernel,
        engine.num_kv_heads,
    )
    assert (dims.engram_dim, dims.engram_orders) == (engine.engram.dim, len(engine.engram.orders))
    assert (dims.index_heads, dims.index_dim) == (engine.bcsa.indexer_heads, engine.bcsa.indexer_dim)


def test_kv_heads_default_to_all_heads_and_text_keys_may_stand_outside(write_checkpoint: Write, tiny: Tiny) -> None:
    tensors, config = tiny()
    for part in "kv":
        tensors[f"model.language_model.layers.1.self_attn.{part}_proj.weight"] = ("BF16", (8, 8))
    config["text_config"]["num_key_value_heads"] = 2
    given = read_checkpoint(write_checkpoint(tensors, config)).dims
    del config["text_config"]["num_key_value_heads"]
    config["vocab_size"] = config["text_config"].pop("vocab_size")
    assert read_checkpoint(write_checkpoint(tensors, config)).dims == given


def test_unknown_missing_and_double_tensors(write_checkpoint: Write, tiny: Tiny) -> None:
    tensors, _ = tiny()
    with pytest.raises(PlannerInputError, match=r"no Volundr model has, first model\.extra"):
        read_checkpoint(write_checkpoint(tensors | {"model.extra": ("BF16", (1,))}))
    with pytest.raises(PlannerInputError, match=r"lm_head\.weight is missing"):
        read_checkpoint(write_checkpoint({k: v for k, v in tensors.items() if k != "lm_head.weight"}))
    both = tensors | {f"{GATE}.weight_packed": ("I32", (16, 1)), f"{GATE}.weight_scale": ("BF16", (16, 1))}
    with pytest.raises(PlannerInputError, match="both packed and as .weight"):
        read_checkpoint(write_checkpoint(both))
    del both[f"{GATE}.weight"]
    del both[f"{GATE}.weight_scale"]
    with pytest.raises(PlannerInputError, match="has no .*weight_scale"):
        read_checkpoint(write_checkpoint(both))


def test_a_tied_head_is_counted_though_it_is_not_stored(write_checkpoint: Write, tiny: Tiny) -> None:
    tensors, config = tiny()
    del tensors["lm_head.weight"]
    config["text_config"]["tie_word_embeddings"] = True
    found = plan(read_checkpoint(write_checkpoint(tensors, config)), load_profile("cpu"))
    assert found.bytes_of("weights.head.fp32") == 32 * 8 * 4


def test_broken_files_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content in (b"", b"\x00" * 4, b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00[]"):
        path.write_bytes(content)
        with pytest.raises(PlannerInputError, match=r"model\.safetensors"):
            read_header(path)
    short = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes(len(short).to_bytes(8, "little") + short + bytes(8))
    with pytest.raises(PlannerInputError, match="cut short"):
        read_header(path)
    lying = json.dumps({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}).encode()
    path.write_bytes(len(lying).to_bytes(8, "little") + lying + bytes(16))
    with pytest.raises(PlannerInputError, match="claims shape"):
        read_header(path)


def test_folders_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(PlannerInputError, match=r"config\.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlannerInputError, match="not valid JSON"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PlannerInputError, match="no \\*.safetensors"):
        read_checkpoint(tmp_path)


def test_unknown_build_of_the_card() -> None:
    card = Path(__file__).resolve().parents[3] / "agens_engine" / "assets" / "volundr-32b"
    with pytest.raises(PlannerInputError, match="did you mean int4"):
        read_card(card, "int8")
    with pytest.raises(PlannerInputError, match="between 1 and 8"):
        read_card(card, "engine-40")


def test_names_and_lines() -> None:
    assert normalise("model.language_model.layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert normalise("language_model.model.norm.weight") == "model.norm.weight"
    cases = {
        "model.layers.3.mlp.up_proj.weight": "mlp",
        "model.layers.3.self_attn.idx_q.weight": "indexer",
        "model.layers.3.self_attn.idx_norm.weight": "small",
        "model.layers.3.self_attn.q_proj.weight": "attention",
        "model.layers.0.linear_attn.conv1d.weight": "small",
        "model.layers.0.linear_attn.f_up.weight": "kda",
        "model.layers.2.engram.tables.1.weight": "engram_table",
        "model.layers.2.engram.gate.bias": "small",
        "model.layers.2.engram.value.weight": "engram",
        "model.mhc.0.dyn.weight": "mhc",
        "model.mhc.0.res_static": "small",
        "model.visual.blocks.0.attn.qkv.weight": "vision",
        "mtp.fc.weight": "ignored",
        "rotary.inv_freq": None,
    }
    assert {name: classify(name) for name in cases} == cases
    assert weight_line("mlp", Fraction("2.82"), "bfloat16") == "weights.mlp.w2_82"
    assert weight_line("mlp", None, "float32") == "weights.mlp.fp32"
    assert weight_line("small", None, "bfloat16") == "weights.small.fp32"
