"""The model behind the routes while it loads, runs and stops: what /health reports and what handlers ask for."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agens_engine.errors import EngineStoppedError, NotFoundError
from agens_engine.server.generation import EngineLike, Generator
from agens_engine.server.metrics import ServerMetrics
from agens_engine.server.options import SamplingDefaults
from agens_engine.settings import Settings

if TYPE_CHECKING:
    from agens_engine.server.model_text import ModelText

log = logging.getLogger(__name__)


class HostState(str, Enum):
    LOADING = "loading"
    READY = "ok"
    FAILED = "failed"
    STOPPING = "stopping"


@dataclass(frozen=True)
class LoadedModel:
    """An engine and the text side of the same checkpoint; everything a handler works with."""

    engine: EngineLike
    text: ModelText
    generator: Generator
    defaults: SamplingDefaults
    max_output_tokens: int
    keep_alive_seconds: float

    @property
    def name(self) -> str:
        return self.text.name

    def check_name(self, name: str | None) -> None:
        """A request may leave the model out; a wrong name is an error that lists the right one."""
        if name is not None and name not in (self.name, self.engine.model_name):
            raise NotFoundError(
                f"the model {name[:100]!r} is not served here; use {self.name!r}",
                param="model",
                code="model_not_found",
            )


@dataclass
class ModelHost:
    """Holds the state; `attach`, `fail` and `stop` move it forward."""

    settings: Settings
    state: HostState = HostState.LOADING
    reason: str | None = None
    model: LoadedModel | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: ServerMetrics = field(default_factory=ServerMetrics)

    def attach(self, engine: EngineLike, text: ModelText) -> None:
        """The model is loaded. When a stop was asked for meanwhile, the state stays at stopping."""
        self.model = LoadedModel(
            engine=engine,
            text=text,
            generator=Generator(engine, self.settings.max_waiting, self.metrics, self.settings.request_timeout_seconds),
            defaults=sampling_defaults(self.settings, text.tokenizer.default_sampling),
            max_output_tokens=self.settings.max_output_tokens,
            keep_alive_seconds=self.settings.keep_alive_seconds,
        )
        self.metrics.observe_engine(engine.stats)
        if self.state is HostState.LOADING:
            self.state = HostState.READY

    def fail(self, reason: str) -> None:
        self.state, self.reason = HostState.FAILED, reason

    def stop(self) -> None:
        self.state = HostState.STOPPING

    def require(self) -> LoadedModel:
        """The model, or the reason why there is none right now (HTTP 503)."""
        if self.state is HostState.LOADING:
            raise EngineStoppedError("the model is still loading; try again shortly")
        if self.state is HostState.STOPPING:
            raise EngineStoppedError("the server is shutting down")
        if self.state is HostState.FAILED or self.model is None:
            raise EngineStoppedError(f"the engine has failed: {self.reason or 'see the log'}")
        return self.model

    def health(self) -> tuple[int, dict[str, Any]]:
        """Status code and body of /health."""
        body: dict[str, Any] = {"status": self.state.value}
        if self.reason is not None:
            body["reason"] = self.reason
        if self.model is not None:
            stats = self.model.engine.stats()
            if self.state is HostState.READY and stats.get("failed"):
                self.fail(str(stats["failed"]))
                body |= {"status": self.state.value, "reason": self.reason}
            body |= {"model": self.model.name, "engine": stats}
        return (200 if self.state is HostState.READY else 503), body


def sampling_defaults(settings: Settings, checkpoint: Mapping[str, Any]) -> SamplingDefaults:
    """Settings override what the checkpoint's generation_config says; what neither names keeps the API's default."""
    values = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
        "reasoning_budget": settings.reasoning_budget,
        "reasoning_budget_soft_bias": settings.reasoning_budget_soft_bias,
        "repetition_guard": settings.repetition_guard,
    }
    return SamplingDefaults(**{**checkpoint, **{name: value for name, value in values.items() if value is not None}})


HOST = web.AppKey("host", ModelHost)
REQUEST_ID = web.RequestKey("request_id", str)
