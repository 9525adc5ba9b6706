"""Another process on this host: held, so that it stays itself, and its memory read.

Shared memory is mapped (`mapped.py`). Private memory is the kernel's to copy, by cross-memory
attach (process_vm_readv, Linux 3.2), which names a process by its PID alone, and a PID may be given
to a stranger. So a peer is held by a pidfd. When it is taken hold of, it is matched with the start
time in its card and with the start id that it keeps in its own memory; and as it has not exited
after a read, it was the same process all the time before.

It refuses to know threads, deadlines and what the bytes mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvass.common.checksum import SHORT, Sums, copy_ranges, sum_ranges
from kvass.common.errors import Invalid, TransferFailed, Unavailable
from kvass.common.native import library
from kvass.common.pages import shared_pages
from kvass.common.transport.copies import Bounds, within
from kvass.common.transport.identity import Identity, start_ticks
from kvass.common.transport.mapped import Mapped
from kvass.common.transport.seam import AttachRefused, Copies, EndpointCard, Region

RANGES_MAX = 1_024  # of one system call: the kernel's IOV_MAX
REGIONS_MAX = 8  # of a peer: each takes a descriptor and a mapping; a pool or a slab is one


class Shown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A `Region` as a card has it."""

    address: Annotated[int, Meta(ge=0, lt=1 << 56)]
    size: Annotated[int, Meta(gt=0, lt=1 << 48)]
    file: Annotated[int, Meta(ge=-1, lt=1 << 31)]
    offset: Annotated[int, Meta(ge=0, lt=1 << 48)]


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The opaque part of a card: how this process is known again, and what may be read of it."""

    start_ticks: int
    page: Shown  # where it keeps its start id
    regions: Annotated[tuple[Shown, ...], Meta(max_length=REGIONS_MAX)]


class Own:
    """What this process shows to others. The page with its start id lives as long as this."""

    def __init__(self, identity: Identity, regions: list[Region]) -> None:
        self._page = shared_pages(len(identity.start_id))
        self._page.view[:] = identity.start_id.encode()
        self.metadata = Metadata(
            start_ticks=start_ticks(os.getpid()) or 0,
            page=_shown(self._page.region),
            regions=tuple(_shown(region) for region in regions),
        )

    def close(self) -> None:
        """Show nothing more."""
        self._page.close()


class PeerProcess:
    """Mutable fields: `_pidfd` (-1 once closed), `_mapped` (what is mapped of it), `users` (reads
    under way; the owner counts)."""

    def __init__(self, card: EndpointCard) -> None:
        """Take hold of the card's process; raises Unavailable, AttachRefused, or Invalid for a card
        that is none."""
        try:
            metadata = msgspec.msgpack.decode(card.metadata, type=Metadata)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Invalid(f"card of {card.start_id}: {error}") from None
        self.card = card
        self.users = 0
        self.regions = [_region(each) for each in metadata.regions]
        self._metadata = metadata
        self._who = f"peer {card.start_id} (process {card.pid})"
        self._mapped: list[Mapped] = []
        self._pidfd = self._hold()

    @property
    def pidfd(self) -> int:
        """Return a descriptor that is readable once the process is gone."""
        return self._pidfd

    def has_exited(self) -> bool:
        """Whether the process is gone, whoever has its PID now."""
        return self._pidfd < 0 or _is_readable(self._pidfd)

    def reading(self, copies: Copies, bounds: Bounds, sums: Sums) -> Reading:
        """Return what copies ranges of registered memory; `sums` takes their checksums. Raises
        Invalid for ranges that the peer has not registered."""
        size = bounds.size
        for mapped in self._mapped:
            sources = mapped.sources(copies, bounds)
            if sources is not None:
                return Reading(self.card.pid, copies, sources, sums, size, is_mapped=True)
        if not within(copies.remote, copies.sizes, self.regions).all():
            raise Invalid(f"{self._who} has not registered one of the ranges")
        return Reading(self.card.pid, copies, copies.remote, sums, size, is_mapped=False)

    def read(self, reading: Reading, first: int, stop: int) -> None:
        """Copy ranges [first, stop) into own memory; at most RANGES_MAX of them.

        Blocking, and without the interpreter lock. Raises Unavailable when the process is gone,
        TransferFailed when it has no such memory; the destination's bytes mean nothing then.
        """
        failed = reading.copy(first, stop)
        if self.has_exited():
            reading.sums.whole[first:stop] = False
            raise Unavailable(f"{self._who} is gone")
        if failed:
            self._identify_attached()  # it loses its memory first when it dies
            raise TransferFailed(f"a read from {self._who}: {failed}")

    def close(self) -> None:
        """Let go of the process and its memory; not while it has users."""
        assert not self.users
        for mapped in self._mapped:
            mapped.close()
        self._mapped.clear()
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
            undo.callback(self._unmap)
            self._map()
            if _is_readable(pidfd):
                raise Unavailable(f"{self._who} is gone: it has just exited")
            undo.pop_all()
        return pidfd

    def _map(self) -> None:
        """Map what is shared, and see that the rest can be read."""
        page = _region(self._metadata.page)
        try:
            shown = Mapped(self.card.pid, page)
            try:
                self._check(shown.bytes(page.address, len(self.card.start_id)))
            finally:
                shown.close()
            for region in self.regions:
                if region.file >= 0:
                    self._mapped.append(Mapped(self.card.pid, region))
        except AttachRefused:
            self._unmap()  # all of it is the kernel's to copy then, if it may
        if len(self._mapped) < len(self.regions):
            self._identify_attached()

    def _unmap(self) -> None:
        for mapped in self._mapped:
            mapped.close()
        self._mapped.clear()

    def _identify_attached(self) -> None:
        """Raise unless the process with the card's PID keeps the card's start id in its memory."""
        page = self._metadata.page
        found = np.zeros(len(self.card.start_id), dtype=np.uint8)
        local, remote, size = found.ctypes.data, page.address, len(found)
        copies = Copies(*(np.array([n], dtype=np.uint64) for n in (local, remote, size)))
        failed = _read_vectors(self.card.pid, copies, 0, 1)
        if failed and failed.errno in (errno.EPERM, errno.ENOSYS):
            reason = f"{self._who}: the kernel refuses cross-memory attach ({failed})"
            raise AttachRefused(reason) from None
        if failed:
            raise Unavailable(f"{self._who} is gone: {failed}") from None
        self._check(found.tobytes())

    def _check(self, start_id: bytes) -> None:
        if not start_id or start_id != self.card.start_id.encode():
            raise Unavailable(f"{self._who} is gone: the process says that it is another one")


@dataclass(frozen=True, slots=True)
class Reading:
    """Ranges to copy out of a process, and where their checksums go.

    `sources`: addresses in this process if the memory `is_mapped`, else in the other one. `size`:
    of each range; 0 where they differ.
    """

    pid: int
    copies: Copies
    sources: NDArray[np.uint64]
    sums: Sums
    size: int
    is_mapped: bool

    @property
    def size_bytes(self) -> int:
        return self.size * len(self.copies.sizes) or int(self.copies.sizes.sum())

    def slices(self, slice_bytes: int) -> Iterator[tuple[int, int]]:
        """Cut the ranges into pieces [first, stop) of about so many bytes, at most RANGES_MAX."""
        count = len(self.copies.sizes)
        if self.size:
            step = min(max(slice_bytes // self.size, 1), RANGES_MAX)
            yield from ((first, min(first + step, count)) for first in range(0, count, step))
            return
        ends = np.cumsum(self.copies.sizes)
        first = 0
        while first < count:
            taken = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, np.uint64(taken + slice_bytes), side="right"))
            stop = min(max(stop, first + 1), first + RANGES_MAX)
            yield first, stop
            first = stop

    def copy(self, first: int, stop: int) -> OSError | None:
        """Copy and sum ranges [first, stop); return what went wrong, also when only a part was
        copied."""
        if self.size:
            return self._copy(self.size, first, stop)
        for place in range(first, stop):  # ranges of one size are copied by one call
            failed = self._copy(int(self.copies.sizes[place]), place, place + 1)
            if failed:
                return failed
        return None

    def _copy(self, size: int, first: int, stop: int) -> OSError | None:
        targets, groups = self.copies.local, self.sums.groups
        if self.is_mapped:
            copy_ranges(targets, self.sources, size, self.sums, first, stop)
            return None
        compiled = _read_sum()
        if compiled is not None and size // groups > SHORT:
            return self._read(compiled, size // groups, first, stop)
        failed = _read_vectors(self.pid, self.copies, first, stop)
        if failed is None:
            found = sum_ranges(targets[first:stop].tolist(), size // groups, groups)
            self.sums.values[first:stop] = found
            self.sums.whole[first:stop] = True
        return failed

    def _read(
        self, compiled: Callable[..., int], group_size: int, first: int, stop: int
    ) -> OSError | None:
        places, groups, error = 8 * first, self.sums.groups, ctypes.c_int(0)
        whole = compiled(
            self.pid,
            stop - first,
            self.copies.local.ctypes.data + places,
            self.sources.ctypes.data + places,
            group_size,
            groups,
            self.sums.values.ctypes.data + places * groups,
            ctypes.byref(error),
        )
        self.sums.whole[first : first + whole] = True
        return OSError(error.value, os.strerror(error.value)) if error.value else None


def _read_vectors(pid: int, copies: Copies, first: int, stop: int) -> OSError | None:
    """Copy ranges by one system call; return what went wrong, also when only a part was copied."""
    sizes = copies.sizes[first:stop]
    local = np.stack([copies.local[first:stop], sizes], axis=1)
    remote = np.stack([copies.remote[first:stop], sizes], axis=1)
    count = stop - first
    copied = _process_vm_readv(pid, local.ctypes.data, count, remote.ctypes.data, count, 0)
    if copied < 0:
        number = ctypes.get_errno()
        return OSError(number, os.strerror(number))
    if copied < int(sizes.sum()):
        return OSError(errno.EFAULT, f"{copied} of {int(sizes.sum())} bytes")
    return None


def _is_readable(pidfd: int) -> bool:
    """Look without `select`, which ends at descriptor 1,023."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _shown(region: Region) -> Shown:
    return Shown(region.address, region.size, region.file, region.offset)


def _region(shown: Shown) -> Region:
    return Region(shown.address, shown.size, shown.file, shown.offset)


@functools.cache
def _read_sum() -> Callable[..., int] | None:
    size, address, number = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int
    return library.function(
        "kvass_read_sum", size, number, size, address, address, size, size, address, address
    )


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
