"""`agens plan`: what a model needs on a machine, before anything is allocated.

Also runs by itself: python -m agens_engine.commands.plan --model volundr-32b --profile 16gb --mtp --images on
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from agens_engine.errors import AgensError, PlanError, UsageError
from agens_engine.planning import PlanRequest, build_question, refusal_line
from agens_planner import MemoryPlan, PlannerInputError, PlanRefused, Suggestion, plan, suggest

_OPTIONAL_VALUE_FLAGS = ("--mtp", "--drafter")


class PlanCommand(TyperCommand):
    """Lets `--mtp` and `--drafter` stand alone: without a value they mean "on"."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, expand_optional_values(args))


def expand_optional_values(args: list[str]) -> list[str]:
    """["--mtp", "--images", "on"] -> ["--mtp", "on", "--images", "on"]; values that are given stay."""
    expanded: list[str] = []
    for i, arg in enumerate(args):
        expanded.append(arg)
        if arg in _OPTIONAL_VALUE_FLAGS and (i + 1 == len(args) or args[i + 1].startswith("-")):
            expanded.append("on")
    return expanded


def plan_command(
    model: Annotated[str, typer.Option(help="folder, nano, or volundr-32b (the shape card)")] = "nano",
    profile: Annotated[str, typer.Option(help="profile name, path to a .toml file, or auto")] = "auto",
    mtp: Annotated[str | None, typer.Option(help="MTP head: on, off, or its folder", metavar="[DIR]")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="DFlash2 drafter: on, off, or its folder", metavar="[DIR]")
    ] = None,
    images: Annotated[str | None, typer.Option(help="vision tower: on or off", metavar="on|off")] = None,
    context: Annotated[str | None, typer.Option(help="tokens per sequence, or max", metavar="N|max")] = None,
    sequences: Annotated[str | None, typer.Option(help="sequences in flight, or max", metavar="N|max")] = None,
    device_memory: Annotated[str | None, typer.Option(help="device cap, e.g. 14GiB", metavar="SIZE")] = None,
    host_memory: Annotated[str | None, typer.Option(help="host memory to use, e.g. 24GiB", metavar="SIZE")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="any profile key, repeatable", metavar="KEY=VALUE")
    ] = None,
    probe: Annotated[
        bool | None, typer.Option("--probe/--no-probe", help="plan for this machine (default, except for a shape card)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="machine-readable output")] = False,
    explain: Annotated[str | None, typer.Option(help="show one line's derivation", metavar="LINE")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="list what would make a refused plan fit")] = False,
    svg: Annotated[Path | None, typer.Option(help="also draw the plan into this file", metavar="FILE")] = None,
) -> None:
    """Show where every byte goes, the largest context that fits, and what the memory bandwidth allows."""
    request = PlanRequest(
        model, profile, mtp, drafter, images, context, sequences, device_memory, host_memory, tuple(set_ or ()), probe
    )
    run_plan(request, as_json=as_json, explain=explain, fit=fit, svg=svg)


def run_plan(request: PlanRequest, *, as_json: bool, explain: str | None, fit: bool, svg: Path | None) -> None:
    """Plan and print. raises UsageError (exit 2) for a wrong question, PlanError (exit 1) when it does not fit."""
    try:
        question = build_question(request)
        try:
            found = plan(question.shapes, question.profile, question.device, question.host, question.options)
        except PlanRefused as refused:
            suggestions = suggest(question, refused)
            _show(refused.plan, as_json=as_json, explain=explain, suggestions=suggestions, brief=not fit, svg=svg)
            raise PlanError(refusal_line(refused, suggestions)) from refused
        _show(found, as_json=as_json, explain=explain, suggestions=None, brief=False, svg=svg)
        if fit and not as_json:
            typer.echo("the plan fits; nothing to change")
    except PlannerInputError as error:
        raise UsageError(str(error)) from error


def _show(
    found: MemoryPlan,
    *,
    as_json: bool,
    explain: str | None,
    suggestions: list[Suggestion] | None,
    brief: bool,
    svg: Path | None,
) -> None:
    """Print the plan; a refused one is shown in full only when asked for (--fit, --explain, --json)."""
    if svg is not None:
        from agens_planner.svg import to_svg

        try:
            svg.write_text(to_svg(found), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg {svg} cannot be written: {error.strerror or error}") from error
    if as_json:
        document = found.to_json()
        if suggestions is not None:
            document["fit"] = [vars(s) for s in suggestions]
        if explain is not None:
            line = found.line(explain)
            document = {"name": line.name, "place": line.place, "bytes": line.bytes, "formula": line.formula}
        typer.echo(json.dumps(document, indent=2))
        return
    from agens_engine.commands.plan_view import make_console, render_line, render_plan, render_suggestions

    console = make_console()
    if explain is not None:
        console.print(render_line(found, explain))
    elif not brief:
        console.print(render_plan(found))
    if suggestions and not brief:
        console.print(render_suggestions(suggestions))


def main() -> int:
    """The command by itself; `agens plan` is the same function mounted in cli.py."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=PlanCommand)(plan_command)
    try:
        app(standalone_mode=False)
    except (AgensError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        print(f"agens plan: {message}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
