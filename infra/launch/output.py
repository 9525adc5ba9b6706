"""Lines to standard output that never hold up whoever says them.

A pipe that nobody reads fills after 64 KiB; the supervisor's event loop also runs the broker and
must not wait for it. So a thread writes, from a bounded queue, and what does not fit is counted.
"""

from __future__ import annotations

import queue
import threading
from types import TracebackType
from typing import Self, TextIO

LINES_QUEUED = 2000  # some 200 KB; more means that nobody is looking
CLOSE_TIMEOUT_S = 2.0


class Output:
    """Mutable fields: `_lost`, the lines dropped since the last one that fitted."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(LINES_QUEUED)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._lines.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            return  # nobody reads: the thread is a daemon and ends with the process
        self._thread.join(CLOSE_TIMEOUT_S)

    def say(self, line: str) -> None:
        """Write a line some time soon."""
        if self._lost:
            line = f"kvass: {self._lost} lines were lost: nobody read them\n{line}"
        try:
            self._lines.put_nowait(line)
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                pass  # the reader is gone; the cluster goes on without one
