"""A store node's memory: one mapping, from start to end. What its slots hold is the index's
matter."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from kvass.common.errors import Invalid
from kvass.common.transport.seam import Region

HUGE_PAGE = 2 << 20
# Of the memory that the host can give now; the rest is for the processes beside and the page cache.
HOST_SHARE = 0.9


class Slab:
    """Anonymous memory, on 2 MiB pages where the host gives them. `close` it after its
    transports."""

    def __init__(self, size_bytes: int) -> None:
        _check_host(size_bytes)
        # One huge page more, so that the used part can start on a boundary of one.
        try:
            self._memory = mmap.mmap(
                -1, size_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise Invalid(
                f"store.slab_bytes is {size_bytes}: the host refuses it: {error}"
            ) from None
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        skip = -start % HUGE_PAGE
        self.address = start + skip
        self.size = size_bytes
        self.view = memoryview(self._memory)[skip : skip + size_bytes]

    @property
    def region(self) -> Region:
        """Return what transports register."""
        return Region(self.address, self.size)

    def copy(self, source: int, target: int, size: int) -> None:
        """Copy bytes from one offset to another; the two may overlap."""
        ctypes.memmove(self.address + target, self.address + source, size)

    def close(self) -> None:
        """Give the memory back."""
        self.view.release()
        self._memory.close()


def _check_host(size_bytes: int) -> None:
    """Refuse a slab that the host cannot carry, before the kernel kills somebody for it."""
    available = available_bytes()
    if not 0 < size_bytes <= available * HOST_SHARE:
        raise Invalid(
            f"store.slab_bytes is {size_bytes}; this host can give {available} bytes now, of which "
            f"at most {HOST_SHARE:.0%} may be a slab"
        )


def available_bytes() -> int:
    """Return the memory that the host (or this process's control group) can still give."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    usage = Path("/sys/fs/cgroup/memory.current")
    try:
        available = min(available, int(limit.read_text()) - int(usage.read_text()))
    except (OSError, ValueError):
        pass  # no control group of its own, or one without a limit ("max")
    return available
