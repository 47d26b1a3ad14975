"""Shape cards: a folder with config.json and card.toml that describes a model nobody has to download.

The card lists tensor families; they are expanded to the full list and take the same way as a real checkpoint's.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from agens_planner.build import build_drafter, build_model, build_mtp
from agens_planner.checkpoint import read_config
from agens_planner.dims import Config, mixer_kinds
from agens_planner.errors import PlannerInputError, nearest
from agens_planner.shapes import TABLE_KINDS, ModelShapes, TensorSpec, classify, normalise

CARD_NAME = "card.toml"


def is_card(folder: Path) -> bool:
    return (folder / CARD_NAME).is_file()


def read_card(folder: Path, build: str) -> ModelShapes:
    """The card's model in one of its builds, drafter and MTP head included.

    build    `engine-2.82`, `int4`, `bf16`, or `engine-<bits>` for the same packed linears at another average
    raises   PlannerInputError for an unknown build or a card that contradicts itself
    """
    path = folder / CARD_NAME
    try:
        card = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlannerInputError(f"{path}: cannot be read: {error}") from error
    config = read_config(folder)
    scheme = _build_scheme(card, build)
    source = f"shape card {card['name']}, build {build}"
    specs = [_packed(spec, scheme) for spec in _expand(card["tensors"], _layer_sets(config))]
    model = build_model(card["name"], source, config, specs, hypothetical=True)
    return replace(
        model,
        drafter=build_drafter(card["drafter"]["config"], _expand(card["drafter"]["tensors"], {}), source),
        mtp=build_mtp(card["mtp"]["config"], _expand(card["mtp"]["tensors"], {}), source),
    )


def _build_scheme(card: Mapping[str, Any], build: str) -> dict[str, Any]:
    builds = card["builds"]
    if build in builds:
        return dict(builds[build])
    if match := re.fullmatch(r"engine-(\d+(?:\.\d+)?)", build):
        if not 1 <= float(match.group(1)) <= 8:
            raise PlannerInputError(f"build {build}: average bits must be between 1 and 8")
        return dict(builds["engine-2.82"]) | {"bits": match.group(1)}
    raise PlannerInputError(f"shape card {card['name']} has no build {build!r}{nearest(build, builds)}")


def _layer_sets(config: Mapping[str, Any]) -> dict[str, list[int]]:
    text = Config(config["text_config"], "shape card")
    mixers = mixer_kinds(text)
    return {
        "all": list(range(len(mixers))),
        "kda": [i for i, m in enumerate(mixers) if m == "kda"],
        "softmax": [i for i, m in enumerate(mixers) if m != "kda"],
        "bcsa": [i for i, m in enumerate(mixers) if m == "bcsa"],
        "engram": text.list("engram_layers", int),
    }


def _expand(families: list[dict[str, Any]], layer_sets: Mapping[str, list[int]]) -> Iterator[TensorSpec]:
    for family in families:
        shape = tuple(family["shape"])
        if "layers" in family:
            for layer in layer_sets[family["layers"]]:
                yield _spec(family["name"].replace("{layer}", str(layer)), shape)
        else:
            for i in range(family.get("repeat", 1)):
                yield _spec(family["name"].replace("{i}", str(i)), shape)


def _spec(name: str, shape: tuple[int, ...]) -> TensorSpec:
    """Published checkpoints are bf16."""
    return TensorSpec(name, shape, table_bytes=2 if classify(normalise(name)) in TABLE_KINDS else 0)


def _packed(spec: TensorSpec, scheme: Mapping[str, Any]) -> TensorSpec:
    if any(re.search(pattern, spec.name) for pattern in scheme["packed"]):
        return replace(spec, bits=Fraction(scheme["bits"]), group=scheme["group"])
    return spec
