"""What fits where: the largest context, the most sequences, or a yes or no, by exact search.

What the plan may give up, in this order; each step is taken only if the plan does not fit without it:

    1. far pools on the device     slower sparse reads at long contexts, same output
    2. vision tower resident       slower first image, same output
    3. prefill chunk, halved       slower prefill, same output
    4. bf16 far pool, block keys   fp8: small change of the output
    5. bf16 dense KV               fp8: small change of the output

Bytes grow with context and sequences under every choice, and every step down this ladder needs less of the device, so
bisection over pages is exact: one more page, or one more sequence, does not fit under any choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from agens_planner.cost import forecast_step, roofline
from agens_planner.errors import PlannerInputError
from agens_planner.facts import DeviceFacts, HostFacts
from agens_planner.inventory import Inventory, Parts, pin_within, with_snapshots
from agens_planner.lines import DEVICE, LIMIT_MODEL_CONTEXT, LIMIT_REQUEST, LIMIT_SEQUENCES
from agens_planner.plan import Choice, MemoryLine, MemoryPlan, PlanRefused
from agens_planner.policies import describe_policies, plan_notes, whole_blocks
from agens_planner.profile import Profile
from agens_planner.shapes import ModelShapes
from agens_planner.units import format_size
from agens_planner.weight_lines import mapped_bytes

MAX_SEQUENCES = 4096
SHORT_CONTEXT = 4096


@dataclass(frozen=True)
class PlanOptions:
    """What is asked for. None means "as many as fit"; at most one of context and sequences may be None."""

    context_tokens: int | None = None
    sequences: int | None = 1
    drafter: bool = False
    mtp: bool = False
    images: bool = False

    @staticmethod
    def from_profile(profile: Profile, shapes: ModelShapes) -> PlanOptions:
        """The profile's wishes, with `auto` meaning "if the model has one"."""
        return PlanOptions(
            context_tokens=profile.context_tokens,
            sequences=profile.sequences,
            drafter=profile.drafter == "on" or (profile.drafter == "auto" and shapes.drafter is not None),
            mtp=profile.mtp == "on" or (profile.mtp == "auto" and shapes.mtp is not None),
            images=profile.images == "on",
        )


def plan(
    shapes: ModelShapes,
    profile: Profile,
    device: DeviceFacts | None = None,
    host: HostFacts | None = None,
    options: PlanOptions | None = None,
) -> MemoryPlan:
    """The plan for a model under a profile on a machine.

    device, host  facts; None: nothing is known and the profile stands alone
    options       what to plan for; None: the profile's wishes
    raises        PlannerInputError: the question contradicts itself; PlanRefused: it does not fit, with the numbers
    """
    options = options or PlanOptions.from_profile(profile, shapes)
    search = _Search(shapes, profile, device or DeviceFacts(kind=profile.device), host or HostFacts(), options)
    return search.run()


