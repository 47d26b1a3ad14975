"""Quantises a model folder layer by layer into an Engine build of 2-, 3- and 4-bit linears.

    forward    calibration text through the layers in order; the streams before each layer go to the work folder
    head       labels drawn from the model's own distribution; the gradient of their log-likelihood at the last streams
    backward   layer by layer from the top: input statistics and output gradients of every linear, then the linear
               rounded at 2, 3 and 4 bits, with the damage each would do to the model's predictions
    allocate   one width per linear under the budget (agens_quant.allocate); tiny ones may stay as they are
    write      the Engine build (engine_build.py)

Damage is the second-order estimate of the KL divergence: with labels drawn from the model, the mean squared gradient
is the Fisher information. The same gradients weigh the tokens in the statistics that the rounding minimises.
Memory: one layer's weights and statistics, the streams of the calibration text twice. Everything finished lies in
DST.work under its final name, so an interrupted run goes on with the next layer.
Sources: GPTQ (arXiv:2210.17323), gradient-weighted objective as in GuidedQuant (arXiv:2505.07004).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from agens_engine.engine_build import Parts, disk_errors, save_tensors, write_build
from agens_engine.errors import AgensError, CheckpointError, UsageError
from agens_engine.layerwise import Layerwise, Step, micro_batches
from agens_engine.model.checkpoint import Checkpoint, open_checkpoint
from agens_quant.allocate import BudgetError, Option, allocate, total_cost, total_size
from agens_quant.codebook import subset_levels
from agens_quant.container import container_parts, stored_bits
from agens_quant.gptq import Recipe, best_of, loss_of
from agens_quant.hessian import WeightedStatistics

WIDTHS = (2, 3, 4)
KEPT_BITS = 16  # stands for "as it was", counted at what it takes in the source
# The indexer only selects blocks: no gradient reaches it, so its damage cannot be estimated. It gets the widest code.
UNSEEN = (".idx_q", ".idx_k")
TINY_SHARE = 0.005  # of all counted weights: a linear that small may be left in its own type
FORMAT = 2  # of the work folder; raise when its files change meaning
Progress = Callable[[str], None]


@dataclass(frozen=True)
class QuantizeOptions:
    """bits is the mean over all linears inside the layers, scales and tables included; keep are regular expressions on
    module names that stay as they are (counted at what they take in the source)."""

    bits: float
    group_size: int = 128
    keep: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class QuantizeResult:
    """estimated_kl is the allocation's second-order estimate on the calibration text, not a measurement."""

    bits_per_weight: float
    modules_by_bits: dict[int, int]
    estimated_kl: float
    calibration_tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def quantize(
    source: Path,
    target: Path,
    options: QuantizeOptions,
    calibration: Tensor,
    progress: Progress = lambda line: None,
) -> QuantizeResult:
    """Make `target` out of `source`, which is only read.

    calibration  [B, T] token ids
    raises       UsageError: the target exists, the budget is out of reach, a pattern is wrong
                 CheckpointError: the source cannot be read; AgensError: disk full, statistics that cannot be used
    """
    if target.exists():
        raise UsageError(f"{target} exists already; choose another destination or remove it")
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise UsageError(
            f"{target} lies inside the source {source}, which is never touched; choose another destination"
        )
    with open_checkpoint(source) as checkpoint:
        run = _Run(checkpoint, target, options, calibration, progress)
        run.check_budget()
        with disk_errors(target.parent):
            run.prepare()
            run.gather()
        result = run.write()
    shutil.rmtree(run.work, ignore_errors=True)
    return result


