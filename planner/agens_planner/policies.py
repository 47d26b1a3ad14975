"""The report of what the plan chose and why, and the remarks a reader needs to trust its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agens_planner.inventory import Inventory, Parts
from agens_planner.lines import HOST_PINNED
from agens_planner.plan import Choice, MemoryLine, Policy
from agens_planner.profile import Profile
from agens_planner.shapes import Dims, ModelShapes
from agens_planner.units import format_size
from agens_planner.weight_lines import mapped_bytes


def describe_policies(
    shapes: ModelShapes, profile: Profile, choice: Choice, parts: Parts, lines: Iterable[MemoryLine], generous: Choice,
    demoted: list[str],
) -> Iterator[Policy]:  # fmt: skip
    """The ladder's choices in its order, then what is fixed by the profile."""
    dims = shapes.dims
    if dims.bcsa_layers:
        resident, fixed = choice.far_resident_layers, profile.far_resident_layers is not None
        why = (
            "set by the profile"
            if fixed
            else ("all fit" if resident == dims.bcsa_layers else "as many as fit beside the rest")
        )
        yield Policy("far pools on the device", f"{resident} of {dims.bcsa_layers} layers", why)
    if parts.images:
        place = "staged from the host" if choice.vision_staged else "resident"
        yield Policy("vision tower", place, _why(profile.vision, choice.vision_staged == generous.vision_staged))
    fixed_chunk = profile.chunk_tokens_min == profile.chunk_tokens_max
    why = "set by the profile" if fixed_chunk else _why("auto", choice.chunk_tokens == generous.chunk_tokens)
    if any(whole_blocks(dims, n) != n for n in (profile.chunk_tokens_min, profile.chunk_tokens_max)):
        why += f", in whole blocks of {dims.compress}"
    yield Policy("prefill chunk", f"{choice.chunk_tokens:,} tokens", why)
    if dims.bcsa_layers:
        yield Policy("far pool and block keys", _kv(choice.fp8_far, profile), _why(profile.fp8_far, not choice.fp8_far))
    if dims.attn_layers:
        yield Policy("dense KV", _kv(choice.fp8_dense, profile), _why(profile.fp8_dense, not choice.fp8_dense))
    yield Policy(
        "output head", _bits(profile.head_bits, profile), "quantised at load" if profile.head_bits < 16 else "as stored"
    )
    if parts.drafter:
        yield Policy("drafter linears", _bits(profile.drafter_bits, profile), "a draft never changes the output")
    if parts.mtp:
        yield Policy("MTP linears", _bits(profile.mtp_bits, profile), "a draft never changes the output")
        yield Policy("MTP window", f"{profile.mtp_context_tokens:,} tokens", "any window is valid")
    if mapped := mapped_bytes(shapes, profile):
        yield Policy("embedding and Engram tables", "mapped from disk", f"set by the profile; {format_size(mapped)}")
    snapshots = next((x.bytes for x in lines if x.name == "host.snapshots"), 0)
    reduced = snapshots < profile.snapshot_bytes
    yield Policy("session store", format_size(snapshots), "what the host has left" if reduced else "set by the profile")
    if demoted:
        yield Policy("pageable instead of pinned", ", ".join(demoted), "page-locked memory is limited")


def plan_notes(
    shapes: ModelShapes, profile: Profile, inventory: Inventory, lines: Iterable[MemoryLine], demoted: list[str]
) -> Iterator[str]:
    yield from shapes.notes
    if shapes.hypothetical:
        yield "shape card: planned from the published shapes, without weights"
    if profile.weight_bits != "auto":
        yield f"packed weights taken at {profile.weight_bits} bits on average, as told"
    if inventory.cap_bytes < profile.cap_bytes:
        yield (
            f"the device has {format_size(inventory.cap_bytes)}, less than the profile's cap of "
            f"{format_size(profile.cap_bytes)}"
        )
    if inventory.device.other_bytes:
        yield (
            f"{format_size(inventory.device.other_bytes)} of the device are used by the display or other processes now"
        )
    if inventory.host_limit_bytes is None:
        yield "host memory is not limited here: the host lines say what the machine must have"
    pinned = [x for x in lines if x.place == HOST_PINNED]
    memlock = inventory.host.memlock_bytes
    if pinned and memlock is not None and memlock < sum(x.bytes for x in pinned) and not inventory.host.wsl:
        yield (
            f"RLIMIT_MEMLOCK is {format_size(memlock)}; the CUDA driver pins past it, else lines fall "
            f"back to pageable at load"
        )
    if mapped := mapped_bytes(shapes, profile):
        yield (
            f"{format_size(mapped)} of tables are read from the checkpoint's files by row: keep it on a fast disk; "
            "free host memory caches what is read often"
        )
    if demoted:
        reason = inventory.host.pinned_reason or "profile: pinned_bytes"
        yield f"pinned memory is limited ({reason}); {', '.join(demoted)} stay pageable and are copied in steps"


def whole_blocks(dims: Dims, tokens: int) -> int:
    """A chunk length as whole blocks of the sparse layers: rounded down, at least one block."""
    return max(dims.compress, tokens // dims.compress * dims.compress) if dims.bcsa_layers else tokens


def _kv(fp8: bool, profile: Profile) -> str:
    return "fp8" if fp8 else profile.dtype


def _why(setting: str, generous: bool) -> str:
    if setting != "auto":
        return "set by the profile"
    return "fits" if generous else "needed to fit"


def _bits(bits: int, profile: Profile) -> str:
    return f"{bits} bits" if bits < 16 else profile.dtype
