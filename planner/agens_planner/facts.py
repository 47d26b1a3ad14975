"""What the machine is like, as plain values:
read by agens_engine/probe.py, invented by tests, unknown for a shape card.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFacts:
    """One accelerator, or the CPU standing in for one.

    kind         "cuda" or "cpu"
    total_bytes  memory of the device; None: unknown, the profile's cap stands for it
    other_bytes  used now by other processes and the display, before we start
    """

    kind: str = "cuda"
    name: str = ""
    total_bytes: int | None = None
    other_bytes: int = 0
    display: bool = False


@dataclass(frozen=True)
class HostFacts:
    """Main memory.

    available_bytes  what this process may still take, cgroup limits included; None: unknown, the profile decides
    pinned_bytes     most that can be page-locked; None: no known limit
    pinned_reason    where that limit comes from, in words
    memlock_bytes    RLIMIT_MEMLOCK, for the report: the CUDA driver pins past it on plain Linux; None: unlimited
    wsl              running under WSL: pinning is tight
    """

    available_bytes: int | None = None
    pinned_bytes: int | None = None
    pinned_reason: str = ""
    memlock_bytes: int | None = None
    wsl: bool = False
