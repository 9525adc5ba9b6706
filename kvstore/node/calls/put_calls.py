"""A store node's side of a put: places, loans, bytes, checks; only then is a block visible.

    same host   read  ─> the node reads the writer's slots    sums ─> compare ─> answer
    TCP         begin ─> a loan, which the writer writes to   commit ─> copy what arrived, compare

On the same host a put is one call: its writer sums its slots while the node reads them, so two
cores work, and there is one wait. Every move that the index has begun is ended whatever happens,
and every loan is settled or abandoned once: by commit, abort, the put's deadline, or the end of the
writer's connection.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from operator import ge

import anyio
import numpy as np
from numpy.typing import NDArray

from kvass.common.block import BlockHeader
from kvass.common.checksum import Sums, Words
from kvass.common.errors import Invalid, KvassError, Unavailable
from kvass.common.keys import indices_of
from kvass.common.rpc.server import Call, Handler
from kvass.common.transport.route import Way
from kvass.common.wire import Done, Message
from kvass.kvstore import messages as m
from kvass.kvstore.index.puts import PutOrder, Verdict
from kvass.kvstore.node.calls.arrivals import Arrival, Judged
from kvass.kvstore.node.deliveries import Lent
from kvass.kvstore.node.state import NodeState, ranges, request_of
from kvass.kvstore.transfers import borrow, parts
from kvass.kvstore.words import unpacked

_log = logging.getLogger(__name__)

TENANTS_NOTED = 64  # of whom it was said that their quota is full
SIZES_NOTED = 16  # a cluster has one block size, a node seldom serves a second
NOTHING = Judged([], [], [], 0)
LEND_WAIT_S = 1.0  # of a put for landing memory, before its blocks are answered `busy`


class PutCalls:
    """Mutable fields: `_ways` (how a session's puts come), `_lent` (loans by put id), `_too_large`
    (the latest block sizes that were said never to fit, each with the room for it), `_over_quota`
    (tenants, as well)."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._ways: dict[str, Way] = {}
        self._lent: dict[str, Lent] = {}
        self._too_large: tuple[tuple[int, int], ...] = ()
        self._over_quota: tuple[str, ...] = ()

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Return what an RPC server answers."""
        return {
            m.PutRead: self._read,
            m.PutBegin: self._begin,
            m.PutCommit: self._commit,
            m.PutAbort: self._abort,
        }

    def attached(self, session: str, way: Way) -> None:
        """Note how bytes come from a writer."""
        self._ways[session] = way

    def counts(self) -> dict[str, int]:
        """Return the largest block that never fits, as far as is known, and what there is for it;
        0 and 0 of none."""
        size, room = max(self._too_large, default=(0, 0))
        return {"too_large_bytes": size, "too_large_room_bytes": room}

    def leave(self, session: str) -> None:
        """A peer's connection has ended: its puts are over, its memory is its own again, and so is
        what it was written to over TCP (an agent here, with a port and five descriptors)."""
        self._ways.pop(session, None)
        if self._state.endpoints.reader is not None:
            self._state.endpoints.reader.detach(session)
        self._state.endpoints.writer.detach(session)
        for put_id in [p for p, lent in self._lent.items() if lent.session == session]:
            self._lent.pop(put_id).loan.abandon()
        self._state.index.leave(session, self._state.now_s())
        self._state.notify()

    def expire(self, now_s: float) -> None:
        """Give up loans of puts whose time is over."""
        for put_id in [p for p, lent in self._lent.items() if lent.ends_s <= now_s]:
            self._lent.pop(put_id).loan.abandon()

    async def _read(self, call: Call) -> m.PutDone:
        """Read a same-host writer's slots, which sums them meanwhile, and compare."""
        request = request_of(call, m.PutRead)
        session = self._session(call, "read", "put_read")
        headers = _headers(request.offer, "put_read")
        addresses = unpacked(request.addresses, "put_read")
        if len(addresses) != len(headers):
            raise Invalid(f"put_read: {len(addresses)} addresses of {len(headers)} blocks")
        order = self._order(request.offer, session, headers)
        try:
            verdicts = self._verdicts(order)
        except KvassError:  # some may have got their places by then
            self._state.index.put_abort(order.put_id, session, self._state.now_s())
            self._state.notify()
            raise
        judged = await self._read_granted(call, order, verdicts, addresses)
        given = partial(_given, headers, verdicts)
        return m.PutDone(
            stored=ranges(judged.stored),
            corrupt=ranges(judged.corrupt),
            failed=_lacking(given("granted"), judged),
            visible=given("visible"),
            busy=given("busy"),
            full=given("full"),
        )

    async def _read_granted(
        self, call: Call, order: PutOrder, verdicts: Sequence[Verdict], addresses: Words
    ) -> Judged:
        """Read what was granted, and show what is right of it: nothing, when the writer does not
        say in time what it must be."""
        if "granted" not in verdicts:
            return NOTHING
        begun_s = self._state.now_s()
        granted = [place for place, verdict in enumerate(verdicts) if verdict == "granted"]
        keys = [order.headers[place].key for place in granted]
        arrival, there = self._arrival(order.put_id, order.session, keys)
        places = np.array(granted, dtype=np.intp)[there]
        try:
            try:
                await self._read_parts(arrival, addresses[places], order)
            except KvassError as error:
                self._failed(arrival, call, error)
            taken_s = self._state.now_s() - begun_s
            with anyio.move_on_after(order.ends_s - self._state.now_s()):
                said = await call.followed(m.PutSums)
                announced = _sums_of(said.checksums, len(order.headers), order.groups, "put_sums")
                return self._judged(call, arrival, announced[places], taken_s)
        finally:
            arrival.discard()
            self._state.notify()
        return NOTHING

    async def _read_parts(self, arrival: Arrival, addresses: Words, order: PutOrder) -> None:
        """Read part by part; each block is summed as it comes."""
        moves, found = arrival.moves, arrival.found
        for part in parts(len(moves), moves[0].size) if moves else ():
            await self._state.deliveries.read(
                order.session,
                moves[part],
                addresses[part],
                Sums(found.values[part], found.whole[part]),
                deadline_s=max(order.ends_s - self._state.now_s(), 1e-3),
            )

    async def _begin(self, call: Call) -> m.PutPlaces:
        request = request_of(call, m.PutBegin)
        headers = _headers(request.offer, "put_begin")
        order = self._order(request.offer, self._session(call, "write", "put_begin"), headers)
        verdicts = self._verdicts(order)
        granted = [h.key for h, v in zip(headers, verdicts, strict=True) if v == "granted"]
        card = None
        if granted:
            card = await self._lend(order, granted)
            if card is None:
                verdicts = ["busy" if v == "granted" else v for v in verdicts]
        given = partial(_given, headers, verdicts)
        return m.PutPlaces(
            granted=given("granted"),
            visible=given("visible"),
            busy=given("busy"),
            full=given("full"),
            loan=card,
        )

    def _session(self, call: Call, way: Way, what: str) -> str:
        """Return whose put it is; raises for one that does not come by this way."""
        session = call.peer.start_id
        known = self._ways.get(session)
        if known is None:
            raise Unavailable(f"{what} before attach")
        if known != way:
            raise Invalid(f"{what}: the way of this writer's puts is {known!r}")
        return session

    def _verdicts(self, order: PutOrder) -> list[Verdict]:
        """Ask the index for places."""
        self._warn_of_size(order)
        index = self._state.index
        over_quota = index.ledger.over_quota
        verdicts = index.put_begin(order, self._state.now_s())
        if index.ledger.over_quota > over_quota:
            self._warn_of_quota(order.headers[0].tenant)
        self._state.notify()
        return verdicts

    def _arrival(
        self, put_id: str, session: str, keys: Sequence[bytes]
    ) -> tuple[Arrival, NDArray[np.bool_]]:
        """Let bytes come for blocks of a put; return them, and of which keys they are."""
        index = self._state.index
        begun = index.begin_moves(put_id, session, keys, self._state.now_s())
        moves = [move for move in begun if move is not None]
        there = np.array([move is not None for move in begun], dtype=np.bool_)
        return Arrival.of(index, moves), there

    def _failed(self, arrival: Arrival, call: Call, error: KvassError) -> None:
        self._state.faults["put_failed"] += len(arrival.moves) - int(arrival.found.whole.sum())
        _log.warning("put of %s: %s", call.peer.member_id, error)

    def _judged(self, call: Call, arrival: Arrival, announced: Words, taken_s: float) -> Judged:
        """Show what is right, and count."""
        judged = arrival.judge(announced)
        self._state.faults["put_corrupt"] += len(judged.corrupt)
        self._state.notify()
        self._state.on_moved("put", judged.size_bytes, taken_s)
        call.later(self._state.index.catch_up)
        if judged.keys:
            self._state.on_stored(judged.keys)
        return judged

    def _warn_of_quota(self, tenant: str) -> None:
        """Say once that a tenant's quota keeps blocks out: they are answered `full`."""
        if tenant not in self._over_quota:
            self._over_quota = (*self._over_quota[-TENANTS_NOTED + 1 :], tenant)
            quota = self._state.index.limits.allotments.quota(tenant)
            _log.warning(
                "tenant %r is at its quota of %d bytes, and nothing of its may go: blocks are not "
                "stored (store.tenant_quotas; said once, counted as over_quota)",
                tenant,
                quota,
            )

    def _warn_of_size(self, order: PutOrder) -> None:
        """Say once that blocks of this size can never be stored here: they are answered `full`."""
        size = order.headers[0].length if order.headers else 0
        room = self._state.index.room_bytes(held=bool(order.hold_owner))
        if size > room and (size, room) not in self._too_large:
            self._too_large = (*self._too_large[-SIZES_NOTED + 1 :], (size, room))
            _log.warning(
                "no block of %d bytes fits, so none is stored: store.slab_bytes leaves %d for %s",
                size,
                room,
                "blocks that are held" if order.hold_owner else "blocks",
            )

    def _order(self, offer: m.Offer, session: str, headers: Sequence[BlockHeader]) -> PutOrder:
        first, stop = offer.groups
        count = len(headers)
        if not 0 <= first < stop <= offer.head_groups or offer.block_size % offer.head_groups:
            raise Invalid(
                f"a put: head groups {first} to {stop} of {offer.head_groups} in blocks of "
                f"{offer.block_size} bytes"
            )
        if count > m.BLOCKS_MAX:
            raise Invalid(f"a put: {count} blocks in one call; at most {m.BLOCKS_MAX}")
        now_s = self._state.now_s()
        return PutOrder(
            put_id=offer.put_id,
            session=session,
            headers=headers,
            head_groups=offer.head_groups,
            groups=range(first, stop),
            ends_s=now_s + offer.deadline_s,
            hold_owner=offer.hold_owner,
            hold_ends_s=now_s + self._state.index.limits.hold_s,
        )

    async def _lend(self, order: PutOrder, granted: Sequence[bytes]) -> m.LoanCard | None:
        """Lend memory for the granted shares; give the put up when there is none."""
        share = len(order.groups) * order.headers[0].length // order.head_groups
        loan = None
        try:
            if order.put_id not in self._lent:
                size = share * len(granted)
                loan = await borrow(self._state.endpoints, size, deadline_s=LEND_WAIT_S)
        finally:
            if loan is None and order.put_id not in self._lent:
                self._state.index.put_abort(order.put_id, order.session, self._state.now_s())
                self._state.notify()
        known = self._lent.get(order.put_id)
        if known is not None:  # asked again, before or while this call waited for memory
            if loan is not None:
                loan.settle()
            return m.card_of(known.loan) if list(known.offsets) == list(granted) else None
        if loan is None:
            return None
        offsets = {key: i * share for i, key in enumerate(granted)}
        self._lent[order.put_id] = Lent(loan, order.session, order.groups, offsets, order.ends_s)
        return m.card_of(loan)

    async def _commit(self, call: Call) -> m.PutStored:
        """Take what a writer has written into its loan, and show what is right of it."""
        request = request_of(call, m.PutCommit)
        session, deadline_s = call.peer.start_id, request.deadline_s
        if len(set(request.keys)) != len(request.keys):
            raise Invalid("put_commit: a key comes twice")
        lent = self._lent.get(request.put_id)
        if lent is None:
            return m.PutStored(stored=(), corrupt=())
        if lent.session != session:
            raise Invalid(f"put_commit: {request.put_id!r} is another writer's")
        if not lent.offsets.keys() >= set(request.keys):
            raise Invalid("put_commit: it names blocks that its loan has no room for")
        announced = _sums_of(request.checksums, len(request.keys), lent.groups, "put_commit")
        begun_s = self._state.now_s()
        arrival, there = self._arrival(request.put_id, session, request.keys)
        del self._lent[request.put_id]  # from here on `take` ends the loan
        try:
            try:
                await self._state.deliveries.take(
                    lent, arrival.moves, arrival.found, deadline_s=deadline_s
                )
            except KvassError as error:
                self._failed(arrival, call, error)
                return m.PutStored(stored=(), corrupt=())
            taken_s = self._state.now_s() - begun_s
            judged = self._judged(call, arrival, announced[there], taken_s)
        finally:
            arrival.discard()
            self._state.notify()
        return m.PutStored(stored=ranges(judged.stored), corrupt=ranges(judged.corrupt))

    def _abort(self, call: Call) -> Done:
        request = request_of(call, m.PutAbort)
        lent = self._lent.get(request.put_id)
        if lent is not None and lent.session == call.peer.start_id:
            del self._lent[request.put_id]
            if request.started:
                lent.loan.abandon()
            else:
                lent.loan.settle()
        session = call.peer.start_id
        self._state.index.put_abort(request.put_id, session, self._state.now_s())
        self._state.notify()
        return Done()


def _headers(offer: m.Offer, what: str) -> list[BlockHeader]:
    """Return headers of the blocks that are offered; raises Invalid unless they are in chain
    order."""
    headers: list[BlockHeader] = []
    for span in offer.spans:
        parent = span.parent
        for index, key in span.named():
            headers.append(
                BlockHeader(
                    key=key,
                    parent=parent,
                    segment_key=span.segment_key,
                    index=index,
                    namespace=offer.namespace,
                    tenant=offer.tenant,
                    writer=offer.writer,
                    token_count=offer.token_count,
                    length=offer.block_size,
                    checksums=(),
                )
            )
            parent = key
    indices = [header.index for header in headers]
    if any(map(ge, indices, indices[1:])):
        raise Invalid(f"{what}: expected blocks in chain order, each once")
    return headers


def _given(
    headers: Sequence[BlockHeader], verdicts: Sequence[Verdict], verdict: Verdict
) -> m.Ranges:
    """Return which blocks got `verdict`."""
    if verdict not in verdicts:
        return ()
    return ranges([h.index for h, v in zip(headers, verdicts, strict=True) if v == verdict])


def _lacking(granted: m.Ranges, judged: Judged) -> m.Ranges:
    """Return which of the blocks that were granted did not come."""
    return ranges(set(indices_of(granted)).difference(judged.stored, judged.corrupt))


def _sums_of(data: bytes, blocks: int, groups: range, what: str) -> Words:
    """Return checksums uint64 [blocks, groups]; raises Invalid for others than of these."""
    sums = unpacked(data, what)
    if len(sums) != blocks * len(groups):
        raise Invalid(f"{what}: {len(sums)} checksums; {blocks} blocks in {len(groups)} groups")
    return sums.reshape(blocks, len(groups))
