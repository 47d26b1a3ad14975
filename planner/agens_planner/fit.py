"""What would make a refused plan fit, cheapest first, each suggestion checked by planning again.

Order of cost: nothing lost, then speed, then a small change of numbers, then context or sequences, then parts of the
model, then another build, then another machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from agens_planner.facts import DeviceFacts, HostFacts
from agens_planner.plan import MemoryPlan, PlanRefused
from agens_planner.profile import Profile
from agens_planner.shapes import ModelShapes
from agens_planner.solve import PlanOptions, plan
from agens_planner.units import MIB, format_size

_SMALL_CHUNK, _SMALL_CACHE, _SMALL_IMAGE = 256, 512, 4_194_304
_LEAST_BITS = Fraction(2)


@dataclass(frozen=True)
class Question:
    """Everything `plan` takes, as one value that can be varied."""

    shapes: ModelShapes
    profile: Profile
    device: DeviceFacts
    host: HostFacts
    options: PlanOptions

    def answer(self) -> MemoryPlan | None:
        try:
            return plan(self.shapes, self.profile, self.device, self.host, self.options)
        except PlanRefused:
            return None


@dataclass(frozen=True)
class Suggestion:
    """One way out. flags: what to type; cost: what it gives up; the plan's numbers if it is taken."""

    flags: str
    cost: str
    context_tokens: int
    sequences: int
    peak_bytes: int

    def text(self) -> str:
        n = f" × {self.sequences} sequences" if self.sequences > 1 else ""
        return f"{self.flags} ({self.cost}; context {self.context_tokens:,}{n}, peak {format_size(self.peak_bytes)})"


@dataclass(frozen=True)
class _Change:
    flags: str
    cost: str
    question: Question


def suggest(question: Question, refused: PlanRefused) -> list[Suggestion]:
    """Ways to make it fit, cheapest first; each was planned and fits.

    First every single change that suffices, then, when dropping parts alone does not, the least combination with the
    largest context it allows, then smaller builds and more memory.
    """
    found = [s for change in _small_changes(question) if (s := _try(change))]
    found += [s for change in _size_changes(question) if (s := _try(change))]
    found += [s for change in _part_changes(question) if (s := _try(change))]
    others = [s for s in (_smaller_build(question), _more_memory(question, refused)) if s]
    if not found and (combined := _combined(question)):
        found.append(combined)
    # A way that leaves a small part of the asked context is a last resort, not the cheapest.
    wanted = question.options.context_tokens or 0
    return sorted(found + others, key=lambda s: s.context_tokens * 4 < wanted)


def _try(change: _Change) -> Suggestion | None:
    answer = change.question.answer()
    if answer is None:
        return None
    return Suggestion(change.flags, change.cost, answer.context_tokens, answer.sequences, answer.planned_peak_bytes)


def _with(question: Question, **profile_changes: object) -> Question:
    return replace(question, profile=question.profile.replace(**profile_changes))


def _small_changes(q: Question) -> Iterator[_Change]:
    """Changes that lose nothing, speed, or a little accuracy."""
    p = q.profile
    if q.device.other_bytes:
        freed = replace(q, device=replace(q.device, other_bytes=0))
        size = format_size(q.device.other_bytes)
        yield _Change("close other programs on the GPU", f"frees up to {size}", freed)
    if p.display_reserve_bytes:
        yield _Change("--set display_reserve_bytes=0", "no room kept for a desktop", _with(q, display_reserve_bytes=0))
    if p.far_resident_layers is not None:
        yield _Change("--set far_resident_layers=auto", "slower sparse reads", _with(q, far_resident_layers="auto"))
    if p.vision != "auto" and q.options.images:
        yield _Change("--set vision=auto", "the tower may be staged or resident", _with(q, vision="auto"))
    if p.load_buffer_bytes > 256 * MIB:
        yield _Change("--set load_buffer_bytes=256MiB", "slower start", _with(q, load_buffer_bytes=256 * MIB))
    if p.chunk_tokens_min > _SMALL_CHUNK:
        smaller = _with(q, chunk_tokens_min=_SMALL_CHUNK)
        yield _Change(f"--set chunk_tokens_min={_SMALL_CHUNK}", "slower prefill", smaller)
    if p.hot_cache_blocks > _SMALL_CACHE:
        smaller = _with(q, hot_cache_blocks=_SMALL_CACHE)
        yield _Change(f"--set hot_cache_blocks={_SMALL_CACHE}", "more far blocks over the bus", smaller)
    if p.image_pixels_max > _SMALL_IMAGE and q.options.images:
        smaller = _with(q, image_pixels_max=_SMALL_IMAGE)
        yield _Change(f"--set image_pixels_max={_SMALL_IMAGE}", "large images are scaled down further", smaller)
    for key in ("fp8_far", "fp8_dense"):
        if getattr(p, key) == "off":
            yield _Change(f"--set {key}=auto", "a small change of the output", _with(q, **{key: "auto"}))
    if p.head_bits > 4:
        yield _Change("--set head_bits=4", "a small change of the output", _with(q, head_bits=4))


