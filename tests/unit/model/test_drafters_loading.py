"""Drafter folders: the alias table, everything wrong with a folder said at once, sizes against the target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from agens_engine.errors import CheckpointError, ConfigError
from agens_engine.model.drafter_loading import dflash2_name, load_dflash2, load_mtp
from agens_engine.model.mtp_config import MtpOptions
from tests.drafterkit import TARGET, dflash2_raw, mtp_raw, random_dflash2, random_mtp, stored, write_folder

CPU = torch.device("cpu")


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def published_elsewhere(name: str) -> str:
    """The same tensors under every alias at once."""
    name = name.replace("hidden_norm.", "encoder.output_norm_enc.")
    name = "encoder.fc.weight" if name == "fc.weight" else name
    return "model." + (name + ".weight" if name.endswith("codebook") else name)


@pytest.mark.parametrize("rename", [str, lambda name: "model." + name, published_elsewhere])
def test_dflash2_under_any_alias(tmp_path: Path, rename: Any) -> None:
    model = random_dflash2()
    folder = write_folder(tmp_path, dflash2_raw(), stored(model, rename))
    loaded = load_dflash2(folder, TARGET, device=CPU)
    assert same(loaded, model)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_plain_dflash_and_biases(tmp_path: Path) -> None:
    plain = random_dflash2(features={})
    assert not any("conv" in name or "selector" in name for name, _ in plain.named_parameters())
    folder = write_folder(tmp_path / "plain", dflash2_raw(features={}), stored(plain))
    assert same(load_dflash2(folder, TARGET, device=CPU), plain)
    biased = random_dflash2(attention_bias=True)
    folder = write_folder(tmp_path / "bias", dflash2_raw(attention_bias=True), stored(biased))
    assert same(load_dflash2(folder, TARGET, device=CPU), biased)


def test_names_outside_the_table_stay() -> None:
    assert dflash2_name("layers.0.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert dflash2_name("encoder.fcx.weight") == "encoder.fcx.weight"
    assert dflash2_name("model.encoder.fc.weight") == "fc.weight"


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    tensors = stored(random_dflash2())
    del tensors["norm.weight"], tensors["layers.1.mlp_conv.base_kernel"]
    tensors["embed_tokens.weight"] = torch.zeros(96, 32)
    tensors["layers.0.self_attn.k_proj.weight"] = torch.zeros(24, 32)
    folder = write_folder(tmp_path, dflash2_raw(), tensors)
    with pytest.raises(CheckpointError) as error:
        load_dflash2(folder, TARGET, device=CPU)
    text = str(error.value)
    for part in (
        "missing (2):", "norm.weight [32]", "layers.1.mlp_conv.base_kernel [2, 2, 32]",
        "unknown (1):", "embed_tokens.weight in model.safetensors",
        "misshapen (1):", "layers.0.self_attn.k_proj.weight in model.safetensors: stored [24, 32], expected [16, 32]",
    ):  # fmt: skip
        assert part in text


def test_two_names_for_one_tensor(tmp_path: Path) -> None:
    tensors = stored(random_dflash2())
    tensors["encoder.fc.weight"] = tensors["fc.weight"].clone()
    with pytest.raises(CheckpointError, match=r"(?=.*encoder\.fc\.weight).*are both fc\.weight"):
        load_dflash2(write_folder(tmp_path, dflash2_raw(), tensors), TARGET, device=CPU)


def test_a_drafter_of_another_target(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, dflash2_raw(vocab_size=100), stored(random_dflash2()))
    with pytest.raises(ConfigError, match=re.escape(str(folder)) + ".*vocab_size is 100, the target model's is 96"):
        load_dflash2(folder, TARGET, device=CPU)
    # the config is silent: the tensors tell
    bare = {key: value for key, value in dflash2_raw().items() if key not in ("hidden_size", "vocab_size")}
    tensors = stored(random_dflash2())
    tensors["norm.weight"] = torch.ones(64)
    with pytest.raises(ConfigError, match="hidden_size is 64, the target model's is 32"):
        load_dflash2(write_folder(tmp_path / "b", bare, tensors), TARGET, device=CPU)


@pytest.mark.parametrize(("load", "flag"), [(load_dflash2, "--drafter"), (load_mtp, "--mtp")])
def test_no_folder(tmp_path: Path, load: Any, flag: str) -> None:
    with pytest.raises(CheckpointError, match=f"does not exist; check the path given with {flag}"):
        load(tmp_path / "nowhere", TARGET, device=CPU)


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "model.language_model.mtp."])
def test_mtp_under_both_prefixes(tmp_path: Path, prefix: str) -> None:
    model = random_mtp()
    folder = write_folder(tmp_path, mtp_raw(), stored(model, lambda name: prefix + name))
    assert same(load_mtp(folder, TARGET, device=CPU), model)


def test_mtp_beside_the_model_it_belongs_to(tmp_path: Path) -> None:
    model = random_mtp()
    tensors = stored(model, lambda name: "mtp." + name)
    tensors |= {"model.embed_tokens.weight": torch.zeros(96, 32), "model.layers.0.x": torch.zeros(1)}
    folder = write_folder(tmp_path, {"model_type": "volundr", "text_config": mtp_raw()}, tensors)
    assert same(load_mtp(folder, TARGET, device=CPU), model)


def test_mtp_faults(tmp_path: Path) -> None:
    tensors = stored(random_mtp(), lambda name: "mtp." + name)
    tensors["mtp.layers.1.input_layernorm.weight"] = tensors.pop("mtp.norm.weight")
    with pytest.raises(CheckpointError, match=r"(?s)missing \(1\):.*norm.weight.*unknown \(1\):.*layers.1.input"):
        load_mtp(write_folder(tmp_path / "a", mtp_raw(), tensors), TARGET, device=CPU)
    with pytest.raises(CheckpointError, match=r"no tensor named mtp\.\* or model\.mtp\.\*"):
        load_mtp(write_folder(tmp_path / "b", mtp_raw(), stored(random_mtp())), TARGET, device=CPU)
    good = stored(random_mtp(), lambda name: "mtp." + name)
    with pytest.raises(ConfigError, match="hidden_size is 48, the target model's is 32"):
        load_mtp(write_folder(tmp_path / "c", mtp_raw(hidden_size=48), good), TARGET, device=CPU)


def test_plain_norms_are_converted(tmp_path: Path) -> None:
    model = random_mtp()
    tensors = stored(model, lambda name: "mtp." + name)
    shifted = {name: tensor + 1.0 if "norm" in name else tensor for name, tensor in tensors.items()}
    folder = write_folder(tmp_path, mtp_raw(), shifted)
    loaded = load_mtp(folder, TARGET, device=CPU, options=MtpOptions(norm_form="plain"))
    for (name, a), (_, b) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name
