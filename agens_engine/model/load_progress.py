"""How far loading is: a bar with GB/s and the time left on a terminal, plain lines in the log otherwise.

Neither shows for loads of a second or two.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

log = logging.getLogger(__name__)

QUIET_SECONDS = 2.0
LINE_SECONDS = 10.0


class LoadProgress:
    """Counts bytes read from weight files; `advance` may be called from several threads. Use as a context manager.

    total_bytes  what there is to read
    terminal     None: whether stderr is one
    clock        seconds, monotonic
    """

    def __init__(
        self, what: str, total_bytes: int, *, terminal: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.what, self.total_bytes, self.done_bytes = what, total_bytes, 0
        self._clock, self._start = clock, clock()
        self._next_line = self._start + QUIET_SECONDS
        self._lock = threading.Lock()
        shown = sys.stderr.isatty() if terminal is None else terminal
        self._bar = (
            tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True, delay=QUIET_SECONDS, leave=False)
            if shown
            else None
        )

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self.done_bytes += num_bytes
            if self._bar is not None:
                self._bar.update(num_bytes)
            elif self._clock() >= self._next_line:
                self._next_line = self._clock() + LINE_SECONDS
                log.info("%s", self.line())

    def line(self) -> str:
        """`loading nano: 40 %, 4.0 of 10.0 GB, 0.95 GB/s, 6 s left`."""
        seconds = max(self._clock() - self._start, 1e-9)
        rate = self.done_bytes / seconds
        left = (self.total_bytes - self.done_bytes) / rate if rate else 0.0
        share = 100 * self.done_bytes / self.total_bytes if self.total_bytes else 100.0
        return (
            f"{self.what}: {share:.0f} %, {self.done_bytes / 1e9:.1f} of {self.total_bytes / 1e9:.1f} GB, "
            f"{rate / 1e9:.2f} GB/s, {left:.0f} s left"
        )
