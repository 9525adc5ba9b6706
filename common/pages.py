"""Memory of this process that blocks lie in: one mapping, on huge pages where the host gives them.

    private_pages   nobody else's; the kernel copies out of it for a peer (cross-memory attach)
    shared_pages    a sealed memory file, which a peer of this host maps to read

What is read by others is best shared: a reader then copies and sums in one pass, without the
kernel. Few hosts give huge pages to shared memory, though (`shmem_enabled` under
/sys/kernel/mm/transparent_hugepage), and what is computed with is read faster on those.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from kvass.common.transport.seam import Region

HUGE_PAGE = 2 << 20  # x86-64 and most arm64 kernels
# From linux/fcntl.h; Python 3.11 has no names for them. Its size never changes again: a reader of
# memory that was cut off would be killed.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEALED = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


class Pages:
    """Pages that are zero, and taken from the machine when they are first touched.

    `view` is `size` bytes from `address` on, which is a huge page's start. `file` is -1 for private
    ones. Mutable fields: all, until `close`.
    """

    def __init__(self, size: int, file: int) -> None:
        self.file = file
        self.size = size
        self._is_closed = False
        # One huge page more, so that the used part can start on a boundary of one.
        if file < 0:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._map = mmap.mmap(-1, size + HUGE_PAGE, flags=flags)
        else:
            self._map = mmap.mmap(file, size + HUGE_PAGE, flags=mmap.MAP_SHARED)
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without transparent huge pages: small ones serve as well, slower
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._skip = -start % HUGE_PAGE
        self.address = start + self._skip
        self.view = memoryview(self._map)[self._skip : self._skip + size]

    @property
    def region(self) -> Region:
        """Return what transports register."""
        return Region(self.address, self.size, self.file, self._skip)

    def close(self) -> None:
        """Give the pages back; no transfer may be in flight.

        The address range goes with the last view of it. Until then private pages read as zeros;
        shared ones stay, here and with every peer that has mapped them.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self.file < 0:
            self._map.madvise(mmap.MADV_DONTNEED)
        else:
            os.close(self.file)
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            return  # somebody holds a view


def private_pages(size: int) -> Pages:
    """Map memory of this process alone. Raises OSError when the host refuses it."""
    return Pages(size, -1)


def shared_pages(size: int) -> Pages:
    """Map memory that peers may map as well. Raises OSError when the host refuses it."""
    file = os.memfd_create("kvass", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size + HUGE_PAGE)
        fcntl.fcntl(file, F_ADD_SEALS, SEALED)
        return Pages(size, file)
    except BaseException:
        os.close(file)
        raise
