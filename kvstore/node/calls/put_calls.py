"""A store node's side of a put: places, loans, bytes, checks; only then is a block visible.

    same host   begin ─> node reads the writer's slots        commit ─> compare
    TCP         begin ─> a loan, which the writer writes to   commit ─> copy what arrived, compare

On the same host a writer sends its commit as soon as it has hashed its slots, while the node reads
them: two cores work, and there is one wait. Every move that the index has begun is ended whatever
happens, and every loan is settled or abandoned once: by commit, abort, the put's deadline, or the
end of the writer's connection.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import ge

from kvass.common.block import BlockHeader
from kvass.common.checksum import Sums, Words
from kvass.common.errors import Invalid, KvassError, Unavailable
from kvass.common.rpc.server import Call, Handler
from kvass.common.transport.route import Way
from kvass.common.wire import Done, Message
from kvass.kvstore import messages as m
from kvass.kvstore.index.puts import PutOrder, Verdict
from kvass.kvstore.node.calls.arrivals import Announced, Arrival, Arrivals
from kvass.kvstore.node.deliveries import Lent
from kvass.kvstore.node.state import NodeState, ranges, request_of
from kvass.kvstore.transfers import borrow, parts
from kvass.kvstore.words import unpacked

_log = logging.getLogger(__name__)

TENANTS_NOTED = 64  # of whom it was said that their quota is full
SIZES_NOTED = 16  # a cluster has one block size, a node seldom serves a second
LEND_WAIT_S = 1.0  # of a put for landing memory, before its blocks are answered `busy`


class PutCalls:
    """Mutable fields: `_ways` (how a session's puts come), `_lent` (loans by put id), `_arrivals`,
    `_too_large` (the latest block sizes that were said never to fit, each with the room for it),
    `_over_quota` (tenants, as well)."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._ways: dict[str, Way] = {}
        self._lent: dict[str, Lent] = {}
        self._arrivals = Arrivals(state.index)
        self._too_large: tuple[tuple[int, int], ...] = ()
        self._over_quota: tuple[str, ...] = ()

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Return what an RPC server answers."""
        return {m.PutBegin: self._begin, m.PutCommit: self._commit, m.PutAbort: self._abort}

    def attached(self, session: str, way: Way) -> None:
        """Note how bytes come from a writer."""
        self._ways[session] = way

    def counts(self) -> dict[str, int]:
        """Return the largest block that never fits, as far as is known, and what there is for it;
        0 and 0 of none."""
        size, room = max(self._too_large, default=(0, 0))
        return {"too_large_bytes": size, "too_large_room_bytes": room}

    def leave(self, session: str) -> None:
        """A peer's connection has ended: its puts are over, and its memory is its own again."""
        self._ways.pop(session, None)
        if self._state.endpoints.reader is not None:
            self._state.endpoints.reader.detach(session)
        for put_id in [p for p, lent in self._lent.items() if lent.session == session]:
            self._lent.pop(put_id).loan.abandon()
        self._state.index.leave(session, self._state.now_s())
        self._arrivals.leave(session)
        self._state.notify()

    def expire(self, now_s: float) -> None:
        """Give up loans and bytes of puts whose time is over."""
        self._arrivals.expire(now_s)
        for put_id in [p for p, lent in self._lent.items() if lent.ends_s <= now_s]:
            self._lent.pop(put_id).loan.abandon()

    async def _begin(self, call: Call) -> m.PutPlaces:
        request = request_of(call, m.PutBegin)
        session = call.peer.start_id
        way = self._ways.get(session)
        if way is None:
            raise Unavailable("put_begin before attach")
        headers, addresses = _offered(request, way)
        order = self._order(request, session, headers)
        self._warn_of_size(order)
        self._arrivals.expire(self._state.now_s())  # what waits for nobody is no quarantine
        over_quota = self._state.index.ledger.over_quota
        verdicts = self._state.index.put_begin(order, self._state.now_s())
        if self._state.index.ledger.over_quota > over_quota:
            self._warn_of_quota(request.tenant)
        self._state.notify()
        places = [place for place, verdict in enumerate(verdicts) if verdict == "granted"]
        card = None
        if places and way == "write":
            card = await self._lend(order, [headers[place].key for place in places])
            if card is None:
                verdicts = ["busy" if v == "granted" else v for v in verdicts]
        elif way == "read":  # its commit is on its way, also when nothing is granted
            await self._read(order, places, addresses, call.peer.member_id)
        return _places(headers, verdicts, card)

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

    def _order(self, request: m.PutBegin, session: str, headers: Sequence[BlockHeader]) -> PutOrder:
        first, stop = request.groups
        count = len(headers)
        if not 0 <= first < stop <= request.head_groups or request.block_size % request.head_groups:
            raise Invalid(
                f"put_begin: head groups {first} to {stop} of {request.head_groups} in blocks of "
                f"{request.block_size} bytes"
            )
        if count > m.BLOCKS_MAX:
            raise Invalid(f"put_begin: {count} blocks in one call; at most {m.BLOCKS_MAX}")
        now_s = self._state.now_s()
        return PutOrder(
            put_id=request.put_id,
            session=session,
            headers=headers,
            head_groups=request.head_groups,
            groups=range(first, stop),
            ends_s=now_s + request.deadline_s,
            hold_owner=request.hold_owner,
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
        self._lent[order.put_id] = Lent(loan, order.session, offsets, order.ends_s)
        return m.card_of(loan)

    async def _read(
        self,
        order: PutOrder,
        granted: Sequence[int],
        addresses: Words,
        writer: str,
    ) -> None:
        """Read a same-host writer's slots, part by part; each block is hashed as it comes.
        `granted` are places in `order` and in `addresses`."""
        known = self._arrivals.find(order.put_id)
        if known is not None:  # asked again
            await known.over.wait()
            return
        begun_s = self._state.now_s()
        keys = [order.headers[place].key for place in granted]
        begun = self._state.index.begin_moves(order.put_id, order.session, keys, begun_s)
        taken = [place for place, move in zip(granted, begun, strict=True) if move is not None]
        moves = [move for move in begun if move is not None]
        arrival = Arrival.of(order.session, order.ends_s, moves)
        self._arrivals.open(order.put_id, arrival)
        try:
            await self._read_parts(arrival, addresses[taken])
        except KvassError as error:
            self._state.faults["put_failed"] += len(moves) - int(arrival.found.whole.sum())
            _log.warning("put of %s: %s", writer, error)
        except BaseException:
            self._arrivals.give_up([order.put_id])  # it is gone, or this node is
            raise
        finally:
            arrival.taken_s = self._state.now_s() - begun_s
            self._arrivals.ended(order.put_id, arrival)
            self._state.notify()

    async def _read_parts(self, arrival: Arrival, addresses: Words) -> None:
        moves, found = arrival.moves, arrival.found
        for part in parts(len(moves), moves[0].size) if moves else ():
            await self._state.deliveries.read(
                arrival.session,
                moves[part],
                addresses[part],
                Sums(found.values[part], found.whole[part]),
                deadline_s=max(arrival.ends_s - self._state.now_s(), 1e-3),
            )

    async def _commit(self, call: Call) -> m.PutStored:
        request = request_of(call, m.PutCommit)
        session = call.peer.start_id
        announced = _announced(request)
        if self._ways.get(session) == "write":
            arrival = await self._landed(request, session, call.peer.member_id)
        else:
            arrival = await self._arrivals.take(
                request.put_id, session, deadline_s=request.deadline_s
            )
        if arrival is None:
            return m.PutStored(stored=(), corrupt=())
        judged = self._arrivals.judge(arrival, announced)
        self._state.faults["put_corrupt"] += len(judged.corrupt)
        self._state.notify()
        self._state.on_moved("put", judged.size_bytes, arrival.taken_s)
        call.later(self._state.index.catch_up)
        if judged.keys:
            self._state.on_stored(judged.keys)
        return m.PutStored(stored=ranges(judged.stored), corrupt=ranges(judged.corrupt))

    async def _landed(self, request: m.PutCommit, session: str, writer: str) -> Arrival | None:
        """Take what a TCP writer has written into its loan; None if its put is over."""
        lent = self._lent.get(request.put_id)
        if lent is not None and lent.session != session:
            raise Invalid(f"put_commit: {request.put_id!r} is another writer's")
        if lent is None:
            return None
        begun_s = self._state.now_s()
        begun = self._state.index.begin_moves(request.put_id, session, request.keys, begun_s)
        moves = [move for move in begun if move is not None]
        arrival = Arrival.of(session, begun_s + request.deadline_s, moves)
        del self._lent[request.put_id]  # from here on `take` ends the loan
        whole = False
        try:
            await self._state.deliveries.take(
                lent, moves, arrival.found, deadline_s=request.deadline_s
            )
            arrival.taken_s = self._state.now_s() - begun_s
            whole = True
        except KvassError as error:
            self._state.faults["put_failed"] += len(moves)
            _log.warning("put of %s: %s", writer, error)
        finally:
            if not whole:
                self._arrivals.discard(arrival)
                self._state.notify()
        return arrival

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
        arrival = self._arrivals.find(request.put_id)
        if arrival is not None and arrival.session == session:
            self._arrivals.give_up([request.put_id])
        self._state.notify()
        return Done()


def _offered(request: m.PutBegin, way: Way) -> tuple[list[BlockHeader], Words]:
    """Return headers of the blocks that are offered, by chain index, and where each is in its
    writer's memory, if the node reads it there; raises Invalid for what cannot be."""
    headers = _headers(request)
    addresses = unpacked(request.addresses, "put_begin")
    given, count = len(addresses), len(headers)
    if given != (count if way == "read" else 0):
        raise Invalid(f"put_begin: {given} addresses of {count} blocks; their way is {way!r}")
    indices = [header.index for header in headers]
    if any(map(ge, indices, indices[1:])):
        if len(set(indices)) != count:
            raise Invalid("put_begin: a chain index comes twice")
        order = sorted(range(count), key=indices.__getitem__)
        headers = [headers[place] for place in order]
        addresses = addresses[order] if given else addresses
    return headers, addresses


def _headers(request: m.PutBegin) -> list[BlockHeader]:
    """Return headers of the blocks that are offered, as their names come."""
    headers: list[BlockHeader] = []
    for span in request.spans:
        parent = span.parent
        for index, key in span.named():
            headers.append(
                BlockHeader(
                    key=key,
                    parent=parent,
                    segment_key=span.segment_key,
                    index=index,
                    namespace=request.namespace,
                    tenant=request.tenant,
                    writer=request.writer,
                    token_count=request.token_count,
                    length=request.block_size,
                    checksums=(),
                )
            )
            parent = key
    return headers


def _places(
    headers: Sequence[BlockHeader], verdicts: Sequence[Verdict], card: m.LoanCard | None
) -> m.PutPlaces:
    def answered(verdict: Verdict) -> m.Ranges:
        if verdict not in verdicts:
            return ()
        return ranges([h.index for h, v in zip(headers, verdicts, strict=True) if v == verdict])

    return m.PutPlaces(
        granted=answered("granted"),
        visible=answered("visible"),
        busy=answered("busy"),
        full=answered("full"),
        loan=card,
    )


def _announced(request: m.PutCommit) -> Announced:
    checksums, count = unpacked(request.checksums, "put_commit"), len(request.keys)
    if len(checksums) % count or not len(checksums):
        raise Invalid(f"put_commit: {len(checksums)} checksums for {count} blocks")
    if len(set(request.keys)) != count:
        raise Invalid("put_commit: a key comes twice")
    return Announced(request.keys, checksums.reshape(count, -1))
