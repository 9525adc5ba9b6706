"""The bytes of a store node: into its slab and out of it. The index decides; this only moves and
checks.

Same host: the node reads a writer's slots into its slab. TCP: writers write into landing buffers
that the node lends, and it copies what arrived into the slab before it looks at it; for gets it
writes into what the reader lends. Whatever enters the slab is checked there, by who put it: nothing
is visible before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import numpy as np

from kvass.common.errors import Invalid
from kvass.common.executor import Executor
from kvass.common.transport.endpoints import Endpoints
from kvass.common.transport.seam import Copies, Loan
from kvass.kvstore.checksum import sums
from kvass.kvstore.index.leases import Lease
from kvass.kvstore.index.ledger import Entry
from kvass.kvstore.index.puts import Move
from kvass.kvstore.messages import LoanCard
from kvass.kvstore.node.slab import Slab


@dataclass(slots=True, eq=False)
class Lent:
    """A loan for a put: where each key's share lies in it, and until when it is waited for."""

    loan: Loan
    session: str
    offsets: dict[bytes, int]
    ends_s: float


class Deliveries:
    """Moves bytes for one node; owns no state."""

    def __init__(self, slab: Slab, endpoints: Endpoints, executor: Executor) -> None:
        self._slab = slab
        self._endpoints = endpoints
        self._executor = executor

    async def read(
        self,
        session: str,
        moves: Sequence[Move],
        addresses: Sequence[int],
        found: dict[int, tuple[int, ...]],
        *,
        deadline_s: float,
    ) -> None:
        """Copy a same-host writer's bytes into the slots of `moves`.

        Adds the checksums of what is in each slot to `found`, by place in `moves`: of all slots
        when this returns, of those that are whole when it raises.
        """
        assert self._endpoints.reader is not None
        base = self._slab.address
        copies = Copies(
            local=np.array([base + move.offset for move in moves], dtype=np.uint64),
            remote=np.array(addresses, dtype=np.uint64),
            sizes=np.array([move.size for move in moves], dtype=np.uint64),
        )

        def in_place(first: int, stop: int) -> None:
            found.update((place, self._sums(moves[place])) for place in range(first, stop))

        await self._endpoints.reader.read(session, copies, deadline_s=deadline_s, in_place=in_place)

    async def take(
        self, lent: Lent, moves: Sequence[Move], *, deadline_s: float
    ) -> list[tuple[int, ...]]:
        """Copy what arrived in a loan into the slots of `moves`; ends the loan. Returns the
        checksums of what is in each slot."""
        loan = lent.loan
        try:
            await loan.arrived(deadline_s=deadline_s)
        except BaseException:
            loan.abandon()
            raise
        try:
            return await self._executor.run(lambda: self._copy(lent, moves))
        finally:
            loan.settle()

    def _copy(self, lent: Lent, moves: Sequence[Move]) -> list[tuple[int, ...]]:
        arrived, found = lent.loan.view(), []
        for move in moves:
            offset = lent.offsets[move.entry.header.key]
            target = slice(move.offset, move.offset + move.size)
            self._slab.view[target] = arrived[offset : offset + move.size]
            found.append(self._sums(move))
        return found

    def _sums(self, move: Move) -> tuple[int, ...]:
        """Return the checksums of what is in a slot now, one a head group."""
        return sums(self._slab.view, move.offset, move.entry.group_size, len(move.groups))

    async def is_right(self, entry: Entry) -> bool:
        """Check a visible block against its header; the caller holds a lease on it."""
        offset, size, count = entry.slot.offset, entry.group_size, entry.head_groups
        found = await self._executor.run(lambda: sums(self._slab.view, offset, size, count))
        return found == entry.header.checksums

    def address(self, entry: Entry, first_group: int) -> int:
        """Return where a block's head group starts in this process's memory."""
        return self._slab.address + entry.slot.offset + first_group * entry.group_size

    async def write(
        self, lease: Lease, groups: range, target: LoanCard, *, deadline_s: float
    ) -> None:
        """Write a lease's blocks into a reader's loan, one after the other.

        Shielded: stopping a write tears down the agent that others write with, and a healthy reader
        takes it in milliseconds; a reader that hangs holds this up until `deadline_s`.
        """
        sizes = [len(groups) * entry.group_size for entry in lease.entries]
        if sum(sizes) > target.size:
            raise Invalid(f"the loan has {target.size} bytes; the blocks take {sum(sizes)}")
        ends = np.cumsum(sizes, dtype=np.uint64)
        sources = [self.address(entry, groups.start) for entry in lease.entries]
        copies = Copies(
            local=np.array(sources, dtype=np.uint64),
            remote=ends - np.array(sizes, dtype=np.uint64) + np.uint64(target.address),
            sizes=np.array(sizes, dtype=np.uint64),
        )
        writer = self._endpoints.writer
        with anyio.CancelScope(shield=True):
            await writer.attach(target.card)
            await writer.write(target.card.start_id, copies, tag=target.tag, deadline_s=deadline_s)
