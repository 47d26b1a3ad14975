"""What the machine really has, read once before planning: device memory, host memory, limits of the container.

Every source is a callable of `Sources`, so tests can invent any machine. No GPU is a normal answer (None). A source
that fails, in whatever way, is named in a warning and its fact stays unknown; nothing here ends a run. Facts go to the
planner as plain values.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agens_planner.constants import WSL_PINNED_BYTES
from agens_planner.facts import DeviceFacts, HostFacts

log = logging.getLogger(__name__)
T = TypeVar("T")

_STABLE_BYTES = 16 * 2**20  # free memory that moves by less than this has settled
_STABLE_READS = 3
_POLL_SECONDS = 0.25
_DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")  # Linux, Linux in a container, WSL
_UNLIMITED = 2**60  # cgroup v1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True)
class GpuMemory:
    """One reading of a GPU. own_bytes: what this process holds already."""

    name: str
    total_bytes: int
    free_bytes: int
    own_bytes: int = 0
    display: bool = False


def _attempt(name: str, source: Callable[[], T]) -> T | None:
    """What the source says, or None and a warning that names it."""
    try:
        return source()
    except Exception as error:  # drivers and containers fail in their own ways; a fact less is no reason to stop
        log.warning("%s cannot be read (%s: %s); going on without it", name, type(error).__name__, error)
        return None


def _read_text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def _read_gpu() -> GpuMemory | None:
    return _attempt("GPU memory through NVML", _read_nvml) or _read_torch()


def _read_nvml() -> GpuMemory | None:
    """CUDA's device 0 through NVML: before any CUDA context exists, so the reading does not disturb itself."""
    try:
        import pynvml
    except ImportError:
        log.debug("no NVML: pynvml is not installed")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.debug("no NVML: %s", error)
        return None
    try:
        handle = _visible_handle(pynvml)
        if handle is None:
            return None
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name = pynvml.nvmlDeviceGetName(handle)
        return GpuMemory(
            name=name if isinstance(name, str) else name.decode(),
            total_bytes=int(memory.total),
            free_bytes=int(memory.free),
            own_bytes=_own_bytes(pynvml, handle),
            display=_display_active(pynvml, handle),
        )
    finally:
        pynvml.nvmlShutdown()


