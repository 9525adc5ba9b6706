"""What the log need not wait for: the next file is made, and the last one sealed, while a third is
written.

It refuses to know what is in them. Files that are made ahead hold zeros, which are no file's head:
what a death leaves of them is removed by the next start.
"""

from __future__ import annotations

import logging
from concurrent.futures import Executor, Future
from functools import partial

from kvass.common.errors import Unavailable
from kvass.kvstore.flash.disk import Disk, DiskFile
from kvass.kvstore.flash.segment import Segment

_log = logging.getLogger(__name__)


class Background:
    """Mutable fields: `_sealing` (a file, while its index is being written), `_made` (the next one,
    with its name)."""

    def __init__(self, disk: Disk, threads: Executor, file_bytes: int) -> None:
        self._disk = disk
        self._threads = threads
        self._file_bytes = file_bytes
        self._sealing: tuple[Segment, Future[None]] | None = None
        self._made: tuple[str, Future[DiskFile]] | None = None

    def seal(self, segment: Segment) -> None:
        """Begin to seal a file, once the one before is; raises Unavailable for that one."""
        self.settle()
        self._sealing = (segment, self._threads.submit(segment.seal))

    def settle(self, segment: Segment | None = None) -> None:
        """Wait until the last file (or `segment`, if it is that one) is sealed; raises Unavailable
        when it could not be: then it stays as one given up."""
        if self._sealing is not None and segment in (None, self._sealing[0]):
            (_, sealing), self._sealing = self._sealing, None
            sealing.result()

    def make(self, name: str) -> None:
        """Begin to make a file, which `take` is asked for next."""
        assert self._made is None
        make = partial(self._disk.create, name, self._file_bytes)
        self._made = (name, self._threads.submit(make))

    def take(self, name: str) -> DiskFile:
        """Return a new file; raises Unavailable."""
        made, self._made = self._made, None
        if made is not None:
            assert made[0] == name
            try:
                return made[1].result()
            except Unavailable as error:  # a while ago: there may be room by now
                _log.debug("%s", error)
        return self._disk.create(name, self._file_bytes)

    def close(self) -> None:
        """Remove what was made for nothing; raises Unavailable."""
        self.settle()
        if self._made is None:
            return
        (name, made), self._made = self._made, None
        try:
            file = made.result()
        except Unavailable as error:  # then there is nothing to remove
            _log.debug("%s", error)
        else:
            file.close()
            self._disk.remove(name)
