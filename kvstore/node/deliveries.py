"""The bytes of a store node: into its slab and out of it. The index decides; this only moves and
checks.

Same host: the node reads a writer's slots into its slab. TCP: writers write into landing buffers
that the node lends, and it copies what arrived into the slab before it looks at it; for gets it
writes into what the reader lends. Whatever enters the slab is checked there, by who put it: nothing
is visible before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import anyio
import numpy as np

from kvass.common.checksum import Sums, Words, copy_ranges, sums
from kvass.common.errors import Invalid
from kvass.common.executor import Executor
from kvass.common.transport.endpoints import Endpoints
from kvass.common.transport.seam import Copies, Loan
from kvass.kvstore.index.leases import Lease
from kvass.kvstore.index.ledger import Entry
from kvass.kvstore.index.puts import Move
from kvass.kvstore.messages import LoanCard
from kvass.kvstore.node.slab import Slab


@dataclass(slots=True, eq=False)
class Lent:
    """A loan for a put of these head groups: where each key's share lies in it, and until when it
    is waited for."""

    loan: Loan
    session: str
    groups: range
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
        addresses: Words,
        found: Sums,
        *,
        deadline_s: float,
    ) -> None:
        """Copy a same-host writer's bytes at `addresses` into the slots of `moves`, which have one
        size.

        `found` takes the checksums of what is in each slot: of all when this returns, of those that
        are whole when it raises.
        """
        assert self._endpoints.reader is not None
        copies = Copies(
            local=self._slots(moves),
            remote=addresses,
            sizes=np.full(len(moves), moves[0].size, dtype=np.uint64),
        )
        await self._endpoints.reader.read(session, copies, deadline_s=deadline_s, sums=found)

    def _slots(self, moves: Sequence[Move]) -> Words:
        """Return where moves' bytes go in this process's memory."""
        offsets = np.array([move.offset for move in moves], dtype=np.uint64)
        return offsets + np.uint64(self._slab.address)

    async def take(
        self, lent: Lent, moves: Sequence[Move], found: Sums, *, deadline_s: float
    ) -> None:
        """Copy what arrived in a loan into the slots of `moves`; ends the loan. `found` takes the
        checksums of what is in each slot."""
        loan = lent.loan
        try:
            await loan.arrived(deadline_s=deadline_s)
        except BaseException:
            loan.abandon()
            raise
        try:
            await self._executor.run(lambda: self._copy(lent, moves, found))
        finally:
            loan.settle()

    def _copy(self, lent: Lent, moves: Sequence[Move], found: Sums) -> None:
        """Copy and sum in one pass: what is summed is what was put into the slot."""
        if not moves:
            return
        landed = np.frombuffer(lent.loan.view(), dtype=np.uint8).ctypes.data
        offsets = [lent.offsets[move.entry.header.key] for move in moves]
        copy_ranges(
            self._slots(moves),
            np.array(offsets, dtype=np.uint64) + np.uint64(landed),
            moves[0].size,
            found,
            0,
            len(moves),
        )

    async def is_right(self, entry: Entry) -> bool:
        """Check a visible block against its header; the caller holds a lease on it."""
        offset, size, count = entry.slot.offset, entry.group_size, entry.head_groups
        found = await self._executor.run(lambda: sums(self._slab.view, offset, size, count))
        return found == entry.header.checksums

    def addresses(self, entries: Iterable[Entry], first_group: int) -> list[int]:
        """Return where the blocks' head group starts in this process's memory."""
        base = self._slab.address
        if not first_group:
            return [base + each.slot.offset for each in entries]
        return [base + each.slot.offset + first_group * each.group_size for each in entries]

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
        sources = self.addresses(lease.entries, groups.start)
        copies = Copies(
            local=np.array(sources, dtype=np.uint64),
            remote=ends - np.array(sizes, dtype=np.uint64) + np.uint64(target.address),
            sizes=np.array(sizes, dtype=np.uint64),
        )
        writer = self._endpoints.writer
        with anyio.CancelScope(shield=True):
            await writer.attach(target.card)
            await writer.write(target.card.start_id, copies, tag=target.tag, deadline_s=deadline_s)
