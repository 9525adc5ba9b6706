"""Timed promises that blocks stay where they are while somebody copies them. Pure.

A lease's id holds the node's start id, so one from before a restart is unknown, and unknown means
not held. When a lease ends its slots may be reused at once: a reader that is still copying learns
so from `end`, and from its checksum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvass.common.errors import Overloaded
from kvass.kvstore.index.deadlines import Deadlines
from kvass.kvstore.index.ledger import Entry, Ledger

LEASES_MAX = 16_384  # sixteen connections with their windows full of gets
MARGIN = 4.0  # a lease lasts so many times what its bytes take at the measured bandwidth
FLOOR_S = 0.5  # a reader's event loop may be busy with other things for this long
CAP_S = 20.0
BANDWIDTH_START = 1e9  # bytes/s; a careful first guess, replaced by what is measured
BANDWIDTH_WEIGHT = 0.2  # of the newest measurement


@dataclass(slots=True, eq=False)
class Lease:
    """Mutable field: `ends_s`. `keys` are the entries', in order."""

    lease_id: str
    entries: tuple[Entry, ...]
    keys: list[bytes]
    begun_s: float
    length_s: float
    ends_s: float
    size_bytes: int


class Leases:
    """Mutable fields: `_leases` by id, `_count`, `bandwidth` (bytes/s), `lost` (ended by time)."""

    def __init__(self, ledger: Ledger, epoch: str) -> None:
        self._ledger = ledger
        self._epoch = epoch
        self._leases: dict[str, Lease] = {}
        self._deadlines: Deadlines[str] = Deadlines(self._ends_s)
        self._count = 0
        self.bandwidth = BANDWIDTH_START
        self.lost = 0

    def __len__(self) -> int:
        return len(self._leases)

    def _ends_s(self, lease_id: str) -> float | None:
        lease = self._leases.get(lease_id)
        return None if lease is None else lease.ends_s

    def begin(self, entries: Iterable[Entry], now_s: float, length_s: float | None = None) -> Lease:
        """Promise that the visible `entries` stay, as long as their transfer should take unless
        `length_s` is given; raises Overloaded when too many leases are out."""
        if len(self._leases) >= LEASES_MAX:
            raise Overloaded(f"{LEASES_MAX} leases are out on this node")
        taken = tuple(entries)
        size_bytes = sum([entry.header.length for entry in taken])
        if length_s is None:
            length_s = min(max(size_bytes / self.bandwidth * MARGIN, FLOOR_S), CAP_S)
        self._count += 1
        lease_id = f"{self._epoch}-{self._count}"
        keys = [entry.header.key for entry in taken]
        lease = Lease(lease_id, taken, keys, now_s, length_s, now_s + length_s, size_bytes)
        self._ledger.lease(taken)
        self._leases[lease_id] = lease
        self._deadlines.add(lease_id, lease.ends_s)
        return lease

    def find(self, lease_id: str) -> Lease | None:
        """Return a lease that is held."""
        return self._leases.get(lease_id)

    def renew(self, lease_id: str, now_s: float) -> bool:
        """Give a lease its whole length again; returns False when it is not held any more."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.ends_s = now_s + lease.length_s
        return True

    def end(self, lease_id: str, now_s: float) -> bool:
        """End a lease; returns whether it was held until now."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        self._release(lease)
        if lease.size_bytes and now_s > lease.begun_s:
            measured = lease.size_bytes / (now_s - lease.begun_s)
            self.bandwidth += BANDWIDTH_WEIGHT * (measured - self.bandwidth)
        return True

    def expire(self, now_s: float) -> None:
        """End leases whose time is over."""
        for lease_id in self._deadlines.due(now_s):
            self._release(self._leases.pop(lease_id))
            self.lost += 1

    def _release(self, lease: Lease) -> None:
        for entry in lease.entries:
            self._ledger.unlease(entry)
