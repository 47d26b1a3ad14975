"""Shapes of what lies on disk: config.json and safetensors headers, never a weight.

A Linear is quantised when its folder holds X.weight_packed and X.weight_scale instead of X.weight; each member is
looked at by itself (spec volundr-weights.md section 3). The width of a packed weight comes from its scale columns and
config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from agens_planner.build import build_drafter, build_model, build_mtp
from agens_planner.dims import Config
from agens_planner.errors import PlannerInputError
from agens_planner.headers import TensorHeader, read_folder
from agens_planner.shapes import TABLE_KINDS, DrafterShapes, ModelShapes, MtpShapes, TensorSpec, classify, normalise

_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
MTP_FOLDERS = ("mtp", "drafters/mtp")
DRAFTER_FOLDERS = ("drafter", "dflash2", "drafters/dflash2")


# What a malformed file makes Python raise where no check names the key; the folder is then all that can be named.
_MALFORMED = (TypeError, ValueError, IndexError, AttributeError, ArithmeticError, KeyError, RecursionError)


def read_checkpoint(folder: Path, name: str | None = None) -> ModelShapes:
    """A model folder's shapes, with the drafters that lie in its subfolders.

    raises  PlannerInputError naming the file at fault
    """
    with _naming(folder):
        config = read_config(folder)
        specs, bits_known = _specs(read_folder(folder), config, folder)
        notes = (
            ()
            if bits_known
            else ("the files do not say how many bits their packed weights use; planned at the container's width",)
        )
        model = build_model(name or folder.name, str(folder), config, specs, bits_known=bits_known, notes=notes)
    mtp, drafter = _first(folder, MTP_FOLDERS), _first(folder, DRAFTER_FOLDERS)
    return replace(
        model,
        mtp=read_mtp(mtp) if mtp else model.mtp,
        drafter=read_drafter(drafter) if drafter else None,
    )


def read_mtp(folder: Path) -> MtpShapes:
    """The MTP head of a folder; raises as read_checkpoint."""
    with _naming(folder):
        config = read_config(folder)
        return build_mtp(config, _specs(read_folder(folder), config, folder)[0], str(folder))


def read_drafter(folder: Path) -> DrafterShapes:
    """The block drafter of a folder; raises as read_checkpoint."""
    with _naming(folder):
        config = read_config(folder)
        return build_drafter(config, _specs(read_folder(folder), config, folder)[0], str(folder))


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turns what a malformed file breaks into a PlannerInputError with the folder's name."""
    try:
        yield
    except _MALFORMED as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise PlannerInputError(f"{folder}: config.json or a tensor header is malformed ({what})") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder; raises PlannerInputError when it is missing or not an object."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise PlannerInputError(f"{folder} is not a folder")
    if not path.is_file():
        raise PlannerInputError(f"{folder} has no config.json; is it a model folder?")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise PlannerInputError(f"{path}: nested too deeply to be a model's config") from error
    except (OSError, ValueError) as error:
        raise PlannerInputError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlannerInputError(f"{path}: must hold a JSON object")
    return config


def _first(folder: Path, candidates: tuple[str, ...]) -> Path | None:
    return next((folder / c for c in candidates if (folder / c / "config.json").is_file()), None)


def _specs(
    headers: Mapping[str, TensorHeader], config: Mapping[str, Any], folder: Path
) -> tuple[list[TensorSpec], bool]:
    """Logical tensors, and whether the width of every packed one is known."""
    specs, bits_known = [], True
    root = Config(config, f"{folder}: config.json")
    for name in sorted(headers):
        base, _, part = name.rpartition(".")
        if part == "weight_packed":
            spec, known = _packed(base, headers, root)
            specs.append(spec)
            bits_known &= known
        elif part in _PARTS:
            if f"{base}.weight_packed" not in headers:
                raise PlannerInputError(f"{headers[name].file}: {name} has no {base}.weight_packed beside it")
        else:
            table = classify(normalise(name)) in TABLE_KINDS
            stored = headers[name].value_bytes if table else 0
            specs.append(TensorSpec(name, headers[name].shape, table_bytes=stored))
    return specs, bits_known


def _packed(base: str, headers: Mapping[str, TensorHeader], config: Config) -> tuple[TensorSpec, bool]:
    packed = headers[f"{base}.weight_packed"]
    scale = headers.get(f"{base}.weight_scale")
    if f"{base}.weight" in headers:
        raise PlannerInputError(f"{packed.file}: {base} is stored both packed and as .weight; remove one")
    if scale is None:
        raise PlannerInputError(f"{packed.file}: {base}.weight_packed has no {base}.weight_scale")
    two_dims = len(packed.shape) == len(scale.shape) == 2 and packed.shape[0] == scale.shape[0]
    if not two_dims or 0 in (*packed.shape, *scale.shape):
        raise PlannerInputError(
            f"{packed.file}: {base} packs {list(packed.shape)} words with {list(scale.shape)} scales"
        )
    container, group, exact = _scheme(base, config)
    columns = packed.shape[1] * (32 // container)
    if group:  # the last word may be padding; whole groups tell the true width
        columns = min(columns, scale.shape[1] * group)
    else:
        group = -(-columns // scale.shape[1])
    zero = f"{base}.weight_zero_point" in headers
    spec = TensorSpec(f"{base}.weight", (packed.shape[0], columns), exact or Fraction(container), group, zero)
    return spec, exact is not None or container != 4


def _scheme(base: str, config: Config) -> tuple[int, int, Fraction | None]:
    """(container bits, group size or 0, true bits if the config tells them) of one module."""
    quant = config.text().section("quantization_config") or Config({}, config.where)
    container, group = 4, 0
    if groups := quant.section("config_groups"):
        for name in groups.values:
            scheme = groups.section(name) or Config({}, groups.where)
            if _targets(scheme, base) and (weights := scheme.section("weights")):
                container = weights.whole("num_bits", 4)
                group = max(0, weights.whole("group_size", 0, low=-1))  # -1: one group per row
    if container not in (2, 3, 4, 8):
        raise PlannerInputError(f"{quant.where}: {base} has num_bits {container}; known: 2, 3, 4, 8")
    true_bits = _true_bits(base, quant)
    # compressed-tensors says nothing about narrower code sets inside 4-bit containers; whether that is a plain INT4
    # file or a mixed build shows only in the codes.
    plain = quant.values.get("quant_method") == "compressed-tensors" and not quant.values.get("mixed_bits", False)
    return container, group, true_bits or (Fraction(container) if plain else None)


def _true_bits(base: str, quant: Config) -> Fraction | None:
    modules = quant.section("bits_per_module")
    value = modules.values.get(base) if modules else None
    if value is None or modules is None:
        return None
    try:
        bits = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        bits = Fraction(0)
    if not 1 <= bits <= 16:
        raise PlannerInputError(f"{modules.where}: {base} must be a number of bits between 1 and 16, not {value!r}")
    return bits


def _targets(scheme: Config, base: str) -> bool:
    try:
        return any(
            t == "Linear" or (t.startswith("re:") and re.match(t[3:], base)) or base.endswith(t)
            for t in scheme.list("targets", str) or ["Linear"]
        )
    except re.error as error:
        raise PlannerInputError(f"{scheme.where}: targets holds a pattern that is not valid: {error}") from error
