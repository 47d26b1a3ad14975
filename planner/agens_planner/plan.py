"""The frozen plan: lines, policies, forecast, and their one JSON form (design section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agens_planner.errors import PlannerError, PlannerInputError, nearest
from agens_planner.formula import Formula
from agens_planner.lines import DEVICE, NOT_ALLOCATED, packed_storage


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One allocation. `bytes` always equals the derivation's value."""

    name: str
    place: str
    derivation: Formula
    bytes: int

    @staticmethod
    def make(name: str, place: str, derivation: Formula) -> MemoryLine:
        return MemoryLine(name, place, derivation, derivation.value)

    @property
    def formula(self) -> str:
        return self.derivation.text()

    @property
    def allocated(self) -> bool:
        """False for lines that only reserve room in the budget; the arena does not hand those out."""
        return self.name not in NOT_ALLOCATED


@dataclass(frozen=True)
class Choice:
    """What the search decided: the variables of the plan."""

    context_tokens: int
    sequences: int
    chunk_tokens: int
    vision_staged: bool
    fp8_far: bool
    fp8_dense: bool
    far_resident_layers: int


@dataclass(frozen=True)
class Policy:
    """One choice of the plan, reported whether it was free or forced."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class FarForecast:
    """What host layers of the far pool cost a verify step: bytes selected, and those the hot cache does not hold.

    hit_source   "assumed" (constants.HOT_HIT_RATE), or "profile": somebody measured it (hot_hit_percent)
    """

    selected_bytes: int = 0
    missed_bytes: int = 0
    hit_rate: float = 0.0
    hit_source: str = "assumed"


@dataclass(frozen=True)
class StepForecast:
    """Bytes one verify step moves. lines: device line (or `host.*` for the bus) -> bytes."""

    at_context: int
    bytes_read: int
    bus_bytes: int
    target_bytes: int
    lines: Mapping[str, int]
    far: FarForecast = FarForecast()


@dataclass(frozen=True)
class Roofline:
    """What a GPU's measured memory bandwidth allows for the forecast step."""

    step_seconds: float
    bus_seconds: float
    tokens_per_second: float
    tokens_per_step: float
    plain_tokens_per_second: float
    has_memory: bool

    @property
    def bus_share(self) -> float:
        """Part of the step that the bus takes."""
        return self.bus_seconds / self.step_seconds


@dataclass(frozen=True)
class MemoryPlan:
    """A plan for one model on one machine. Device lines sum to the planned peak,
    host lines to the planned host bytes.
    """

    model: str
    source: str
    profile: str
    dtype: str
    fits: bool
    choice: Choice
    max_context_tokens: int
    binding_line: str
    cap_bytes: int
    limit_bytes: int
    host_limit_bytes: int | None
    lines: tuple[MemoryLine, ...]
    policies: tuple[Policy, ...]
    notes: tuple[str, ...]
    step: StepForecast
    step_short: StepForecast
    roofline: Mapping[str, Roofline]
    map_tables: bool = False  # embedding and Engram tables are read from the mapped checkpoint
    hot_cache_blocks: int = 0  # far blocks cached per host layer and sequence, at most its pool
    mtp_window_tokens: int = 0  # positions the MTP head sees; its context line holds them

    @property
    def context_tokens(self) -> int:
        return self.choice.context_tokens

    @property
    def sequences(self) -> int:
        return self.choice.sequences

    @property
    def device_lines(self) -> tuple[MemoryLine, ...]:
        return tuple(line for line in self.lines if line.place == DEVICE)

    @property
    def host_lines(self) -> tuple[MemoryLine, ...]:
        return tuple(line for line in self.lines if line.place != DEVICE)

    @property
    def planned_peak_bytes(self) -> int:
        return sum(line.bytes for line in self.device_lines)

    @property
    def planned_host_bytes(self) -> int:
        return sum(line.bytes for line in self.host_lines)

    @property
    def packed_weights(self) -> bool:
        """Whether any weight of the target stays in the low-bit layout instead of being unpacked at load."""
        return any(x.name.startswith("weights.") and packed_storage(x.name) for x in self.device_lines)

    def line(self, name: str) -> MemoryLine:
        """The line of that name; raises PlannerInputError with the nearest one for an unknown name."""
        for line in self.lines:
            if line.name == name:
                return line
        raise PlannerInputError(f"the plan has no line {name!r}{nearest(name, (x.name for x in self.lines))}")

    def bytes_of(self, name: str) -> int:
        """Bytes of a line, 0 when the plan does not need it."""
        return next((line.bytes for line in self.lines if line.name == name), 0)

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form; every number in it is the one the table shows."""
        return {
            "fits": self.fits,
            "model": self.model,
            "source": self.source,
            "profile": self.profile,
            "dtype": self.dtype,
            "context_tokens": self.context_tokens,
            "max_context_tokens": self.max_context_tokens,
            "sequences": self.sequences,
            "chunk_tokens": self.choice.chunk_tokens,
            "binding_line": self.binding_line,
            "device": {
                "cap_bytes": self.cap_bytes,
                "limit_bytes": self.limit_bytes,
                "planned_peak_bytes": self.planned_peak_bytes,
            },
            "host": {"planned_bytes": self.planned_host_bytes, "limit_bytes": self.host_limit_bytes},
            "lines": [{"name": x.name, "place": x.place, "bytes": x.bytes, "formula": x.formula} for x in self.lines],
            "policies": [{"name": p.name, "value": p.value, "reason": p.reason} for p in self.policies],
            "notes": list(self.notes),
            "step": _step_json(self.step),
            "step_short": _step_json(self.step_short),
            "roofline": {
                gpu: {
                    "step_seconds": r.step_seconds,
                    "bus_seconds": r.bus_seconds,
                    "bus_share": r.bus_share,
                    "tokens_per_second": r.tokens_per_second,
                    "tokens_per_step": r.tokens_per_step,
                    "plain_tokens_per_second": r.plain_tokens_per_second,
                    "has_memory": r.has_memory,
                }
                for gpu, r in self.roofline.items()
            },
        }


class PlanRefused(PlannerError):
    """The memory does not suffice.

    plan           the smallest plan for what was asked, `fits` false: every line with its bytes
    binding_line   the line to shrink
    missing_bytes  by how much the tightest place is exceeded
    """

    def __init__(self, message: str, *, plan: MemoryPlan, binding_line: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.plan = plan
        self.binding_line = binding_line
        self.missing_bytes = missing_bytes


def _step_json(step: StepForecast) -> dict[str, Any]:
    return {
        "bytes_read": step.bytes_read,
        "bus_bytes": step.bus_bytes,
        "target_bytes_read": step.target_bytes,
        "draft_bytes_read": step.bytes_read - step.target_bytes,
        "at_context_tokens": step.at_context,
        "far_pool": {
            "selected_bytes": step.far.selected_bytes,
            "missed_bytes": step.far.missed_bytes,
            "hit_rate": step.far.hit_rate,
            "hit_rate_source": step.far.hit_source,
        },
        "lines": dict(step.lines),
    }
