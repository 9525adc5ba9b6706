"""A peer's shared memory, mapped here to be read.

The peer names a descriptor of its own, which is opened by way of /proc: the kernel asks of that no
more than of reading the process's memory, and containers that forbid the latter mostly allow it.
What comes from there is a stranger's until it was checked: it must be a file in memory whose size
is sealed, or a reader could be made to wait, or be killed by a page that has gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

import numpy as np
from numpy.typing import NDArray

from kvass.common.pages import F_GET_SEALS, SEALED
from kvass.common.transport.copies import Bounds, within
from kvass.common.transport.seam import AttachRefused, Copies, Region


class Mapped:
    """One region of a peer. Mutable fields: `_map`, `_whole` (until `close`)."""

    def __init__(self, pid: int, region: Region) -> None:
        """Map the region of a process that the caller holds; raises AttachRefused."""
        self.region = region
        what = f"descriptor {region.file} of process {pid}"
        try:
            # A pipe, say, must not keep this process waiting.
            file = os.open(f"/proc/{pid}/fd/{region.file}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise AttachRefused(f"{what} cannot be opened ({error.strerror})") from None
        try:
            end = region.offset + region.size
            # Seals first: from then on the size is what it is.
            if fcntl.fcntl(file, F_GET_SEALS) & SEALED != SEALED:
                raise AttachRefused(f"{what} may change its size")
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_size < end:
                raise AttachRefused(f"{what} is no memory of {end} bytes")
            if os.fstatvfs(file).f_bsize != mmap.PAGESIZE:
                raise AttachRefused(f"{what} is of reserved huge pages, which may run out")
            self._map = mmap.mmap(file, end, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise AttachRefused(f"{what} cannot be mapped ({error})") from None
        finally:
            os.close(file)
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # small pages serve as well, slower
        self._whole: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._shift = int(self._whole.ctypes.data) + region.offset - region.address

    def sources(self, copies: Copies, bounds: Bounds) -> NDArray[np.uint64] | None:
        """Return where the remote ranges are in this process; None unless all are inside."""
        if not bounds.surely_inside("remote", self.region):
            if not within(copies.remote, copies.sizes, [self.region]).all():
                return None
        return copies.remote + np.uint64(self._shift % (1 << 64))

    def bytes(self, address: int, size: int) -> bytes:
        """Return what the peer has at one of its addresses."""
        start = address - self.region.address + self.region.offset
        return self._whole[start : start + size].tobytes()

    def close(self) -> None:
        """Unmap: the memory is the machine's again when its owner has gone too. No copy may be
        under way."""
        del self._whole
        self._map.close()
