"""Where the log's bytes are: one folder of files. The seam, and the real disk.

Reads and writes are of whole pages, from and into memory that starts on a page: so they can pass
the page cache by. Every fault of a disk (full, an I/O error, a short write, no permission) is
Unavailable, with what was done to which file in its message; what follows is the log's matter.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
from pathlib import Path
from typing import Protocol

from kvass.common.errors import Unavailable
from kvass.kvstore.flash.folder import Folder, mapped

PAGE = 4096  # the unit of O_DIRECT on every file system in use; a flash page is no smaller
FILES_MAX = 1 << 20  # of one log: of 64 MiB each, 64 TiB


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
    """A folder that belongs to one log. Removing lasts when it returns, creating after a `sync`.
    `renewals`: how often the folder was found to be gone, and made again, an empty one."""

    @property
    def renewals(self) -> int: ...

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


def page_memory(size: int) -> memoryview:
    """Return zeroed memory that starts on a page, as direct I/O needs it."""
    return memoryview(mmap.mmap(-1, size))


class RealFile:
    """An open file, past the page cache where the file system allows that. Mutable field: `_is_new`
    (its name does not last yet)."""

    def __init__(self, folder: Folder, name: str, descriptor: int, *, is_new: bool) -> None:
        self._folder = folder
        self._path = folder.path / name
        self._descriptor = descriptor
        self._is_new = is_new

    def read(self, offset: int, into: memoryview) -> int:
        done = 0
        with mapped("read", self._path):
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
        with mapped("write", self._path):
            while done < len(data):
                count = os.pwrite(self._descriptor, data[done:], offset + done)
                if count <= 0 or count % PAGE:
                    raise OSError(0, f"{count} of {len(data) - done} bytes were written")
                done += count

    def sync(self) -> None:
        with mapped("sync", self._path):
            try:
                os.fdatasync(self._descriptor)
            except OSError:
                # What the page cache holds passes for written from now on: let reads see the disk.
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                raise
        if self._is_new:
            self._folder.sync()
            self._is_new = False

    def close(self) -> None:
        os.close(self._descriptor)


class RealDisk:
    """A folder of a local file system, which it makes if need be, and locks; raises Unavailable.
    A folder that was removed meanwhile is made again when the next file is."""

    def __init__(self, path: Path) -> None:
        self._folder = Folder(path)

    @property
    def renewals(self) -> int:
        return self._folder.renewals

    def names(self) -> list[str]:
        return self._folder.names()

    def create(self, name: str, size: int) -> RealFile:
        descriptor = self._folder.create(name)
        try:
            with mapped("create", self._folder.path / name):
                os.posix_fallocate(descriptor, 0, size)
        except Unavailable:
            os.close(descriptor)
            with contextlib.suppress(Unavailable):
                self.remove(name)
            raise
        return RealFile(self._folder, name, descriptor, is_new=True)

    def open(self, name: str) -> RealFile:
        return RealFile(self._folder, name, self._folder.open(name), is_new=False)

    def remove(self, name: str) -> None:
        self._folder.remove(name)

    def close(self) -> None:
        self._folder.close()


def open_files_max() -> int:
    """Return how many files a log may have open: half of what this process may; the rest is for
    connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES_MAX if soft == resource.RLIM_INFINITY else min(soft // 2, FILES_MAX)
