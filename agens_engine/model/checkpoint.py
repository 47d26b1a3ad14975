"""A model folder as named tensors: names normalised, quantised linears decoded, everything wrong with it said at once.

    files -> StoredTensor (header) -> TensorEntry (normalised name; a quantised linear is one entry) -> read() -> Tensor

Opening reads headers (and the 16-byte weight_shape of quantised linears); tensor data is mapped and read one tensor
at a time. Python files in the folder are never run. Which tensors a model needs is the model's business: it calls
verify().
Sources: spec volundr-model.md section 2 (names), volundr-weights.md sections 2 and 3 (formats).
"""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from agens_engine.errors import CheckpointError, ConfigError
from agens_engine.model.safetensors_files import StoredTensor, read_json_object, read_stored_tensors
from agens_quant.compressed_tensors import PART_SUFFIXES, PackedLayout, QuantFormatError, dequantize, infer_layout

# Published prefix -> ours, each rule applied once, in this order, to the outcome of the one before.
NAME_RULES: tuple[tuple[str, str], ...] = (
    ("model.language_model.", "model."),
    ("language_model.", "model."),
    ("model.model.", "model."),
)
MTP_PREFIXES = ("mtp.",)
VISION_PREFIXES = ("model.visual.", "visual.")
_REQUIRED_PARTS = ("weight_packed", "weight_scale", "weight_shape")


def normalise_name(disk_name: str) -> str:
    """The name after the three prefix rules."""
    name = disk_name
    for prefix, replacement in NAME_RULES:
        if name.startswith(prefix):
            name = replacement + name[len(prefix) :]
    return name


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as the model sees it.

    parts    what is stored: {"": tensor} for a plain one, else by suffix (agens_quant PART_SUFFIXES)
    layout   how a quantised linear is packed; None for a plain tensor
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]
    layout: PackedLayout | None = None

    @property
    def file(self) -> Path:
        return next(iter(self.parts.values())).file

    @property
    def format(self) -> str:
        return next(iter(self.parts.values())).dtype.lower() if self.layout is None else str(self.layout)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True)
class FormatRow:
    """How one kind of module is stored; `kind` is a tensor name with its numbers replaced by *."""

    kind: str
    format: str
    num_tensors: int
    nbytes: int


