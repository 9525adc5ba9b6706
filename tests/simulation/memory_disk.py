"""A disk in memory that forgets, tears and fails when it is told to: for tests and the simulation.

A process that is killed leaves what it wrote; a machine that loses power leaves what was synced and
an arbitrary part of the rest. Both are deterministic here: `budget` says after how many written
bytes the process dies, `crash` which unsynced writes get through, and how far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvass.common.errors import Unavailable
from kvass.kvstore.flash.folder import DiskFull

# Creating, removing and syncing a file cost this many bytes of the budget: so death comes there,
# too.
STEP_BYTES = 1


class Killed(BaseException):
    """The process that used the disk has died; no code of ours may go on after it."""


@dataclass(slots=True, eq=False)
class _Content:
    """Mutable fields: `data` (as readers see it), `kept` (what is sure to last), `writes` since the
    last sync, as (offset, bytes), `lasts` (it has been synced once)."""

    data: bytearray
    kept: bytearray
    writes: list[tuple[int, bytes]] = field(default_factory=list)
    lasts: bool = False


class MemoryFile:
    """See `MemoryDisk`."""

    def __init__(self, disk: MemoryDisk, name: str, content: _Content) -> None:
        self._disk = disk
        self._name = name
        self._content = content

    def read(self, offset: int, into: memoryview) -> int:
        self._disk.attempt("read", self._name)
        found = self._content.data[offset : offset + len(into)]
        into[: len(found)] = found
        return len(found)

    def write(self, offset: int, data: memoryview) -> None:
        self._disk.attempt("write", self._name)
        if self._disk.is_full:
            raise DiskFull(f"flash: cannot write {self._name}: No space left on device")
        allowed = self._disk.spend(len(data))
        part = bytes(data[:allowed])
        self._content.data[offset : offset + len(part)] = part
        self._content.writes.append((offset, part))
        if allowed < len(data):
            raise Killed

    def sync(self) -> None:
        self._disk.attempt("sync", self._name)
        self._disk.step()
        self._content.kept = bytearray(self._content.data)
        self._content.writes.clear()
        self._content.lasts = True

    def close(self) -> None:
        pass


class MemoryDisk:
    """Mutable fields: `files` by name; `budget` (bytes that may still be written before the process
    dies, None: no end), `room` (for all files together, None: no end), `is_full` (it
    writes nothing, promised or not), `written`, `refuses` (says
    why an operation on a file fails, or None), `renewals` (see `Disk`)."""

    def __init__(self) -> None:
        self.files: dict[str, _Content] = {}
        self.budget: int | None = None
        self.room: int | None = None
        self.is_full = False
        self.written = 0
        self.renewals = 0
        self.refuses: Callable[[str, str], str | None] = lambda what, name: None

    def names(self) -> list[str]:
        return list(self.files)

    def create(self, name: str, size: int) -> MemoryFile:
        self.attempt("create", name)
        self.step()
        assert name not in self.files
        if self.room is not None and self.taken() + size > self.room:
            raise DiskFull(f"flash: cannot create {name}: No space left on device")
        self.files[name] = _Content(bytearray(size), bytearray(size))
        return MemoryFile(self, name, self.files[name])

    def open(self, name: str) -> MemoryFile:
        self.attempt("open", name)
        return MemoryFile(self, name, self.files[name])

    def remove(self, name: str) -> None:
        self.attempt("remove", name)
        self.step()
        del self.files[name]

    def close(self) -> None:
        pass

    def taken(self) -> int:
        """Return the bytes of all files."""
        return sum(len(content.data) for content in self.files.values())

    # --- what a test does to it ---

    def attempt(self, what: str, name: str) -> None:
        """Fail an operation that is to fail."""
        why = self.refuses(what, name)
        if why is not None:
            raise Unavailable(f"flash: cannot {what} {name}: {why}")

    def spend(self, size: int) -> int:
        """Take bytes from the budget; returns how many there were."""
        allowed = size if self.budget is None else min(size, self.budget)
        if self.budget is not None:
            self.budget -= allowed
        self.written += allowed
        return allowed

    def step(self) -> None:
        """Take a step that happens whole or not at all."""
        if self.spend(STEP_BYTES) < STEP_BYTES:
            raise Killed

    def crash(self, got_through: Callable[[int], int]) -> None:
        """Lose power: of each unsynced write of n bytes the first `got_through(n)` last; a file
        that was never synced is gone."""
        self.budget = None
        self.files = {name: each for name, each in self.files.items() if each.lasts}
        for content in self.files.values():
            for offset, data in content.writes:
                part = data[: got_through(len(data))]
                content.kept[offset : offset + len(part)] = part
            content.data = bytearray(content.kept)
            content.writes.clear()
