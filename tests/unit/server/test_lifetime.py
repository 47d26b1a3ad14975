"""The server as a process: bind, load, signals, drain, exit codes. The engine is the scripted stand-in."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from agens_engine.errors import CheckpointError, UsageError
from agens_engine.server.app import serve
from agens_engine.settings import Settings
from tests.serverkit import END, USER, parse_sse

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import logging, sys, time
from agens_engine.server.app import serve
from agens_engine.settings import Settings
from tests.fake_engine import FakeEngine
from tests.serverkit import model_text, says

def load():
    time.sleep({load_seconds})
    engine = FakeEngine(says({text!r}), context_tokens=10**7)
    engine.step_seconds = 0.01
    return engine, model_text()

logging.basicConfig(level="INFO", stream=sys.stderr, format="%(message)s")
serve(Settings(port=0, drain_seconds={drain}, host={host!r}), load)
print("clean end")
"""


@contextmanager
def server(
    text: str, *, drain: float = 30.0, load_seconds: float = 0.0, host: str = "127.0.0.1", wait_for: str = "ready"
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """(process, base URL, log lines so far)"""
    program = textwrap.dedent(PROGRAM).format(text=text, drain=drain, load_seconds=load_seconds, host=host)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: list[str] = []
        url = ""
        try:
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"http://[\d.]+:\d+", line):
                    url = found.group().replace("0.0.0.0", "127.0.0.1")
                if wait_for in line:
                    break
            assert url, "".join(lines)
            reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
            reader.start()
            yield process, url, lines
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def open_stream(url: str, max_tokens: int) -> Any:
    body = {"messages": USER, "stream": True, "max_tokens": max_tokens, "enable_thinking": False}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_lets_running_answers_finish(number: signal.Signals) -> None:
    with server("word " * 20 + END) as (process, url, _), open_stream(url, 1000) as response:
        first = response.readline()
        process.send_signal(number)
        payloads, done, _ = parse_sse(first + response.read())
        assert done and payloads[-1]["choices"][0]["finish_reason"] == "stop"
        assert process.wait(60) == 0
        assert process.stdout is not None and process.stdout.read() == "clean end\n"


def test_who_comes_during_the_drain_is_told_503() -> None:
    with server("word " * 60 + END) as (process, url, lines), open_stream(url, 10**5) as response:
        first = response.readline()
        process.send_signal(signal.SIGTERM)
        while not any("stopping" in line for line in lines):
            first += response.readline()
        for ask in (lambda: open_stream(url, 5), lambda: urllib.request.urlopen(f"{url}/health", timeout=60)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                ask()
            with caught.value as refused:
                assert refused.status == 503 and refused.headers["x-request-id"]
        payloads, done, _ = parse_sse(first + response.read())
        assert done and payloads[-1]["choices"][0]["finish_reason"] == "stop"
        assert process.wait(60) == 0


def test_drain_time_over_ends_what_still_runs() -> None:
    with server("a", drain=0.2) as (process, url, _), open_stream(url, 10**6) as response:
        first = response.readline()
        process.send_signal(signal.SIGTERM)
        payloads, done, _ = parse_sse(first + response.read())
        assert done and payloads[-1]["error"]["type"] == "service_unavailable_error"
        assert process.wait(60) == 0


def test_second_signal_ends_at_once() -> None:
    with server("a", drain=1000.0) as (process, url, lines), open_stream(url, 10**6) as response:
        response.readline()
        process.send_signal(signal.SIGTERM)
        while not any("stopping" in line for line in lines):
            response.readline()
        process.send_signal(signal.SIGTERM)
        response.read()
        assert process.wait(60) == 0


def test_signal_during_loading_ends_the_process() -> None:
    with server("a", load_seconds=1000.0, wait_for="loading") as (process, url, _):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/health", timeout=60)
        with caught.value as response:
            assert response.status == 503 and json.load(response)["status"] == "loading"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_public_address_without_a_key_is_warned_about() -> None:
    with server(END, host="0.0.0.0") as (_, _, lines):
        assert any("without an API key" in line for line in lines)
    with server(END) as (_, _, lines):
        assert not any("without an API key" in line for line in lines)


def _no_load() -> NoReturn:
    raise CheckpointError("the shard is half a shard")


def test_busy_port_and_failed_load_are_typed_errors() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"cannot listen on 127\.0\.0\.1:.*choose another --port"):
            serve(Settings(port=taken.getsockname()[1]), _no_load)
    with pytest.raises(CheckpointError, match="half a shard"):
        serve(Settings(port=0), _no_load)