@dataclass
class Checkpoint:
    """An open model folder. `tensors` are the text model's; MTP and vision tensors stand apart.

    Tensors may be read from several threads at once; closing is for when none reads any more.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    mtp: dict[str, TensorEntry]
    vision: dict[str, TensorEntry]
    _handles: dict[Path, Any] = field(default_factory=dict, repr=False)
    _opening: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Forget the file maps. Tensors read with dtype=None keep theirs alive."""
        self._handles.clear()

    def entry(self, name: str) -> TensorEntry:
        """Look a tensor up by its normalised name in all three groups."""
        for group in (self.tensors, self.mtp, self.vision):
            if name in group:
                return group[name]
        raise CheckpointError(f"{self.folder} has no tensor {name}")

    def read(self, name: str, dtype: torch.dtype | None = torch.float32) -> Tensor:
        """One tensor, on the CPU; a quantised linear is decoded.

        dtype    floating tensors are converted to it (a copy of their own), integers keep theirs. None keeps what is
                 stored: a plain tensor is then a view of the mapped file, not to be written; a decoded one is float32
        raises   CheckpointError naming the file and the tensor
        """
        entry = self.entry(name)
        if entry.layout is None:
            tensor = self._load(entry.parts[""])
            return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype, copy=True)
        part = self.parts(name)
        with self.naming(name):
            return dequantize(
                entry.layout,
                part["weight_packed"],
                part["weight_scale"],
                part.get("weight_zero_point"),
                part.get("weight_g_idx"),
                dtype=dtype or torch.float32,
            )

    def parts(self, name: str) -> dict[str, Tensor]:
        """What is stored of a tensor, by suffix, as views of the mapped file: not to be written."""
        return {suffix: self._load(stored) for suffix, stored in self.entry(name).parts.items()}

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Turns a QuantFormatError into a CheckpointError that names the file and the tensor."""
        try:
            yield
        except QuantFormatError as e:
            raise CheckpointError(f"{self.entry(name).file}: quantised linear {name}: {e}") from e

    def _load(self, stored: StoredTensor) -> Tensor:
        try:
            with self._opening:
                handle = self._handles.get(stored.file)
                if handle is None:
                    handle = self._handles[stored.file] = safe_open(stored.file, framework="pt")
            tensor: Tensor = handle.get_tensor(stored.disk_name)
        except Exception as e:  # the library raises its own type; the file passed our header check, so name it and stop
            raise CheckpointError(f"{stored.file}: tensor {stored.disk_name} cannot be read: {e}") from e
        return tensor

    def verify(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the text model's tensors with what the model needs.

        expected   normalised name -> shape
        raises     CheckpointError that lists every missing, unknown and misshapen tensor
        """
        missing = [f"{name} {list(shape)}" for name, shape in expected.items() if name not in self.tensors]
        unknown = [name for name in self.tensors if name not in expected]
        misshapen = [
            f"{name} in {self.tensors[name].file.name}: stored {list(self.tensors[name].shape)}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in self.tensors and self.tensors[name].shape != tuple(shape)
        ]
        if not (missing or unknown or misshapen):
            return
        lines = [f"{self.folder} does not fit its config.json:"]
        lines += _section("missing", missing)
        lines += _section("unknown", [f"{name} in {self.tensors[name].file.name}" for name in unknown])
        lines += _section("misshapen", misshapen)
        foreign = _foreign_suffixes(unknown, expected)
        if foreign:
            method = _quantization_config(self.config).get("quant_method", "none named")
            lines.append(f"  suffixes this engine does not know (quant_method: {method}): {', '.join(foreign)}")
        raise CheckpointError("\n".join(lines))

    def describe_formats(self) -> list[FormatRow]:
        """Module kind -> format -> bytes, over all three groups, in the order of the names."""
        count: Counter[tuple[str, str]] = Counter()
        nbytes: Counter[tuple[str, str]] = Counter()
        for group in (self.tensors, self.mtp, self.vision):
            for entry in group.values():
                key = (re.sub(r"(?<=\.)\d+(?=\.)", "*", entry.name), entry.format)
                count[key] += 1
                nbytes[key] += entry.nbytes
        return [FormatRow(kind, fmt, count[kind, fmt], nbytes[kind, fmt]) for kind, fmt in sorted(count)]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model folder and read all headers.

    raises  CheckpointError (ConfigError for config.json), naming the file and the tensor
    """
    folder = Path(path)
    if not folder.exists():
        raise CheckpointError(f"model folder {folder} does not exist; check the path given with --model")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; --model takes the folder that holds config.json and the weights")
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ConfigError(f"{folder} has no config.json; a model folder needs it beside the weights")
    config = read_json_object(config_file, ConfigError)
    hints = _Hints(_quantization_config(config))

    stored = _normalise(folder, read_stored_tensors(folder))
    checkpoint = Checkpoint(folder, config, {}, {}, {})
    for entry in _entries(checkpoint, stored, hints):
        if entry.name.startswith(MTP_PREFIXES):
            checkpoint.mtp[entry.name] = entry
        elif entry.name.startswith(VISION_PREFIXES):
            checkpoint.vision[entry.name] = entry
        else:
            checkpoint.tensors[entry.name] = entry
    return checkpoint


def _normalise(folder: Path, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    named: dict[str, StoredTensor] = {}
    for tensor in stored.values():
        name = normalise_name(tensor.disk_name)
        if name in named:
            raise CheckpointError(
                f"{folder}: {named[name].disk_name} ({named[name].file.name}) and {tensor.disk_name} "
                f"({tensor.file.name}) are both {name} once prefixes are removed"
            )
        named[name] = tensor
    return named


def _entries(checkpoint: Checkpoint, stored: Mapping[str, StoredTensor], hints: _Hints) -> Iterator[TensorEntry]:
    """Plain tensors as they are; the parts of each quantised linear X joined to X.weight. Decided by suffix alone."""
    modules: defaultdict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        modules[module][suffix] = tensor
    problems: list[str] = []
    entries: list[TensorEntry] = []
    for module, by_suffix in modules.items():
        prefix = f"{module}." if module else ""
        parts = {suffix: by_suffix[suffix] for suffix in PART_SUFFIXES if suffix in by_suffix}
        if parts:
            problem = _companions_problem(by_suffix)
            if problem:
                problems.append(f"{module} in {next(iter(parts.values())).file.name}: {problem}")
                continue
            entries.append(_quantised_entry(checkpoint, prefix + "weight", parts, hints))
        entries += [
            TensorEntry(prefix + suffix, tensor.shape, {"": tensor})
            for suffix, tensor in by_suffix.items()
            if suffix not in parts
        ]
    if problems:
        method = hints.quant_method or "none named"
        lines = [f"{checkpoint.folder}: {len(problems)} quantised linears cannot be decoded (quant_method: {method}):"]
        lines += [f"  {problem}" for problem in problems]
        lines.append(f"  known suffixes: {', '.join(PART_SUFFIXES)}")
        raise CheckpointError("\n".join(lines))
    yield from entries


def _companions_problem(by_suffix: Mapping[str, StoredTensor]) -> str | None:
    """What is wrong with the set of tensors beside a quantised weight, or None."""
    missing = [s for s in _REQUIRED_PARTS if s not in by_suffix]
    if missing:
        present = [s for s in PART_SUFFIXES if s in by_suffix]
        return f"{', '.join(present)} without {', '.join(missing)}"
    if "weight" in by_suffix:
        return "both weight and weight_packed"
    unknown = sorted(set(by_suffix) - set(PART_SUFFIXES) - {"bias"})
    return f"unknown suffixes {', '.join(unknown)}" if unknown else None


def _quantised_entry(
    checkpoint: Checkpoint, name: str, parts: Mapping[str, StoredTensor], hints: _Hints
) -> TensorEntry:
    packed, stored_shape = parts["weight_packed"], parts["weight_shape"]
    try:
        if len(stored_shape.shape) != 1 or stored_shape.dtype not in ("I64", "I32"):
            raise QuantFormatError(f"weight_shape is {stored_shape.dtype} {list(stored_shape.shape)}; expected I64 [2]")
        shape = tuple(int(n) for n in checkpoint._load(stored_shape).tolist())
        bits, group_size = hints.of(packed.disk_name.removesuffix(".weight_packed"))
        part_shapes = {suffix: stored.shape for suffix, stored in parts.items()}
        layout = infer_layout(shape, part_shapes, bits_hint=bits, group_size_hint=group_size)
    except QuantFormatError as e:
        raise CheckpointError(f"{packed.file}: quantised linear {name}: {e}") from e
    return TensorEntry(name, shape, parts, layout)


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization block, at the top or beside the text keys; empty when there is none."""
    for holder in (config, config.get("text_config")):
        block = holder.get("quantization_config") if isinstance(holder, dict) else None
        if isinstance(block, dict):
            return block
        if block is not None:
            raise ConfigError(f"config.json: quantization_config must be an object, not {block!r}")
    return {}


