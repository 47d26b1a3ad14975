"""The `agens` command: flags to settings, one function per subcommand. Heavy rooms are imported inside them, so that
`agens --help` answers at once. Errors are one line on stderr; exit 2 for usage, 1 for failure (errors.py).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from agens_engine.commands.plan import PlanCommand, plan_command
from agens_engine.errors import AgensError, UsageError
from agens_engine.settings import Settings

app = typer.Typer(
    name="agens",
    help="Agens Engine: run Agens Volundr models.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# Flags that several commands share. None means "not given", so that the environment and the profile can speak.
_Model = Annotated[
    str | None, typer.Option("--model", help="folder, hub id, or nano (the embedded model) [default: nano]")
]
_Profile = Annotated[str | None, typer.Option("--profile", help="profile name or TOML file")]
_Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16")]
_Context = Annotated[int | None, typer.Option("--context", help="context in tokens [default: the model's]")]
_Speculation = Annotated[
    bool | None, typer.Option("--speculation/--no-speculation", help="draft tokens and verify them [default: on]")
]
_Sources = Annotated[str | None, typer.Option("--draft-sources", help="comma-separated names [default: all]")]
_Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy")]
_TopP = Annotated[float | None, typer.Option("--top-p")]
_TopK = Annotated[int | None, typer.Option("--top-k", help="0 is off")]
_MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="limit of one answer")]
_Effort = Annotated[str | None, typer.Option("--reasoning-effort", help="low, medium or xhigh")]
_Thinking = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="think before answering [default: the template's]")
]
_LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error")]
_Mtp = Annotated[str | None, typer.Option("--mtp", metavar="DIR", help="MTP head; not in this version yet")]
_Drafter = Annotated[str | None, typer.Option("--drafter", metavar="DIR", help="DFlash2; not in this version yet")]
_Images = Annotated[str | None, typer.Option("--images", metavar="on|off", help="not in this version yet")]
_Ranks = Annotated[int | None, typer.Option("--tp", help="tensor parallelism; not in this version yet")]
_Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]


@app.command()
def serve(
    model: _Model = None,
    profile: _Profile = None,
    host: Annotated[str | None, typer.Option("--host", help="[default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option("--port", help="0 picks a free one [default: 8000]")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="better set as AGENS_API_KEY")] = None,
    sequences: Annotated[int | None, typer.Option("--sequences", help="answers at once [default: 8]")] = None,
    context: _Context = None,
    device_memory: Annotated[str | None, typer.Option("--device-memory", help="memory cap, e.g. 14GiB")] = None,
    host_memory: Annotated[str | None, typer.Option("--host-memory", help="host memory to use, e.g. 24GiB")] = None,
    dtype: _Dtype = None,
    speculation: _Speculation = None,
    draft_sources: _Sources = None,
    mtp: _Mtp = None,
    drafter: _Drafter = None,
    images: _Images = None,
    tp: _Ranks = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    max_tokens: _MaxTokens = None,
    log_level: _LogLevel = None,
) -> None:
    """Serve the OpenAI-style HTTP API."""
    _refuse_missing(mtp, drafter, images, tp)
    settings = Settings.build(
        {
            "model": model,
            "profile": profile,
            "host": host,
            "port": port,
            "api_key": api_key,
            "max_sequences": sequences,
            "context_tokens": context,
            "device_memory": device_memory,
            "host_memory": host_memory,
            "dtype": dtype,
            "speculation": speculation,
            "draft_sources": draft_sources,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_output_tokens": max_tokens,
            "log_level": log_level,
        }
    )
    _log_to_stderr(settings.log_level)
    from agens_engine.commands.model import load_model
    from agens_engine.server.app import serve as run_server

    run_server(settings, lambda: load_model(settings))


@app.command()
def chat(
    model: _Model = None,
    profile: _Profile = None,
    system: Annotated[str | None, typer.Option("--system", help="system message")] = None,
    context: _Context = None,
    dtype: _Dtype = None,
    speculation: _Speculation = None,
    draft_sources: _Sources = None,
    mtp: _Mtp = None,
    drafter: _Drafter = None,
    images: _Images = None,
    tp: _Ranks = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    max_tokens: _MaxTokens = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    reasoning_effort: _Effort = None,
    thinking: _Thinking = None,
) -> None:
    """Talk to a model in the terminal. /reset starts over, /exit leaves."""
    _refuse_missing(mtp, drafter, images, tp)
    settings = _one_user_settings(model, profile, context, dtype, speculation, draft_sources)
    from agens_engine.commands.chat import run_chat

    run_chat(
        settings,
        system,
        _given(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=max_tokens,
            seed=seed,
            reasoning_effort=reasoning_effort,
            enable_thinking=thinking,
        ),
    )


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", help="the text; or use --prompt-file")] = None,
    prompt_file: Annotated[str | None, typer.Option("--prompt-file", help="a file with the text, - for stdin")] = None,
    model: _Model = None,
    profile: _Profile = None,
    system: Annotated[str | None, typer.Option("--system", help="system message")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template: the model continues the text")] = False,
    json_out: _Json = False,
    context: _Context = None,
    dtype: _Dtype = None,
    speculation: _Speculation = None,
    draft_sources: _Sources = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    max_tokens: _MaxTokens = None,
    seed: Annotated[int | None, typer.Option("--seed")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="stop string; may be repeated")] = None,
    reasoning_effort: _Effort = None,
    thinking: _Thinking = None,
) -> None:
    """Answer one prompt; the text goes to stdout."""
    from agens_engine.commands.generate import read_prompt, run_generate

    text = read_prompt(prompt, prompt_file)
    settings = _one_user_settings(model, profile, context, dtype, speculation, draft_sources)
    options = _given(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop or None,
        reasoning_effort=reasoning_effort,
        enable_thinking=thinking,
    )
    run_generate(settings, text, system=system, raw=raw, json_out=json_out, options=options)


@app.command()
def logits(
    model: Annotated[str, typer.Option("--model", help="folder, hub id, or nano")],
    ids: Annotated[str, typer.Option("--ids", help="file with a JSON list of token ids")],
    out: Annotated[str, typer.Option("--out", help="the .npy file to write, float32 [T, V]")],
    chunk: Annotated[int | None, typer.Option("--chunk", help="prefill in pieces of N tokens", min=1)] = None,
    dtype: Annotated[str, typer.Option("--dtype")] = "float32",
) -> None:
    """Write the logits of every position, to compare implementations."""
    _log_to_stderr("warning")
    from agens_engine.commands.logits import run_logits

    run_logits(model, ids, out, chunk, dtype)


@app.command()
def doctor(model: _Model = None, json_out: _Json = False) -> None:
    """Show versions, devices, memory, and whether the model is found."""
    from agens_engine.commands.doctor import run_doctor

    run_doctor(Settings.build({"model": model}).model, json_out)


@app.command()
def pull(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="hub id, OWNER/NAME")],
    revision: Annotated[str | None, typer.Option("--revision", help="branch, tag or commit")] = None,
) -> None:
    """Download a model into the local Hugging Face cache."""
    from agens_engine.commands.pull import run_pull

    run_pull(repo, revision)


app.command(name="plan", cls=PlanCommand)(plan_command)


def _one_user_settings(
    model: str | None,
    profile: str | None,
    context: int | None,
    dtype: str | None,
    speculation: bool | None,
    draft_sources: str | None,
) -> Settings:
    """For commands with one answer at a time; they log warnings only."""
    _log_to_stderr("warning")
    return Settings.build(
        {
            "model": model,
            "profile": profile,
            "context_tokens": context,
            "dtype": dtype,
            "speculation": speculation,
            "draft_sources": draft_sources,
            "max_sequences": 1,
        }
    )


def _refuse_missing(mtp: str | None, drafter: str | None, images: str | None, tp: int | None) -> None:
    """Flags of the stable contract whose features are still to come; saying so beats ignoring them."""
    asked = {"--mtp": mtp not in (None, "off"), "--drafter": drafter not in (None, "off")}
    asked |= {"--images": images not in (None, "off"), "--tp": tp not in (None, 1)}
    missing = [flag for flag, wanted in asked.items() if wanted]
    if missing:
        raise UsageError(f"{', '.join(missing)}: not in this version yet; leave it out (`agens plan` can plan for it)")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _log_to_stderr(level: str) -> None:
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=line, stream=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = app(args=given or ["--help"], prog_name="agens", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except AgensError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # the reader of our output has left (`agens generate | head`); keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _fail(message: str, code: int) -> int:
    print("agens: " + " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
