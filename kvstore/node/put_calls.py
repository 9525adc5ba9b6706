"""A store node's side of a put: places, loans, bytes, checks; only then is a block visible.

    same host   begin ─> granted             commit ─> node reads the writer's slots, checks
    TCP         begin ─> granted, a loan     commit ─> node copies what arrived, checks the copy

Every move that the index has begun is ended whatever happens, and every loan is settled or
abandoned once: by commit, abort, the put's deadline, or the end of the writer's connection.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvass.common.block import BlockHeader
from kvass.common.errors import Invalid, KvassError, Unavailable
from kvass.common.rpc.server import Call, Handler
from kvass.common.transport.route import Way
from kvass.common.wire import Done, Message
from kvass.kvstore import messages as m
from kvass.kvstore.checksum import rows
from kvass.kvstore.index.puts import Move, PutOrder
from kvass.kvstore.node.deliveries import Lent
from kvass.kvstore.node.state import NodeState, chosen, ranges, request_of
from kvass.kvstore.transfers import borrow, parts

_log = logging.getLogger(__name__)

TENANTS_NOTED = 64  # of whom it was said that their quota is full
SIZES_NOTED = 16  # a cluster has one block size, a node seldom serves a second
LEND_WAIT_S = 1.0  # of a put for landing memory, before its blocks are answered `busy`


@dataclass(slots=True, eq=False)
class _Coming:
    """One block of a commit. `address` is in the writer's memory (same host)."""

    index: int
    move: Move
    address: int
    announced: tuple[int, ...]


