"""From settings to a running engine: the plan first, then weights, drafters and sessions, all inside the plan."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial

from agens_engine.engine import Engine
from agens_engine.errors import UsageError
from agens_engine.memory.arena import Arena
from agens_engine.model.drafter_loading import check_drafters, find_drafters
from agens_engine.model.loading import check_model, load_model, pick_device
from agens_engine.model.packed_weights import survey_packed
from agens_engine.model.repack_cache import RepackCache
from agens_engine.model_files import added_token_id, model_name, resolve_model
from agens_engine.planning import plan_run
from agens_engine.sessions import open_session_files
from agens_engine.settings import Settings
from agens_engine.speculate.build import SOURCE_NAMES, load_sources
from agens_engine.speculate.policy import AdaptivePolicy


def load_engine(settings: Settings, *, unused_ids: Iterable[int] = ()) -> Engine:
    """Plan, then load the model that the settings name. Raises UsageError, PlanError or CheckpointError."""
    wanted = SOURCE_NAMES if settings.draft_sources is None else settings.draft_sources
    unknown = sorted(set(wanted) - set(SOURCE_NAMES))
    if unknown:
        raise UsageError(f"unknown draft source {', '.join(unknown)}; known: {', '.join(SOURCE_NAMES)}")
    device = pick_device(settings.device)
    if device.type != "cpu":
        raise UsageError(f"--device {settings.device}: this version runs on the CPU only; use --device cpu")
    folder = resolve_model(settings.model)
    config = check_model(folder)  # a broken folder is named before anything is planned for it
    drafters = find_drafters(folder, mtp=settings.mtp_choice, drafter=settings.drafter_choice)
    mask = partial(added_token_id, folder)
    check_drafters(drafters, config, resolve_token=mask)
    cache = RepackCache(settings.repack_cache) if settings.repack_cache is not None else None
    survey = lru_cache(lambda: survey_packed(folder, cache))
    plan = plan_run(settings, lambda: survey().values())
    arena = Arena.of_plan(plan, device)
    packed = survey() if plan.packed_weights else None
    model = load_model(
        folder, device=device, dtype=settings.dtype, memory=arena, packed=packed, cache=cache,
        map_tables=plan.map_tables,
    )  # fmt: skip
    unused_ids = tuple(unused_ids)
    sources = load_sources(
        drafters,
        model,
        names=wanted if settings.speculation else (),
        unused_ids=unused_ids,
        resolve_token=mask,
        max_sequences=plan.sequences,
        context_tokens=plan.context_tokens,
        mtp_window_tokens=plan.mtp_window_tokens,
        arena=arena,
    )
    return Engine(
        model,
        model_name=model_name(settings.model),
        unused_ids=unused_ids,
        context_tokens=plan.context_tokens,
        max_sequences=plan.sequences,
        prefill_chunk_tokens=plan.choice.chunk_tokens,
        arena=arena,
        far_resident_layers=plan.choice.far_resident_layers,
        hot_cache_blocks=plan.hot_cache_blocks,
        sources=sources,
        policy=AdaptivePolicy() if settings.adaptive_drafts else None,
        session_bytes=(budget := plan.bytes_of("host.snapshots") if settings.session_cache else 0),
        session_files=open_session_files(settings.session_dir, folder, model, budget) if budget else None,
    )
