"""Drafter configs: every key at both levels, every documented fallback, every refusal (spec drafters.md A.1, B)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from agens_engine.errors import ConfigError
from agens_engine.model.config import ModelConfig
from agens_engine.model.dflash2 import DFlash2
from agens_engine.model.dflash2_config import BlockLayer, DFlash2Config, parse_dflash2_config
from agens_engine.model.mtp_config import parse_mtp_config
from tests.drafterkit import CONV_SELECTOR, TARGET, dflash2_raw, mtp_raw, random_dflash2, random_mtp

Shapes = dict[str, tuple[int, ...]]


def parse(raw: dict[str, Any], shapes: Shapes | None = None, **kwargs: Any) -> DFlash2Config:
    return parse_dflash2_config(raw, shapes or {}, TARGET, **kwargs)


def shapes_of(model: torch.nn.Module) -> Shapes:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def flat(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same keys, all at top level."""
    merged = {**raw, **raw["dflash_config"], **changes}
    del merged["dflash_config"]
    return {key: value for key, value in merged.items() if value is not None}


def test_both_levels_say_the_same_and_the_nested_one_wins() -> None:
    nested = parse(dflash2_raw())
    assert parse(flat(dflash2_raw())) == nested
    assert nested.block_size == 8 and nested.target_layer_ids == (0, 2, 3) and nested.mask_token_id == 95
    assert (nested.conv_kernel, nested.conv_group, nested.selector_rank, nested.selector_top_k) == (2, 8, 12, 6)
    assert parse(dflash2_raw(block_size=4, mask_token_id=1, sliding_window=99)).block_size == 8
    within = dflash2_raw()
    within["dflash_config"]["sliding_window"] = 7
    assert parse(within).layers[0].window == 7


def test_defaults() -> None:
    raw = flat(dflash2_raw(features={}), block_size=None, rope_parameters=None)
    config = parse(raw)
    assert config.block_size == 16
    assert (config.conv_kernel, config.selector_rank) == (0, 0)
    assert (config.output_multiplier, config.softcap, config.embedding_scale) == (1.0, None, 1.0)
    assert (config.rms_eps, config.rope_theta, config.max_positions) == (1e-6, 1e7, 262144)
    assert config.num_target_layers == 4 and not config.attention_bias


def test_the_three_scalings_are_read() -> None:
    config = parse(dflash2_raw(output_multiplier=0.5, final_logit_softcapping=30, input_embedding_scale=2))
    assert (config.output_multiplier, config.softcap, config.embedding_scale) == (0.5, 30.0, 2.0)
    for off in (0, -1.0, None):
        assert parse(dflash2_raw(final_logit_softcapping=off)).softcap is None
    for key in ("output_multiplier", "input_embedding_scale"):
        with pytest.raises(ConfigError, match=f"{key} must be above 0, not -1"):
            parse({**dflash2_raw(), key: -1})


