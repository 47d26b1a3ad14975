"""Counting memory in tests: what a piece of work held at once, from torch's own allocation events."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes of tensors that `work` held at once, beyond what lived before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        top = max(top, live)
    return top