class _Search:
    def __init__(
        self, shapes: ModelShapes, profile: Profile, device: DeviceFacts, host: HostFacts, options: PlanOptions
    ) -> None:
        _check(shapes, profile, options)
        self.shapes, self.profile, self.options = shapes, profile, options
        parts = Parts(drafter=options.drafter, mtp=options.mtp, images=options.images)
        self.inventory = Inventory(shapes, profile, device, host, parts)
        self.max_context = shapes.dims.max_context
        self.pages = -(-self.max_context // profile.page_tokens)
        self.ladders = self._ladders()

    def run(self) -> MemoryPlan:
        context, sequences = self.options.context_tokens, self.options.sequences
        if sequences is None:
            assert context is not None
            length: int = context
            sequences = _bisect(MAX_SEQUENCES, lambda n: self._best(length, n) is not None) or 1
        elif context is None:
            count: int = sequences
            pages = _bisect(self.pages, lambda p: self._best(self._context(p), count) is not None) or 1
            context = self._context(pages)
        assert context is not None
        choice = self._preferred(context, sequences)
        if choice is None:
            raise self._refusal(context, sequences)
        return self._plan(choice, fits=True, binding=self._binding(choice))

    # --- choices ----------------------------------------------------------------------------------------------------

    def _ladders(self) -> list[list[Choice]]:
        """One ladder per place of the vision tower, each from the most generous choice to the smallest."""
        p, dims = self.profile, self.shapes.dims
        places = {"auto": [False, True], "resident": [False], "staged": [True]}[p.vision]
        if not self.options.images:
            places = [False]
        fp8 = p.element_bytes == 2
        far = {"auto": [False, True], "on": [True], "off": [False]}[p.fp8_far if fp8 and dims.bcsa_layers else "off"]
        dense = {"auto": [False, True], "on": [True], "off": [False]}[
            p.fp8_dense if fp8 and dims.attn_layers else "off"
        ]
        halves = [p.chunk_tokens_max]
        while halves[-1] > p.chunk_tokens_min:
            halves.append(max(halves[-1] // 2, p.chunk_tokens_min))
        # A chunk that ends inside a block cannot be taken back and tried again: whole blocks only.
        chunks = list(dict.fromkeys(whole_blocks(dims, chunk) for chunk in halves))
        ladders = []
        for staged in places:
            steps = [(chunk, far[0], dense[0]) for chunk in chunks]
            steps += [(chunks[-1], f, dense[0]) for f in far[1:]]
            steps += [(chunks[-1], far[-1], d) for d in dense[1:]]
            ladders.append([Choice(0, 0, chunk, staged, f, d, 0) for chunk, f, d in steps])
        return ladders

    def _best(self, context: int, sequences: int) -> Choice | None:
        """A choice that fits, if any: the bottom of a ladder dominates everything above it."""
        for ladder in self.ladders:
            if choice := self._place_far(replace(ladder[-1], context_tokens=context, sequences=sequences)):
                return choice
        return None

    def _preferred(self, context: int, sequences: int) -> Choice | None:
        """The first choice in the stated order that fits:
        resident tower, then staged with shrinking steps, then the rest.
        """
        first = [ladder[0] for ladder in self.ladders]
        rest = [step for ladder in reversed(self.ladders) for step in ladder[1:]]
        for step in first + rest:
            if choice := self._place_far(replace(step, context_tokens=context, sequences=sequences)):
                return choice
        return None

    def _place_far(self, choice: Choice) -> Choice | None:
        """The choice with as many far layers on the device as fit, or None when it does not fit at all.

        With every layer resident hot cache and staging vanish, so that end is tried by itself; below it the device
        bytes are linear in the number of layers, and the most layers need the least of the host.
        """
        layers = self.shapes.dims.bcsa_layers
        fixed = self.profile.far_resident_layers
        if fixed is not None or not layers:
            chosen = replace(choice, far_resident_layers=min(fixed or 0, layers))
            return chosen if self.inventory.fits(chosen) else None
        every = replace(choice, far_resident_layers=layers)
        if self.inventory.fits(every):
            return every
        most = self._most_resident(choice, layers)
        if most is None:
            return None
        chosen = replace(choice, far_resident_layers=most)
        return chosen if self.inventory.fits(chosen) else None

    def _most_resident(self, choice: Choice, layers: int) -> int | None:
        limit = self.inventory.limit_bytes
        device = [self.inventory.totals(replace(choice, far_resident_layers=k))[0] for k in range(min(3, layers))]
        if device[0] > limit:
            return None
        if layers < 3 or device[1] > limit:
            return max(k for k in range(len(device)) if device[k] <= limit)
        # From one resident layer on each further one costs the same.
        slope = device[2] - device[1]
        return layers - 1 if slope <= 0 else min(layers - 1, 1 + (limit - device[1]) // slope)

    def _context(self, pages: int) -> int:
        return min(pages * self.profile.page_tokens, self.max_context)

    # --- explanations -----------------------------------------------------------------------------------------------

    def _smallest(self, context: int, sequences: int) -> Choice:
        """The choice that misses the device limit by the least, for a refusal's report."""
        layers = self.shapes.dims.bcsa_layers
        fixed = self.profile.far_resident_layers
        ends = [min(fixed, layers)] if fixed is not None else sorted({0, layers})
        choices = [
            replace(ladder[-1], context_tokens=context, sequences=sequences, far_resident_layers=k)
            for ladder in self.ladders
            for k in ends
        ]
        return min(choices, key=self._missing)

    def _missing(self, choice: Choice) -> tuple[int, int]:
        device, host = self.inventory.totals(choice)
        over_host = 0 if self.inventory.host_limit_bytes is None else host - self.inventory.host_limit_bytes
        return max(0, device - self.inventory.limit_bytes) + max(0, over_host), device

    def _binding(self, choice: Choice) -> str:
        """The line that stops the plan from growing by one page, or by one sequence when those were searched for.

        Where more would fit no line binds: the model's context, the most sequences, or the request itself ends it.
        """
        if self.options.sequences is None:
            larger = replace(choice, sequences=choice.sequences + 1)
            if choice.sequences >= MAX_SEQUENCES:
                return LIMIT_SEQUENCES
        elif choice.context_tokens >= self.max_context:
            return LIMIT_MODEL_CONTEXT
        else:
            longer = min(choice.context_tokens + self.profile.page_tokens, self.max_context)
            larger = replace(choice, context_tokens=longer)
        if self._best(larger.context_tokens, larger.sequences) is not None:
            return LIMIT_REQUEST
        tightest = self._smallest(larger.context_tokens, larger.sequences)
        return self._most_grown(
            replace(tightest, context_tokens=choice.context_tokens, sequences=choice.sequences), tightest
        )

    def _most_grown(self, small: Choice, large: Choice) -> str:
        """The line, in the place that is exceeded, that grows the most between two choices."""
        device, _ = self.inventory.totals(large)
        over_device = device > self.inventory.limit_bytes or self.inventory.fits(large)
        before = {line.name: line.bytes for line in self.inventory.lines(small)}
        after = self._suspects(large, over_device)
        return max(after, key=lambda x: (x.bytes - before.get(x.name, 0), x.bytes, x.name)).name

    def _suspects(self, choice: Choice, over_device: bool) -> list[MemoryLine]:
        """The lines that fill the place that is exceeded; without an accelerator the host holds all of them."""
        lines = [x for x in self.inventory.lines(choice) if x.name != "host.device_lines"]
        if not over_device and not self.inventory.accelerated:
            return lines
        return [x for x in lines if (x.place == DEVICE) == over_device]

    def _refusal(self, context: int, sequences: int) -> PlanRefused:
        inventory = self.inventory
        worst = self._smallest(context, sequences)
        device, host = inventory.totals(worst)
        over_device = device > inventory.limit_bytes
        least = self._best(self._context(1), 1) is not None
        if least:  # a shorter context or fewer sequences would fit: name what grows with them
            binding = self._most_grown(self._smallest(self._context(1), 1), worst)
        else:
            binding = max(self._suspects(worst, over_device), key=lambda x: (x.bytes, x.name)).name
        need, limit = (device, inventory.limit_bytes) if over_device else (host, inventory.host_limit_bytes or 0)
        refused = self._plan(worst, fits=False, binding=binding)
        line = refused.line(binding)
        place = "device" if over_device else "host"
        margin = f" ({format_size(inventory.cap_bytes)} cap less margin)" if over_device else ""
        message = (
            f"{context:,} tokens × {sequences:,} sequence{'s' if sequences > 1 else ''} need "
            f"{format_size(need)} of {place} memory, "
            f"{format_size(need - limit)} over the {format_size(limit)} limit{margin}; binding line: "
            f"{binding}, {format_size(line.bytes)}"
        )
        return PlanRefused(message, plan=refused, binding_line=binding, missing_bytes=need - limit)

    def _plan(self, choice: Choice, *, fits: bool, binding: str) -> MemoryPlan:
        inventory, shapes, profile = self.inventory, self.shapes, self.profile
        bare = inventory.lines(choice)
        lines = with_snapshots(bare, inventory)
        lines, demoted = pin_within(lines, self._pinned_limit())
        if not inventory.accelerated:  # nothing to pin for; not worth a remark
            demoted = []
        step = forecast_step(shapes, profile, choice, lines, choice.context_tokens)
        short = forecast_step(shapes, profile, choice, lines, min(SHORT_CONTEXT, choice.context_tokens))
        peak = sum(x.bytes for x in lines if x.place == DEVICE)
        ordered = [x for x in lines if x.place == DEVICE] + sorted(
            (x for x in lines if x.place != DEVICE), key=_host_key
        )
        return MemoryPlan(
            model=shapes.name,
            source=shapes.source,
            profile=profile.name,
            dtype=profile.dtype,
            fits=fits,
            choice=choice,
            max_context_tokens=self.max_context,
            binding_line=binding,
            cap_bytes=inventory.cap_bytes,
            limit_bytes=inventory.limit_bytes,
            host_limit_bytes=inventory.host_limit_bytes,
            lines=tuple(ordered),
            policies=tuple(
                describe_policies(shapes, profile, choice, inventory.parts, lines, self._generous(), demoted)
            ),
            notes=tuple(plan_notes(shapes, profile, inventory, lines, demoted)),
            step=step,
            step_short=short,
            roofline=roofline(step, choice, peak, drafter=self.options.drafter),
            map_tables=mapped_bytes(shapes, profile) > 0,
            hot_cache_blocks=profile.hot_cache_blocks,
            mtp_window_tokens=min(choice.context_tokens, profile.mtp_context_tokens),
        )

    def _generous(self) -> Choice:
        return self.ladders[0][0]

    def _pinned_limit(self) -> int | None:
        if not self.inventory.accelerated:
            return 0
        limits = [b for b in (self.profile.pinned_bytes, self.inventory.host.pinned_bytes) if b is not None]
        return min(limits) if limits else None


def _host_key(line: MemoryLine) -> tuple[str, str]:
    return line.place, line.name


def _bisect(high: int, fits: Callable[[int], bool]) -> int:
    """The largest k in 0..high with fits(k); 0 when even 1 does not. fits must be downward closed."""
    low, top = 0, high + 1
    if fits(high):
        return high
    while top - low > 1:
        middle = (low + top) // 2
        if fits(middle):
            low = middle
        else:
            top = middle
    return low


def _check(shapes: ModelShapes, profile: Profile, options: PlanOptions) -> None:
    if options.context_tokens is None and options.sequences is None:
        raise PlannerInputError("context and sequences cannot both be max; give one of them a number")
    if options.sequences is not None and not 1 <= options.sequences <= MAX_SEQUENCES:
        raise PlannerInputError(f"sequences must be between 1 and {MAX_SEQUENCES:,}, not {options.sequences:,}")
    longest = shapes.dims.max_context
    if options.context_tokens is not None and not 1 <= options.context_tokens <= longest:
        raise PlannerInputError(
            f"context must be between 1 and the model's {longest:,} tokens, not {options.context_tokens:,}"
        )
    for wanted, part, flag in (
        (options.drafter, shapes.drafter, "drafter"),
        (options.mtp, shapes.mtp, "mtp"),
        (options.images, shapes.vision, "images"),
    ):
        if wanted and part is None:
            what = {"drafter": "no DFlash2 drafter", "mtp": "no MTP head", "images": "no vision tower"}[flag]
            raise PlannerInputError(f"{shapes.name} has {what}; give its folder or use --{flag} off")
    if profile.far_resident_layers is not None and profile.far_resident_layers > shapes.dims.bcsa_layers:
        raise PlannerInputError(
            f"far_resident_layers {profile.far_resident_layers} is more than the model's "
            f"{shapes.dims.bcsa_layers} sparse layers"
        )
