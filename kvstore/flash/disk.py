"""Where the log's bytes are: one folder of files. The seam, and the real disk.

Reads and writes are of whole pages, from and into memory that starts on a page: so they can pass
the page cache by. Every fault of a disk (full, an I/O error, a short write, no permission) is
Unavailable, with what was done to which file in its message; what follows is the log's matter.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from kvass.common.errors import Unavailable

PAGE = 4096  # the unit of O_DIRECT on every file system in use; a flash page is no smaller
LOCK_NAME = "lock"


class DiskFile(Protocol):
    """One file of fixed size. Reads may come from any thread, beside writes."""

    def read(self, offset: int, into: memoryview) -> int:
        """Fill `into`; returns the bytes that there are, fewer only at the file's end."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data`; lasting only after `sync`."""
        ...

    def sync(self) -> None:
        """Make what was written last through a power cut."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Disk(Protocol):
    """A folder that belongs to one log. Removing lasts when it returns, creating after a `sync`."""

    def names(self) -> list[str]:
        """Return the names of all files, in no order."""
        ...

    def create(self, name: str, size: int) -> DiskFile:
        """Make a file of zeros, with all of its space taken."""
        ...

    def open(self, name: str) -> DiskFile:
        """Open a file that is there."""
        ...

    def remove(self, name: str) -> None:
        """Give a file's space back; who has it open may go on reading."""
        ...

    def close(self) -> None:
        """Let another process have the folder."""
        ...


class FolderTaken(Unavailable):
    """Another running node has the folder."""


def page_memory(size: int) -> memoryview:
    """Return zeroed memory that starts on a page, as direct I/O needs it."""
    return memoryview(mmap.mmap(-1, size))


class RealFile:
    """An open file, past the page cache where the file system allows that. Mutable field: `_is_new`
    (its name does not last yet)."""

    def __init__(self, folder: Path, name: str, descriptor: int, *, is_new: bool) -> None:
        self._folder = folder
        self._name = name
        self._descriptor = descriptor
        self._is_new = is_new

    def read(self, offset: int, into: memoryview) -> int:
        done = 0
        with _mapped("read", self._name):
            while done < len(into):
                count = os.preadv(self._descriptor, [into[done:]], offset + done)
                done += count
                # At the end of a file that was cut short a count need not be of whole pages.
                if count == 0 or count % PAGE:
                    break
        return done

    def write(self, offset: int, data: memoryview) -> None:
        assert offset % PAGE == 0 and len(data) % PAGE == 0
        done = 0
        with _mapped("write", self._name):
            while done < len(data):
                count = os.pwrite(self._descriptor, data[done:], offset + done)
                if count <= 0 or count % PAGE:
                    raise OSError(0, f"{count} of {len(data) - done} bytes were written")
                done += count

    def sync(self) -> None:
        with _mapped("sync", self._name):
            os.fdatasync(self._descriptor)
            if self._is_new:
                sync_folder(self._folder)
                self._is_new = False

    def close(self) -> None:
        os.close(self._descriptor)


class RealDisk:
    """A folder of a local file system, which it makes if need be, and locks; raises Unavailable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _mapped("use", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise FolderTaken(f"{folder} belongs to another store node that is running") from None

    def names(self) -> list[str]:
        with _mapped("list", str(self._folder)):
            return [name for name in os.listdir(self._folder) if name != LOCK_NAME]

    def create(self, name: str, size: int) -> RealFile:
        descriptor = self._opened(name, os.O_CREAT | os.O_EXCL)
        try:
            with _mapped("create", name):
                os.posix_fallocate(descriptor, 0, size)
        except Unavailable:
            os.close(descriptor)
            with contextlib.suppress(Unavailable):
                self.remove(name)
            raise
        return RealFile(self._folder, name, descriptor, is_new=True)

    def open(self, name: str) -> RealFile:
        return RealFile(self._folder, name, self._opened(name, 0), is_new=False)

    def remove(self, name: str) -> None:
        with _mapped("remove", name):
            (self._folder / name).unlink(missing_ok=True)
            sync_folder(self._folder)

    def close(self) -> None:
        os.close(self._lock)

    def _opened(self, name: str, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CLOEXEC
        path = self._folder / name
        with _mapped("open", name):
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system that knows no direct I/O
                    raise
            # The failed call may have made the file all the same.
            return os.open(path, flags & ~os.O_EXCL, 0o600)


def sync_folder(folder: Path) -> None:
    """Make the names of a folder's files last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _mapped(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"flash: cannot {what} {name}: {error.strerror or error}") from None