class _Run:
    def __init__(
        self, checkpoint: Checkpoint, target: Path, options: QuantizeOptions, ids: Tensor, progress: Progress
    ) -> None:
        self.checkpoint, self.target, self.options, self.ids, self.progress = checkpoint, target, options, ids, progress
        self.work = target.with_name(target.name + ".work")
        self.model = Layerwise(checkpoint)
        self.num_layers = self.model.config.num_layers
        self.model.check_ids(ids)
        self.source_state = self._fingerprint()
        self.by_layer = [self._names(i) for i in range(self.num_layers)]
        shapes = {name: checkpoint.entry(f"{name}.weight").shape for names in self.by_layer for name in names}
        self.shapes: dict[str, tuple[int, int]] = {name: (s[0], s[1]) for name, s in shapes.items()}
        self.num_weights = sum(n * k for n, k in self.shapes.values())
        patterns = [_compiled(p) for p in options.keep]
        self.kept = {name for name in self.shapes if any(p.search(name) for p in patterns)}

    def _names(self, index: int) -> list[str]:
        return list(self.model.linears(index))

    def widths(self, name: str) -> tuple[int, ...]:
        """The widths a linear may get."""
        n, k = self.shapes[name]
        if name in self.kept:
            return (KEPT_BITS,)
        if name.endswith(UNSEEN):
            return (WIDTHS[-1],)
        return (*WIDTHS, KEPT_BITS) if n * k <= TINY_SHARE * self.num_weights else WIDTHS

    def size(self, name: str, bits: int) -> int:
        if bits == KEPT_BITS:
            return 8 * self.checkpoint.entry(f"{name}.weight").nbytes
        n, k = self.shapes[name]
        return stored_bits(n, k, bits, -(-k // self.options.group_size))

    @property
    def budget(self) -> int:
        return int(self.options.bits * self.num_weights)

    def check_budget(self) -> None:
        """Refuse a target that no choice of widths can reach, before any work is done."""
        if len(self.kept) == len(self.shapes):
            raise UsageError("--keep keeps every linear; there is nothing to quantise")
        sizes = [[self.size(name, b) for b in self.widths(name)] for name in self.shapes]
        low = sum(min(s) for s in sizes) / self.num_weights
        high = sum(max(s) for s in sizes) / self.num_weights
        if not low <= self.options.bits <= high:
            raise UsageError(
                f"--bits {self.options.bits:g} is out of reach: with groups of {self.options.group_size} and scales "
                f"counted, this model takes {_round_up(low):.3f} to {int(high * 1000) / 1000:.3f} bits per weight"
            )

    def prepare(self) -> None:
        """A work folder of this very run; one of another run is cleared."""
        manifest = {"format": FORMAT, "ids": hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()}
        manifest |= {"group_size": self.options.group_size, "seed": self.options.seed, "source": self.source_state}
        file = self.work / "manifest.json"
        if file.is_file() and file.read_text(encoding="utf-8") == json.dumps(manifest, sort_keys=True):
            self.progress(f"going on with what is in {self.work}")
            return
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        file.write_text(json.dumps(manifest, sort_keys=True), encoding="utf-8")

    def _fingerprint(self) -> str:
        """Changes when a weight file is replaced or edited."""
        files = {s.file for e in self.checkpoint.tensors.values() for s in e.parts.values()}
        facts = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(files)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    # --- statistics and rounding -------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Until every layer's roundings are in the work folder."""
        done = [i for i in range(self.num_layers) if self._layer_file(i).is_file()]
        first = min(done, default=self.num_layers)
        if first == self.num_layers:
            self._forward()
            if not self._file("gradient", self.num_layers).is_file():
                self._head()
        for index in reversed(range(first)):
            self.progress(f"layer {index}: statistics and rounding ({self.num_layers - index} of {self.num_layers})")
            self._backward(index)

    def _forward(self) -> None:
        have = max((i for i in range(self.num_layers + 1) if self._file("streams", i).is_file()), default=-1)
        if have < 0:
            save_tensors(self._file("streams", 0), {"x": self.model.embed(self.ids.reshape(-1))})
            have = 0
        streams = self._load("streams", have)
        for index in range(have, self.num_layers):
            self.progress(f"layer {index}: forward, {self.ids.numel()} tokens")
            with self.model.layer(index) as step:
                streams = step.run(streams, self.ids)
            save_tensors(self._file("streams", index + 1), {"x": streams})

    def _head(self) -> None:
        streams = self._load("streams", self.num_layers)
        generator = torch.Generator().manual_seed(self.options.seed)
        gradient = torch.empty_like(streams)
        with self.model.head() as head:
            for start in range(0, streams.shape[0], 256):
                x = streams[start : start + 256].clone().requires_grad_(True)
                logp = F.log_softmax(head.logits(x), -1)
                drawn = torch.multinomial(logp.detach().exp(), 1, generator=generator)
                (gradient[start : start + 256],) = torch.autograd.grad(-logp.gather(1, drawn).sum(), x)
        save_tensors(self._file("gradient", self.num_layers), {"x": gradient})

    def _backward(self, index: int) -> None:
        streams, after = self._load("streams", index), self._load("gradient", index + 1)
        before = torch.empty_like(streams)
        with self.model.layer(index) as step:
            linears = self.model.linears(index)
            statistics = {
                name: WeightedStatistics.of(m.out_features, m.in_features, name.endswith(UNSEEN))
                for name, m in linears.items()
            }
            with _recording(linears, statistics):
                for rows, part in micro_batches(self.ids):
                    before[rows] = _pull_back(step, streams[rows], part, after[rows])
            found: dict[str, Tensor] = {}
            costs: dict[str, dict[int, float]] = {}
            for name, module in linears.items():
                if name not in self.kept:
                    parts, costs[name] = self._round(name, module.weight.data, statistics[name])
                    found |= parts
        save_tensors(self._file("gradient", index), {"x": before})
        save_tensors(self._layer_file(index), found, {"costs": json.dumps(costs)})
        for stale in (self._file("gradient", index + 1), self._file("streams", index + 1)):
            stale.unlink(missing_ok=True)

    def _round(self, name: str, weight: Tensor, s: WeightedStatistics) -> tuple[dict[str, Tensor], dict[int, float]]:
        """A linear at every width: container parts by "name|bits|suffix", and the damage of each."""
        hessian, importance = s.hessian(), s.importance()
        recipe = Recipe(group_size=self.options.group_size)
        parts: dict[str, Tensor] = {}
        costs: dict[int, float] = {}
        if not bool(torch.isfinite(hessian).all() and torch.isfinite(weight).all()):
            raise CheckpointError(f"{name}: weights or activations are not finite; the source cannot be quantised")
        for bits in (b for b in self.widths(name) if b in WIDTHS):
            try:
                rounded = best_of(weight, hessian, subset_levels(bits), recipe)
            except ValueError as error:
                raise AgensError(f"{name}: {error}; use a longer calibration text") from error
            costs[bits] = 0.0 if s.unseen else max(0.0, 0.5 * loss_of(weight, hessian, rounded, importance))
            parts |= {f"{name}|{bits}|{suffix}": t for suffix, t in container_parts(rounded).items()}
        return parts, costs

    # --- allocation and output ---------------------------------------------------------------------------------------

    def write(self) -> QuantizeResult:
        if self._fingerprint() != self.source_state:
            raise CheckpointError(
                f"the weight files of {self.checkpoint.folder} changed while they were being quantised; run it again"
            )
        costs: dict[str, dict[int, float]] = {}
        for index in range(self.num_layers):
            with safe_open(self._layer_file(index), framework="pt") as f:
                layer = json.loads((f.metadata() or {})["costs"])
            costs |= {name: {int(b): c for b, c in by_bits.items()} for name, by_bits in layer.items()}
        names = list(self.shapes)
        tensors = [
            [Option(self.size(name, b), costs.get(name, {}).get(b, 0.0)) for b in self.widths(name)] for name in names
        ]
        try:
            plan = allocate(tensors, self.budget)
        except BudgetError as error:  # rounding of the budget to whole bits
            raise UsageError(
                f"--bits {self.options.bits:g} is out of reach by {error.low - error.budget} bits"
            ) from error
        chosen = {name: self.widths(name)[o] for name, o in zip(names, plan, strict=True)}
        result = QuantizeResult(
            bits_per_weight=total_size(tensors, plan) / self.num_weights,
            modules_by_bits={b: list(chosen.values()).count(b) for b in (*WIDTHS, KEPT_BITS)},
            estimated_kl=total_cost(tensors, plan),
            calibration_tokens=self.ids.numel(),
        )
        layer_of = {name: i for i, names_of in enumerate(self.by_layer) for name in names_of}
        quantised = _Chosen(self._layer_file, layer_of, {n: b for n, b in chosen.items() if b in WIDTHS})
        self.progress(f"writing {self.target}")
        summary = {"group_size": self.options.group_size, "bits_per_weight": round(result.bits_per_weight, 4)}
        write_build(self.checkpoint, self.target, quantised, summary)
        return result

    def _file(self, what: str, index: int) -> Path:
        return self.work / f"{what}-{index:04d}.safetensors"

    def _layer_file(self, index: int) -> Path:
        return self._file("layer", index)

    def _load(self, what: str, index: int) -> Tensor:
        with safe_open(self._file(what, index), framework="pt") as f:
            tensor: Tensor = f.get_tensor("x")
        return tensor


class _Chosen(Mapping[str, tuple[int, Parts]]):
    """The chosen rounding of each module, read from the work folder when asked for."""

    def __init__(self, file_of: Callable[[int], Path], layer_of: Mapping[str, int], bits: Mapping[str, int]) -> None:
        self._file_of, self._layer_of, self._bits = file_of, layer_of, bits

    def __getitem__(self, module: str) -> tuple[int, Parts]:
        bits = self._bits[module]
        with safe_open(self._file_of(self._layer_of[module]), framework="pt") as f:
            suffixes = ("weight_packed", "weight_scale", "weight_shape")
            return bits, {s: f.get_tensor(f"{module}|{bits}|{s}") for s in suffixes}

    def __contains__(self, module: object) -> bool:
        return module in self._bits

    def __iter__(self) -> Iterator[str]:
        return iter(self._bits)

    def __len__(self) -> int:
        return len(self._bits)


class _recording:
    """Collects statistics from the linears' inputs and output gradients inside the block."""

    def __init__(self, linears: Mapping[str, nn.Linear], statistics: Mapping[str, WeightedStatistics]) -> None:
        self._linears, self._statistics = linears, statistics
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._linears.items():
            self._handles.append(module.register_forward_hook(self._hook(self._statistics[name])))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    @staticmethod
    def _hook(statistics: WeightedStatistics) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def forward(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            x = args[0].detach().reshape(-1, args[0].shape[-1])
            statistics.add_inputs(x)
            if not statistics.unseen:
                # an output that does not hang on the streams (the n-gram memory's) would get no gradient
                out.requires_grad_(True)
                out.register_hook(lambda gradient: statistics.add_gradients(x, gradient.reshape(x.shape[0], -1)))

        return forward


def _pull_back(step: Step, streams: Tensor, ids: Tensor, gradient: Tensor) -> Tensor:
    """Gradient at the layer's input from the gradient at its output."""
    x = streams.clone().requires_grad_(True)
    out = step.forward(x, step.model.fresh_batch(ids))
    out.backward(gradient)
    assert x.grad is not None
    return x.grad


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--keep {pattern!r} is no regular expression: {error}") from error


def _round_up(x: float) -> float:
    return -int(-x * 1000 // 1) / 1000
