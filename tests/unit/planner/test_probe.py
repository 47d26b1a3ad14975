"""Facts about invented machines: no GPU, memory that is still being freed, containers, WSL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

import pytest

from agens_engine import probe
from agens_engine.probe import GpuMemory, Sources, read_device, read_host
from agens_planner.constants import WSL_PINNED_BYTES
from agens_planner.units import GIB, MIB


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def read(self) -> float:
        return self.now


def sources(
    gpu: Sequence[GpuMemory | None] | Callable[[], GpuMemory | None] | None = None,
    files: dict[str, str] | None = None,
    **changes: object,
) -> Sources:
    clock = Clock()
    readings: Iterator[GpuMemory | None] = iter(() if gpu is None or callable(gpu) else gpu)
    last: list[GpuMemory | None] = [None]

    def next_reading() -> GpuMemory | None:
        last[0] = next(readings, last[0])
        return last[0]

    base = Sources(
        gpu=gpu if callable(gpu) else next_reading,
        available=lambda: 32 * GIB,
        memlock=lambda: None,
        read_text=(files or {}).get,
        sleep=clock.sleep,
        clock=clock.read,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def card(free_gib: float, own_gib: float = 0.0) -> GpuMemory:
    return GpuMemory("card", 24 * GIB, int(free_gib * GIB), int(own_gib * GIB), display=True)


def test_no_gpu_is_a_normal_answer() -> None:
    assert read_device(sources([None])) is None


def test_other_use_is_what_is_neither_free_nor_ours() -> None:
    facts = read_device(sources([card(20, own_gib=1)]))
    assert facts is not None
    assert (facts.total_bytes, facts.other_bytes, facts.display) == (24 * GIB, 3 * GIB, True)


def test_j6_waits_until_the_old_process_has_freed_its_memory() -> None:
    facts = read_device(sources([card(8), card(12), card(17), card(23), card(23), card(23)]))
    assert facts is not None
    assert facts.other_bytes == 1 * GIB


def test_j6_gives_up_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    restless = [card(8 + (i % 2)) for i in range(1000)]
    with caplog.at_level(logging.WARNING):
        facts = read_device(sources(restless), patience_seconds=2)
    assert facts is not None
    assert "still moves" in caplog.text


def test_a_gpu_that_vanishes_while_waiting() -> None:
    assert read_device(sources([card(8), None])) is None


def test_container_limit_of_cgroup_v2_counts_and_its_page_cache_does_not() -> None:
    files = {
        "/proc/self/cgroup": "0::/app/worker\n",
        "/sys/fs/cgroup/app/worker/memory.max": "max\n",
        "/sys/fs/cgroup/app/worker/memory.current": "1",
        "/sys/fs/cgroup/app/memory.max": str(8 * GIB),
        "/sys/fs/cgroup/app/memory.current": str(3 * GIB),
        "/sys/fs/cgroup/app/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    assert read_host(sources(files=files)).available_bytes == 6 * GIB


def test_container_limit_of_cgroup_v1() -> None:
    files = {
        "/proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/x\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(10 * GIB),
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": str(4 * GIB),
    }
    assert read_host(sources(files=files)).available_bytes == 6 * GIB
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = str(2**63 - 4096)
    assert read_host(sources(files=files)).available_bytes == 32 * GIB


def test_an_exceeded_container_limit_leaves_nothing() -> None:
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": str(GIB),
        "/sys/fs/cgroup/memory.current": str(2 * GIB),
    }
    assert read_host(sources(files=files)).available_bytes == 0


def test_j12_wsl_is_recognised() -> None:
    facts = read_host(sources(files={"/proc/version": "Linux version 6.6.87.2-microsoft-standard-WSL2"}))
    assert facts.wsl
    assert facts.pinned_bytes == WSL_PINNED_BYTES


def test_memlock_is_reported_but_does_not_limit_plain_linux() -> None:
    facts = read_host(sources(memlock=lambda: 8 * MIB, files={"/proc/version": "Linux version 6.8.0-generic"}))
    assert (facts.pinned_bytes, facts.memlock_bytes, facts.wsl) == (None, 8 * MIB, False)


def failing(*_: object) -> NoReturn:
    raise RuntimeError("device fell off the bus")


def test_a_source_that_fails_is_named_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_device(sources(gpu=failing)) is None
    assert "GPU memory cannot be read" in caplog.text and "fell off the bus" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        facts = read_host(sources(available=failing, memlock=failing, read_text=failing))
    assert (facts.available_bytes, facts.memlock_bytes, facts.wsl) == (None, None, False)
    for name in ("available memory", "RLIMIT_MEMLOCK", "/proc/version", "/proc/self/cgroup"):
        assert f"{name} cannot be read" in caplog.text


def test_a_container_limit_counts_when_the_machine_does_not_answer() -> None:
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": str(8 * GIB),
        "/sys/fs/cgroup/memory.current": str(3 * GIB),
    }
    assert read_host(sources(available=failing, files=files)).available_bytes == 5 * GIB


class Nvml:
    """Cards in PCI order, as NVML counts them."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetName(self, handle: str) -> str:
        return self.names[int(handle)]


@pytest.mark.parametrize(
    ("visible", "order", "names", "handle"),
    [
        (None, None, ("slow",), "0"),
        ("1", None, ("same", "same"), "1"),
        ("1", "PCI_BUS_ID", ("slow", "fast"), "1"),
        (None, None, ("slow", "fast"), "GPU-asked"),  # CUDA puts the fast one first, NVML does not
        ("1,0", "FASTEST_FIRST", ("slow", "fast"), "GPU-asked"),
        ("GPU-1234", None, ("slow", "fast"), "GPU-1234"),
        ("", None, ("slow", "fast"), None),
        ("2", None, ("slow", "fast"), None),
    ],
)
def test_nvml_reads_the_card_that_cuda_calls_0(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, order: str | None, names: tuple[str, ...], handle: str | None
) -> None:
    for variable, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    monkeypatch.setattr(probe, "_cuda_uuid", lambda: "GPU-asked")
    assert probe._visible_handle(Nvml(*names)) == handle


def test_this_machine_answers() -> None:
    facts = read_host()
    assert facts.available_bytes is not None and facts.available_bytes > 0
