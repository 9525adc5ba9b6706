"""How blocks go from own slots into a store node.

    same host   put_begin: the node reads the slots    put_commit, meanwhile: it compares
    TCP         put_begin ─> a loan     write the slots into it, put_commit: it checks

A put that is not committed is aborted, whatever happened, so that its blocks are writable again
at once; when that cannot be said either, the node finds out by the end of the connection or the
deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
                    await put.run(replace(terms, tenant=tenant), landed=landed)

        landed = ways.put_way == "write"
        await transfers.in_lanes(sorted(slots), move, landed=landed)
    except KvassError:
        failed = [i for i in slots if i not in outcome.stored and i not in outcome.refused]
        outcome.refused.update(dict.fromkeys(failed, "failed"))
        link.detach()
    return outcome


@dataclass(slots=True, eq=False)
class _Put:
    """One call's blocks. Mutable fields: `outcome` (the push's), `_sums` (checksums of `slots`, in
    their order, uint64 [blocks, groups]),
    `_started` (bytes may be on their way into the node's loan), `_over` (nothing is left to
    abort)."""

    transfers: Transfers
    link: NodeLink
    chain: Chain
    slots: Mapping[int, int]
    ends_s: float
    outcome: PutOutcome
    _sums: Words | None = None
    _started: bool = False
    _over: bool = False

    def _left_s(self) -> float:
        return max(self.ends_s - self.link.now_s(), 1e-3)

    async def run(self, terms: PutTerms, *, landed: bool) -> None:
        """Begin, move, commit; or abort."""
        put_id = self.transfers.next_put()
        try:
            if landed:
                self._over = await self._write_loan(put_id, terms)
            else:
                self._over = await self._let_read(put_id, terms)
        finally:
            if not self._over:
                await self.link.tell(m.PutAbort(put_id=put_id, started=self._started))

    async def _let_read(self, put_id: str, terms: PutTerms) -> bool:
        """Let the node read the slots; hash them meanwhile, and say at once what it must find.
        Returns whether nothing is left to abort."""
        places = self.transfers.places(list(self.slots.values()))
        request = self._request(put_id, terms, places.tobytes())
        left_s = request.deadline_s
        async with self.link.asked(request, deadline_s=left_s, limit_s=TRANSFER_S) as reply:
            await self._hash(places)
            stored = await self._commit(put_id, list(self.slots))
            begun = await reply()
        if begun.loan is not None:
            raise self.link.wrong("a loan where none is of use")
        return self._note(self._answered(begun), stored)

    async def _write_loan(self, put_id: str, terms: PutTerms) -> bool:
        """Ask for places, and hash the slots meanwhile: nearly all that is pushed is granted. Then
        write what was granted. Returns whether nothing is left to abort."""
        request = self._request(put_id, terms)
        left_s = request.deadline_s
        async with self.link.asked(request, deadline_s=left_s, limit_s=BEGIN_S) as reply:
            await self._hash(self.transfers.places(list(self.slots.values())))
            begun = await reply()
        granted = self._answered(begun)
        if not granted:
            return True
        loan = await self._checked(begun.loan, len(granted))
        self._started = True
        await self._write(loan, [self.slots[index] for index in granted])
        return self._note(granted, await self._commit(put_id, granted))

    async def _checked(self, loan: m.LoanCard | None, count: int) -> m.LoanCard:
        """Return a loan that is the node's own and has the room."""
        ways = await self.link.ways(deadline_s=self._left_s())
        if loan is None:
            raise self.link.wrong("no loan where one is needed")
        if loan.size < count * self.transfers.share or loan.card.start_id != ways.start_id:
            raise self.link.wrong("a loan that is too small, or another process's")
        return loan

    async def _hash(self, places: Words) -> None:
        self._sums = await self.transfers.hashed(places)

    def _answered(self, places: m.PutPlaces) -> list[int]:
        """Note what is there or refused; return what was granted."""
        answers = places.visible, places.busy, places.full, places.granted
        visible, busy, full, granted = self.link.told(self.slots, *answers)
        self.outcome.stored.update(visible)
        self.outcome.refused.update(dict.fromkeys(busy, "busy"))
        self.outcome.refused.update(dict.fromkeys(full, "full"))
        return sorted(granted)

    def _note(self, granted: Sequence[int], reply: m.PutStored) -> bool:
        """Note what became of the blocks that were granted; returns whether that is settled."""
        stored, corrupt = self.link.told(granted, reply.stored, reply.corrupt)
        self.outcome.stored |= stored
        self.outcome.moved += len(stored)
        for index in set(granted) - stored:
            self.outcome.refused[index] = "corrupt" if index in corrupt else "failed"
        return set(granted) <= stored | corrupt

    def _request(self, put_id: str, terms: PutTerms, addresses: bytes = b"") -> m.PutBegin:
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
            addresses=addresses,
        )

    async def _commit(self, put_id: str, indices: Sequence[int]) -> m.PutStored:
        """Say what the node must have or find."""
        assert self._sums is not None
        sums = self._sums
        if len(indices) < len(self.slots):
            wanted = set(indices)
            sums = sums[[index in wanted for index in self.slots]]
        commit = m.PutCommit(
            put_id=put_id,
            keys=tuple([self.chain.keys[index] for index in indices]),
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
