"""Calibration and evaluation text that every machine with CPython 3.11 has: standard library sources and its manual.

The two lists share no file and no manual topic (topics alternate in the alphabet). Sources are cut in windows from the
top, the manual pages of `pydoc_data.topics` are joined and cut alike; sources and manual take turns.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data import topics

WINDOW = 512
CALIBRATION_FILES = (
    "argparse.py", "asyncio/base_events.py", "configparser.py", "csv.py", "dataclasses.py", "datetime.py", "decimal.py",
    "email/message.py", "enum.py", "fractions.py", "http/client.py", "inspect.py", "json/encoder.py",
    "logging/__init__.py", "pathlib.py", "pickle.py", "random.py", "shutil.py", "socket.py", "subprocess.py",
    "tarfile.py", "threading.py", "typing.py", "unittest/case.py", "urllib/parse.py", "zipfile.py",
)  # fmt: skip
EVALUATION_FILES = (
    "ast.py", "bisect.py", "collections/__init__.py", "contextlib.py", "difflib.py", "functools.py", "heapq.py",
    "queue.py", "statistics.py", "string.py", "tempfile.py", "textwrap.py",
)  # fmt: skip
Encode = Callable[[str], list[int]]


def windows(encode: Encode, files: Sequence[str], topic_parity: int, count: int) -> list[list[int]]:
    """`count` windows of WINDOW tokens, by turns from the sources (one from each in turn) and the manual's topics."""
    sources = _rounds([_cut(encode(_source(name))) for name in files])
    names = sorted(topics.topics)[topic_parity::2]
    manual = _cut(encode("\n\n".join(topics.topics[name] for name in names)))
    found = [w for pair in zip(sources, manual, strict=False) for w in pair][:count]
    if len(found) < count:
        raise ValueError(f"the texts give {len(found)} windows of {WINDOW} tokens, {count} are wanted")
    return found


def calibration(encode: Encode, count: int) -> list[list[int]]:
    return windows(encode, CALIBRATION_FILES, 0, count)


def evaluation(encode: Encode, count: int) -> list[list[int]]:
    return windows(encode, EVALUATION_FILES, 1, count)


def _source(name: str) -> str:
    return (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8")


def _cut(ids: list[int]) -> list[list[int]]:
    return [ids[a : a + WINDOW] for a in range(0, len(ids) - WINDOW + 1, WINDOW)]


def _rounds(rows: list[list[list[int]]]) -> list[list[int]]:
    """First windows of all files, then second ones, and so on."""
    longest = max(len(row) for row in rows)
    return [row[i] for i in range(longest) for row in rows if i < len(row)]
