"""Who needs how many bytes: all lines of one choice on one machine. Only here are a plan's lines assembled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agens_planner import constants as c
from agens_planner.facts import DeviceFacts, HostFacts
from agens_planner.formula import Formula
from agens_planner.lines import DEVICE, HOST_PAGEABLE, HOST_PINNED, NOT_ALLOCATED, PIN_ORDER
from agens_planner.plan import Choice, MemoryLine
from agens_planner.profile import Profile
from agens_planner.sequence_lines import (
    drafter_rows,
    kv_rows,
    mtp_rows,
    prefill_formula,
    reference_drafting,
    reference_sampling,
    reference_scratch,
    state_rows,
    verify_rows,
    vision_rows,
)
from agens_planner.shapes import ModelShapes
from agens_planner.weight_lines import tensor_count, unpack_formula, weight_lines


@dataclass(frozen=True)
class Parts:
    """Which optional parts of the model are loaded."""

    drafter: bool
    mtp: bool
    images: bool


class Inventory:
    """All lines as a function of the choice. Immutable once built; weight lines are computed once."""

    def __init__(
        self, shapes: ModelShapes, profile: Profile, device: DeviceFacts, host: HostFacts, parts: Parts
    ) -> None:
        self.shapes, self.profile, self.device, self.host, self.parts = shapes, profile, device, host, parts
        self.static = weight_lines(shapes, profile, drafter=parts.drafter, mtp=parts.mtp)
        self._static_device = sum(x.bytes for x in self.static if x.place == DEVICE)
        self._static_host = sum(x.bytes for x in self.static if x.place != DEVICE)
        self._static_lines = sum(1 for x in self.static if x.place == DEVICE and x.bytes)
        self._tensors = tensor_count(shapes, drafter=parts.drafter, mtp=parts.mtp, images=parts.images)
        self._totals: dict[Choice, tuple[int, int]] = {}
        self.accelerated = profile.device == "cuda"
        self.cap_bytes = min(profile.cap_bytes, device.total_bytes or profile.cap_bytes)
        self.limit_bytes = max(0, self.cap_bytes - profile.cap_margin_bytes)
        limits = [b for b in (profile.host_bytes, host.available_bytes) if b is not None]
        self.host_limit_bytes = min(limits) if limits else None

    def lines(self, choice: Choice) -> list[MemoryLine]:
        """Every line but the snapshots, device first, in a fixed order."""
        rows = [*self._model_rows(choice), *self._runtime_rows(choice)]
        device = [MemoryLine.make(*row) for row in rows if row[1] == DEVICE]
        host = [MemoryLine.make(*row) for row in rows if row[1] != DEVICE]
        device += [line for line in self.static if line.place == DEVICE]
        host += [line for line in self.static if line.place != DEVICE]
        device += self._reserves(sum(1 for line in device if line.allocated and line.bytes))
        # An empty line says nothing, except that the tower's scratch was thought of and lies inside another one.
        device = [line for line in device if line.bytes or line.name == "vision.scratch"]
        device.sort(key=lambda line: _ORDER[line.name.partition(".")[0]])
        if not self.accelerated:
            peak = Formula.of((sum(line.bytes for line in device), "bytes planned on the device"))
            host.append(MemoryLine.make("host.device_lines", HOST_PAGEABLE, peak))
        return device + sorted((line for line in host if line.bytes), key=lambda line: line.name)

    def totals(self, choice: Choice) -> tuple[int, int]:
        """(device bytes, host bytes without snapshots) of a choice: the sums of `lines`, without building them."""
        if choice not in self._totals:
            device, host, count = self._static_device, self._static_host, self._static_lines
            for name, place, formula in (*self._model_rows(choice), *self._runtime_rows(choice)):
                size = formula.value
                if place == DEVICE:
                    device += size
                    count += size > 0 and name not in NOT_ALLOCATED
                else:
                    host += size
            device += sum(line.bytes for line in self._reserves(count))
            self._totals[choice] = device, host + (0 if self.accelerated else device)
        return self._totals[choice]

    def fits(self, choice: Choice) -> bool:
        device, host = self.totals(choice)
        return device <= self.limit_bytes and self.fits_host(host)

    def fits_host(self, host_bytes: int) -> bool:
        return self.host_limit_bytes is None or host_bytes <= self.host_limit_bytes

    def _model_rows(self, choice: Choice) -> list[tuple[str, str, Formula]]:
        shapes, profile, dims = self.shapes, self.profile, self.shapes.dims
        element = profile.element_bytes
        verify = list(verify_rows(dims, choice))
        prefill = prefill_formula(shapes, choice, element, drafter=self.parts.drafter)
        if not self.accelerated:
            prefill = reference_scratch(dims, choice, prefill, choice.chunk_tokens)
            own = {
                "activations.verify": lambda f: reference_scratch(dims, choice, f, c.VERIFY_ROWS),
                "sampling.scratch": lambda f: f + reference_sampling(dims, choice),
            }
            verify = [(name, place, own[name](f) if name in own else f) for name, place, f in verify]
        rows = [*state_rows(dims, choice, element), *kv_rows(dims, profile, choice), *verify]
        rows.append(("activations.prefill", DEVICE, prefill))
        if self.parts.drafter and shapes.drafter:
            rows += drafter_rows(shapes.drafter, dims, choice, element)
        if self.parts.mtp and shapes.mtp:
            rows += mtp_rows(shapes.mtp, dims, profile, choice)
        if not self.accelerated:
            rows = [
                (name, place, reference_drafting(shapes, profile, choice, name, f) if name in _DRAFT_SCRATCH else f)
                for name, place, f in rows
            ]
        if self.parts.images and shapes.vision:
            rows += vision_rows(shapes.vision, profile, choice, prefill.value)
        return rows

    def _runtime_rows(self, choice: Choice) -> list[tuple[str, str, Formula]]:
        profile = self.profile
        runtime = c.HOST_RUNTIME_BYTES if self.accelerated else c.HOST_RUNTIME_CPU_BYTES
        buffers = min(profile.load_buffer_bytes, self._static_device + self._static_host)
        rows = [
            ("host.runtime", HOST_PAGEABLE, Formula.of((runtime, "bytes (constants.py)"))),
            ("host.load_buffers", HOST_PAGEABLE, Formula.of((buffers, "bytes (profile, at most all weights)"))),
            ("host.headroom", HOST_PAGEABLE, Formula.of((profile.host_headroom_bytes, "bytes (profile)"))),
        ]
        if not self.accelerated:
            widest = max(choice.chunk_tokens, choice.sequences * c.VERIFY_ROWS)
            rows.append(("runtime.unpack", DEVICE, unpack_formula(self.shapes, profile, widest)))
        if self.accelerated:
            sizes = _graph_sizes(choice.sequences)
            models = 1 + self.parts.drafter + self.parts.mtp
            graphs = Formula.of((sizes, "batch sizes"), (models, "models"), (c.GRAPH_BYTES, "bytes (constants.py)"))
            rows += [
                ("runtime.cuda_context", DEVICE, Formula.of((c.CUDA_CONTEXT_BYTES, "bytes (constants.py)"))),
                ("runtime.libraries", DEVICE, Formula.of((c.LIBRARY_BYTES, "bytes (constants.py)"))),
                ("runtime.graphs", DEVICE, graphs),
            ]
        return rows

    def _reserves(self, device_lines: int) -> list[MemoryLine]:
        profile = self.profile
        slack = Formula.of((device_lines, "lines"), (c.ALLOCATION_STEP_BYTES, "bytes"))
        slack += Formula.of((self._tensors, "tensors"), (c.TENSOR_ALIGN_BYTES, "bytes"))
        outside = max(0, (self.device.total_bytes or self.cap_bytes) - self.cap_bytes)
        used = max(self.device.other_bytes, profile.display_reserve_bytes)
        other = Formula.of(
            (max(0, used - outside), f"bytes of {used:,} used or reserved, {outside:,} lie outside the cap")
        )
        lines = [MemoryLine.make("allocator.slack", DEVICE, slack)] if self.accelerated else []
        if other.value:
            lines.append(MemoryLine.make("reserve.other", DEVICE, other))
        if profile.headroom_bytes:
            headroom = Formula.of((profile.headroom_bytes, "bytes (profile)"))
            lines.append(MemoryLine.make("reserve.headroom", DEVICE, headroom))
        return lines


_DRAFT_SCRATCH = ("drafter.scratch", "mtp.scratch")
_ORDER = {
    prefix: i
    for i, prefix in enumerate(
        (
            "weights",
            "drafter",
            "mtp",
            "vision",
            "state",
            "kv",
            "far",
            "activations",
            "logits",
            "sampling",
            "runtime",
            "allocator",
            "reserve",
        )
    )
}


def _graph_sizes(sequences: int) -> int:
    """Batch sizes captured: 1, 2, 4, ... and the largest admitted one."""
    return sequences.bit_length() + (0 if sequences & (sequences - 1) == 0 else 1)


def with_snapshots(lines: list[MemoryLine], inventory: Inventory) -> list[MemoryLine]:
    """Add the session store: the profile's budget, or what the host has left."""
    budget = inventory.profile.snapshot_bytes
    if inventory.host_limit_bytes is not None:
        planned = sum(line.bytes for line in lines if line.place != DEVICE)
        budget = max(0, min(budget, inventory.host_limit_bytes - planned))
    if not budget:
        return lines
    store = Formula.of((budget, "bytes (profile, at most what the host has left)"))
    return [*lines, MemoryLine.make("host.snapshots", HOST_PAGEABLE, store)]


def pin_within(lines: list[MemoryLine], limit: int | None) -> tuple[list[MemoryLine], list[str]]:
    """Keep lines pinned in PIN_ORDER while they fit the limit; return the lines and the names that became pageable."""
    if limit is None:
        return lines, []
    left, keep = limit, set()
    by_name = {line.name: line for line in lines if line.place == HOST_PINNED}
    for name in PIN_ORDER:
        if name in by_name and by_name[name].bytes <= left:
            keep.add(name)
            left -= by_name[name].bytes
    demoted = sorted(set(by_name) - keep)
    return [replace(x, place=HOST_PAGEABLE) if x.name in demoted else x for x in lines], demoted
