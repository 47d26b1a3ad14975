"""A follow-up turn of a long agent session, cold and resumed: tokens computed, time to the first token, and the ratio.

    python scripts/bench_sessions.py [--tokens 25000] [--new 300] [--answer 24] [--rounds 3] [--chunk 256]

Runs nano in this process, with positions raised beyond those it was trained for: what it says at 25,000 tokens means
nothing, what it costs does. Each round runs the session's second turn on an engine without stored sessions, then on one
that answered the first turn, then once more after a restart, from files. All answers must be equal before any
number is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("", "kernels", "quant", "planner")]

from agens_engine.core import Request, SamplingParams, StepEvent  # noqa: E402
from agens_engine.engine import Engine  # noqa: E402
from agens_engine.memory.session_files import SessionFiles, fingerprint  # noqa: E402
from agens_engine.model.loading import load_model  # noqa: E402
from agens_engine.model.volundr import Volundr  # noqa: E402
from agens_engine.model_files import resolve_model  # noqa: E402
from agens_engine.text.tokenizer import Tokenizer  # noqa: E402

SESSION_BYTES = 256 << 20  # as profiles/cpu.toml has it


def run_turn(engine: Engine, ids: list[int], count: int) -> tuple[list[int], StepEvent, float, float]:
    """(answer, last event, seconds to the first token, seconds in all) of one greedy request."""
    events: list[tuple[float, StepEvent]] = []
    done = threading.Event()

    def receive(event: StepEvent) -> None:
        events.append((time.perf_counter(), event))
        if event.finish_reason is not None:
            done.set()

    started = time.perf_counter()
    engine.submit(Request(f"turn {started}", ids, SamplingParams(temperature=0.0), max_tokens=count), receive)
    done.wait()
    last = events[-1][1]
    if last.error is not None:
        raise last.error
    answer = [token for _, event in events for token in event.token_ids]
    return answer, last, events[0][0] - started, events[-1][0] - started


def session_text(folder: Path, num_tokens: int) -> list[int]:
    """Token ids of the bundled text, over and over with a changing line, as files in an agent's context are."""
    tokenizer, ids = Tokenizer.load(folder), list[int]()
    text = (folder / "calibration.txt").read_text(encoding="utf-8")
    while len(ids) < num_tokens:
        ids += tokenizer.encode(f"\n# file {len(ids)}\n{text}", allow_control=False)
    return ids[:num_tokens]


def measure(model: Volundr, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One round: figures by kind of run."""
    context = args.tokens + args.new + 2 * args.answer + 8

    def engine(session_bytes: int, files: SessionFiles | None = None) -> Engine:
        return Engine(
            model,
            context_tokens=context,
            max_sequences=1,
            prefill_chunk_tokens=args.chunk,
            session_bytes=session_bytes,
            session_files=files,
        )

    def stored(place: str) -> SessionFiles:
        return SessionFiles(place, model=fingerprint(folder), dtype="float32", limit_bytes=8 * SESSION_BYTES)

    text = session_text(folder, args.tokens + args.new)
    first, new = text[: args.tokens], text[args.tokens :]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        live = engine(SESSION_BYTES, stored(place))
        answer, _, seconds, _ = run_turn(live, first, args.answer)
        figures["first_turn"] = {"computed": live.prompt_tokens, "first_token_s": seconds}
        second = first + answer + new
        answers = []
        for kind in ("cold", "follow_up", "after_restart"):
            used = (
                live if kind == "follow_up" else engine(0) if kind == "cold" else engine(SESSION_BYTES, stored(place))
            )
            before = used.prompt_tokens
            found, last, first_token, whole = run_turn(used, second, args.answer)
            answers.append(found)
            figures[kind] = {
                "prompt": last.prompt_tokens,
                "cached": last.cached_tokens,
                "computed": used.prompt_tokens - before,
                "first_token_s": first_token,
                "turn_s": whole,
            }
            if kind == "follow_up":
                figures["store"] = {k: used.stats()["sessions"][k] for k in ("entries", "bytes")}
            used.shutdown()
            used.check()
    assert answers[0] == answers[1] == answers[2], "a resumed answer differs from the cold one"
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 25_000), ("new", 300), ("answer", 24), ("rounds", 3), ("chunk", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = resolve_model("nano")
    model = load_model(folder, device=torch.device("cpu"))
    model.config = replace(model.config, max_positions=2 * args.tokens)
    rounds = [measure(model, folder, args) for _ in range(args.rounds)]
    print(f"second turn of a session of {args.tokens:,} tokens, {args.new} of them new; median of {args.rounds} rounds")
    print(f"{'':14} {'cached':>8} {'computed':>9} {'first token':>12} {'whole turn':>11}")
    result: dict[str, Any] = {
        "bench": "sessions",
        **vars(args),
        "torch": torch.__version__,
        "store": rounds[0]["store"],
    }
    for kind in ("cold", "follow_up", "after_restart"):
        middle = {key: statistics.median(r[kind][key] for r in rounds) for key in rounds[0][kind]}
        result[kind] = middle
        print(
            f"{kind:14} {middle['cached']:8,.0f} {middle['computed']:9,.0f} {middle['first_token_s']:10.3f} s "
            f"{middle['turn_s']:9.3f} s"
        )
    for key in ("first_token_s", "turn_s"):
        for kind in ("follow_up", "after_restart"):
            ratios = [r["cold"][key] / r[kind][key] for r in rounds]
            name = f"{kind}_{key.removesuffix('_s')}_ratio"
            result[name] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
            print(f"{name:32} {statistics.median(ratios):7.1f} x  ({min(ratios):.1f} to {max(ratios):.1f})")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
