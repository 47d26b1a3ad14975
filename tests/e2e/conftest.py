"""Real servers for end-to-end tests: `agens serve` as a process, one per model and test session."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.tinymodel import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Server:
    """url ends without a slash; log holds what the process wrote to stderr so far."""

    url: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)


@contextmanager
def serving(model: str, *flags: str) -> Iterator[Server]:
    """`agens serve` on a free port; ends with SIGTERM and checks that it ended well."""
    command = [sys.executable, "-m", "agens_engine.cli", "serve", "--model", model, "--port", "0", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        server = Server("", process)
        try:
            for line in process.stderr:
                server.log.append(line)
                if "ready: " in line and (found := re.search(r"http://[\d.]+:\d+", line)):
                    server.url = found.group()
                    break
            assert server.url, "the server did not start:\n" + "".join(server.log)
            reader = threading.Thread(target=lambda: server.log.extend(process.stderr or ()), daemon=True)
            reader.start()
            yield server
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
            faults = ("Traceback", "memory is not as it should be")  # the engine checks its arena at exit
            assert not any(fault in line for line in server.log for fault in faults), "".join(server.log)
            assert any("device memory: planned" in line for line in server.log), "".join(server.log)
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with a real tokenizer and template: says nonsense through every part of the engine."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def tiny_server(tiny_model_dir: Path) -> Iterator[Server]:
    with serving(str(tiny_model_dir), "--sequences", "4", "--context", "1024", "--max-tokens", "64") as server:
        yield server


@pytest.fixture(scope="session")
def nano_server() -> Iterator[Server]:
    """The embedded model."""
    with serving("nano") as server:
        yield server
