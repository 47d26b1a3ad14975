"""Facts about invented machines: no GPU, memory that is still being freed, containers, WSL."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

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
    gpu: list[GpuMemory | None] | None = None, files: dict[str, str] | None = None, **changes: object
) -> Sources:
    clock = Clock()
    readings: Iterator[GpuMemory | None] = iter(gpu or [])
    last: list[GpuMemory | None] = [None]

    def next_reading() -> GpuMemory | None:
        last[0] = next(readings, last[0])
        return last[0]

    base = Sources(
        gpu=next_reading,
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
        facts = read_device(sources(restless), patience_seconds=2)  # type: ignore[arg-type]
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


def test_this_machine_answers() -> None:
    facts = read_host()
    assert facts.available_bytes is not None and facts.available_bytes > 0
