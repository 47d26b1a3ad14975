"""From configs and tensor lists to ModelShapes: target, vision tower, drafter, MTP head."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from agens_planner.dims import Config, check_shapes, read_dims
from agens_planner.errors import PlannerInputError
from agens_planner.shapes import (
    DrafterShapes,
    ModelShapes,
    MtpShapes,
    TensorSpec,
    VisionShapes,
    WeightGroup,
    classify,
    group_specs,
    normalise,
)

_CODEBOOK = re.compile(r"candidate_selector\.(predecessor|successor)_codebook(\.weight)?$")
_ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def build_model(
    name: str,
    source: str,
    config: Mapping[str, Any],
    tensors: Iterable[TensorSpec],
    *,
    hypothetical: bool = False,
    bits_known: bool = True,
    notes: tuple[str, ...] = (),
) -> ModelShapes:
    """The target model's shapes, checked against its config.

    raises  PlannerInputError: unknown or missing tensors, contradictory shapes
    """
    root = Config(config, f"{source}: config.json" if not hypothetical else f"shape card {name}")
    text = root.text()
    specs = {normalise(t.name): t for t in whole_tensors(tensors, source)}
    kinds = {n: classify(n) for n in specs}
    unknown = sorted(n for n, kind in kinds.items() if kind is None)
    if unknown:
        raise PlannerInputError(f"{source}: {len(unknown)} tensors no Volundr model has, first {unknown[0]}")
    dims = read_dims(text, specs)
    check_shapes(specs, text, dims, source)
    text_specs = [(k, specs[n]) for n, k in kinds.items() if k not in ("vision", "ignored", None)]
    tied = bool(text.values.get("tie_word_embeddings", root.values.get("tie_word_embeddings", False)))
    if "head" not in kinds.values():
        if not tied:
            raise PlannerInputError(f"{source}: lm_head.weight is missing and tie_word_embeddings is false")
        # a matrix that is multiplied with is no table
        text_specs = [(kind, replace(s, table_bytes=0) if kind == "embedding" else s) for kind, s in text_specs]
        text_specs.append(("head", TensorSpec("lm_head.weight", (dims.vocab, dims.hidden))))
    vision_specs = [(k, specs[n]) for n, k in kinds.items() if k == "vision"]
    return ModelShapes(
        name=name,
        source=source,
        dims=dims,
        groups=group_specs((str(k), s) for k, s in text_specs),
        vision=_build_vision(root, vision_specs) if vision_specs else None,
        mtp=_mtp_inside(text, specs, source),
        hypothetical=hypothetical,
        bits_known=bits_known,
        notes=notes,
    )


def whole_tensors(tensors: Iterable[TensorSpec], source: str) -> Iterator[TensorSpec]:
    """The tensors, each with at least one dimension and no empty one; raises PlannerInputError naming the first other.

    No line can be planned for less, and sizes are divided by some of these.
    """
    for tensor in tensors:
        if not tensor.shape or 0 in tensor.shape:
            raise PlannerInputError(f"{source}: tensor {tensor.name} has shape {list(tensor.shape)}; it holds no rows")
        yield tensor


def _build_vision(root: Config, specs: list[tuple[str, TensorSpec]]) -> VisionShapes:
    vision = root.section("vision_config")
    if vision is None:
        raise PlannerInputError(f"{root.where}: vision tensors without a vision_config")
    patch = vision.whole("patch_size")
    return VisionShapes(
        depth=vision.whole("depth"),
        hidden=vision.whole("hidden_size"),
        heads=vision.whole("num_heads"),
        intermediate=vision.whole("intermediate_size"),
        patch_values=vision.whole("in_channels", 3) * vision.whole("temporal_patch_size", 2) * patch * patch,
        merge=vision.whole("spatial_merge_size", 2),
        out_hidden=vision.whole("out_hidden_size"),
        patch=patch,
        groups=group_specs(specs),
    )


def _mtp_inside(text: Config, specs: Mapping[str, TensorSpec], source: str) -> MtpShapes | None:
    """MTP tensors that a merged checkpoint carries itself; the loader may ignore them, so the plan only offers them."""
    inside = [s for n, s in specs.items() if classify(n) == "ignored"]
    if not any(s.name.endswith("fc.weight") for s in inside):
        return None
    return build_mtp(text.values, inside, source)


def build_mtp(config: Mapping[str, Any], tensors: Iterable[TensorSpec], source: str) -> MtpShapes:
    """The MTP head's shapes (spec drafters.md, B.1).

    raises  PlannerInputError when fc.weight is missing or does not have the width the config names
    """
    conf = Config(config, f"{source}: config.json").text()
    specs = {re.sub(r"^(model\.)?mtp\.", "", t.name): t for t in whole_tensors(tensors, source)}
    hidden = conf.whole("hidden_size")
    if "fc.weight" not in specs:
        raise PlannerInputError(
            f"{source}: mtp.fc.weight is missing: not a complete MTP head; download it again or use --mtp off"
        )
    if specs["fc.weight"].shape != (hidden, 2 * hidden):
        raise PlannerInputError(
            f"{source}: mtp.fc.weight has shape {list(specs['fc.weight'].shape)}, not {[hidden, 2 * hidden]}"
        )
    layers = {m.group(1) for n in specs if (m := re.match(r"layers\.(\d+)\.", n))}
    heads, kv_heads, head_dim = _head_sizes(conf, specs, hidden)
    return MtpShapes(
        layers=max(1, len(layers)),
        hidden=hidden,
        intermediate=conf.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        groups=_linear_groups(specs.items()),
    )


def build_drafter(config: Mapping[str, Any], tensors: Iterable[TensorSpec], source: str) -> DrafterShapes:
    """The block drafter's shapes (spec drafters.md, A.1 and A.2).

    raises  PlannerInputError: missing fc.weight, a sliding layer without a window, contradictory widths
    """
    conf = Config(config, f"{source}: config.json")
    inner = conf.section("dflash_config") or conf
    specs = {}
    for t in whole_tensors(tensors, source):
        short = t.name.removeprefix("model.")
        specs[_ALIASES.get(short, short)] = t
    if "fc.weight" not in specs:
        raise PlannerInputError(f"{source}: fc.weight is missing: not a DFlash drafter")
    hidden = conf.whole("hidden_size")
    if len(specs["fc.weight"].shape) != 2:
        raise PlannerInputError(f"{source}: fc.weight has shape {list(specs['fc.weight'].shape)}, not two dimensions")
    taps, rest = divmod(specs["fc.weight"].shape[1], hidden)
    if rest or not taps:
        raise PlannerInputError(
            f"{source}: fc.weight has {specs['fc.weight'].shape[1]} columns, not a multiple of hidden_size {hidden}"
        )
    layers = conf.whole("num_hidden_layers")
    full = sum(k == "full_attention" for k in _drafter_kinds(conf, layers))
    heads, kv_heads, head_dim = _head_sizes(conf, specs, hidden)
    return DrafterShapes(
        layers=layers,
        hidden=hidden,
        intermediate=conf.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=conf.whole("sliding_window") if full < layers else 0,
        full_layers=full,
        taps=taps,
        block=inner.whole("block_size", conf.whole("block_size", 16)),
        groups=_linear_groups((n, s) for n, s in specs.items() if not _CODEBOOK.match(n)),
        codebooks=group_specs(("codebook", s) for n, s in specs.items() if _CODEBOOK.match(n)),
    )


def _drafter_kinds(conf: Config, layers: int) -> list[str]:
    """layer_types; what the config leaves out slides where a window is given and used (as the engine reads it)."""
    slides = conf.values.get("use_sliding_window") is True and conf.values.get("sliding_window") is not None
    first = conf.whole("max_window_layers", 0, low=0)
    kinds = ["sliding_attention" if slides and i >= first else "full_attention" for i in range(layers)]
    return conf.list("layer_types", str) or kinds


def _head_sizes(conf: Config, specs: Mapping[str, TensorSpec], hidden: int) -> tuple[int, int, int]:
    """(heads, K/V heads, head dim) of a drafter; what the config leaves out follows from the first layer's tensors."""
    norm, key = (specs.get(f"layers.0.self_attn.{part}.weight") for part in ("q_norm", "k_proj"))
    heads = conf.whole("num_attention_heads")
    head_dim = conf.whole("head_dim", norm.shape[0] if norm else hidden // heads)
    return heads, conf.whole("num_key_value_heads", key.shape[0] // head_dim if key else heads), head_dim


def _linear_groups(specs: Iterable[tuple[str, TensorSpec]]) -> tuple[WeightGroup, ...]:
    """Matrices are `linear` (may be quantised at load), everything else is `small` and kept."""
    return group_specs(("linear" if len(s.shape) == 2 else "small", s) for _, s in specs)
