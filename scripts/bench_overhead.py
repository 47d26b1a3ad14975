"""How much of a decode step is not the model: scheduler, sampling, text and server together, as a ratio in one run.

    python scripts/bench_overhead.py [--tokens 400] [--rounds 3] [--sampled]

Serves nano in this process with the real HTTP server, streams chat completions to a client in another process, and
times every forward inside the engine's thread. Overhead is the rest of the wall time of the decode phase, as a share of
the model's time. Drafts are off, so a step is one token and nothing hides behind accepted drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("", "kernels", "quant", "planner")]

from agens_engine.commands.model import load_model  # noqa: E402
from agens_engine.model.volundr import Volundr  # noqa: E402
from agens_engine.server.app import make_app  # noqa: E402
from agens_engine.server.host import ModelHost  # noqa: E402
from agens_engine.settings import Settings  # noqa: E402

CLIENT = """
import json, sys, time, urllib.request
body = json.loads(sys.argv[2])
request = urllib.request.Request(sys.argv[1], json.dumps(body).encode(), {"content-type": "application/json"})
stamps = []
with urllib.request.urlopen(request) as answer:
    for line in answer:
        if line.startswith(b"data: {"):
            stamps.append(time.perf_counter())
print(json.dumps([stamps[0], stamps[-1], len(stamps)]))
"""


class ForwardClock:
    """Sums the wall time of Volundr.forward and Volundr.logits, one number per call."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._in_step = 0.0
        for name in ("forward", "logits"):
            self._wrap(name, getattr(Volundr, name))

    def _wrap(self, name: str, original: Any) -> None:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent = time.perf_counter() - started
                self._in_step += spent
                if name == "logits":
                    self.seconds.append(self._in_step)
                    self._in_step = 0.0

        setattr(Volundr, name, timed)


def serve_in_thread(settings: Settings) -> tuple[str, Any, ModelHost]:
    """Start the real application on a free port; returns its URL, a stop function and the host."""
    engine, text = load_model(settings)
    host = ModelHost(settings)
    host.attach(engine, text)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(make_app(host), handler_cancellation=True)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    threading.Thread(target=loop.run_forever, name="server", daemon=True).start()
    port = asyncio.run_coroutine_threadsafe(start(), loop).result()

    def stop() -> None:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        engine.shutdown(0.0)
        loop.call_soon_threadsafe(loop.stop)

    return f"http://127.0.0.1:{port}/v1/chat/completions", stop, host


async def one_round(url: str, body: dict[str, Any]) -> float:
    """Seconds from the first to the last streamed event, as the client saw it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, url, json.dumps(body), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit("the client failed")
    first, last, _ = json.loads(out)
    return float(last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--sampled", action="store_true", help="temperature 0.6, top-p 0.95, top-k 20 instead of greedy"
    )
    args = parser.parse_args()
    clock = ForwardClock()
    url, stop, _ = serve_in_thread(Settings.build({"model": "nano", "speculation": False, "log_level": "warning"}))
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "seed": 1} if args.sampled else {"temperature": 0}
    body = {
        "messages": [{"role": "user", "content": "Repeat: copper lantern, seven rivers, a quiet field"}],
        "max_tokens": args.tokens,
        "ignore_eos": True,
        "stream": True,
        **sampling,
    }
    shares, steps = [], []
    for index in range(args.rounds + 1):
        clock.seconds.clear()
        wall = asyncio.run(one_round(url, body))
        decode = clock.seconds[1:]  # the first logits belong to the prefill
        if index == 0:
            continue  # warm-up
        shares.append((wall - sum(decode)) / sum(decode))
        steps.append(sum(decode) / len(decode))
    stop()
    print(f"{'round':>6} {'model ms/step':>14} {'overhead':>9}")
    for number, (share, step) in enumerate(zip(shares, steps, strict=True), start=1):
        print(f"{number:>6} {1e3 * step:>14.2f} {share:>9.1%}")
    result = {
        "benchmark": "engine_overhead",
        "sampling": "sampled" if args.sampled else "greedy",
        "tokens": args.tokens,
        "overhead_share_median": round(statistics.median(shares), 4),
        "overhead_share_max": round(max(shares), 4),
        "model_ms_per_step": round(1e3 * statistics.median(steps), 3),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
