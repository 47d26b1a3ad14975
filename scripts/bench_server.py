"""The server under load: many clients, random aborts, and what a streamed token costs beside the model.

    python scripts/bench_server.py [--model nano] [--clients 16] [--requests 50] [--aborts 1000] [--tokens 400]

Runs the real application over the real engine in this process; the server's event loop has a thread of its own, the
clients have another.

load      `clients` clients send `requests` chat requests each, one after the other, half of them streamed. Counted:
          answers that are not right (status, finish reason, end of the stream), sequences and seats left behind, and
          resident memory between the end of the warm-up (a quarter of the load) and the end. Waiting time is the
          engine's queue_seconds; the spread over clients shows whether somebody is always last.
          The session cache is off: it may fill its planned budget, and that growth would hide a leak.
aborts    requests of all shapes (queued, in prefill, in decode; streamed and whole; one choice or two) lose their
          client: streams after 0 to 5 pieces, whole answers after up to 100 ms. Between the moment the engine is
          told and the sequence's last event at most one step may begin, which is the one that was about to.
overhead  one stream of `tokens` tokens, drafts off. CPU time of the server's thread (events, JSON, frames, socket) plus
          that of the output parser and of handing events over, both on the engine's thread, divided by the tokens.
          Thread clocks count only time on a core, so neither the model nor the client nor waiting for the interpreter
          lock is in it; a busy machine with cold caches still makes every instruction dearer. The median of `--rounds`
          streams after one that is thrown away.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("", "kernels", "quant", "planner")]

from agens_engine.commands.model import load_model  # noqa: E402
from agens_engine.core import Request, StepEvent  # noqa: E402
from agens_engine.server.app import make_app  # noqa: E402
from agens_engine.server.generation import EventStream  # noqa: E402
from agens_engine.server.host import ModelHost  # noqa: E402
from agens_engine.settings import Settings  # noqa: E402
from agens_engine.text.output import OutputParser  # noqa: E402

CHAT = "/v1/chat/completions"
PROMPTS = (
    "Repeat: copper lantern, seven rivers, a quiet field",
    "What is 17 + 26?",
    "Name three colours and say why you like each of them.",
    "Repeat: " + "a long road under a grey sky, " * 12,
)


class RunningServer:
    """The application on a free port, served by an event loop on its own thread."""

    def __init__(self, settings: Settings) -> None:
        self.engine: Any
        self.engine, text = load_model(settings)
        self.host = ModelHost(settings)
        self.host.attach(self.engine, text)
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(make_app(self.host), handler_cancellation=True)
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._run(self._start())}"

    def cpu_seconds(self) -> float:
        """Time that the server's thread has spent on a core."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def stop(self) -> None:
        self._run(self._runner.cleanup())
        self.engine.shutdown(0.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def leftovers(self) -> int:
        """Sequences and seats that nobody uses any more, once everything has ended."""
        stats = self.engine.stats()
        seats = self.engine.max_sequences - stats["slots_free"]
        return int(stats["running"] + stats["waiting"] + seats + len(self.host.require().generator.slots()))

    async def idle(self) -> None:
        while self.engine.stats()["running"] or self.engine.stats()["waiting"]:
            await asyncio.sleep(0.01)

    async def _start(self) -> int:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    def _run(self, work: Awaitable[Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(_finished(work), self._loop).result()


async def _finished(work: Awaitable[Any]) -> Any:
    return await work


# --- load ------------------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """waits: queue seconds of each request, by client; rss_bytes: resident memory after each quarter of the load."""

    waits: list[list[float]]
    errors: list[str] = field(default_factory=list)
    leaked: int = 0
    rss_bytes: list[int] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Of resident memory after the warm-up, as a share."""
        return max(self.rss_bytes[1:]) / self.rss_bytes[0] - 1.0

    def summary(self) -> dict[str, Any]:
        means = [statistics.mean(waits) for waits in self.waits]
        flat = sorted(wait for waits in self.waits for wait in waits)
        return {
            "requests": len(flat),
            "errors": len(self.errors),
            "leaked_sequences": self.leaked,
            "memory_growth": round(self.growth, 5),
            "wait_median_seconds": round(statistics.median(flat), 4),
            "wait_p95_seconds": round(flat[int(0.95 * (len(flat) - 1))], 4),
            "wait_max_seconds": round(flat[-1], 4),
            "client_mean_wait_seconds": [round(min(means), 4), round(max(means), 4)],
        }


def chat_body(number: int, max_tokens: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}],
        "max_tokens": max_tokens,
        "temperature": 0.7,
        "seed": number,
        "ignore_eos": True,
        "stream": number % 2 == 0,
    }


async def load(server: RunningServer, clients: int, requests: int, max_tokens: int) -> Load:
    """Every client's requests, in four quarters with a look at the memory after each."""
    result = Load([[] for _ in range(clients)])
    async with aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        quarters = [range(requests * part // 4, requests * (part + 1) // 4) for part in range(4)]
        for numbers in quarters:
            await asyncio.gather(*(_client(session, c, numbers, max_tokens, result) for c in range(clients)))
            await server.idle()
            gc.collect()
            result.rss_bytes.append(psutil.Process().memory_info().rss)
    result.leaked = server.leftovers()
    return result


async def _client(session: aiohttp.ClientSession, client: int, numbers: range, max_tokens: int, result: Load) -> None:
    for number in numbers:
        body = chat_body(1000 * client + number, max_tokens)
        try:
            async with session.post(CHAT, json=body) as response:
                raw = await response.read()
            problem, timings = _judge(response.status, raw, body, max_tokens)
        except aiohttp.ClientError as error:
            problem, timings = repr(error), {}
        if problem:
            result.errors.append(problem)
        result.waits[client].append(timings.get("queue_seconds", 0.0))


def _judge(status: int, raw: bytes, body: dict[str, Any], max_tokens: int) -> tuple[str, dict[str, Any]]:
    """What is wrong with an answer ("" for nothing), and its timings."""
    if status != 200:
        return f"{status} {raw[:200]!r}", {}
    if body["stream"]:
        frames = raw.decode().strip().split("\n\n")
        if frames[-1] != "data: [DONE]":
            return f"the stream ended with {frames[-1]!r}", {}
        last = json.loads(frames[-2].removeprefix("data: "))
    else:
        last = json.loads(raw)
        if last["usage"]["completion_tokens"] != max_tokens:
            return f"{last['usage']['completion_tokens']} tokens", {}
    reason = last["choices"][0]["finish_reason"]
    return ("" if reason == "length" else f"finish_reason {reason}"), last["timings"]


# --- aborts ----------------------------------------------------------------------------------------------------------


@dataclass
class Aborts:
    """steps: for each aborted sequence, the steps that began between the abort and its end."""

    requests: int = 0
    finished_first: int = 0
    states: dict[str, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    leaked: int = 0

    def summary(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "aborted_sequences": len(self.steps),
            "finished_first": self.finished_first,
            "aborted_in": dict(sorted(self.states.items())),
            "max_steps_until_freed": max(self.steps, default=0),
            "leaked_sequences": self.leaked,
        }


class AbortWatch:
    """Stands between server and engine and notes the step number of every abort and of the end that follows."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.result = Aborts()
        self.submitted = 0
        self._asked: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._submit, self._abort = engine.submit, engine.abort
        engine.submit, engine.abort = self._watched_submit, self._watched_abort

    def close(self) -> Aborts:
        self.engine.submit, self.engine.abort = self._submit, self._abort
        return self.result

    def _watched_submit(self, request: Request, on_event: Callable[[StepEvent], None]) -> None:
        def noted(event: StepEvent) -> None:
            if event.token_ids:
                self._tokens[request.request_id] = len(event.token_ids)
            if event.finish_reason is not None:
                asked = self._asked.pop(request.request_id, None)
                if event.finish_reason.value != "abort":
                    self.result.finished_first += 1
                elif asked is not None:
                    self.result.steps.append(self.engine.num_steps - asked)
            on_event(event)

        self._submit(request, noted)
        self.submitted += 1

    def _watched_abort(self, request_id: str) -> None:
        state = "decode" if request_id in self._tokens else "queue or prefill"
        self._asked[request_id] = self.engine.num_steps
        self.result.states[state] = self.result.states.get(state, 0) + 1
        self._abort(request_id)


async def aborts(server: RunningServer, count: int, at_once: int, seed: int = 0) -> Aborts:
    """`count` requests whose clients leave; `at_once` more than there are seats keeps a queue."""
    rng = random.Random(seed)
    watch = AbortWatch(server.engine)
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with gate, aiohttp.ClientSession(server.url) as session:
            body = {**chat_body(number, 10_000), "n": rng.choice((1, 1, 1, 2))}
            if body["stream"]:  # its headers come once the engine has the request
                async with session.post(CHAT, json=body) as response:
                    for _ in range(rng.randint(0, 5)):
                        await response.content.readany()
                    response.close()
                return
            before = watch.submitted
            task = asyncio.create_task(_read_all(session, body))
            while watch.submitted == before and not task.done():
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1 * rng.random())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*(one(number) for number in range(count)))
    await server.idle()
    result = watch.close()
    result.requests, result.leaked = count, server.leftovers()
    return result


async def _read_all(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    async with session.post(CHAT, json=body) as response:
        async for _ in response.content.iter_any():
            continue


# --- overhead --------------------------------------------------------------------------------------------------------


class EngineSideClock:
    """CPU time of the server's work on the engine's thread: reading tokens into text, and handing events over."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._push, self._callback = OutputParser.push, EventStream._callback

    def __enter__(self) -> EngineSideClock:
        def push(parser: OutputParser, token_id: int) -> Any:
            return self._timed(self._push, parser, token_id)

        def callback(stream: EventStream, *given: Any) -> Callable[[StepEvent], None]:
            on_event = self._callback(stream, *given)
            return lambda event: self._timed(on_event, event)

        OutputParser.push = push  # type: ignore[method-assign, assignment]
        EventStream._callback = callback  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: object) -> None:
        OutputParser.push, EventStream._callback = self._push, self._callback  # type: ignore[method-assign]

    def _timed(self, work: Callable[..., Any], *given: Any) -> Any:
        started = time.thread_time()
        try:
            return work(*given)
        finally:
            self.seconds += time.thread_time() - started


async def overhead(server: RunningServer, tokens: int, rounds: int) -> list[tuple[float, float]]:
    """Microseconds of CPU for each token: (server's thread, its work on the engine's thread), one pair per round."""
    body = {**chat_body(0, tokens), "stream": True, "speculation": False}
    found = []
    async with aiohttp.ClientSession(server.url) as session:
        with EngineSideClock() as clock:
            for index in range(rounds + 1):
                clock.seconds, before = 0.0, server.cpu_seconds()
                await _read_all(session, body)
                spent = server.cpu_seconds() - before
                if index:
                    found.append((1e6 * spent / tokens, 1e6 * clock.seconds / tokens))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=50, help="of each client")
    parser.add_argument("--max-tokens", type=int, default=16, help="of each request of the load")
    parser.add_argument("--aborts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream of the overhead")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    server = RunningServer(Settings.build({"model": args.model, "log_level": "warning", "session_cache": False}))
    try:
        loaded = asyncio.run(load(server, args.clients, args.requests, args.max_tokens))
        aborted = asyncio.run(aborts(server, args.aborts, at_once=2 * server.engine.max_sequences))
        costs = asyncio.run(overhead(server, args.tokens, args.rounds))
    finally:
        server.stop()
    totals = [here + there for here, there in costs]
    result = {
        "benchmark": "server",
        "model": args.model,
        "load": {"clients": args.clients, **loaded.summary()},
        "aborts": aborted.summary(),
        "overhead": {
            "cpu_us_per_token": round(statistics.median(totals), 1),
            "cpu_us_per_token_max": round(max(totals), 1),
            "of_it_on_engine_thread_us": round(statistics.median(there for _, there in costs), 1),
        },
        "torch": torch.__version__,
    }
    for title in ("load", "aborts", "overhead"):
        print(title)
        for name, value in result[title].items():
            print(f"  {name:<26} {value}")
    for error in loaded.errors[:5]:
        print(f"error: {error}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
