"""Hands out exactly what the plan names, and counts it against the plan's lines.

Every long-lived tensor is claimed by the name of its line before anything runs; asking for more than the line holds, or
for a line the plan does not have, is refused. Work space that steps take and give back is reserved whole at start-up
(`reserve`), the logits of a step are counted one by one (`using`). On a CPU the same bytes are counted against the same
cap as on a GPU, so all of this is testable without one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from agens_engine.errors import PlanError
from agens_planner import MemoryPlan
from agens_planner.lines import DEVICE
from agens_planner.units import format_size


@dataclass
class LineUse:
    """Bytes of one line: what the plan allows, what is taken now, and the most that ever was."""

    place: str
    planned_bytes: int
    used_bytes: int = 0
    peak_bytes: int = 0


class Arena:
    """All memory of one engine. Tensors live on `device`, host lines on the CPU; `limits` are the plan's lines."""

    def __init__(self, limits: Mapping[str, tuple[str, int]], *, cap_bytes: int, device: torch.device) -> None:
        self.lines = {name: LineUse(place, size) for name, (place, size) in limits.items()}
        self.cap_bytes, self.device = cap_bytes, device
        self.peak_device_bytes = 0
        self._device_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def of_plan(cls, plan: MemoryPlan, device: torch.device) -> Arena:
        limits = {line.name: (line.place, line.bytes) for line in plan.lines if line.allocated}
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, plan.cap_bytes / total), device)
        return cls(limits, cap_bytes=plan.cap_bytes, device=device)

    def claim(self, line: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A zeroed tensor out of a line, for the engine's life. Raises PlanError when the line is too small."""
        self._take(line, math.prod(shape) * dtype.itemsize)
        on_device = self.lines[line].place == DEVICE
        return torch.zeros(shape, dtype=dtype, device=self.device if on_device else torch.device("cpu"))

    def adopt(self, line: str, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that was read from a file as part of a line. Raises PlanError when the line is too small."""
        self._take(line, tensor.numel() * tensor.element_size())
        return tensor

    def reserve(self, lines: Iterable[str]) -> None:
        """Take whole lines for work space that comes and goes; lines the plan does not have need none."""
        for line in lines:
            if line in self.lines:
                self._take(line, self.lines[line].planned_bytes)

    @contextmanager
    def using(self, line: str, num_bytes: int) -> Iterator[None]:
        """Count memory that a step takes and gives back."""
        self._take(line, num_bytes)
        try:
            yield
        finally:
            self._give_back(line, num_bytes)

    def _take(self, line: str, num_bytes: int) -> None:
        use = self.lines.get(line)
        if use is None:
            raise PlanError(f"the plan has no line {line!r}, so nothing may be allocated for it")
        with self._lock:
            if use.used_bytes + num_bytes > use.planned_bytes:
                raise PlanError(
                    f"line {line} holds {format_size(use.planned_bytes)}, {format_size(use.used_bytes)} of it taken; "
                    f"{format_size(num_bytes)} more were asked for: the plan and the engine disagree, please report it "
                    f"with the output of `agens plan --explain {line}`"
                )
            use.used_bytes += num_bytes
            use.peak_bytes = max(use.peak_bytes, use.used_bytes)
            if use.place == DEVICE:
                self._device_bytes += num_bytes
                self.peak_device_bytes = max(self.peak_device_bytes, self._device_bytes)

    def _give_back(self, line: str, num_bytes: int) -> None:
        use = self.lines[line]
        with self._lock:
            use.used_bytes -= num_bytes
            if use.place == DEVICE:
                self._device_bytes -= num_bytes
        assert use.used_bytes >= 0, f"line {line} gave back more than it took"

    def check(self) -> None:
        """Assert that no line is over its plan and the device total never passed the cap."""
        for name, use in self.lines.items():
            assert 0 <= use.used_bytes <= use.peak_bytes <= use.planned_bytes, (name, use)
        assert self.peak_device_bytes <= self.cap_bytes, (self.peak_device_bytes, self.cap_bytes)

    def summary(self) -> str:
        """One line for the log at exit: planned and counted peak, and the allocator's own peak where there is one."""
        report = self.report()
        measured = report["measured_peak_bytes"]
        text = f"device memory: planned {format_size(report['planned_bytes'] or 0)}, "
        text += f"counted peak {format_size(self.peak_device_bytes)}"
        return text if measured is None else f"{text}, measured peak {format_size(measured)}"

    def report(self) -> dict[str, Any]:
        """Planned and counted bytes side by side, the device's and each line's (`lines`, by name).

        `measured_peak_bytes` is the allocator's own figure on CUDA, None elsewhere.
        """
        planned = sum(use.planned_bytes for use in self.lines.values() if use.place == DEVICE)
        measured = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        return {
            "cap_bytes": self.cap_bytes,
            "planned_bytes": planned,
            "counted_peak_bytes": self.peak_device_bytes,
            "measured_peak_bytes": measured,
            "lines": {name: asdict(use) for name, use in self.lines.items()},
        }
