"""A memory plan for people: tables and a bar chart in the terminal. Numbers come from the plan and nowhere else."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agens_planner.fit import Suggestion
from agens_planner.lines import DEVICE, describe
from agens_planner.plan import MemoryLine, MemoryPlan
from agens_planner.svg import grouped
from agens_planner.units import format_size

_BAR_CELLS = 60


def render_plan(plan: MemoryPlan) -> RenderableType:
    """Head, bar chart, lines by place, policies, forecast, notes."""
    parts: list[RenderableType] = [_head(plan), _bars(plan), _lines(plan), _policies(plan), _forecast(plan)]
    parts += [Text.from_markup(f"[dim]note: {escape(note)}[/dim]") for note in plan.notes]
    return Group(*parts)


def render_line(plan: MemoryPlan, name: str) -> RenderableType:
    """One line with its derivation; raises PlannerInputError for an unknown name."""
    line = plan.line(name)
    table = Table.grid(padding=(0, 2))
    table.add_row("line", Text(line.name, style="bold"))
    table.add_row("holds", describe(line.name))
    table.add_row("place", line.place.replace("_", " "))
    table.add_row("bytes", f"{line.bytes:,} ({format_size(line.bytes)})")
    table.add_row("formula", Text(line.formula))
    reads = plan.step.lines.get(line.name)
    if reads is not None:
        table.add_row("read", f"{reads:,} bytes per verify step at {plan.step.at_context:,} tokens")
    return table


def render_suggestions(suggestions: list[Suggestion]) -> RenderableType:
    table = Table(title="What would make it fit, cheapest first", box=box.SIMPLE, title_justify="left")
    for column in ("change", "gives up", "context", "peak"):
        table.add_column(column, justify="right" if column in ("context", "peak") else "left")
    for s in suggestions:
        context = f"{s.context_tokens:,}" + (f" × {s.sequences}" if s.sequences > 1 else "")
        table.add_row(escape(s.flags), s.cost, context, format_size(s.peak_bytes))
    return table


def make_console(*, stderr: bool = False) -> Console:
    """Wide enough for the tables even when the output is a file."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=118)


def _head(plan: MemoryPlan) -> Text:
    verdict = Text("fits", style="bold green") if plan.fits else Text("does not fit", style="bold red")
    head = Text(f"{plan.model} ({plan.source}), profile {plan.profile}: ")
    head.append_text(verdict)
    sequences = f"{plan.sequences} sequence{'s' if plan.sequences > 1 else ''}"
    head.append(f"\ncontext {plan.context_tokens:,} of {plan.max_context_tokens:,} tokens, {sequences}")
    head.append(f"; peak {format_size(plan.planned_peak_bytes)} of {format_size(plan.cap_bytes)} cap")
    head.append(f"; host {format_size(plan.planned_host_bytes)}\nbound by {plan.binding_line}")
    return head


def _bars(plan: MemoryPlan) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    scale = _BAR_CELLS / max(plan.cap_bytes, plan.planned_peak_bytes, 1)
    strip = Text()
    for label, size, colour in grouped(plan.device_lines):
        strip.append("█" * max(1, round(size * scale)), style=colour)
        table.add_row(
            Text("■ " + label, style=colour), Text(format_size(size), justify="right"), _bar(size, scale, colour)
        )
    free = plan.cap_bytes - plan.planned_peak_bytes
    if free > 0:
        strip.append("░" * max(1, round(free * scale)), style="dim")
        table.add_row(
            Text("□ free below the cap", style="dim"),
            Text(format_size(free), justify="right"),
            _bar(free, scale, "dim"),
        )
    return Group(Text(), strip, table)


def _bar(size: int, scale: float, colour: str) -> Text:
    eighths = max(1, round(size * scale * 8))
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), style=colour)


def _lines(plan: MemoryPlan) -> RenderableType:
    table = Table(box=box.SIMPLE, title=None)
    table.add_column("line", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("read per step", justify="right", no_wrap=True)
    table.add_column("holds")
    sections = (
        ("device", plan.device_lines, plan.planned_peak_bytes),
        ("host", plan.host_lines, plan.planned_host_bytes),
    )
    for title, lines, total in sections:
        table.add_section()
        table.add_row(Text(title, style="bold"), Text(format_size(total), style="bold"), "", "", "")
        for line in lines:
            table.add_row(*_line_row(plan, line, total))
    return table


def _line_row(plan: MemoryPlan, line: MemoryLine, total: int) -> tuple[Text, str, str, str, str]:
    style = "bold yellow" if line.name == plan.binding_line else ""
    reads = plan.step.lines.get(line.name)
    share = f"{100 * line.bytes / total:.1f} %" if total else ""
    place = "" if line.place == DEVICE else f" [{line.place.removeprefix('host_')}]"
    return (
        Text(line.name, style=style),
        format_size(line.bytes),
        share,
        format_size(reads) if reads else "",
        escape(describe(line.name) + place),
    )


def _policies(plan: MemoryPlan) -> RenderableType:
    table = Table(box=box.SIMPLE, title="Policies, in the order they are given up", title_justify="left")
    for column in ("policy", "choice", "why"):
        table.add_column(column)
    for policy in plan.policies:
        table.add_row(policy.name, policy.value, policy.reason)
    return table


def _forecast(plan: MemoryPlan) -> RenderableType:
    full, short = plan.step, plan.step_short
    title = (
        f"Forecast of one verify step: {full.bytes_read / 1e9:.2f} GB read and "
        f"{full.bus_bytes / 1e6:.1f} MB over the bus at "
        f"{full.at_context:,} tokens ({short.bytes_read / 1e9:.2f} GB at {short.at_context:,}; hot cache "
        f"{100 * full.far.hit_rate:.0f} % hits, {full.far.hit_source}); "
        f"memory roofline, not measured"
    )
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    table.add_column("GPU")
    for column in ("step", "bus share", "tokens/s with drafts", "tokens/s without", "enough memory"):
        table.add_column(column, justify="right")
    for gpu, r in plan.roofline.items():
        style = "" if r.has_memory else "dim"
        table.add_row(
            gpu,
            f"{1e3 * r.step_seconds:.1f} ms",
            f"{100 * r.bus_share:.1f} %",
            f"{r.tokens_per_second:.0f}",
            f"{r.plain_tokens_per_second:.0f}",
            "yes" if r.has_memory else "no",
            style=style,
        )
    return table
