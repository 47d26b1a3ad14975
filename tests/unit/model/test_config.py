"""config.json to ModelConfig: what may be missing, what may not, and contradictions that name both numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from agens_engine.errors import CheckpointError, ConfigError, UsageError
from agens_engine.model.config import expected_shapes, parse_config
from agens_engine.model.loading import check_model, load_model, pick_device
from tests.modelkit import CPU, DATA, tiny_config, write_checkpoint

SHAPES = expected_shapes(parse_config(tiny_config(), {}))


def without(*keys: str, **text: Any) -> dict[str, Any]:
    raw = copy.deepcopy(tiny_config(**text))
    for key in keys:
        del raw["text_config"][key]
    return raw


def test_missing_keys_come_from_the_tensors() -> None:
    """Spec volundr-model.md, last table: gate rank, indexer, Engram sizes and stream count are derived from shapes."""
    derived = ("kda_gate_rank", "engram_rows", "engram_dim", "mhc_streams")
    assert parse_config(without(*derived), SHAPES) == parse_config(tiny_config(), SHAPES)
    config = parse_config(tiny_config(), SHAPES)
    assert config.bcsa is not None and (config.bcsa.indexer_heads, config.bcsa.indexer_dim) == (4, 128)
    narrow = {
        name: (6, 32) if "idx_q" in name else (2, 32) if "idx_k" in name else shape for name, shape in SHAPES.items()
    }
    bcsa = parse_config(tiny_config(), narrow).bcsa
    assert bcsa is not None and (bcsa.indexer_heads, bcsa.indexer_dim) == (3, 2)


def test_layer_types_stand_in_for_mixer_types() -> None:
    raw = without("mixer_types", layer_types=["linear_attention", "full_attention", "linear_attention", "other"])
    assert parse_config(raw, {}).mixers == ("kda", "bcsa", "kda", "bcsa")


def test_text_keys_may_sit_at_top_level_and_rope_in_three_places() -> None:
    nested = tiny_config()
    flat = {**nested["text_config"]}
    assert parse_config(flat, {}) == parse_config(nested, {})
    rope = flat.pop("rope_parameters")
    assert parse_config({**flat, "rope_scaling": rope}, {}).rope == parse_config(nested, {}).rope
    loose = {**flat, "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    assert parse_config(loose, {}).rope == parse_config(nested, {}).rope


@pytest.mark.parametrize("streams", [0, 1])
def test_no_streams_means_a_plain_residual(streams: int) -> None:
    config = parse_config(tiny_config(mhc_streams=streams), {})
    assert config.num_streams == 1 and not any(name.startswith("model.mhc") for name in expected_shapes(config))


@pytest.mark.parametrize(
    ("raw", "shapes", "message"),
    [
        (without("hidden_size"), {}, "lacks hidden_size"),
        (without("mixer_types"), {}, "lacks mixer_types"),
        (tiny_config(mixer_types=["kda", "mamba", "kda", "attn"]), {}, "unknown mixer_types mamba"),
        (tiny_config(mixer_types=["kda"]), {}, "lists 1 layers, num_hidden_layers says 4"),
        (tiny_config(hidden_size="32"), {}, "hidden_size must be an integer"),
        (tiny_config(hidden_size=True), {}, "hidden_size must be an integer"),
        (tiny_config(num_attention_heads=3), {}, "3 is not a multiple of num_key_value_heads 2"),
        (tiny_config(linear_num_value_heads=2, linear_num_key_heads=3), {}, "2 is not a multiple"),
        (tiny_config(attention_bias=True), {}, "attention_bias"),
        (tiny_config(hidden_act="gelu"), {}, "hidden_act 'gelu'"),
        (tiny_config(attn_output_gate=False), {}, "attn_output_gate"),
        (tiny_config(rope_parameters={"rope_type": "yarn"}), {}, "rope_type 'yarn'"),
        (tiny_config(rope_parameters={"partial_rotary_factor": 0.05}), {}, "partial_rotary_factor"),
        (tiny_config(rope_parameters={"partial_rotary_factor": 0.5, "mrope_section": [1, 1]}), {}, "mrope_section"),
        (tiny_config(bcsa_compress=9), {}, "bcsa_window 8 is smaller than bcsa_compress 9"),
        (tiny_config(bcsa_window=7), {}, "bcsa_window 7 is smaller than a verify step of 8"),
        (tiny_config(engram_layers=[9]), {}, "outside 0..3"),
        (tiny_config(engram_orders="2"), {}, "engram_orders must be a list"),
        (tiny_config(kda_gate_rank=9), SHAPES, "kda_gate_rank is 9, .*f_down.weight has 8"),
        (tiny_config(mhc_streams=3), SHAPES, "mhc_streams is 3, model.mhc.0.pre_static has 4"),
        ({"text_config": 5}, {}, "text_config must be an object"),
    ],
)
def test_a_bad_config_names_the_key_and_both_numbers(
    raw: dict[str, Any], shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(raw, shapes)


def test_check_model_names_everything_without_loading(tmp_path: Any) -> None:
    folder = write_checkpoint(tmp_path / "m")
    check_model(folder)
    other = write_checkpoint(tmp_path / "n", intermediate_size=40, mixer_types=["kda", "kda", "kda", "attn"])
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError) as caught:
        check_model(folder)
    for part in ("missing", "unknown", "misshapen", "layers.1.self_attn.idx_q.weight", "layers.1.linear_attn.A_log"):
        assert part in str(caught.value)


def test_devices_and_dtypes_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="not a device"):
        pick_device("toaster")
    with pytest.raises(UsageError, match="float32"):
        load_model(DATA / "golden", device=CPU, dtype="bfloat16")