def _visible_handle(pynvml: Any) -> Any:
    """NVML handle of the device CUDA calls 0; None when CUDA_VISIBLE_DEVICES hides every GPU.

    A UUID in CUDA_VISIBLE_DEVICES is taken as it is. A number counts in CUDA's order, NVML's in PCI order: they agree
    with one GPU, with CUDA_DEVICE_ORDER=PCI_BUS_ID, and when all GPUs are of one model (equally fast ones stay in PCI
    order). Otherwise CUDA itself is asked for the UUID of its device 0, which costs a context.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = "0" if visible is None else visible.split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(first)
    count = pynvml.nvmlDeviceGetCount()
    if not first.isdigit() or int(first) >= count:
        return None
    if count > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        if len({pynvml.nvmlDeviceGetName(handle) for handle in handles}) > 1:
            return pynvml.nvmlDeviceGetHandleByUUID(_cuda_uuid())
    return pynvml.nvmlDeviceGetHandleByIndex(int(first))


def _cuda_uuid() -> str:
    """UUID of CUDA's device 0 in NVML's spelling."""
    import torch

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def _own_bytes(pynvml: Any, handle: Any) -> int:
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError as error:
        log.debug("NVML does not list processes (%s); our own use counts as others'", error)
        return 0
    return sum(int(p.usedGpuMemory or 0) for p in processes if p.pid == os.getpid())


def _display_active(pynvml: Any, handle: Any) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetDisplayActive(handle))
    except pynvml.NVMLError as error:
        log.debug("NVML does not say whether a display is attached: %s", error)
        return False


def _read_torch() -> GpuMemory | None:
    """The fallback where NVML is missing (some containers, WSL): creates a CUDA context, so it comes second."""
    if not any(Path(node).exists() for node in _DEVICE_NODES):
        return None  # no driver: importing torch to hear the same would cost seconds
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    return GpuMemory(torch.cuda.get_device_name(0), total, free, own_bytes=torch.cuda.memory_reserved(0))


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _memlock_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else int(soft)


@dataclass(frozen=True)
class Sources:
    """Where the facts come from; replace any of them in a test."""

    gpu: Callable[[], GpuMemory | None] = _read_gpu
    available: Callable[[], int] = _available_bytes
    memlock: Callable[[], int | None] = _memlock_bytes
    read_text: Callable[[str], str | None] = _read_text
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


def read_device(sources: Sources | None = None, *, patience_seconds: float = 10.0) -> DeviceFacts | None:
    """The GPU as it stands once its free memory has settled, or None where there is none.

    patience_seconds  how long to wait for a previous process to finish freeing its memory; after that the last reading
                      counts, with a warning
    """
    sources = sources or Sources()
    reading = _attempt("GPU memory", sources.gpu)
    if reading is None:
        return None
    deadline, calm = sources.clock() + patience_seconds, 1
    while calm < _STABLE_READS:
        if sources.clock() >= deadline:
            log.warning("free GPU memory still moves after %.0f s; planning with the last reading", patience_seconds)
            break
        sources.sleep(_POLL_SECONDS)
        following = _attempt("GPU memory", sources.gpu)
        if following is None:
            return None
        calm = calm + 1 if abs(following.free_bytes - reading.free_bytes) < _STABLE_BYTES else 1
        reading = following
    other = max(0, reading.total_bytes - reading.free_bytes - reading.own_bytes)
    return DeviceFacts("cuda", reading.name, reading.total_bytes, other, reading.display)


def read_host(sources: Sources | None = None) -> HostFacts:
    """Main memory this process may still take, and how much of it can be pinned."""
    sources = sources or Sources()

    def read_text(path: str) -> str | None:
        return _attempt(path, lambda: sources.read_text(path))

    available = _attempt("available memory", sources.available)
    limits = [*([] if available is None else [available]), *_cgroup_rooms(read_text)]
    wsl = "microsoft" in (read_text("/proc/version") or "").lower()
    return HostFacts(
        available_bytes=max(0, min(limits)) if limits else None,
        pinned_bytes=WSL_PINNED_BYTES if wsl else None,
        pinned_reason="WSL2" if wsl else "",
        memlock_bytes=_attempt("RLIMIT_MEMLOCK", sources.memlock),
        wsl=wsl,
    )


def _cgroup_rooms(read_text: Callable[[str], str | None]) -> list[int]:
    """Bytes left under each memory limit above this process: cgroup v2 from our group up to the root, then v1."""
    rooms = []
    for line in (read_text("/proc/self/cgroup") or "").splitlines():
        number, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if number == "0" and not controllers:
            parts = [p for p in path.split("/") if p and p != ".."]
            folders = ["/".join(("/sys/fs/cgroup", *parts[:k])) for k in range(len(parts), -1, -1)]
            rooms += [_room(read_text, f, "memory.max", "memory.current", "inactive_file") for f in folders]
        elif "memory" in controllers.split(","):
            for folder in dict.fromkeys(("/sys/fs/cgroup/memory" + path.rstrip("/"), "/sys/fs/cgroup/memory")):
                rooms.append(
                    _room(read_text, folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                )
    return [room for room in rooms if room is not None]


def _room(read_text: Callable[[str], str | None], folder: str, limit: str, usage: str, cache: str) -> int | None:
    """Limit minus usage, page cache that can be dropped not counted as used; None where nothing is limited."""
    bound = (read_text(f"{folder}/{limit}") or "").strip()
    used = (read_text(f"{folder}/{usage}") or "").strip()
    if not bound.isdigit() or not used.isdigit() or int(bound) >= _UNLIMITED:
        return None
    droppable = 0
    for line in (read_text(f"{folder}/memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == cache and value.strip().isdigit():
            droppable = int(value)
    return int(bound) - max(0, int(used) - droppable)
