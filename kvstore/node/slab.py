"""A store node's memory: one mapping, from start to end. What its slots hold is the index's
matter."""

from __future__ import annotations

import ctypes

from kvass.common.control_groups import available_bytes
from kvass.common.errors import Invalid
from kvass.common.pages import shared_pages
from kvass.common.transport.seam import Region

# Of the memory that the host can give now; the rest is for the processes beside and the page cache.
HOST_SHARE = 0.9


class Slab:
    """Memory that peers on this host may map to read it. `close` it after its transports."""

    def __init__(self, size_bytes: int) -> None:
        _check_host(size_bytes)
        try:
            self._pages = shared_pages(size_bytes)
        except OSError as error:
            raise Invalid(
                f"store.slab_bytes is {size_bytes}: the host refuses it: {error}"
            ) from None
        self.address = self._pages.address
        self.size = size_bytes
        self.view = self._pages.view

    @property
    def region(self) -> Region:
        """Return what transports register."""
        return self._pages.region

    def copy(self, source: int, target: int, size: int) -> None:
        """Copy bytes from one offset to another; the two may overlap."""
        ctypes.memmove(self.address + target, self.address + source, size)

    def close(self) -> None:
        """Give the memory back."""
        self._pages.close()


def _check_host(size_bytes: int) -> None:
    """Refuse a slab that the host cannot carry, before the kernel kills somebody for it."""
    available = available_bytes()
    if not 0 < size_bytes <= available * HOST_SHARE:
        raise Invalid(
            f"store.slab_bytes is {size_bytes}; this host can give {available} bytes now (limits "
            f"of control groups counted), of which at most {HOST_SHARE:.0%} may be a slab"
        )