@dataclass(slots=True)
class _Outcome:
    """Mutable fields: chain indices, and the bytes that were stored."""

    stored: list[int] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    size_bytes: int = 0


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
        """A writer's connection has ended."""
        self._ways.pop(session, None)
        for put_id in [p for p, lent in self._lent.items() if lent.session == session]:
            self._lent.pop(put_id).loan.abandon()
        self._state.index.leave(session, self._state.now_s())
        self._state.notify()

    def expire(self, now_s: float) -> None:
        """Give up loans of puts whose time is over."""
        for put_id in [p for p, lent in self._lent.items() if lent.ends_s <= now_s]:
            self._lent.pop(put_id).loan.abandon()

    async def _begin(self, call: Call) -> m.PutPlaces:
        request = request_of(call, m.PutBegin)
        session = call.peer.start_id
        way = self._ways.get(session)
        if way is None:
            raise Unavailable("put_begin before attach")
        order = self._order(request, session)
        self._warn_of_size(order)
        over_quota = self._state.index.ledger.over_quota
        verdicts = self._state.index.put_begin(order, self._state.now_s())
        if self._state.index.ledger.over_quota > over_quota:
            self._warn_of_quota(request.tenant)
        self._state.notify()
        answers = {h.index: verdict for h, verdict in zip(order.headers, verdicts, strict=True)}
        card = None
        granted = [h.key for h in order.headers if answers[h.index] == "granted"]
        if granted and way == "write":
            card = await self._lend(order, granted)
            if card is None:
                answers = {i: "busy" if v == "granted" else v for i, v in answers.items()}
        return m.PutPlaces(
            granted=chosen(answers, "granted"),
            visible=chosen(answers, "visible"),
            busy=chosen(answers, "busy"),
            full=chosen(answers, "full"),
            loan=card,
        )

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

    def _order(self, request: m.PutBegin, session: str) -> PutOrder:
        first, stop = request.groups
        count = len(m.named(request.spans))
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
            headers=sorted(_headers(request), key=lambda header: header.index),
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

    async def _commit(self, call: Call) -> m.PutStored:
        request = request_of(call, m.PutCommit)
        session = call.peer.start_id
        lent = self._lent.get(request.put_id)
        if lent is not None and lent.session != session:
            raise Invalid(f"put_commit: {request.put_id!r} is another writer's")
        way = self._ways.get(session)
        _check_commit(request, way)
        coming = self._begin_moves(request, session)
        self._lent.pop(request.put_id, None)  # from here on `take` ends the loan
        outcome = _Outcome()
        begun_s = self._state.now_s()
        try:
            if lent is not None:
                await self._land(lent, coming, outcome, request.deadline_s)
            elif way == "read":
                await self._read(session, coming, outcome, request.deadline_s)
        except KvassError as error:
            self._state.faults["put_failed"] += len(coming)
            _log.warning("put of %s: %s", call.peer.member_id, error)
        finally:
            for block in list(coming):
                self._end(coming, block, None)
            self._state.notify()
        self._state.on_moved("put", outcome.size_bytes, self._state.now_s() - begun_s)
        if outcome.stored:
            stored = set(outcome.stored)
            pairs = zip(request.keys, request.indices, strict=True)
            self._state.on_stored([key for key, index in pairs if index in stored])
        return m.PutStored(stored=ranges(outcome.stored), corrupt=ranges(outcome.corrupt))

    def _begin_moves(self, request: m.PutCommit, session: str) -> dict[_Coming, None]:
        addresses = request.addresses or (0,) * len(request.keys)
        announced = rows(request.checksums, len(request.checksums) // max(len(request.keys), 1))
        coming: dict[_Coming, None] = {}
        now_s = self._state.now_s()
        moves = self._state.index.begin_moves(request.put_id, session, request.keys, now_s)
        blocks = zip(moves, request.indices, addresses, announced, strict=True)
        for move, index, address, checksums in blocks:
            if move is not None and len(checksums) == len(move.groups):
                coming[_Coming(index, move, address, checksums)] = None
            elif move is not None:
                self._state.index.end_move(move, None)
        self._state.notify()
        return coming

    async def _land(
        self, lent: Lent, coming: dict[_Coming, None], outcome: _Outcome, deadline_s: float
    ) -> None:
        """Take what a TCP writer has written into its loan."""
        blocks = list(coming)
        moves = [block.move for block in blocks]
        found = await self._state.deliveries.take(lent, moves, deadline_s=deadline_s)
        self._judge(coming, dict(zip(blocks, found, strict=True)), outcome)

    async def _read(
        self, session: str, coming: dict[_Coming, None], outcome: _Outcome, deadline_s: float
    ) -> None:
        """Read a same-host writer's slots, part by part; each block is hashed as it comes."""
        blocks = list(coming)
        for part in parts(blocks, blocks[0].move.size) if blocks else ():
            found: dict[int, tuple[int, ...]] = {}
            try:
                await self._state.deliveries.read(
                    session,
                    [block.move for block in part],
                    [block.address for block in part],
                    found,
                    deadline_s=deadline_s,
                )
            finally:  # what came before a fault is there
                self._judge(coming, {part[i]: sums for i, sums in found.items()}, outcome)

    def _judge(
        self,
        coming: dict[_Coming, None],
        found: Mapping[_Coming, tuple[int, ...]],
        outcome: _Outcome,
    ) -> None:
        """Compare what is in the slots with what was announced, and end the moves."""
        for block, checksums in found.items():
            if checksums != block.announced:
                self._state.faults["put_corrupt"] += 1
                outcome.corrupt.append(block.index)
                self._end(coming, block, None)
            elif self._end(coming, block, checksums):
                outcome.stored.append(block.index)
                outcome.size_bytes += block.move.size
        self._state.notify()

    def _end(
        self, coming: dict[_Coming, None], block: _Coming, checksums: tuple[int, ...] | None
    ) -> bool:
        del coming[block]
        return self._state.index.end_move(block.move, checksums)

    async def _abort(self, call: Call) -> Done:
        request = request_of(call, m.PutAbort)
        lent = self._lent.get(request.put_id)
        if lent is not None and lent.session == call.peer.start_id:
            del self._lent[request.put_id]
            if request.started:
                lent.loan.abandon()
            else:
                lent.loan.settle()
        self._state.index.put_abort(request.put_id, call.peer.start_id, self._state.now_s())
        self._state.notify()
        return Done()


def _headers(request: m.PutBegin) -> list[BlockHeader]:
    headers = []
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


def _check_commit(request: m.PutCommit, way: Way | None) -> None:
    count = len(request.keys)
    addresses = count if way == "read" else 0
    if len(request.indices) != count or len(request.addresses) != addresses:
        raise Invalid(
            f"put_commit: {count} keys, {len(request.indices)} indices and "
            f"{len(request.addresses)} addresses for a put whose way is {way!r}"
        )
    if count and (len(request.checksums) % count or not request.checksums):
        raise Invalid(f"put_commit: {len(request.checksums)} checksums for {count} blocks")
    if len(set(request.keys)) != count:
        raise Invalid("put_commit: a key comes twice")
    if any(not 0 <= address < 1 << 56 for address in request.addresses):
        raise Invalid("put_commit: an address that is none in user space")
