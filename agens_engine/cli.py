"""The `agens` command: flags to settings, one function per subcommand. Heavy rooms are imported inside them, so that
`agens --help` answers at once. Errors are one line on stderr; exit 2 for usage, 1 for failure (errors.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from agens_engine.commands.plan import PlanCommand, plan_command
from agens_engine.errors import AgensError, UsageError
from agens_engine.server.logs import log_to_stderr
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
_Effort = Annotated[str | None, typer.Option("--reasoning-effort", help="none, minimal, low, medium, high or xhigh")]
_Thinking = Annotated[
    bool | None, typer.Option("--thinking/--no-thinking", help="think before answering [default: the template's]")
]
_LogLevel = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error")]
_Mtp = Annotated[
    str | None, typer.Option("--mtp", metavar="DIR|auto|off", help="MTP head [default: as the profile says]")
]
_Drafter = Annotated[
    str | None, typer.Option("--drafter", metavar="DIR|auto|off", help="DFlash2 drafter [default: as the profile says]")
]
_Weights = Annotated[
    str | None,
    typer.Option("--weights", metavar="auto|dequantise|packed", help="quantised linears on a CPU [default: auto]"),
]
_RepackCache = Annotated[
    str | None, typer.Option("--repack-cache", metavar="DIR", help="keep repacked weights here for the next start")
]
_SessionDir = Annotated[
    str | None, typer.Option("--session-dir", metavar="DIR", help="keep conversations here across restarts")
]
_SessionCache = Annotated[
    bool | None,
    typer.Option("--session-cache/--no-session-cache", help="reuse what earlier turns computed [default: on]"),
]
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
    weights: _Weights = None,
    repack_cache: _RepackCache = None,
    session_cache: _SessionCache = None,
    session_dir: _SessionDir = None,
    images: _Images = None,
    tp: _Ranks = None,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    top_k: _TopK = None,
    max_tokens: _MaxTokens = None,
    reasoning_budget: Annotated[
        int | None, typer.Option("--reasoning-budget", help="tokens a thought may have; 0 is off [default: off]")
    ] = None,
    reasoning_budget_soft_bias: Annotated[
        float | None,
        typer.Option("--reasoning-budget-soft-bias", help="pull towards the end of a thought [default: 0]"),
    ] = None,
    repetition_guard: Annotated[
        bool | None,
        typer.Option("--repetition-guard/--no-repetition-guard", help="end thoughts in circles [default: on]"),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", metavar="ORIGIN|*", help="web pages that may call; repeatable [default: none]"),
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option("--request-timeout", help="seconds an answer may take; 0 is no limit [default: 0]")
    ] = None,
    drain: Annotated[float | None, typer.Option("--drain", help="seconds to finish at a stop [default: 30]")] = None,
    log_level: _LogLevel = None,
    log_format: Annotated[str | None, typer.Option("--log-format", help="text or json [default: text]")] = None,
) -> None:
    """Serve the OpenAI-style HTTP API."""
    _refuse_missing(images, tp)
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
            "mtp": mtp,
            "drafter": drafter,
            "weights": weights,
            "repack_cache": repack_cache,
            "session_cache": session_cache,
            "session_dir": session_dir,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_output_tokens": max_tokens,
            "reasoning_budget": reasoning_budget,
            "reasoning_budget_soft_bias": reasoning_budget_soft_bias,
            "repetition_guard": repetition_guard,
            "cors_origins": cors_origin or None,
            "request_timeout_seconds": request_timeout,
            "drain_seconds": drain,
            "log_level": log_level,
            "log_format": log_format,
        }
    )
    log_to_stderr(settings.log_level, settings.log_format)
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
    weights: _Weights = None,
    repack_cache: _RepackCache = None,
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
    _refuse_missing(images, tp)
    settings = _one_user_settings(
        model=model, profile=profile, context_tokens=context, dtype=dtype, speculation=speculation,
        draft_sources=draft_sources, mtp=mtp, drafter=drafter, weights=weights, repack_cache=repack_cache,
    )  # fmt: skip
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
    mtp: _Mtp = None,
    drafter: _Drafter = None,
    weights: _Weights = None,
    repack_cache: _RepackCache = None,
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
    settings = _one_user_settings(
        model=model, profile=profile, context_tokens=context, dtype=dtype, speculation=speculation,
        draft_sources=draft_sources, mtp=mtp, drafter=drafter, weights=weights, repack_cache=repack_cache,
    )  # fmt: skip
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
    log_to_stderr("warning")
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


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="folder, hub id, or nano")],
    target: Annotated[str, typer.Argument(metavar="DST", help="the folder to make")],
    bits: Annotated[float, typer.Option("--bits", help="bits per weight of the linears, scales included")],
    calibration: Annotated[
        str | None, typer.Option("--calibration", metavar="FILE", help="text like what the model is for")
    ] = None,
    group: Annotated[int, typer.Option("--group", help="weights per scale: 128, 64 or 32")] = 128,
    keep: Annotated[
        list[str] | None, typer.Option("--keep", metavar="PATTERN", help="modules to leave as they are; repeatable")
    ] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    json_out: _Json = False,
) -> None:
    """Make a low-bit build of a model."""
    from agens_engine.commands.quantize import run_quantize

    run_quantize(
        source, target, bits, calibration=calibration, group_size=group, keep=keep or (), seed=seed, json_out=json_out
    )


@app.command()
def evaluate(
    reference: Annotated[str, typer.Argument(metavar="REF", help="folder, hub id, or nano")],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="the model to compare with it")],
    text: Annotated[str, typer.Option("--text", metavar="FILE", help="the text to compare them on")],
    json_out: _Json = False,
) -> None:
    """Measure what a smaller model costs in quality."""
    from agens_engine.commands.evaluate import run_evaluate

    run_evaluate(reference, candidate, text, json_out=json_out)


@app.command()
def bench(
    suite: Annotated[
        str | None,
        typer.Option("--suite", help="comma-separated names or JSON files [default: chat,code,thinking,tools,agent]"),
    ] = None,
    model: _Model = None,
    profile: _Profile = None,
    context: _Context = None,
    dtype: _Dtype = None,
    draft_sources: _Sources = None,
    mtp: _Mtp = None,
    drafter: _Drafter = None,
    repeat: Annotated[int, typer.Option("--repeat", help="ask every prompt so many times")] = 1,
    cases: Annotated[int | None, typer.Option("--cases", help="only the first so many prompts of a suite")] = None,
    json_out: _Json = False,
) -> None:
    """Measure drafting against plain decoding on prompt suites."""
    from agens_engine.commands.bench import run_bench

    settings = _one_user_settings(
        model=model, profile=profile, context_tokens=context, dtype=dtype, draft_sources=draft_sources, mtp=mtp,
        drafter=drafter,
    )  # fmt: skip
    suites = {} if suite is None else {"suites": [name.strip() for name in suite.split(",") if name.strip()]}
    run_bench(settings, **suites, repeat=repeat, cases=cases, json_out=json_out)


app.command(name="plan", cls=PlanCommand)(plan_command)


def _one_user_settings(**flags: Any) -> Settings:
    """Settings by name, for commands with one answer at a time; they log warnings only."""
    log_to_stderr("warning")
    return Settings.build({**flags, "max_sequences": 1})


def _refuse_missing(images: str | None, tp: int | None) -> None:
    """Flags of the stable contract whose features are still to come; saying so beats ignoring them."""
    asked = {"--images": images not in (None, "off"), "--tp": tp not in (None, 1)}
    missing = [flag for flag, wanted in asked.items() if wanted]
    if missing:
        raise UsageError(f"{', '.join(missing)}: not in this version yet; leave it out (`agens plan` can plan for it)")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


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