def _size_changes(q: Question) -> Iterator[_Change]:
    """The largest context, and the most sequences, that do fit."""
    options = q.options
    if options.context_tokens is not None and options.sequences is not None:
        shorter = replace(q, options=replace(options, context_tokens=None))
        if (answer := shorter.answer()) and answer.context_tokens < options.context_tokens:
            yield _Change(f"--context {answer.context_tokens}", "shorter context", shorter)
        if options.sequences > 1:
            fewer = replace(q, options=replace(options, sequences=None))
            if (answer := fewer.answer()) and answer.sequences < options.sequences:
                yield _Change(f"--sequences {answer.sequences}", "fewer requests at once", fewer)


def _part_changes(q: Question) -> Iterator[_Change]:
    """Without one part of the model."""
    if q.options.images:
        yield _Change("--images off", "no images", replace(q, options=replace(q.options, images=False)))
    if q.options.mtp:
        yield _Change("--mtp off", "fewer tokens per step", replace(q, options=replace(q.options, mtp=False)))
    if q.options.drafter:
        yield _Change("--drafter off", "fewer tokens per step", replace(q, options=replace(q.options, drafter=False)))


def _combined(question: Question) -> Suggestion | None:
    """Add changes from the cheapest on until something fits, take back those that were not needed, report the rest.

    When even all of them do not make the asked context fit, the largest context counts as one more change.
    """
    changes = [*_small_changes(question), *_part_changes(question)]
    for shorten in (False, True):
        base = question
        if shorten:
            if question.options.context_tokens is None or question.options.sequences is None:
                return None
            base = replace(question, options=replace(question.options, context_tokens=None))
        taken: list[_Change] = []
        for change in changes:
            taken.append(change)
            if _apply(base, taken).answer():
                break
        else:
            continue
        for change in list(taken):
            fewer = [c for c in taken if c is not change]
            if _apply(base, fewer).answer():
                taken = fewer
        answer = _apply(base, taken).answer()
        if answer is None:
            continue
        flags, costs = [c.flags for c in taken], [c.cost for c in taken]
        if shorten:
            flags.append(f"--context {answer.context_tokens}")
            costs.append("shorter context")
        return Suggestion(
            " ".join(flags), ", ".join(costs), answer.context_tokens, answer.sequences, answer.planned_peak_bytes
        )
    return None


def _apply(question: Question, changes: list[_Change]) -> Question:
    for change in changes:
        question = _merge(question, change)
    return question


def _merge(question: Question, change: _Change) -> Question:
    """Apply a change that was made on the original question to an already changed one."""
    changed = change.question
    if change.flags.startswith("--set "):
        key, _, value = change.flags.removeprefix("--set ").partition("=")
        return _with(question, **{key: value})
    if change.flags.startswith("--"):
        part = change.flags.split()[0].removeprefix("--")
        return replace(question, options=replace(question.options, **{part: False}))
    return replace(question, device=changed.device)


def _smaller_build(q: Question) -> Suggestion | None:
    """The highest average width, in hundredths of a bit, at which the packed weights would let the plan fit."""
    widths = [g.bits for g in q.shapes.groups if g.bits is not None]
    if not widths:
        return None
    high = Fraction(q.profile.weight_bits) if q.profile.weight_bits != "auto" else max(widths)
    low, top = int(_LEAST_BITS * 100) - 1, int(high * 100)
    best = None
    while top - low > 1:
        middle = (low + top) // 2
        answer = _with(q, weight_bits=f"{middle / 100:.2f}").answer()
        if answer:
            low, best = middle, answer
        else:
            top = middle
    if best is None:
        return None
    bits = f"{low / 100:.2f}"
    return Suggestion(
        f"--set build=engine-{bits}" if q.shapes.hypothetical else f"a build of at most {bits} bits per weight",
        "lower quality",
        best.context_tokens,
        best.sequences,
        best.planned_peak_bytes,
    )


def _more_memory(q: Question, refused: PlanRefused) -> Suggestion | None:
    """The cap, or the host memory, that suffices for exactly what was asked."""
    refused_plan, profile = refused.plan, q.profile
    wanted: dict[str, object] = {}
    flags = []
    if (over := refused_plan.planned_peak_bytes - refused_plan.limit_bytes) > 0:
        cap = refused_plan.cap_bytes + over
        wanted["cap_bytes"] = cap
        flags.append(f"--device-memory {-(-cap // MIB)}MiB")
    needed = refused_plan.planned_host_bytes - refused_plan.bytes_of("host.snapshots")
    if refused_plan.host_limit_bytes is not None and needed > refused_plan.host_limit_bytes:
        wanted["host_bytes"] = needed
        flags.append(f"--host-memory {-(-needed // MIB)}MiB")
    larger = replace(
        q,
        profile=profile.replace(**wanted),
        device=replace(q.device, total_bytes=None, other_bytes=0) if "cap_bytes" in wanted else q.device,
        host=replace(q.host, available_bytes=None) if "host_bytes" in wanted else q.host,
    )
    return _try(_Change(" ".join(flags), "more memory", larger)) if flags else None
