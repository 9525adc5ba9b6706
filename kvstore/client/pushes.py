"""How blocks go from own slots into a store node.

    same host   put_read: the node reads the slots, which this sums meanwhile; it compares
    TCP         put_begin ─> a loan     write the slots into it, put_commit: it checks

A put that is not over is aborted, whatever happened, so that its blocks are writable again at once
(that its call is cancelled, the node may hear later than of the next put); when that cannot be said
either, the node finds out by the end of the connection or the deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import anyio
import numpy as np

from kvass.common.checksum import Words
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
                    whose = replace(terms, tenant=tenant)
                    await put.run(whose, landed=landed)

        landed = ways.put_way == "write"
        await transfers.in_lanes(sorted(slots), move, landed=landed)
    except KvassError:
        failed = [i for i in slots if i not in outcome.stored and i not in outcome.refused]
        outcome.refused.update(dict.fromkeys(failed, "failed"))
        link.detach()
    return outcome


@dataclass(slots=True, eq=False)
class _Put:
    """One call's blocks. Mutable fields: `outcome` (the push's), `_started` (bytes may be on their
    way into the node's loan), `_over` (nothing is left to abort)."""

    transfers: Transfers
    link: NodeLink
    chain: Chain
    slots: Mapping[int, int]
    ends_s: float
    outcome: PutOutcome
    _started: bool = False
    _over: bool = False

    def _left_s(self) -> float:
        return max(self.ends_s - self.link.now_s(), 1e-3)

    async def run(self, terms: PutTerms, *, landed: bool) -> None:
        """Let the node read what it grants, or write it into its loan; or abort."""
        offer = self._offer(terms)
        try:
            self._over = await (self._write_loan(offer) if landed else self._let_read(offer))
        finally:
            if not self._over:
                await self.link.tell(m.PutAbort(put_id=offer.put_id, started=self._started))

    async def _let_read(self, offer: m.Offer) -> bool:
        """Let the node read the slots; sum them meanwhile, and say at once what it must find. When
        it has answered, nothing is left to abort."""
        places = self.transfers.places(list(self.slots.values()))
        request, left_s = m.PutRead(offer, places.tobytes()), offer.deadline_s
        async with self.link.asked(request, deadline_s=left_s, limit_s=TRANSFER_S) as asked:
            sums = await self.transfers.hashed(places)
            await asked.follow(m.PutSums(checksums=sums.tobytes()))
            done = await asked.reply()
        answers = done.visible, done.busy, done.full, done.stored, done.corrupt, done.failed
        visible, busy, full, stored, corrupt, failed = self.link.told(self.slots, *answers)
        self._note_answered(visible, busy, full)
        self._note(stored | corrupt | failed, stored, corrupt)
        return True

    async def _write_loan(self, offer: m.Offer) -> bool:
        """Ask for places, and sum the slots meanwhile: nearly all that is pushed is granted. Then
        write what was granted. Returns whether nothing is left to abort."""
        request, left_s = m.PutBegin(offer), offer.deadline_s
        async with self.link.asked(request, deadline_s=left_s, limit_s=BEGIN_S) as asked:
            sums = await self.transfers.hashed(self.transfers.places(list(self.slots.values())))
            begun = await asked.reply()
        answers = begun.visible, begun.busy, begun.full, begun.granted
        visible, busy, full, granted = self.link.told(self.slots, *answers)
        self._note_answered(visible, busy, full)
        if not granted:
            return True
        loan = await self._checked(begun.loan, len(granted))
        self._started = True
        await self._write(loan, [self.slots[index] for index in sorted(granted)])
        reply = await self._commit(offer.put_id, granted, sums)
        stored, corrupt = self.link.told(granted, reply.stored, reply.corrupt)
        self._note(granted, stored, corrupt)
        return granted <= stored | corrupt

    async def _checked(self, loan: m.LoanCard | None, count: int) -> m.LoanCard:
        """Return a loan that is the node's own and has the room."""
        ways = await self.link.ways(deadline_s=self._left_s())
        if loan is None:
            raise self.link.wrong("no loan where one is needed")
        if loan.size < count * self.transfers.share or loan.card.start_id != ways.start_id:
            raise self.link.wrong("a loan that is too small, or another process's")
        return loan

    def _note_answered(self, visible: set[int], busy: set[int], full: set[int]) -> None:
        self.outcome.stored |= visible
        self.outcome.refused.update(dict.fromkeys(busy, "busy"))
        self.outcome.refused.update(dict.fromkeys(full, "full"))

    def _note(self, granted: Set[int], stored: set[int], corrupt: set[int]) -> None:
        """Note what became of the blocks that were granted."""
        self.outcome.stored |= stored
        self.outcome.moved += len(stored)
        for index in granted - stored:
            self.outcome.refused[index] = "corrupt" if index in corrupt else "failed"

    def _offer(self, terms: PutTerms) -> m.Offer:
        transfers = self.transfers
        return m.Offer(
            put_id=transfers.next_put(),
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

    async def _commit(self, put_id: str, granted: Set[int], sums: Words) -> m.PutStored:
        """Say what the node must find in its loan: `sums` uint64 [slots, groups] of `granted`."""
        if len(granted) < len(self.slots):
            sums = sums[[index in granted for index in self.slots]]
        commit = m.PutCommit(
            put_id=put_id,
            keys=tuple([self.chain.keys[index] for index in self.slots if index in granted]),
            checksums=sums.tobytes(),
            deadline_s=self._left_s(),
        )
        left_s = commit.deadline_s
        return await self.link.call(commit, deadline_s=left_s, limit_s=TRANSFER_S)

    async def _write(self, target: m.LoanCard, slots: Sequence[int]) -> None:
        """Write slots into a node's loan, one after the other.

        Shielded: stopping a write tears down the agent of all writes, and a healthy node takes
        it in milliseconds; a node that hangs holds this up until the deadline.
        """
        share = self.transfers.share
        offsets = np.arange(len(slots), dtype=np.uint64) * np.uint64(share)
        copies = Copies(
            local=self.transfers.places(slots),
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
