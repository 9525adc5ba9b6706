"""How blocks come from a store node into own slots.

    same host   get_begin ─> lease, places   read into slots, check     get_end
    TCP         lend, get_write ─> written   copy into slots, check     settle

When a pull returns, raises or is cancelled, no transfer into the slots is in flight: the
reader's own thread copies (same host), or bytes land elsewhere and are copied here (TCP).
Nothing counts as pulled before its checksum was right in the slot.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
import numpy as np

from kvass.common.checksum import Sums, Words, copy_ranges
from kvass.common.errors import KvassError
from kvass.common.keys import ranges_of
from kvass.common.transport.seam import Copies, Loan
from kvass.kvstore import messages as m
from kvass.kvstore.links import CLEAN_UP_S, NodeLink
from kvass.kvstore.transfers import TRANSFER_S, Transfers, borrow, parts
from kvass.kvstore.words import WORD_BYTES, unpacked

# A pull over TCP that was cancelled waits this long for bytes that are on their way, since a loan
# that is given up costs a rebuild of the landing's agent.
ARRIVAL_GRACE_S = 0.25
# As much as this is copied and summed in the event loop, mostly in less than a tenth of a
# millisecond: to wake a thread and to be woken by it takes as long. (Groups of less than 256 bytes,
# or without the compiled library, take two microseconds each, and the interpreter either way.)
COPY_BYTES = 1 << 20


@dataclass(slots=True)
class PullOutcome:
    """Mutable fields: `pulled`, the blocks that are there and right, why others were `missed`, and
    `_parts`, checksums as they came."""

    pulled: set[int] = field(default_factory=set)
    missed: dict[int, str] = field(default_factory=dict)
    _parts: list[tuple[Sequence[int], Words]] = field(default_factory=list)

    def take(self, indices: Sequence[int], checksums: Words) -> None:
        """Note blocks that are there and right, and their checksums uint64 [blocks, groups]."""
        self.pulled.update(indices)
        self._parts.append((indices, checksums))

    def checksums(self) -> dict[int, tuple[int, ...]]:
        """Return the checksums of what was pulled, by index. Few ask for them, and a tuple a block
        takes a twentieth of a small get."""
        found: dict[int, tuple[int, ...]] = {}
        for indices, values in self._parts:
            found.update(zip(indices, map(tuple, values.tolist()), strict=True))
        return found


async def pull(
    transfers: Transfers,
    link: NodeLink,
    chain: m.Named,
    slots: Mapping[int, int],
    *,
    ends_s: float,
) -> PullOutcome:
    """Bring blocks of one node into their slots."""
    outcome = PullOutcome()
    try:
        ways = await link.ways(deadline_s=ends_s - link.now_s())
        landed = ways.get_way == "write"

        async def move(indices: Sequence[int]) -> None:
            left_s = min(ends_s - link.now_s(), TRANSFER_S)
            if left_s <= 0 or not link.usable:
                outcome.missed.update(dict.fromkeys(indices, "late"))
                return
            wanted = {index: slots[index] for index in indices}
            batch = _Batch(transfers, link, chain, wanted, link.now_s() + left_s, outcome)
            if landed:
                await batch.take_written()
            else:
                await batch.read(ways.start_id)

        await transfers.in_lanes(sorted(slots), move, landed=landed)
    except KvassError:
        failed = [i for i in slots if i not in outcome.pulled and i not in outcome.missed]
        outcome.missed.update(dict.fromkeys(failed, "failed"))
        link.detach()
    return outcome


@dataclass(slots=True, eq=False)
class _Batch:
    """One call's blocks. Mutable fields: `outcome` (the pull's), `wrong` (of another checksum)."""

    transfers: Transfers
    link: NodeLink
    chain: m.Named
    slots: Mapping[int, int]
    ends_s: float
    outcome: PullOutcome
    wrong: list[int] = field(default_factory=list)

    def _left_s(self) -> float:
        return max(self.ends_s - self.link.now_s(), 1e-3)

    def _spans(self) -> tuple[m.Span, ...]:
        return tuple(m.spans_of(self.chain, ranges_of(self.slots)))

    def _check(self, places: m.Places, addresses: int) -> Words:
        """Refuse places that are not of the blocks that were asked for, each once, in order. That
        they are the right blocks' is the node's word: checksums are of bytes, not of names.
        Returns the checksums uint64 [blocks, groups] that the node has of them."""
        count, groups = len(places.indices), len(self.transfers.groups)
        if (
            not self._are_ours(places.indices)
            or addresses != WORD_BYTES * count
            or len(places.checksums) != WORD_BYTES * count * groups
        ):
            raise self.link.wrong("places of other blocks than were asked for, or not whole")
        return unpacked(places.checksums, "checksums").reshape(count, groups)

    def _are_ours(self, indices: tuple[int, ...]) -> bool:
        """Whether these are of the blocks that were asked for, each once, in order."""
        if indices == tuple(self.slots):  # all of them, as a rule
            return True
        once = set(indices)
        return self.slots.keys() >= once and tuple(sorted(once)) == indices

    # --- same host ---

    async def read(self, start_id: str) -> None:
        """Lease, read, check."""
        transfers = self.transfers
        request = m.GetBegin(
            spans=self._spans(),
            block_size=transfers.block_size,
            head_groups=transfers.head_groups,
            groups=(transfers.groups.start, transfers.groups.stop),
        )
        lease = await self.link.call(request, deadline_s=self._left_s())
        announced = self._check(lease, len(lease.addresses))
        self._note_gone(lease)
        if not lease.indices:
            return
        try:
            await self._read_leased(lease, announced, start_id)
        finally:
            suspects = tuple([self.chain.key(index) for index in self.wrong])
            request_end = m.GetEnd(lease_id=lease.lease_id, corrupt=suspects)
            transfers.later(partial(self._end, request_end))

    async def _end(self, request: m.GetEnd) -> None:
        """End a lease, in the background: what was checked is right, held or not, and what was not
        is discarded. That one was lost is worth knowing."""
        try:
            reply = await self.link.call(request, deadline_s=CLEAN_UP_S)
        except KvassError:
            self.transfers.counts["tidy_failed"] += 1
        else:
            self.transfers.counts["lease_lost"] += not reply.held

    async def _read_leased(self, lease: m.Places, announced: Words, start_id: str) -> None:
        """Read part by part, and renew the lease between them when it is half over."""
        sources = unpacked(lease.addresses, "addresses")
        renew_s = self.link.now_s() + lease.lease_s / 2
        for part in parts(len(lease.indices), self.transfers.share):
            if self.link.now_s() >= renew_s:
                renew_s = self.link.now_s() + lease.lease_s / 2
                await self.link.tell(m.GetRenew(lease_id=lease.lease_id))
            await self._read_part(start_id, lease.indices[part], sources[part], announced[part])

    async def _read_part(
        self,
        start_id: str,
        part: Sequence[int],
        sources: Words,
        announced: Words,
    ) -> None:
        """Read a part; each block is summed as it comes into its slot."""
        transfers = self.transfers
        assert transfers.endpoints.reader is not None
        slots = [self.slots[index] for index in part]
        copies = Copies(
            local=transfers.places(slots),
            remote=sources,
            sizes=np.full(len(part), transfers.share, dtype=np.uint64),
        )
        sums = Sums.of(len(part), len(transfers.groups))
        try:
            await transfers.endpoints.reader.read(
                start_id, copies, deadline_s=self._left_s(), sums=sums
            )
        finally:  # what came before a fault is there
            self._judge(part, sums, announced)

    def _judge(self, indices: Sequence[int], sums: Sums, announced: Words) -> None:
        """Sort blocks that are in their slots by whether their checksums are right."""
        if sums.whole.all() and sums.values.tobytes() == announced.tobytes():
            self.outcome.take(indices, sums.values)
            return
        right = (sums.values == announced).all(axis=1) & sums.whole
        self.outcome.take(
            [indices[at] for at in np.flatnonzero(right).tolist()], sums.values[right]
        )
        for at in np.flatnonzero(sums.whole & ~right).tolist():
            self.transfers.counts["pull_corrupt"] += 1
            self.outcome.missed[indices[at]] = "corrupt"
            self.wrong.append(indices[at])

    def _note_gone(self, places: m.Places) -> None:
        """What the node did not give a place of, it has no more."""
        if len(places.indices) < len(self.slots):
            gone = self.slots.keys() - set(places.indices)
            self.outcome.missed.update(dict.fromkeys(gone, "gone"))

    # --- TCP ---

    async def take_written(self) -> None:
        """Lend, have it written, copy, check."""
        transfers = self.transfers
        size = len(self.slots) * transfers.share
        loan = await borrow(transfers.endpoints, size, deadline_s=self._left_s())
        if loan is None:
            self.outcome.missed.update(dict.fromkeys(self.slots, "landing_full"))
            return
        async with _settled(loan):
            request = m.GetWrite(
                spans=self._spans(),
                block_size=transfers.block_size,
                head_groups=transfers.head_groups,
                groups=(transfers.groups.start, transfers.groups.stop),
                loan=m.card_of(loan),
                deadline_s=self._left_s(),
            )
            places = await self.link.call(
                request, deadline_s=request.deadline_s, limit_s=TRANSFER_S
            )
            announced = self._check(places, WORD_BYTES * len(places.indices))
            self._note_gone(places)
            if places.indices:
                await loan.arrived(deadline_s=self._left_s())
                targets = [self.slots[index] for index in places.indices]
                if len(targets) * transfers.share <= COPY_BYTES:
                    sums = self._copy(loan, targets)
                else:
                    sums = await transfers.executor.run(lambda: self._copy(loan, targets))
                self._judge(places.indices, sums, announced)
        if self.wrong:
            suspects = tuple(self.chain.key(index) for index in self.wrong)
            await self.link.tell(m.GetEnd(lease_id=places.lease_id, corrupt=suspects))

    def _copy(self, loan: Loan, slots: Sequence[int]) -> Sums:
        """Copy what has landed into its slots, and sum in the same pass what is put there: late
        bytes may still change the loan, never a slot."""
        landed = np.frombuffer(loan.view(), dtype=np.uint8).ctypes.data
        transfers, count = self.transfers, len(slots)
        sums = Sums.of(count, len(transfers.groups))
        copy_ranges(
            transfers.places(slots),
            landed + np.arange(count, dtype=np.uint64) * np.uint64(transfers.share),
            transfers.share,
            sums,
            0,
            count,
        )
        return sums


@asynccontextmanager
async def _settled(loan: Loan) -> AsyncIterator[None]:
    """Give a loan back; after a failure only if its bytes come within a moment."""
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True):
            try:
                await loan.arrived(deadline_s=ARRIVAL_GRACE_S)
            except KvassError:
                loan.abandon()
        loan.settle()
        raise
    loan.settle()