def test_rope_theta_nested_or_flat() -> None:
    assert parse(dflash2_raw(rope_theta=5)).rope_theta == 1e4  # nested wins
    assert parse(dflash2_raw(rope_parameters=None, rope_theta=5)).rope_theta == 5.0
    with pytest.raises(ConfigError, match="rope_type 'yarn' is not supported"):
        parse(dflash2_raw(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn"}))


@pytest.mark.parametrize(
    ("is_causal", "sliding", "full"), [(None, True, False), (False, False, False), (True, True, True)]
)
def test_direction(is_causal: bool | None, sliding: bool, full: bool) -> None:
    config = parse(dflash2_raw(is_causal=is_causal, layer_types=["sliding_attention", "full_attention"]))
    assert config.layers == (BlockLayer(12, sliding), BlockLayer(None, full))
    assert config.max_window is None
    assert parse(dflash2_raw()).max_window == 12


@pytest.mark.parametrize(
    "changes", [{"use_sliding_window": None}, {"use_sliding_window": False}, {"sliding_window": None}]
)
def test_a_sliding_layer_needs_a_window(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sliding_attention but no window"):
        parse(dflash2_raw(**changes))
    # without a list of kinds the same keys mean full attention
    assert parse(dflash2_raw(layer_types=None, **changes)).layers == (BlockLayer(None, False),) * 2


def test_layer_kinds_without_a_list() -> None:
    assert parse(dflash2_raw(layer_types=None)).layers == (BlockLayer(12, False),) * 2
    assert [x.window for x in parse(dflash2_raw(layer_types=None, max_window_layers=1)).layers] == [None, 12]
    with pytest.raises(ConfigError, match="must list 2 layers .* not 1"):
        parse(dflash2_raw(layer_types=["full_attention"]))
    with pytest.raises(ConfigError, match="unknown layer_types linear"):
        parse(dflash2_raw(layer_types=["linear", "full_attention"]))


def test_the_mask_by_text() -> None:
    asked: list[str] = []

    def resolve(text: str) -> int | None:
        asked.append(text)
        return {"<|MASK|>": 7, "<m>": 8}.get(text)

    raw = flat(dflash2_raw(), mask_token_id=None)
    assert parse(raw, resolve_token=resolve).mask_token_id == 7
    assert parse({**raw, "mask_token": "<m>"}, resolve_token=resolve).mask_token_id == 8
    assert parse({**raw, "mask_token_id": "<m>"}, resolve_token=resolve).mask_token_id == 8
    assert parse({**raw, "mask_token_id": 0, "mask_token": "<m>"}, resolve_token=resolve).mask_token_id == 0
    assert asked == ["<|MASK|>", "<m>", "<m>"]
    with pytest.raises(ConfigError, match="'<x>' is unknown .the tokenizer does not have it.; set mask_token_id"):
        parse({**raw, "mask_token": "<x>"}, resolve_token=resolve)
    with pytest.raises(ConfigError, match="'<|MASK|>' is unknown .no tokenizer"):
        parse(raw)


@pytest.mark.parametrize("key", CONV_SELECTOR)
def test_features_are_given_in_pairs(key: str) -> None:
    half = {k: v for k, v in CONV_SELECTOR.items() if k != key}
    with pytest.raises(ConfigError, match=f"{key} is 0|is 0 and {key}|{key}.*together or not at all"):
        parse(dflash2_raw(features=half))


def test_absent_sizes_come_from_the_tensors() -> None:
    full = random_dflash2()
    raw = {
        key: value
        for key, value in flat(dflash2_raw()).items()
        if key
        in (
            "target_layer_ids",
            "mask_token_id",
            "block_size",
            "sliding_window",
            "use_sliding_window",
            "is_causal",
            "rope_parameters",
        )
    }
    derived = parse(raw, shapes_of(full))
    expected = parse(dflash2_raw(features={**CONV_SELECTOR, "selector_top_k": 16}))
    assert derived == expected
    # an explicit 0 is an answer, not an absence
    off = parse({**raw, "conv_kernel_size": 0, "selector_rank": 0}, shapes_of(full))
    assert (off.conv_kernel, off.conv_group, off.selector_rank, off.selector_top_k) == (0, 0, 0, 0)
    with pytest.raises(ConfigError, match="target_layer_ids is missing; fc.weight wants 3 of them"):
        parse({k: v for k, v in raw.items() if k != "target_layer_ids"}, shapes_of(full))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "does not fit the target model: hidden_size is 64, the target model's is 32"),
        ({"vocab_size": 100}, "vocab_size is 100, the target model's is 96"),
        ({"dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": 95}}, "names layer 4, .* has 4 layers"),
        ({"dflash_config": {"target_layer_ids": [1], "mask_token_id": 96}}, "mask_token_id is 96, .* has 96 tokens"),
        ({"dflash_config": {"target_layer_ids": [1, 1], "mask_token_id": 5}}, "target_layer_ids must list different"),
        ({"dflash_config": {"target_layer_ids": [], "mask_token_id": 5}}, "target_layer_ids must list different"),
        ({"dflash_config": [1]}, "dflash_config must be an object"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 is not a multiple of num_key_value_heads 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; silu is"),
        ({"is_causal": "no"}, "is_causal must be true or false, not 'no'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer of at least 1, not True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)  # fmt: skip
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(dflash2_raw(**changes))


def test_another_layer_count_of_the_target_is_only_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse(dflash2_raw(num_target_layers=4))
        assert not caplog.records
        parse(dflash2_raw(num_target_layers=6))
    assert "num_target_layers is 6, the target model has 4 layers" in caplog.text


def volundr_32b() -> ModelConfig:
    import dataclasses

    return dataclasses.replace(
        TARGET, hidden_size=5120, vocab_size=248320, mixers=("kda",) * 71 + ("attn",), num_heads=24, num_kv_heads=4,
        head_dim=256, intermediate_size=17408, rope=dataclasses.replace(TARGET.rope, theta=1e7, rotary_dims=64),
    )  # fmt: skip


def test_the_published_sizes() -> None:
    """81 tensors with 1,924,404,480 parameters, and 15 with 424,699,392 (spec A.1, B.1)."""
    raw = {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 248320, "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 2048, "use_sliding_window": True, "is_causal": False,
        "dflash_config": {
            "block_size": 8, "target_layer_ids": [8, 21, 35, 53, 67], "mask_token_id": 248070, "conv_kernel_size": 2,
            "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16,
        },
    }  # fmt: skip
    with torch.device("meta"):
        drafter = DFlash2(parse_dflash2_config(raw, {}, volundr_32b()))
    shapes = shapes_of(drafter)
    assert len(shapes) == 81
    assert sum(parameter.numel() for parameter in drafter.parameters()) == 1_924_404_480
    assert shapes["fc.weight"] == (5120, 25600)
    assert shapes["layers.4.mlp_conv.base_kernel"] == (2, 2, 5120)
    assert shapes["layers.0.attention_conv.kernel_projection.weight"] == (1280, 5120)
    assert shapes["candidate_selector.predecessor_codebook"] == (248320, 256)

    from agens_engine.model.mtp import MtpHead

    with torch.device("meta"):
        head = MtpHead(parse_mtp_config({}, {}, volundr_32b()))
    shapes = shapes_of(head)
    assert len(shapes) == 15
    assert sum(parameter.numel() for parameter in head.parameters()) == 424_699_392
    assert shapes["layers.0.self_attn.q_proj.weight"] == (12288, 5120)


def test_mtp_sizes_from_keys_tensors_or_target() -> None:
    full = parse_mtp_config(mtp_raw(), {}, TARGET)
    assert full.block.rope.rotary_dims == 8 and full.block.rope.theta == 1e4 and full.num_draft_steps == 4
    other = random_mtp(num_attention_heads=2, num_key_value_heads=1, intermediate_size=40)
    derived = parse_mtp_config({}, shapes_of(other), TARGET)
    assert (derived.block.num_heads, derived.block.num_kv_heads, derived.block.intermediate_size) == (2, 1, 40)
    bare = parse_mtp_config({}, {}, TARGET)
    assert (bare.block.num_heads, bare.block.head_dim) == (TARGET.num_heads, TARGET.head_dim)
    assert bare.block.rope.rotary_dims == TARGET.rope.rotary_dims
    nested = {"hidden_size": 999, "text_config": {"hidden_size": 32}}
    assert parse_mtp_config(nested, {}, TARGET).block.hidden_size == 32


@pytest.mark.parametrize("key", ["num_draft_steps", "draft_length", "mtp_steps"])
def test_the_draft_length_under_any_name(key: str) -> None:
    assert parse_mtp_config(mtp_raw(**{key: 3}), {}, TARGET).num_draft_steps == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64, "vocab_size": 95}, "hidden_size is 64, .* is 32; vocab_size is 95, .* is 96"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "gives 24 rotary dims"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_mtp_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_mtp_config(mtp_raw(**changes), {}, TARGET)
