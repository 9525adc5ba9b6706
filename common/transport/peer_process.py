"""Another process on this host: held, so that it stays itself, and its memory read.

The kernel's cross-memory attach (process_vm_readv, Linux 3.2) names a process by its PID alone, and
a PID may be given to a stranger. So a peer is held by a pidfd. When it is taken hold of, it is
matched with the start time in its card and with the start id that it keeps in its own memory; and
as it has not exited after a read, it was the same process all the time before.

It refuses to know threads, deadlines and what the bytes mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvass.common.errors import Invalid, TransferFailed, Unavailable
from kvass.common.transport.identity import Identity, start_ticks
from kvass.common.transport.seam import AttachRefused, Copies, EndpointCard, Region

RANGES_MAX = 1_024  # of one system call: the kernel's IOV_MAX


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The opaque part of a card: how this process is known again, and what may be read of it."""

    start_ticks: int
    page: int  # where it keeps its start id
    regions: tuple[tuple[int, int], ...]  # address, size


class Own:
    """What this process shows to others. The page with its start id lives as long as this."""

    def __init__(self, identity: Identity, regions: list[Region]) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._page.write(identity.start_id.encode())
        self.metadata = Metadata(
            start_ticks=start_ticks(os.getpid()) or 0,
            page=ctypes.addressof(ctypes.c_char.from_buffer(self._page)),
            regions=tuple((region.address, region.size) for region in regions),
        )


class PeerProcess:
    """Mutable fields: `_pidfd` (-1 once closed), `users` (reads under way; the owner counts)."""

    def __init__(self, card: EndpointCard) -> None:
        """Take hold of the card's process; raises Unavailable, AttachRefused, or Invalid for a card
        that is none."""
        try:
            metadata = msgspec.msgpack.decode(card.metadata, type=Metadata)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Invalid(f"card of {card.start_id}: {error}") from None
        self.card = card
        self.users = 0
        self.regions = [Region(address, size) for address, size in metadata.regions]
        self._metadata = metadata
        self._who = f"peer {card.start_id} (process {card.pid})"
        self._pidfd = self._hold()

    def has_exited(self) -> bool:
        """Whether the process is gone, whoever has its PID now."""
        return self._pidfd < 0 or bool(select.select([self._pidfd], [], [], 0)[0])

    def read(self, vectors: Vectors, first: int, stop: int) -> None:
        """Copy ranges [first, stop) into own memory; at most RANGES_MAX of them.

        Blocking, and without the interpreter lock. Raises Unavailable when the process is gone,
        TransferFailed when it has no such memory; the destination's bytes mean nothing then.
        """
        failed = vectors.read(self.card.pid, first, stop)
        if self.has_exited():
            raise Unavailable(f"{self._who} is gone")
        if failed:
            self._identify()  # it loses its memory first when it dies
            raise TransferFailed(f"a read from {self._who}: {failed}")

    def close(self) -> None:
        """Let go of the process; not while it has users."""
        assert not self.users
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _hold(self) -> int:
        pid = self.card.pid
        try:
            pidfd = os.pidfd_open(pid)
        except (ProcessLookupError, OverflowError) as error:
            raise Unavailable(f"{self._who} is gone: {error}") from None
        except OSError as error:
            raise AttachRefused(f"{self._who}: no pidfd ({error})") from None
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, pidfd)
            if start_ticks(pid) != self._metadata.start_ticks:
                raise Unavailable(f"{self._who} is gone; another process has its PID")
            self._identify()
            if select.select([pidfd], [], [], 0)[0]:
                raise Unavailable(f"{self._who} is gone: it has just exited")
            undo.pop_all()
        return pidfd

    def _identify(self) -> None:
        """Raise unless the process with the card's PID keeps the card's start id in its memory."""
        expected = np.frombuffer(self.card.start_id.encode(), dtype=np.uint8)
        found = np.zeros_like(expected)
        local, remote, size = found.ctypes.data, self._metadata.page, len(expected)
        vectors = Vectors(Copies(*(np.array([n], dtype=np.uint64) for n in (local, remote, size))))
        failed = vectors.read(self.card.pid, 0, 1)
        if failed and failed.errno in (errno.EPERM, errno.ENOSYS):
            reason = f"{self._who}: the kernel refuses cross-memory attach ({failed})"
            raise AttachRefused(reason) from None
        if failed:
            raise Unavailable(f"{self._who} is gone: {failed}") from None
        if not np.array_equal(found, expected):
            raise Unavailable(f"{self._who} is gone: the process says that it is another one")


class Vectors:
    """Copies as the system call takes them: pairs of address and size, 16 bytes each. Immutable."""

    def __init__(self, copies: Copies) -> None:
        self._sizes = copies.sizes
        self._local = _pairs(copies.local, copies.sizes)
        self._remote = _pairs(copies.remote, copies.sizes)

    def read(self, pid: int, first: int, stop: int) -> OSError | None:
        """Copy ranges [first, stop); return what went wrong, also when only a part was copied."""
        offset, count = first * self._local.strides[0], stop - first
        copied = _process_vm_readv(
            pid,
            self._local.ctypes.data + offset,
            count,
            self._remote.ctypes.data + offset,
            count,
            0,
        )
        if copied < 0:
            number = ctypes.get_errno()
            return OSError(number, os.strerror(number))
        size = int(self._sizes[first:stop].sum())
        if copied < size:
            return OSError(errno.EFAULT, f"{copied} of {size} bytes")
        return None


def _pairs(addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(np.stack([addresses, sizes], axis=1))


_process_vm_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t
_process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