class _Hints:
    """num_bits and group_size that quantization_config states for a module; shapes overrule both."""

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        self.quant_method = quantization.get("quant_method")
        self._by_name: list[tuple[str, tuple[int | None, int | None]]] = []
        self._default: tuple[int | None, int | None] = (None, None)
        groups = quantization.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            if not isinstance(weights, dict):
                continue
            hint = (_positive_int(weights.get("num_bits")), _positive_int(weights.get("group_size")))
            targets = group.get("targets")
            for target in targets if isinstance(targets, list) else ():
                if target == "Linear":
                    self._default = hint
                elif isinstance(target, str):
                    self._by_name.append((target, hint))

    def of(self, module: str) -> tuple[int | None, int | None]:
        """(num_bits, group_size) for a module by its published name, each None when not stated."""
        for target, hint in self._by_name:
            if module == target or (target.startswith("re:") and _matches(target[3:], module)):
                return hint
        return self._default


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error as e:
        raise ConfigError(f"config.json: quantization target {pattern!r} is no regular expression ({e})") from e


def _positive_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _section(title: str, items: list[str]) -> list[str]:
    return [f"  {title} ({len(items)}):", *(f"    {item}" for item in items)] if items else []


def _foreign_suffixes(unknown: Iterable[str], expected: Iterable[str]) -> list[str]:
    """Last name parts of unknown tensors that no expected tensor has, with their counts."""
    known = {name.rpartition(".")[2] for name in expected}
    foreign = Counter(name.rpartition(".")[2] for name in unknown)
    return [f"{suffix} ({n})" for suffix, n in sorted(foreign.items()) if suffix not in known]
