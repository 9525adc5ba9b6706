"""How bytes get to the end of a file: one buffer is being filled while others are written.

It keeps the bound on unsynced bytes. It refuses to know what the bytes are.
"""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import Executor, Future
from functools import partial

from kvass.common.errors import Unavailable
from kvass.kvstore.flash.disk import PAGE, DiskFile, page_memory

# Large beside what a write costs besides its bytes, small beside a segment.
BUFFER_BYTES = 4 << 20
DEPTH = 4  # writes in flight: one alone leaves the disk idle between two


class Appender:
    """Mutable fields: `position` (where the next byte goes), `written` (all before is in
    the file), `unsynced` (bytes in the file, or on
    their way, since the last sync), `_buffer` (which is being filled) and `_filled` (of it),
    `_free` (buffers), `_writing` (writes in flight, with their buffers, oldest first)."""

    def __init__(
        self, threads: Executor, unsynced_max: int, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        assert buffer_bytes % PAGE == 0
        self._threads = threads
        self._unsynced_max = max(unsynced_max, buffer_bytes)
        self._buffer = page_memory(buffer_bytes)
        self._free = [page_memory(buffer_bytes) for _ in range(DEPTH)]
        self._writing: deque[tuple[Future[None], memoryview, int]] = deque(maxlen=DEPTH + 1)
        self._filled = 0
        self._file: DiskFile | None = None
        self.position = 0
        self.written = 0
        self.unsynced = 0

    def start(self, file: DiskFile) -> None:
        """Append to a new file from its beginning; what came before is written, or given up."""
        assert not self._writing and not self._filled
        self._file, self.position, self.written, self.unsynced = file, 0, 0, 0

    def add(self, data: bytes | memoryview) -> None:
        """Copy bytes into the buffer, and start a write whenever it is full."""
        view = memoryview(data)
        while len(view):
            buffer = self._buffer
            count = min(len(view), len(buffer) - self._filled)
            buffer[self._filled : self._filled + count] = view[:count]
            self._filled += count
            self.position += count
            view = view[count:]
            if self._filled == len(buffer):
                self._write()

    def pad(self) -> None:
        """Fill the last page up with zeros."""
        self.add(bytes(-self.position % PAGE))

    def flush(self) -> None:
        """Return when all bytes are in the file; raises Unavailable when they are not."""
        assert self.position % PAGE == 0
        self._write()
        while self._writing:
            self._wait()

    def sync(self) -> None:
        """As `flush`, and they last."""
        self.flush()
        assert self._file is not None
        if self.unsynced:
            self._file.sync()
            self.unsynced = 0

    def give_up(self) -> None:
        """Forget what is not in the file yet; nothing is being written when this returns."""
        self._filled = 0
        while self._writing:
            with contextlib.suppress(Unavailable):
                self._wait()

    def _write(self) -> None:
        """Start writing the buffer; returns when there is another one to fill."""
        size = self._filled
        if not size:
            return
        file = self._file
        assert file is not None
        if self.unsynced and self.unsynced + size > self._unsynced_max:
            while self._writing:
                self._wait()
            file.sync()
            self.unsynced = 0
        while not self._free:
            self._wait()
        buffer, self._buffer = self._buffer, self._free.pop()
        self._filled = 0
        self.unsynced += size
        write = partial(file.write, self.position - size, buffer[:size])
        self._writing.append((self._threads.submit(write), buffer, self.position))

    def _wait(self) -> None:
        """Wait for the oldest write."""
        writing, buffer, end = self._writing.popleft()
        try:
            writing.result()
        finally:
            self._free.append(buffer)
        self.written = end
