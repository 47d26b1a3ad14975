"""agens_engine.model.checkpoint on small folders made here: names, formats, every refusal with its file and tensor."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agens_engine.errors import CheckpointError, ConfigError
from agens_engine.model.checkpoint import normalise_name, open_checkpoint
from agens_engine.model.safetensors_files import DTYPE_BYTES, read_header
from agens_quant.compressed_tensors import pack_codes

Tensors = dict[str, torch.Tensor]
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 8}}},
}


def make_folder(folder: Path, files: Mapping[str, Tensors], config: Any = None, index: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "volundr"} if config is None else config))
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def sharded(folder: Path) -> Path:
    """Two shards and an index."""
    files: dict[str, Tensors] = {
        "model-00001-of-00002.safetensors": {"model.language_model.a.weight": torch.ones(2, 3)},
        "model-00002-of-00002.safetensors": {"lm_head.weight": torch.zeros(4), "mtp.fc.weight": torch.ones(1)},
    }
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    return make_folder(folder, files, index={"metadata": {}, "weight_map": weight_map})


def packed_linear(name: str, n: int = 16, k: int = 16, group: int = 8, bits: int = 4) -> tuple[Tensors, torch.Tensor]:
    """The stored parts of a quantised linear, and the weights they mean."""
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 1 << bits, (n, k))
    scale = torch.from_numpy(rng.normal(size=(n, k // group))).to(torch.bfloat16)
    weight = (torch.from_numpy(codes) - (1 << (bits - 1))).float() * scale.float().repeat_interleave(group, 1)
    parts = {
        f"{name}.weight_packed": torch.from_numpy(pack_codes(codes, bits)),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor([n, k]),
    }
    return parts, weight


def refusal(path: Path, error: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    return str(caught.value)


def raw_safetensors(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


class TestNames:
    @pytest.mark.parametrize(
        ("disk", "expected"),
        [
            ("model.language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
            ("language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
            ("model.model.norm.weight", "model.norm.weight"),
            ("language_model.model.norm.weight", "model.norm.weight"),
            ("model.language_model.model.norm.weight", "model.norm.weight"),
            ("model.norm.weight", "model.norm.weight"),
            ("lm_head.weight", "lm_head.weight"),
            ("model.visual.merger.norm.weight", "model.visual.merger.norm.weight"),
            ("a.model.model.weight", "a.model.model.weight"),
        ],
    )
    def test_prefix_rules(self, disk: str, expected: str) -> None:
        assert normalise_name(disk) == expected

    def test_two_names_that_become_one_are_refused(self, tmp_path: Path) -> None:
        twins = {"model.norm.weight": torch.ones(1), "model.language_model.norm.weight": torch.ones(1)}
        message = refusal(make_folder(tmp_path, {"model.safetensors": twins}))
        assert "model.language_model.norm.weight" in message
        assert "both model.norm.weight" in message

    def test_mtp_and_vision_stand_apart(self, tmp_path: Path) -> None:
        names = ["model.norm.weight", "mtp.fc.weight", "model.visual.pos_embed.weight", "visual.b.weight"]
        folder = make_folder(tmp_path, {"model.safetensors": {n: torch.full((1,), i) for i, n in enumerate(names)}})
        checkpoint = open_checkpoint(folder)
        assert list(checkpoint.tensors) == ["model.norm.weight"]
        assert list(checkpoint.mtp) == ["mtp.fc.weight"]
        assert sorted(checkpoint.vision) == ["model.visual.pos_embed.weight", "visual.b.weight"]
        assert checkpoint.read("mtp.fc.weight").tolist() == [1]
        checkpoint.verify({"model.norm.weight": (1,)})


class TestReading:
    def test_golden_checkpoint(self, golden_dir: Path) -> None:
        """Only model.safetensors counts where it exists; golden.safetensors lies beside it."""
        stored = load_file(golden_dir / "model.safetensors")
        with open_checkpoint(golden_dir) as checkpoint:
            assert len(checkpoint.tensors) == len(stored) == 169
            assert sum(t.nbytes for t in checkpoint.tensors.values()) == 2 * 2_138_176
            assert checkpoint.config["text_config"]["hidden_size"] == 128
            for disk_name, tensor in stored.items():
                name = normalise_name(disk_name)
                assert checkpoint.tensors[name].shape == tuple(tensor.shape)
                assert torch.equal(checkpoint.read(name), tensor.float())
            assert not checkpoint.mtp and not checkpoint.vision

    def test_dtypes(self, tmp_path: Path) -> None:
        tensors = {"a": torch.tensor([1.5], dtype=torch.float16), "b": torch.tensor([3]), "c": torch.tensor([2.5])}
        checkpoint = open_checkpoint(make_folder(tmp_path, {"model.safetensors": tensors}))
        assert checkpoint.read("a").dtype == torch.float32
        assert checkpoint.read("a", dtype=None).dtype == torch.float16
        assert checkpoint.read("a", dtype=torch.bfloat16).dtype == torch.bfloat16
        assert checkpoint.read("b").dtype == torch.int64
        checkpoint.read("c").zero_()  # a copy of its own: the file's stays
        assert checkpoint.read("c").tolist() == [2.5]

    def test_index_and_shards(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(sharded(tmp_path))
        assert checkpoint.tensors["model.a.weight"].file.name == "model-00001-of-00002.safetensors"
        assert checkpoint.read("model.a.weight").tolist() == [[1, 1, 1], [1, 1, 1]]
        assert checkpoint.read("lm_head.weight").tolist() == [0, 0, 0, 0]

    def test_all_files_where_nothing_says_which(self, tmp_path: Path) -> None:
        files: dict[str, Tensors] = {"x.safetensors": {"a": torch.ones(1)}, "y.safetensors": {"b": torch.ones(2)}}
        assert set(open_checkpoint(make_folder(tmp_path, files)).tensors) == {"a", "b"}

    def test_an_unknown_tensor(self, golden_dir: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no tensor model\.nope"):
            open_checkpoint(golden_dir).read("model.nope")

    def test_empty_and_scalar_tensors(self, tmp_path: Path) -> None:
        tensors = {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.0)}
        checkpoint = open_checkpoint(make_folder(tmp_path, {"model.safetensors": tensors}))
        assert checkpoint.read("empty").shape == (0, 4)
        assert checkpoint.read("scalar").item() == 2.0

    def test_python_files_are_not_run(self, tmp_path: Path) -> None:
        config = {"auto_map": {"AutoModel": "modeling.Evil"}}
        folder = make_folder(tmp_path, {"model.safetensors": {"a": torch.ones(1)}}, config)
        (folder / "modeling.py").write_text("raise SystemExit('ran')\n")
        assert open_checkpoint(folder).read("a").tolist() == [1]


class TestQuantised:
    def test_a_quantised_linear_reads_like_a_plain_one(self, tmp_path: Path) -> None:
        parts, weight = packed_linear("model.language_model.layers.0.mlp.up_proj")
        tensors = {**parts, "model.language_model.norm.weight": torch.ones(16)}
        config = {"quantization_config": QUANTIZATION}
        checkpoint = open_checkpoint(make_folder(tmp_path, {"model.safetensors": tensors}, config))
        name = "model.layers.0.mlp.up_proj.weight"
        checkpoint.verify({name: (16, 16), "model.norm.weight": (16,)})
        assert torch.equal(checkpoint.read(name), weight)
        assert torch.equal(checkpoint.read(name, dtype=torch.bfloat16), weight.bfloat16())

    def test_zero_points_and_order(self, tmp_path: Path) -> None:
        parts, _ = packed_linear("up")
        parts["up.weight_packed"] = torch.from_numpy(pack_codes(np.full((16, 16), 9), 4))
        parts["up.weight_scale"] = torch.tensor([[1.0, 100.0]]).repeat(16, 1)
        zeros = np.arange(32).reshape(16, 2) % 16  # [out, groups]
        parts["up.weight_zero_point"] = torch.from_numpy(pack_codes(zeros.T, 4).T.copy())
        parts["up.weight_g_idx"] = torch.arange(16, dtype=torch.int32) % 2
        checkpoint = open_checkpoint(make_folder(tmp_path, {"model.safetensors": parts}))
        weight = checkpoint.read("up.weight")
        expected = torch.from_numpy(9 - zeros).float() * torch.tensor([1.0, 100.0])
        assert torch.equal(weight, expected.repeat(1, 8))
        assert checkpoint.tensors["up.weight"].format == "int4 g8 zero points g_idx"

    def test_formats_are_told_per_module_kind(self, tmp_path: Path) -> None:
        tensors: Tensors = {"model.norm.weight": torch.ones(16, dtype=torch.bfloat16)}
        for layer in range(3):
            tensors |= packed_linear(f"model.layers.{layer}.mlp.up_proj")[0]
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.ones(16, 16, dtype=torch.bfloat16)
        rows = open_checkpoint(make_folder(tmp_path, {"model.safetensors": tensors})).describe_formats()
        packed_bytes = 16 * 2 * 4 + 16 * 2 * 2 + 2 * 8
        assert [(r.kind, r.format, r.num_tensors, r.nbytes) for r in rows] == [
            ("model.layers.*.mlp.up_proj.weight", "bf16", 1, 512),
            ("model.layers.*.mlp.up_proj.weight", "int4 g8", 3, 3 * packed_bytes),
            ("model.norm.weight", "bf16", 1, 32),
        ]

    def test_group_size_of_the_config_settles_ragged_groups(self, tmp_path: Path) -> None:
        """15 columns in groups of 8 or of 7.5? Targets are matched by the published name."""
        parts = {
            "model.language_model.up.weight_packed": torch.from_numpy(pack_codes(np.full((2, 15), 9), 4)),
            "model.language_model.up.weight_scale": torch.tensor([[1.0, 10.0]]).repeat(2, 1),
            "model.language_model.up.weight_shape": torch.tensor([2, 15]),
        }
        groups = {
            "a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 5}},
            "b": {"targets": [r"re:model\.language_model\..*up"], "weights": {"num_bits": 4, "group_size": 8}},
        }
        config = {"text_config": {"quantization_config": {"config_groups": groups}}}
        checkpoint = open_checkpoint(make_folder(tmp_path, {"model.safetensors": parts}, config))
        assert checkpoint.read("model.up.weight")[0].tolist() == [1.0] * 8 + [10.0] * 7
        assert "divide the 15" in refusal(make_folder(tmp_path, {}))

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda t: t.pop("up.weight_scale"), "weight_packed, weight_shape without weight_scale"),
            (lambda t: t.pop("up.weight_packed"), "weight_scale, weight_shape without weight_packed"),
            (lambda t: t.update({"up.weight": torch.ones(16, 16)}), "both weight and weight_packed"),
            (lambda t: t.update({"up.weight_codebook": torch.ones(4)}), "unknown suffixes weight_codebook"),
            (lambda t: t.update({"up.weight_shape": torch.tensor([16.0, 16.0])}), "weight_shape is F32"),
            (lambda t: t.update({"up.weight_shape": torch.tensor([16, 99])}), "none of"),
            (lambda t: t.update({"up.weight_shape": torch.tensor([16, -16])}), "two positive numbers"),
            (lambda t: t.update({"up.weight_scale": torch.ones(16, 3)}), "do not divide"),
        ],
    )
    def test_parts_that_do_not_belong_together(
        self, tmp_path: Path, damage: Callable[[Tensors], object], message: str
    ) -> None:
        parts, _ = packed_linear("up")
        damage(parts)
        said = refusal(make_folder(tmp_path, {"model.safetensors": parts}))
        assert message in said
        assert "up" in said and "model.safetensors" in said

    def test_all_undecodable_linears_are_listed(self, tmp_path: Path) -> None:
        tensors = {f"layers.{i}.up.{s}": torch.ones(2) for i in range(3) for s in ("weight", "weight_scale")}
        config = {"quantization_config": {"quant_method": "fp8"}}
        said = refusal(make_folder(tmp_path, {"model.safetensors": tensors}, config))
        assert "quant_method: fp8" in said
        assert all(f"layers.{i}.up in model.safetensors: weight_scale without" in said for i in range(3))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_scales_that_are_not_finite(self, tmp_path: Path, bad: float) -> None:
        parts, _ = packed_linear("up")
        parts["up.weight_scale"][3, 1] = bad
        checkpoint = open_checkpoint(make_folder(tmp_path, {"model.safetensors": parts}))
        with pytest.raises(CheckpointError, match=r"model\.safetensors: quantised linear up\.weight: .*row 3, group 1"):
            checkpoint.read("up.weight")

    def test_a_target_that_is_no_expression(self, tmp_path: Path) -> None:
        config = {"quantization_config": {"config_groups": {"a": {"targets": ["re:("], "weights": {"num_bits": 4}}}}}
        folder = make_folder(tmp_path, {"model.safetensors": packed_linear("up")[0]}, config)
        assert "no regular expression" in refusal(folder, ConfigError)


class TestVerify:
    def test_everything_wrong_is_in_one_error(self, tmp_path: Path) -> None:
        tensors = {"a.weight": torch.ones(2, 3), "b.qweight": torch.ones(1), "c.qweight": torch.ones(1)}
        config = {"quantization_config": {"quant_method": "gptq"}}
        checkpoint = open_checkpoint(make_folder(tmp_path, {"model.safetensors": tensors}, config))
        with pytest.raises(CheckpointError) as caught:
            checkpoint.verify({"a.weight": (3, 2), "b.weight": (4, 4), "c.weight": (5,)})
        assert str(caught.value).splitlines() == [
            f"{tmp_path} does not fit its config.json:",
            "  missing (2):",
            "    b.weight [4, 4]",
            "    c.weight [5]",
            "  unknown (2):",
            "    b.qweight in model.safetensors",
            "    c.qweight in model.safetensors",
            "  misshapen (1):",
            "    a.weight in model.safetensors: stored [2, 3], expected [3, 2]",
            "  suffixes this engine does not know (quant_method: gptq): qweight (2)",
        ]

    def test_a_fitting_folder_passes(self, golden_dir: Path) -> None:
        checkpoint = open_checkpoint(golden_dir)
        expected = {name: entry.shape for name, entry in checkpoint.tensors.items()}
        checkpoint.verify(expected)
        expected.pop("lm_head.weight")
        with pytest.raises(CheckpointError, match=r"unknown \(1\):\n    lm_head\.weight"):
            checkpoint.verify(expected)


class TestFolderRefusals:
    def test_no_folder(self, tmp_path: Path) -> None:
        assert "does not exist" in refusal(tmp_path / "nope")

    def test_a_file_instead(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").touch()
        assert "is a file" in refusal(tmp_path / "m.gguf")

    def test_no_config(self, tmp_path: Path) -> None:
        save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
        assert "no config.json" in refusal(tmp_path, ConfigError)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"{", "not valid JSON"),
            (b"", "not valid JSON"),
            (b"\xff\xfe", "not valid JSON"),
            (b"[1]", "must hold a JSON object, not a list"),
            (b"[" * 100_000, "not valid JSON"),
            (b'{"quantization_config": 4}', "quantization_config must be an object"),
        ],
    )
    def test_a_malformed_config(self, tmp_path: Path, content: bytes, message: str) -> None:
        make_folder(tmp_path, {"model.safetensors": {"a": torch.ones(1)}})
        (tmp_path / "config.json").write_bytes(content)
        said = refusal(tmp_path, ConfigError)
        assert message in said and "config.json" in said

    def test_no_weights(self, tmp_path: Path) -> None:
        assert re.search(r"has no \*\.safetensors file$", refusal(make_folder(tmp_path, {})))
        (tmp_path / "pytorch_model.bin").touch()
        (tmp_path / "model.safetensors.part").touch()
        said = refusal(tmp_path)
        assert "pytorch_model.bin cannot be read" in said
        assert "unfinished download is there: model.safetensors.part" in said

    def test_an_unfinished_hub_download(self, tmp_path: Path) -> None:
        cache = make_folder(tmp_path, {}) / ".cache" / "huggingface" / "download"
        cache.mkdir(parents=True)
        (cache / "abc.incomplete").touch()
        assert "abc.incomplete" in refusal(tmp_path)

    def test_numbered_shards_without_index(self, tmp_path: Path) -> None:
        files: dict[str, Tensors] = {"model-00002-of-00003.safetensors": {"a": torch.ones(1)}}
        said = refusal(make_folder(tmp_path, files))
        assert "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors" in said

    def test_a_tensor_in_two_files(self, tmp_path: Path) -> None:
        files: dict[str, Tensors] = {f"{n}.safetensors": {"a.weight": torch.ones(1)} for n in "xy"}
        assert "a.weight is in two files, x.safetensors and y.safetensors" in refusal(make_folder(tmp_path, files))


class TestIndexRefusals:
    def test_a_shard_that_is_not_there(self, tmp_path: Path) -> None:
        (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
        (tmp_path / "model-00002-of-00002.safetensors.incomplete").touch()
        said = refusal(tmp_path)
        assert "1 of 2 files that are not in" in said
        assert "model-00002-of-00002.safetensors (an unfinished download is there" in said

    def test_a_broken_link_counts_as_missing(self, tmp_path: Path) -> None:
        shard = sharded(tmp_path) / "model-00001-of-00002.safetensors"
        shard.unlink()
        shard.symlink_to(tmp_path / "blob-that-is-gone")
        assert shard.name in refusal(tmp_path)

    def test_a_tensor_its_shard_lacks(self, tmp_path: Path) -> None:
        shard = sharded(tmp_path) / "model-00002-of-00002.safetensors"
        save_file({"lm_head.weight": torch.zeros(4)}, shard)
        said = refusal(tmp_path)
        assert "mtp.fc.weight (not in model-00002-of-00002.safetensors)" in said

    def test_a_tensor_in_another_shard(self, tmp_path: Path) -> None:
        folder = sharded(tmp_path)
        index = folder / "model.safetensors.index.json"
        moved = json.loads(index.read_text())
        moved["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
        index.write_text(json.dumps(moved))
        assert "lm_head.weight (in model-00002-of-00002.safetensors, index says model-00001" in refusal(folder)

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            ([], "must hold a JSON object"),
            ({}, "'weight_map' must map"),
            ({"weight_map": {"a": 3}}, "'weight_map' must map"),
            ({"weight_map": {}}, "'weight_map' is empty"),
            ({"weight_map": {"a": "../x.safetensors"}}, "points outside the folder"),
            ({"weight_map": {"a": "/x.safetensors"}}, "points outside the folder"),
            ({"weight_map": {"a": ".."}}, "points outside the folder"),
        ],
    )
    def test_a_malformed_index(self, tmp_path: Path, index: Any, message: str) -> None:
        said = refusal(make_folder(tmp_path, {"model.safetensors": {"a": torch.ones(1)}}, index=index))
        assert message in said and "index.json" in said

    def test_two_indices(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
        assert "2 index files" in refusal(make_folder(tmp_path, {}))


class TestBrokenFiles:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return make_folder(tmp_path, {"model.safetensors": {"a.weight": torch.ones(64)}})

    def test_every_truncation_is_refused_with_its_numbers(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        whole = file.read_bytes()
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            said = refusal(folder)
            assert "model.safetensors" in said
            assert str(length) in said, said

    def test_data_cut_off(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        size = file.stat().st_size
        file.write_bytes(file.read_bytes()[:-10])
        assert f"is cut off: {size} bytes declared, {size - 10} present" in refusal(folder)

    def test_data_too_long(self, folder: Path) -> None:
        with (folder / "model.safetensors").open("ab") as f:
            f.write(b"xx")
        assert "longer than its header says" in refusal(folder)

    def test_a_large_file_pointer(self, folder: Path) -> None:
        (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        assert "git lfs pull" in refusal(folder)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"<!DOCTYPE html><html>not found</html>", "is no safetensors file"),
            (raw_safetensors(b"{nope"), "malformed safetensors header"),
            (raw_safetensors(b"\xff\xff"), "malformed safetensors header"),
            (raw_safetensors([1]), "no JSON object"),
            (raw_safetensors({"a.weight": 3}), "entry of tensor a.weight is malformed"),
            (raw_safetensors({"a.weight": {"dtype": "F32"}}), "entry of tensor a.weight is malformed"),
            (
                raw_safetensors({"a.weight": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
                "entry of tensor a.weight is malformed",
            ),
            (
                raw_safetensors({"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
                "a.weight [2] F32 needs 8 bytes, its header reserves 4",
            ),
            (
                raw_safetensors({"a.weight": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
                "tensor a.weight has dtype Q7",
            ),
            (
                raw_safetensors({"a.weight": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
                "data of tensor a.weight starts at byte 4",
            ),
            (
                raw_safetensors(
                    {
                        "a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                        "b.weight": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
                    },
                    bytes(8),
                ),
                "data of tensor b.weight starts at byte 4",
            ),
        ],
    )
    def test_a_malformed_header(self, folder: Path, content: bytes, message: str) -> None:
        (folder / "model.safetensors").write_bytes(content)
        said = refusal(folder)
        assert message in said and "model.safetensors" in said

    def test_a_file_that_vanishes_before_it_is_read(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        (folder / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor a\.weight cannot be read"):
            checkpoint.read("a.weight")

    def test_headers_are_read_as_the_library_reads_them(self, tmp_path: Path) -> None:
        dtypes = {
            "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
            "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
            "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
            "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
        }  # fmt: skip
        assert dtypes.keys() == DTYPE_BYTES.keys()
        save_file({name: torch.zeros(3, 2, dtype=dtype) for name, dtype in dtypes.items()}, tmp_path / "x.safetensors")
        for tensor in read_header(tmp_path / "x.safetensors"):
            assert tensor.dtype == tensor.disk_name
            assert (tensor.shape, tensor.nbytes) == ((3, 2), 6 * dtypes[tensor.disk_name].itemsize)
