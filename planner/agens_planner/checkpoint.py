"""Shapes of what lies on disk: config.json and safetensors headers, never a weight.

A Linear is quantised when its folder holds X.weight_packed and X.weight_scale instead of X.weight; each member is
looked at by itself (spec volundr-weights.md section 3). The width of a packed weight comes from its scale columns and
config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from agens_planner.build import build_drafter, build_model, build_mtp
from agens_planner.errors import PlannerInputError
from agens_planner.headers import TensorHeader, read_folder
from agens_planner.shapes import DrafterShapes, ModelShapes, MtpShapes, TensorSpec

_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
MTP_FOLDERS = ("mtp", "drafters/mtp")
DRAFTER_FOLDERS = ("drafter", "dflash2", "drafters/dflash2")


def read_checkpoint(folder: Path, name: str | None = None) -> ModelShapes:
    """A model folder's shapes, with the drafters that lie in its subfolders.

    raises  PlannerInputError naming the file at fault
    """
    config = read_config(folder)
    specs, bits_known = _specs(read_folder(folder), config)
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
    config = read_config(folder)
    return build_mtp(config, _specs(read_folder(folder), config)[0], str(folder))


def read_drafter(folder: Path) -> DrafterShapes:
    config = read_config(folder)
    return build_drafter(config, _specs(read_folder(folder), config)[0], str(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder; raises PlannerInputError when it is missing or not an object."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise PlannerInputError(f"{folder} is not a folder")
    if not path.is_file():
        raise PlannerInputError(f"{folder} has no config.json; is it a model folder?")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlannerInputError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlannerInputError(f"{path}: must hold a JSON object")
    return config


def _first(folder: Path, candidates: tuple[str, ...]) -> Path | None:
    return next((folder / c for c in candidates if (folder / c / "config.json").is_file()), None)


def _specs(headers: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> tuple[list[TensorSpec], bool]:
    """Logical tensors, and whether the width of every packed one is known."""
    specs, bits_known = [], True
    for name in sorted(headers):
        base, _, part = name.rpartition(".")
        if part == "weight_packed":
            spec, known = _packed(base, headers, config)
            specs.append(spec)
            bits_known &= known
        elif part in _PARTS:
            if f"{base}.weight_packed" not in headers:
                raise PlannerInputError(f"{headers[name].file}: {name} has no {base}.weight_packed beside it")
        else:
            specs.append(TensorSpec(name, headers[name].shape))
    return specs, bits_known


def _packed(base: str, headers: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> tuple[TensorSpec, bool]:
    packed = headers[f"{base}.weight_packed"]
    scale = headers.get(f"{base}.weight_scale")
    if f"{base}.weight" in headers:
        raise PlannerInputError(f"{packed.file}: {base} is stored both packed and as .weight; remove one")
    if scale is None:
        raise PlannerInputError(f"{packed.file}: {base}.weight_packed has no {base}.weight_scale")
    if len(packed.shape) != 2 or len(scale.shape) != 2 or packed.shape[0] != scale.shape[0]:
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


def _scheme(base: str, config: Mapping[str, Any]) -> tuple[int, int, Fraction | None]:
    """(container bits, group size or 0, true bits if the config tells them) of one module."""
    quant = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    container, group = 4, 0
    for scheme in (quant.get("config_groups") or {}).values():
        if _targets(scheme.get("targets") or ["Linear"], base):
            weights = scheme.get("weights") or {}
            container = int(weights.get("num_bits") or 4)
            group = max(0, int(weights.get("group_size") or 0))
    true_bits = (quant.get("bits_per_module") or {}).get(base)
    if container not in (2, 3, 4, 8):
        raise PlannerInputError(f"config.json: {base} has num_bits {container}; known: 2, 3, 4, 8")
    # compressed-tensors says nothing about narrower code sets inside 4-bit containers; whether that is a plain INT4
    # file or a mixed build shows only in the codes.
    plain = quant.get("quant_method") == "compressed-tensors" and not quant.get("mixed_bits", False)
    return container, group, Fraction(str(true_bits)) if true_bits else (Fraction(container) if plain else None)


def _targets(targets: list[str], base: str) -> bool:
    return any(t == "Linear" or (t.startswith("re:") and re.match(t[3:], base)) or base.endswith(t) for t in targets)
