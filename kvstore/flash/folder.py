"""A log's folder on a local file system: made, locked, and made again when somebody removes it.

Files are reached through the folder's descriptor, never through its path: so what comes to stand
at that path meanwhile, another node's folder among others, is not written into. It refuses to know
what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from kvass.common.errors import Unavailable

_log = logging.getLogger(__name__)

LOCK_NAME = "lock"
LOCK_BYTES_MAX = 4096  # of what its owner may have written into the lock file
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class FolderTaken(Unavailable):
    """Another running node has the folder."""


class DiskFull(Unavailable):
    """There is no more room on the disk, or no more for this user."""


class Folder:
    """Mutable fields, under `_guard`: `_descriptor` and `_lock`, which the folder is locked by, and
    `renewals`, how often it was made again and both are others. Raises Unavailable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.renewals = 0
        self._guard = threading.Lock()
        self._descriptor, self._lock = self._taken()

    def _taken(self) -> tuple[int, int]:
        with mapped("use", self.path), contextlib.ExitStack() as opened:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, _FLAGS)
            opened.callback(os.close, descriptor)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            lock = os.open(LOCK_NAME, flags, 0o600, dir_fd=descriptor)
            opened.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise FolderTaken(
                    f"{self.path} belongs to another store node that is running"
                ) from None
            opened.pop_all()
        return descriptor, lock

    def names(self) -> list[str]:
        """Return the names of its files; what is no file is left alone, and said."""
        with self._guard, mapped("list", self.path), os.scandir(self._descriptor) as entries:
            found = [(entry.name, entry.is_file(follow_symlinks=False)) for entry in entries]
        for name, is_file in found:
            if not is_file:
                _log.warning("flash: %s is not a file: it is left alone", self.path / name)
        return [name for name, is_file in found if is_file and name != LOCK_NAME]

    def create(self, name: str) -> int:
        """Make a file, and before it the folder, if that is gone; returns its descriptor."""
        with self._guard, mapped("create", self.path / name):
            if not self._is_ours():
                self._renew()
            return self._opened(name, os.O_CREAT | os.O_EXCL)

    def open(self, name: str) -> int:
        """Open a file that is there; returns its descriptor."""
        with self._guard, mapped("open", self.path / name):
            return self._opened(name, 0)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there; it lasts."""
        with self._guard, mapped("remove", self.path / name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._descriptor)
            os.fsync(self._descriptor)

    def sync(self) -> None:
        """Make the names of its files last."""
        with self._guard, mapped("sync", self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Let another process have it."""
        with self._guard:
            os.close(self._descriptor)
            os.close(self._lock)

    def _opened(self, name: str, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(name, flags | os.O_DIRECT, 0o600, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that knows no direct I/O
                raise
        # The failed call may have made the file all the same.
        return os.open(name, flags & ~os.O_EXCL, 0o600, dir_fd=self._descriptor)

    def _is_ours(self) -> bool:
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # it cannot be told: what was opened serves
        return os.path.samestat(there, os.fstat(self._descriptor))

    def _renew(self) -> None:
        descriptor, lock = self._taken()
        os.pwrite(lock, os.pread(self._lock, LOCK_BYTES_MAX, 0), 0)
        os.close(self._descriptor)
        os.close(self._lock)
        self._descriptor, self._lock = descriptor, lock
        self.renewals += 1
        _log.error("flash: %s was removed, or another put in its place: it is made anew", self.path)


@contextlib.contextmanager
def mapped(what: str, path: Path) -> Iterator[None]:
    """Say of an error of the system what was done to which file."""
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else Unavailable
        raise kind(f"flash: cannot {what} {path}: {error.strerror or error}") from None
