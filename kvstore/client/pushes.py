"""How blocks go from own slots into a store node.

    same host   put_begin ─> granted    put_commit: the node reads the slots and checks
    TCP         put_begin ─> a loan     write the slots into it, put_commit: the node checks

A put that is not committed is aborted, whatever happened, so that its blocks are writable again
at once; when that cannot be said either, the node finds out by the end of the connection or the
deadline.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import anyio
import numpy as np

from kvass.common.errors import KvassError
from kvass.common.keys import Chain, ranges_of
from kvass.common.transport.seam import Copies
from kvass.kvstore import messages as m
from kvass.kvstore.links import CALL_S, NodeLink
from kvass.kvstore.transfers import TRANSFER_S, Transfers

BEGIN_S = 2 * CALL_S  # a node may wait a second for landing memory before it answers


@dataclass(frozen=True, slots=True)
class PutTerms:
    """What goes with a put besides its bytes."""

    writer: str
    tenant: str
    hold_owner: str


@dataclass(slots=True)
class PutOutcome:
    """Mutable fields: `stored` indices, why others are `refused`, and how many blocks `moved`:
    those that were visible already did not."""

    stored: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)
    moved: int = 0


async def push(
    transfers: Transfers,
    link: NodeLink,
    chain: Chain,
    slots: Mapping[int, int],
    terms: PutTerms,
    *,
    ends_s: float,
) -> PutOutcome:
    """Offer blocks to one node. What is neither stored nor refused was not offered."""
    outcome = PutOutcome()
    try:
        ways = await link.ways(deadline_s=ends_s - link.now_s())

        async def move(indices: Sequence[int]) -> None:
            left_s = min(ends_s - link.now_s(), TRANSFER_S)
            if left_s > 0 and link.usable:
                for tenant, own in _by_tenant(chain, indices, terms.tenant):
                    wanted = {index: slots[index] for index in own}
                    put = _Put(transfers, link, chain, wanted, link.now_s() + left_s, outcome)
                    await put.run(replace(terms, tenant=tenant))

        await transfers.in_lanes(sorted(slots), move, landed=ways.put_way == "write")
    except KvassError:
        failed = [i for i in slots if i not in outcome.stored and i not in outcome.refused]
        outcome.refused.update(dict.fromkeys(failed, "failed"))
        link.detach()
    return outcome


@dataclass(slots=True, eq=False)
class _Put:
    """One call's blocks. Mutable fields: `outcome` (the push's), `_sums` (checksums by index),
    `_started` (bytes may be on their way into the node's loan), `_over` (nothing is left to
    abort)."""

    transfers: Transfers
    link: NodeLink
    chain: Chain
    slots: Mapping[int, int]
    ends_s: float
    outcome: PutOutcome
    _sums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _started: bool = False
    _over: bool = False

    def _left_s(self) -> float:
        return max(self.ends_s - self.link.now_s(), 1e-3)

    async def run(self, terms: PutTerms) -> None:
        """Begin, move, commit; or abort."""
        put_id = self.transfers.next_put()
        try:
            places = await self._begin(put_id, terms)
            answers = places.visible, places.busy, places.full, places.granted
            visible, busy, full, granted = self.link.told(self.slots, *answers)
            self.outcome.stored.update(visible)
            self.outcome.refused.update(dict.fromkeys(busy, "busy"))
            self.outcome.refused.update(dict.fromkeys(full, "full"))
            if granted:
                await self._check_loan(places.loan, len(granted))
                await self._commit(put_id, sorted(granted), places.loan)
            self._over = True
        finally:
            if not self._over:
                await self.link.tell(m.PutAbort(put_id=put_id, started=self._started))

    async def _check_loan(self, loan: m.LoanCard | None, count: int) -> None:
        """Refuse a loan that has no room, or is not the node's own."""
        ways = await self.link.ways(deadline_s=self._left_s())
        if (loan is not None) != (ways.put_way == "write"):
            raise self.link.wrong("a loan where none is of use, or none where one is")
        if loan is not None:
            if loan.size < count * self.transfers.share or loan.card.start_id != ways.start_id:
                raise self.link.wrong("a loan that is too small, or another process's")

    async def _begin(self, put_id: str, terms: PutTerms) -> m.PutPlaces:
        """Ask for places, and hash the slots meanwhile: nearly all that is pushed is granted."""
        request = self._request(put_id, terms)
        slots = list(self.slots.values())
        failure: KvassError | None = None

        async def hash_slots() -> None:
            found = await self.transfers.executor.run(lambda: self.transfers.sums(slots))
            self._sums.update(zip(self.slots, found, strict=True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hash_slots)
            try:
                left_s = request.deadline_s
                places = await self.link.call(request, deadline_s=left_s, limit_s=BEGIN_S)
            except KvassError as error:
                failure = error  # raised after the group, so that it stays what it is
        if failure is not None:
            raise failure
        return places

    def _request(self, put_id: str, terms: PutTerms) -> m.PutBegin:
        transfers = self.transfers
        return m.PutBegin(
            put_id=put_id,
            spans=tuple(m.spans_of(self.chain, ranges_of(self.slots))),
            namespace=self.chain.namespace,
            tenant=terms.tenant,
            writer=terms.writer,
            token_count=self.chain.block_tokens,
            block_size=transfers.block_size,
            head_groups=transfers.head_groups,
            groups=(transfers.groups.start, transfers.groups.stop),
            deadline_s=self._left_s(),
            hold_owner=terms.hold_owner,
        )

    async def _commit(self, put_id: str, granted: Sequence[int], loan: m.LoanCard | None) -> None:
        transfers = self.transfers
        slots = [self.slots[index] for index in granted]
        announced = [self._sums[index] for index in granted]
        if loan is not None:
            self._started = True
            await self._write(loan, slots)
        commit = m.PutCommit(
            put_id=put_id,
            keys=tuple(self.chain.keys[index] for index in granted),
            indices=tuple(granted),
            addresses=() if loan else tuple(transfers.places(slots)),
            checksums=tuple(itertools.chain.from_iterable(announced)),
            deadline_s=self._left_s(),
        )
        left_s = commit.deadline_s
        reply = await self.link.call(commit, deadline_s=left_s, limit_s=TRANSFER_S)
        stored, corrupt = self.link.told(granted, reply.stored, reply.corrupt)
        self.outcome.stored |= stored
        self.outcome.moved += len(stored)
        for index in set(granted) - stored:
            self.outcome.refused[index] = "corrupt" if index in corrupt else "failed"

    async def _write(self, target: m.LoanCard, slots: Sequence[int]) -> None:
        """Write slots into a node's loan, one after the other.

        Shielded: stopping a write tears down the agent of all writes, and a healthy node takes
        it in milliseconds; a node that hangs holds this up until the deadline.
        """
        share = self.transfers.share
        offsets = np.arange(len(slots), dtype=np.uint64) * np.uint64(share)
        copies = Copies(
            local=np.array(self.transfers.places(slots), dtype=np.uint64),
            remote=offsets + np.uint64(target.address),
            sizes=np.full(len(slots), share, dtype=np.uint64),
        )
        writer = self.transfers.endpoints.writer
        with anyio.CancelScope(shield=True):
            await writer.attach(target.card)
            await writer.write(
                target.card.start_id, copies, tag=target.tag, deadline_s=self._left_s()
            )


def _by_tenant(
    chain: Chain, indices: Sequence[int], tenant: str
) -> Iterator[tuple[str, Sequence[int]]]:
    """Public blocks are nobody's in particular, whoever was the first to need them."""
    public = [index for index in indices if index < chain.public_blocks]
    private = [index for index in indices if index >= chain.public_blocks]
    for whose, own in (("", public), (tenant, private)):
        if own:
            yield whose, own
