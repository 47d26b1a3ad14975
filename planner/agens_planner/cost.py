"""Bytes and bandwidth to time: what one verify step reads, and what common GPUs make of it.

A forecast, not a measurement: the floor we hold a real run against. Rates are measured read bandwidths where we know
one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agens_planner import constants as c
from agens_planner.plan import Choice, FarForecast, MemoryLine, Roofline, StepForecast
from agens_planner.profile import Profile
from agens_planner.sequence_lines import far_blocks
from agens_planner.shapes import ModelShapes
from agens_planner.units import GIB


@dataclass(frozen=True)
class Gpu:
    """memory as sold; read rate and bus rate in bytes per second; source of the read rate."""

    name: str
    memory_bytes: int
    read_bytes_per_second: float
    bus_bytes_per_second: float
    source: str


# Bus: pinned copies reach 24.7 GB/s over PCIe 4 x16 and about 50 over PCIe 5 x16. "sheet": 91 % of the data sheet, the
# share measured on the 3090.
GPUS = (
    Gpu("RTX 3060 12GB", 12 * GIB, 328e9, 24.7e9, "sheet"),
    Gpu("RTX 4060 Ti 16GB", 16 * GIB, 262e9, 12.3e9, "sheet, x8 bus"),
    Gpu("RTX 4080 SUPER", 16 * GIB, 670e9, 24.7e9, "sheet"),
    Gpu("RTX 5070 Ti", 16 * GIB, 815e9, 50e9, "sheet"),
    Gpu("RTX 5080", 16 * GIB, 874e9, 50e9, "sheet"),
    Gpu("RTX 3090", 24 * GIB, 870e9, 24.7e9, "measured by others, 854 to 894"),
    Gpu("RTX 4090", 24 * GIB, 925e9, 24.7e9, "measured by others at a power cap, 921"),
    Gpu("RTX 5090", 32 * GIB, 1640e9, 50e9, "measured by others, 1628 to 1674"),
    Gpu("RTX A6000", 48 * GIB, 699e9, 24.7e9, "sheet"),
    Gpu("L40S", 48 * GIB, 786e9, 24.7e9, "sheet"),
    Gpu("H200", 141 * 10**9, 4300e9, 50e9, "measured by others"),
)


def forecast_step(
    shapes: ModelShapes, profile: Profile, choice: Choice, lines: Iterable[MemoryLine], context: int
) -> StepForecast:
    """Bytes of one 8-row verify step of all sequences, each `context` tokens long.

    Weights count once, recurrent state twice (read and write), the head once per model that uses it. Far blocks that
    miss the hot cache and the gathered table rows go over the bus.
    """
    sizes = {line.name: line.bytes for line in lines}
    dims, element, n = shapes.dims, profile.element_bytes, choice.sequences
    drafter = shapes.drafter if "drafter.weights" in sizes else None
    mtp = shapes.mtp if "mtp.weights" in sizes else None
    share = context / choice.context_tokens
    reads: dict[str, int] = {}
    draft = 0
    for name, size in sizes.items():
        if name.startswith("weights."):
            reads[name] = size
        if name.startswith("weights.head."):
            chain = c.MTP_CHAIN_STEPS if drafter else c.VERIFY_ROWS - 1
            shortlist = chain * min(1.0, c.MTP_SHORTLIST_TOKENS / dims.vocab) if mtp else 0
            again = int(size * ((1 if drafter else 0) + shortlist))
            reads[name] += again
            draft += again
            if mtp:
                for part in ("mtp.weights", "mtp.context"):
                    reads[part] = chain * sizes[part]
                    draft += reads[part]
    if drafter:
        for part in ("drafter.weights", "drafter.context"):
            reads[part] = sizes[part]
            draft += reads[part]
    for name in ("state.kda", "state.records"):
        if name in sizes:
            reads[name] = 2 * sizes[name]
    for name in ("kv.dense", "kv.block_keys"):
        if name in sizes:
            reads[name] = int(sizes[name] * share)
    if dims.bcsa_layers:
        window = min(dims.window + c.VERIFY_ROWS, context)
        reads["kv.window"] = n * dims.bcsa_layers * window * dims.kv_width * element
    hit_rate = c.HOT_HIT_RATE if profile.hot_hit_percent is None else profile.hot_hit_percent / 100
    selected, missed = _far_reads(shapes, choice, context, element, hit_rate, reads)
    bus = missed
    if "logits.verify" in sizes:
        reads["logits.verify"] = 2 * sizes["logits.verify"]
    rows = n * c.VERIFY_ROWS * (1 + (1 if drafter else 0))
    bus += rows * dims.hidden * element
    bus += n * c.VERIFY_ROWS * dims.engram_layers * dims.engram_orders * dims.engram_dim * element
    total = sum(reads.values())
    far = FarForecast(selected, missed, hit_rate, "assumed" if profile.hot_hit_percent is None else "profile")
    return StepForecast(context, total, bus, total - draft, dict(sorted(reads.items())), far)


def _far_reads(
    shapes: ModelShapes, choice: Choice, context: int, element: int, hit_rate: float, reads: dict[str, int]
) -> tuple[int, int]:
    """Add the far blocks read on the device to `reads`; return the bytes that host layers select, and that miss."""
    dims = shapes.dims
    union = min(c.FAR_UNION_BLOCKS, far_blocks(dims, context)) * choice.sequences
    if not union:
        return 0, 0
    block = dims.kv_width * (1 if choice.fp8_far else element)
    if choice.far_resident_layers:
        reads["far.resident"] = choice.far_resident_layers * union * block
    hosted = dims.bcsa_layers - choice.far_resident_layers
    selected = hosted * union * block
    missed = round(selected * (1 - hit_rate))
    if hosted:
        reads["far.hot_cache"] = selected - missed
    return selected, missed


def roofline(step: StepForecast, choice: Choice, peak_bytes: int, *, drafter: bool) -> dict[str, Roofline]:
    """Step time and tokens per second for each known GPU; memory reads and bus reads do not overlap."""
    result = {}
    per_step = c.TOKENS_PER_STEP_DRAFTED if drafter else 1.0
    for gpu in GPUS:
        bus = step.bus_bytes / gpu.bus_bytes_per_second
        seconds = step.bytes_read / gpu.read_bytes_per_second + bus
        plain = step.target_bytes / gpu.read_bytes_per_second + bus
        result[gpu.name] = Roofline(
            step_seconds=seconds,
            bus_seconds=bus,
            tokens_per_second=choice.sequences * per_step / seconds,
            tokens_per_step=per_step,
            plain_tokens_per_second=choice.sequences / plain,
            has_memory=gpu.memory_bytes >= peak_bytes,
        )
    return result
