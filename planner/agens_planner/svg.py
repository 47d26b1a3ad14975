"""The plan as a picture: one stacked bar per place, drawn as plain SVG text."""

from __future__ import annotations

from html import escape

from agens_planner.lines import DEVICE
from agens_planner.plan import MemoryLine, MemoryPlan
from agens_planner.units import format_size

GROUPS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("weights", ("weights",), "#4269d0"),
    ("drafters", ("drafter", "mtp"), "#6cc5b0"),
    ("vision", ("vision",), "#a463f2"),
    ("sequence state", ("state",), "#efb118"),
    ("KV and block keys", ("kv",), "#ff725c"),
    ("far pool", ("far",), "#ff8ab7"),
    ("work space", ("activations", "logits", "sampling"), "#3ca951"),
    ("runtime", ("runtime", "allocator"), "#97bbf5"),
    ("reserves", ("reserve",), "#9c9c9c"),
)
_WIDTH, _BAR, _LEFT = 960, 54, 16


def grouped(lines: tuple[MemoryLine, ...]) -> list[tuple[str, int, str]]:
    """(label, bytes, colour) of each group of device lines that is not empty, in drawing order."""
    sums = [
        (label, sum(x.bytes for x in lines if x.name.split(".")[0] in prefixes), colour)
        for label, prefixes, colour in GROUPS
    ]
    return [entry for entry in sums if entry[1]]


def to_svg(plan: MemoryPlan) -> str:
    """The device bar with its cap, the host bar, and a legend with sizes; text is selectable, no fonts are loaded."""
    device = grouped(plan.device_lines)
    host_colours = [g[2] for g in GROUPS]
    host = [
        (x.name.removeprefix("host."), x.bytes, host_colours[i % len(host_colours)])
        for i, x in enumerate(sorted(plan.host_lines, key=lambda x: (-x.bytes, x.name)))
    ]
    title = f"{plan.model}, profile {plan.profile}: {plan.context_tokens:,} tokens × {plan.sequences}"
    verdict = "" if plan.fits else " — does not fit"
    parts = [f'<text x="{_LEFT}" y="26" font-size="18" font-weight="600">{escape(title + verdict)}</text>']
    y = 64
    for label, total, limit, pieces in (
        (DEVICE, plan.planned_peak_bytes, plan.cap_bytes, device),
        ("host", plan.planned_host_bytes, plan.host_limit_bytes or plan.planned_host_bytes, host),
    ):
        parts += _bar(y, label, total, limit, pieces)
        rows = -(-len(pieces) // 3)
        y += _BAR + 74 + 22 * rows
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y - 24}" width="{_WIDTH}" height="{y - 24}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#222">\n'
        '<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _bar(y: int, label: str, total: int, limit: int, pieces: list[tuple[str, int, str]]) -> list[str]:
    inner = _WIDTH - 2 * _LEFT
    scale = inner / max(total, limit, 1)
    caption = f"{label}: {format_size(total)} planned of {format_size(limit)}"
    out = [f'<text x="{_LEFT}" y="{y}">{escape(caption)}</text>']
    out.append(f'<rect x="{_LEFT}" y="{y + 8}" width="{limit * scale:.1f}" height="{_BAR}" fill="#f0f0f0"/>')
    x = float(_LEFT)
    for name, size, colour in pieces:
        width = size * scale
        tip = escape(f"{name}: {format_size(size)}")
        out.append(
            f'<rect x="{x:.1f}" y="{y + 8}" width="{width:.1f}" height="{_BAR}" fill="{colour}" '
            'stroke="#fff" stroke-width="0.5">'
            f"<title>{tip}</title></rect>"
        )
        x += width
    if total > limit:
        edge = _LEFT + limit * scale
        out.append(
            f'<line x1="{edge:.1f}" y1="{y}" x2="{edge:.1f}" y2="{y + 16 + _BAR}" stroke="#c00" stroke-width="2"/>'
        )
    for i, (name, size, colour) in enumerate(pieces):
        left, top = _LEFT + (i % 3) * (inner // 3), y + _BAR + 30 + 22 * (i // 3)
        out.append(f'<rect x="{left}" y="{top - 11}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{left + 18}" y="{top}">{escape(name)} {format_size(size)}</text>')
    return out
