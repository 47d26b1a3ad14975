"""From what a user asked to a plan: profile, shapes and machine facts are read here, and nothing is allocated.

`agens plan` and the engine's start-up both come through build_question, so they can never disagree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agens_engine.errors import PlanError, UsageError
from agens_engine.model_files import SHAPE_CARD, resolve_model
from agens_engine.probe import Sources, read_device, read_host
from agens_engine.settings import Settings
from agens_planner import (
    DeviceFacts,
    HostFacts,
    MemoryPlan,
    ModelShapes,
    PlannerInputError,
    PlanOptions,
    PlanRefused,
    Profile,
    Question,
    Suggestion,
    TensorSpec,
    choose_profile,
    environment_overrides,
    load_profile,
    plan,
    read_checkpoint,
    read_drafter,
    read_mtp,
    suggest,
    with_packed,
)
from agens_planner.card import is_card, read_card

ASSETS = Path(__file__).resolve().parent / "assets"
_SWITCH_WORDS = {"on", "off", "auto"}
_LABELS = {
    "context_tokens": "--context",
    "sequences": "--sequences",
    "cap_bytes": "--device-memory",
    "host_bytes": "--host-memory",
    "images": "--images",
    "mtp": "--mtp",
    "drafter": "--drafter",
}


@dataclass(frozen=True)
class PlanRequest:
    """What was asked on the command line. None: not given. mtp, drafter: on, off, auto or a folder."""

    model: str = "nano"
    profile: str = "auto"
    mtp: str | None = None
    drafter: str | None = None
    images: str | None = None
    context: str | None = None
    sequences: str | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    settings: tuple[str, ...] = ()
    probe: bool | None = None


def build_question(
    request: PlanRequest, *, environ: Mapping[str, str] | None = None, sources: Sources | None = None
) -> Question:
    """Read profile, shapes and machine; nothing is planned yet.

    raises  PlannerInputError naming the flag, file or key at fault
    """
    folder = _model_folder(request.model)
    probing = request.probe if request.probe is not None else not is_card(folder)
    device = read_device(sources) if probing or request.profile == "auto" else None
    name = request.profile
    if name == "auto":
        # A shape card describes a GPU model; without a GPU here, plan it for the smallest card that runs it well.
        name = "16gb" if device is None and is_card(folder) else choose_profile(device)
    overrides = environment_overrides(os.environ if environ is None else environ) | _overrides(request)
    profile = load_profile(name, overrides, labels=_LABELS)
    if not probing or (device is not None and profile.device == "cpu"):
        device = None
    shapes = _with_parts(_read_shapes(folder, request.model, profile), request)
    host = read_host(sources) if probing else HostFacts()
    facts = device or DeviceFacts(kind=profile.device)
    return Question(shapes, profile, facts, host, PlanOptions.from_profile(profile, shapes))


def plan_run(settings: Settings, survey: Callable[[], Iterable[TensorSpec]] = tuple) -> MemoryPlan:
    """The plan the engine runs under: what the settings ask for, on this machine.

    Weights are unpacked to float32 when that fits, or when `--weights dequantise` says so; else those that can stay
    packed do.

    survey   gives the tensors that can stay packed, with their exact bytes; called only when it matters
    raises   PlanError when it does not fit (with the cheapest way out), or when the profile plans what this version
             cannot run; UsageError for a wrong setting
    """
    request = PlanRequest(
        model=settings.model,
        profile=settings.profile or "cpu",
        mtp=settings.mtp_choice,
        drafter=settings.drafter_choice,
        images="off",
        context=_text(settings.context_tokens),
        sequences=_text(settings.max_sequences),
        device_memory=settings.device_memory,
        host_memory=settings.host_memory,
        settings=()
        if settings.prefill_chunk_tokens is None
        else (
            f"chunk_tokens_max={settings.prefill_chunk_tokens}",
            f"chunk_tokens_min={settings.prefill_chunk_tokens}",
        ),
    )
    try:
        question = build_question(request)
    except PlannerInputError as error:
        raise UsageError(str(error)) from error
    if question.profile.device != "cpu" or question.profile.dtype != "float32":
        raise PlanError(
            f"profile {question.profile.name} plans a {question.profile.device} device in "
            f"{question.profile.dtype}; this version runs in float32 on the CPU (--profile cpu); "
            "`agens plan` shows what the profile will hold"
        )
    found = make_plan(_choose_weights(question, settings.weights, survey))
    if found.choice.fp8_far or found.choice.fp8_dense:
        raise PlanError(
            "the plan fits only with fp8 K/V, which this version does not have yet; lower --context or --sequences"
        )
    return found


def _choose_weights(question: Question, weights: str, survey: Callable[[], Iterable[TensorSpec]]) -> Question:
    """The question with all weights unpacked, or with those packed that can stay so; `weights` as in the settings."""
    unpacked = replace(question, shapes=with_packed(question.shapes))
    if weights == "dequantise" or (weights == "auto" and unpacked.answer() is not None):
        return unpacked
    packed = tuple(survey())
    if packed:
        return replace(question, shapes=with_packed(question.shapes, packed))
    if weights == "packed":
        raise UsageError(
            f"--weights packed: {question.shapes.source} has no quantised linears that can stay packed; "
            "use --weights auto"
        )
    return unpacked


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


def make_plan(question: Question) -> MemoryPlan:
    """The plan of a question; a refusal becomes a PlanError that names the cheapest way out."""
    try:
        return plan(question.shapes, question.profile, question.device, question.host, question.options)
    except PlanRefused as refused:
        raise PlanError(refusal_line(refused, suggest(question, refused))) from refused
    except PlannerInputError as error:
        raise UsageError(str(error)) from error


def refusal_line(refused: PlanRefused, suggestions: list[Suggestion]) -> str:
    """One line: what is missing, which line binds, and the cheapest setting that would fit."""
    way_out = f"; cheapest: {suggestions[0].text()}" if suggestions else "; no setting makes it fit"
    return f"the plan does not fit: {refused}{way_out}"


def _overrides(request: PlanRequest) -> dict[str, Any]:
    values: dict[str, Any] = {
        "context_tokens": request.context,
        "sequences": request.sequences,
        "cap_bytes": request.device_memory,
        "host_bytes": request.host_memory,
        "images": request.images,
        "mtp": _switch(request.mtp),
        "drafter": _switch(request.drafter),
    }
    overrides = {key: value for key, value in values.items() if value is not None}
    for setting in request.settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise PlannerInputError(f"--set needs KEY=VALUE, not {setting!r}")
        overrides[key.strip()] = value.strip()
    return overrides


def _switch(value: str | None) -> str | None:
    """A folder means on; `on`, `off`, `auto` mean themselves."""
    if value is None or value.lower() in _SWITCH_WORDS:
        return value
    return "on"


def _model_folder(model: str) -> Path:
    card = ASSETS / model
    return card if model == SHAPE_CARD else resolve_model(model)


def _read_shapes(folder: Path, model: str, profile: Profile) -> ModelShapes:
    return read_card(folder, profile.build) if is_card(folder) else read_checkpoint(folder, Path(model).name)


def _with_parts(shapes: ModelShapes, request: PlanRequest) -> ModelShapes:
    """Drafters given as folders replace what the model folder has."""
    if request.mtp and request.mtp.lower() not in _SWITCH_WORDS:
        shapes = replace(shapes, mtp=read_mtp(Path(request.mtp).expanduser()))
    if request.drafter and request.drafter.lower() not in _SWITCH_WORDS:
        shapes = replace(shapes, drafter=read_drafter(Path(request.drafter).expanduser()))
    return shapes
