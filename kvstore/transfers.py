"""A client's bytes: from a store node into own slots, and from own slots into a node.

    get, same host   get_begin ─> lease, places   read into slots, check   get_end
    get, TCP         lend, get_write ─> written   copy into slots, check the copy, settle
    put, same host   put_begin ─> granted         commit: the node reads the slots and checks
    put, TCP         put_begin ─> loan            write the slots into it, commit

When a pull returns, raises or is cancelled, no transfer into the slots is in flight: the reader's
own thread copies (same host), or bytes land elsewhere and are copied here (TCP). Nothing counts as
pulled before its checksum was right in the slot. It refuses to know about placement.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import numpy as np
from numpy.typing import NDArray

from kvass.common.block import BlockLayout
from kvass.common.errors import KvassError
from kvass.common.executor import Executor
from kvass.common.keys import Chain, ranges_of
from kvass.common.transport.endpoints import Endpoints
from kvass.common.transport.seam import Copies, Loan
from kvass.kvstore import messages as m
from kvass.kvstore.checksum import rows, sums
from kvass.kvstore.deliveries import borrow, parts
from kvass.kvstore.links import CALL_S, CLEAN_UP_S, NodeLink

# One call's bytes over TCP: some milliseconds, and a landing memory holds several.
TCP_BATCH_BYTES = 8 << 20
LANDING_SHARE = 4  # no batch takes more than this part of the landing memory
TRANSFER_S = 10.0  # of one batch: bounds what a hanging peer can hold up
# A cancelled pull over TCP waits this long for bytes that are on their way, since a loan that is
# given up costs a rebuild of the landing's agent.
ARRIVAL_GRACE_S = 0.25

Refusals = dict[int, str]


class BlockMemory(Protocol):
    """What `common.pool.memory.SlotMemory` is, without torch."""

    address: int
    size: int
    array: NDArray[np.uint8]

    def address_of(self, slot: int) -> int: ...


@dataclass(frozen=True, slots=True)
class PutTerms:
    """What goes with a put besides its bytes."""

    writer: str
    tenant: str
    hold_owner: str


@dataclass(slots=True, eq=False)
class Transfers:
    """`groups`: the head groups that this process reads and writes. Mutable field: `_puts`."""

    memory: BlockMemory
    layout: BlockLayout
    groups: range
    endpoints: Endpoints
    executor: Executor
    counts: Counter[str]
    _puts: Iterator[int] = field(default_factory=itertools.count)

    @property
    def share(self) -> int:
        """Bytes of a block that this process moves."""
        return len(self.groups) * self.layout.group_size

    def _place(self, slot: int) -> int:
        return self.memory.address_of(slot) + self.layout.group_offset(self.groups.start)

    def _sums(self, slots: Sequence[int]) -> list[tuple[int, ...]]:
        offset, size = self.layout.group_offset(self.groups.start), self.layout.group_size
        array = self.memory.array
        return [sums(array[slot], offset, size, len(self.groups)) for slot in slots]

    def _batches(self, indices: Sequence[int], *, landed: bool) -> Iterator[Sequence[int]]:
        most = m.BLOCKS_MAX
        if landed:
            room = self.endpoints.landing.counts()["total"] // LANDING_SHARE
            most = max(1, min(room, TCP_BATCH_BYTES) // self.share)
        for first in range(0, len(indices), most):
            yield indices[first : first + most]

    # --- get ---

    async def pull(
        self, link: NodeLink, chain: Chain, slots: Mapping[int, int], *, ends_s: float
    ) -> set[int]:
        """Bring blocks of one node into their slots; return the indices that are there and
        right."""
        pulled: set[int] = set()
        try:
            ways = await link.ways(deadline_s=ends_s - link.now_s())
            landed = ways.get_way == "write"
            for batch in self._batches(list(slots), landed=landed):
                left_s = min(ends_s - link.now_s(), TRANSFER_S)
                if left_s <= 0 or not link.usable:
                    self.counts["pull_late"] += len(slots) - len(pulled)
                    break
                wanted = {index: slots[index] for index in batch}
                if landed:
                    await self._pull_landed(link, chain, wanted, pulled, left_s)
                else:
                    await self._pull_read(link, chain, wanted, pulled, left_s, ways.start_id)
        except KvassError:
            self.counts["pull_failed"] += 1
            link.detach()
        return pulled

    async def _pull_read(
        self,
        link: NodeLink,
        chain: Chain,
        slots: Mapping[int, int],
        pulled: set[int],
        deadline_s: float,
        start_id: str,
    ) -> None:
        request = m.GetBegin(
            spans=tuple(m.spans_of(chain, ranges_of(slots))),
            block_size=self.layout.block_size,
            head_groups=self.layout.head_groups,
            groups=(self.groups.start, self.groups.stop),
        )
        lease = await link.call(request, deadline_s=deadline_s)
        if not lease.indices:
            return
        wrong: list[int] = []
        try:
            await self._read(link, lease, slots, pulled, wrong, deadline_s, start_id)
        finally:
            suspects = tuple(chain.keys[index] for index in wrong)
            await self._end(link, m.GetEnd(lease_id=lease.lease_id, corrupt=suspects))

    async def _end(self, link: NodeLink, request: m.GetEnd) -> None:
        """End a lease. What was checked is right, held or not; one that was lost is worth
        knowing."""
        with anyio.CancelScope(shield=True):
            try:
                reply = await link.call(request, deadline_s=CLEAN_UP_S)
            except KvassError:
                self.counts["tidy_failed"] += 1
            else:
                self.counts["lease_lost"] += not reply.held

    async def _read(
        self,
        link: NodeLink,
        lease: m.Places,
        slots: Mapping[int, int],
        pulled: set[int],
        wrong: list[int],
        deadline_s: float,
        start_id: str,
    ) -> None:
        """Read part by part; each part is checked beside the next one's read."""
        announced = dict(zip(lease.indices, rows(lease.checksums, len(self.groups)), strict=True))
        places = dict(zip(lease.indices, lease.addresses, strict=True))
        renew_s = link.now_s() + lease.lease_s / 2
        failures: list[KvassError] = []
        reader = self.endpoints.reader
        assert reader is not None

        async def read(part: Sequence[int]) -> None:
            copies = Copies(
                local=np.array([self._place(slots[i]) for i in part], dtype=np.uint64),
                remote=np.array([places[i] for i in part], dtype=np.uint64),
                sizes=np.full(len(part), self.share, dtype=np.uint64),
            )
            try:
                await reader.read(start_id, copies, deadline_s=deadline_s)
            except KvassError as error:
                failures.append(error)

        before: Sequence[int] = ()
        for part in [*parts(list(lease.indices), self.share), ()]:
            async with anyio.create_task_group() as tasks:
                if before:
                    tasks.start_soon(self._check, before, slots, announced, pulled, wrong)
                if part:
                    tasks.start_soon(read, part)
            if failures:
                raise failures[0]
            if link.now_s() >= renew_s:
                await link.call(m.GetRenew(lease_id=lease.lease_id), deadline_s=deadline_s)
                renew_s = link.now_s() + lease.lease_s / 2
            before = part

    async def _check(
        self,
        indices: Sequence[int],
        slots: Mapping[int, int],
        announced: Mapping[int, tuple[int, ...]],
        pulled: set[int],
        wrong: list[int],
    ) -> None:
        found = await self.executor.run(lambda: self._sums([slots[i] for i in indices]))
        for index, checksums in zip(indices, found, strict=True):
            if checksums == announced[index]:
                pulled.add(index)
            else:
                self.counts["pull_corrupt"] += 1
                wrong.append(index)

    async def _pull_landed(
        self,
        link: NodeLink,
        chain: Chain,
        slots: Mapping[int, int],
        pulled: set[int],
        deadline_s: float,
    ) -> None:
        ends_s = link.now_s() + deadline_s
        size = len(slots) * self.share
        loan = await borrow(self.endpoints, size, deadline_s=deadline_s)
        if loan is None:
            self.counts["landing_full"] += 1
            return
        left_s = max(ends_s - link.now_s(), 1e-3)
        request = m.GetWrite(
            spans=tuple(m.spans_of(chain, ranges_of(slots))),
            block_size=self.layout.block_size,
            head_groups=self.layout.head_groups,
            groups=(self.groups.start, self.groups.stop),
            loan=m.card_of(loan),
            deadline_s=left_s,
        )
        async with _settled(loan):
            places = await link.call(request, deadline_s=left_s, limit_s=TRANSFER_S)
            if places.indices:
                await loan.arrived(deadline_s=max(ends_s - link.now_s(), 1e-3))
                targets = [slots[index] for index in places.indices]
                await self.executor.run(lambda: self._copy(loan, targets))
        announced = dict(zip(places.indices, rows(places.checksums, len(self.groups)), strict=True))
        wrong: list[int] = []
        await self._check(places.indices, slots, announced, pulled, wrong)
        if wrong:
            keys = tuple(chain.keys[index] for index in wrong)
            await link.tell(m.GetEnd(lease_id=places.lease_id, corrupt=keys))

    def _copy(self, loan: Loan, slots: Sequence[int]) -> None:
        landed = loan.view()
        start, share = self.layout.group_offset(self.groups.start), self.share
        for i, slot in enumerate(slots):
            bytes_of = np.frombuffer(landed, dtype=np.uint8, count=share, offset=i * share)
            self.memory.array[slot][start : start + share] = bytes_of

    # --- put ---

    async def push(
        self,
        link: NodeLink,
        chain: Chain,
        slots: Mapping[int, int],
        terms: PutTerms,
        *,
        ends_s: float,
    ) -> tuple[set[int], Refusals]:
        """Offer blocks to one node; return what is stored there now, and why the rest is not."""
        stored: set[int] = set()
        refused: Refusals = {}
        try:
            ways = await link.ways(deadline_s=ends_s - link.now_s())
            for batch in self._batches(list(slots), landed=ways.put_way == "write"):
                left_s = min(ends_s - link.now_s(), TRANSFER_S)
                if left_s <= 0 or not link.usable:
                    break
                wanted = {index: slots[index] for index in batch}
                await self._put(link, chain, wanted, terms, left_s, stored, refused)
        except KvassError:
            self.counts["push_failed"] += 1
            link.detach()
        return stored, {i: refused.get(i, "unavailable") for i in slots if i not in stored}

    async def _put(
        self,
        link: NodeLink,
        chain: Chain,
        slots: Mapping[int, int],
        terms: PutTerms,
        deadline_s: float,
        stored: set[int],
        refused: Refusals,
    ) -> None:
        ends_s = link.now_s() + deadline_s
        request = m.PutBegin(
            put_id=f"{self.endpoints.identity.start_id}-{next(self._puts)}",
            spans=tuple(m.spans_of(chain, ranges_of(slots))),
            namespace=chain.namespace,
            tenant=terms.tenant,
            writer=terms.writer,
            token_count=chain.block_tokens,
            block_size=self.layout.block_size,
            head_groups=self.layout.head_groups,
            groups=(self.groups.start, self.groups.stop),
            deadline_s=deadline_s,
            hold_owner=terms.hold_owner,
        )
        started = committed = False
        try:
            places = await link.call(request, deadline_s=deadline_s, limit_s=2 * CALL_S)
            stored.update(_each(places.visible))
            refused.update({i: "busy" for i in _each(places.busy)})
            refused.update({i: "full" for i in _each(places.full)})
            granted = [index for index in _each(places.granted) if index in slots]
            if not granted:
                committed = True
                return
            targets = [slots[index] for index in granted]
            announced = await self.executor.run(lambda: self._sums(targets))
            if places.loan is not None:
                started = True
                await self._write(places.loan, targets, ends_s - link.now_s())
            commit = m.PutCommit(
                put_id=request.put_id,
                keys=tuple(chain.keys[index] for index in granted),
                indices=tuple(granted),
                addresses=() if places.loan else tuple(map(self._place, targets)),
                checksums=tuple(itertools.chain.from_iterable(announced)),
                deadline_s=max(ends_s - link.now_s(), 1e-3),
            )
            reply = await link.call(commit, deadline_s=commit.deadline_s, limit_s=TRANSFER_S)
            committed = True
        finally:
            if not committed:
                await link.tell(m.PutAbort(put_id=request.put_id, started=started))
        stored.update(_each(reply.stored))
        refused.update({i: "corrupt" for i in _each(reply.corrupt)})
        self.counts["push_corrupt"] += sum(1 for _ in _each(reply.corrupt))

    async def _write(self, target: m.LoanCard, slots: Sequence[int], deadline_s: float) -> None:
        """Write slots into a node's loan, one after the other. Shielded: stopping a write tears
        down the agent of all writes, and a healthy node takes it in milliseconds."""
        offsets = np.arange(len(slots), dtype=np.uint64) * np.uint64(self.share)
        copies = Copies(
            local=np.array([self._place(slot) for slot in slots], dtype=np.uint64),
            remote=offsets + np.uint64(target.address),
            sizes=np.full(len(slots), self.share, dtype=np.uint64),
        )
        writer = self.endpoints.writer
        with anyio.CancelScope(shield=True):
            await writer.attach(target.card)
            await writer.write(
                target.card.start_id, copies, tag=target.tag, deadline_s=max(deadline_s, 1e-3)
            )


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


def _each(ranges: m.Ranges) -> Iterator[int]:
    return itertools.chain.from_iterable(range(first, stop) for first, stop in ranges)
