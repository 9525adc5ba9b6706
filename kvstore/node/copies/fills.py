"""How a store node takes copies of blocks from another one: for replicas, repair and handover.

    fill(source, spans) ─> a bounded queue ─> describe ─> put_begin here ─> pull ─> visible

A fill is a hint: it is taken in at once and done later, one at a time, so that a node that has just
joined or come back is not stormed, and what its memory holds already is skipped. Bytes come as they
come to every client, by a lease and with checksums; nothing is visible before it was checked here.

It refuses to know why somebody wants the copy: that is `handover.py`'s, and the reader's that found
a block at another node than the first.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.abc
import numpy as np
from numpy.typing import NDArray

from kvass.common.block import BlockHeader
from kvass.common.checksum import Words
from kvass.common.errors import KvassError
from kvass.common.executor import Executor
from kvass.common.rpc.server import Call, Handler
from kvass.common.wire import Message
from kvass.kvstore import messages as m
from kvass.kvstore.client.pulls import PullOutcome, pull
from kvass.kvstore.index.puts import PutOrder
from kvass.kvstore.links import CALL_S, NodeLink
from kvass.kvstore.node.slab import Slab
from kvass.kvstore.node.state import NodeState, ranges, request_of
from kvass.kvstore.router import Router
from kvass.kvstore.transfers import TRANSFER_S, PlainShape, Transfers

FULL_S = 5.0  # for which a copy that found no room is not tried again
FULL_MAX = 65_536  # such copies; 6 MB of memory
QUEUED_MAX = 16_384  # blocks; of the default model 3 GB, a second or two of a fast network
OWN_SESSION = "fill"  # no process's start id: the puts that this node makes to itself


@dataclass(frozen=True, slots=True)
class _SlabSlots:
    """The slab as a worker's slots are seen: a slot's number is its offset."""

    slab: Slab
    block_size: int

    @property
    def address(self) -> int:
        return self.slab.address

    @property
    def size(self) -> int:
        return self.slab.size

    @property
    def array(self) -> _SlabSlots:
        return self

    def __getitem__(self, offset: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.slab.view, dtype=np.uint8, count=self.block_size, offset=offset)

    def addresses(self, offsets: Sequence[int]) -> Words:
        return np.array(offsets, dtype=np.uint64) + np.uint64(self.slab.address)


Kind = tuple[bytes, str, str, int, int, int]  # a `messages.Shape` without its index


@dataclass(slots=True)
class Filler:
    """The copies that one node takes. `agree` returns when a source has heard of every erasure that
    this node has heard of, with the number of the last one (`Erasures.number`); `found` what of
    some keys is below memory.

    Mutable fields: `_queue` (source, span, whether it spares what is here), `_queued` and `_taking`
    (keys of what waits, and of what comes now), `_lasting` (of these, what is to go to flash),
    `_full` (keys that found no free room, with when), `_news`, and the counts of blocks `filled`,
    `failed`, `refused` (no free room) and `dropped` (there was no room in the queue)."""

    state: NodeState
    slab: Slab
    router: Router
    executor: Executor
    tasks: anyio.abc.TaskGroup
    agree: Callable[[NodeLink], Awaitable[int]]
    found: Callable[[Sequence[bytes]], set[bytes]] = lambda keys: set()
    has_flash: bool = False
    filled: int = 0
    failed: int = 0
    dropped: int = 0
    refused: int = 0
    _queue: deque[tuple[str, m.Span, bool]] = field(default_factory=deque)
    _full: dict[bytes, float] = field(default_factory=dict)
    _queued: set[bytes] = field(default_factory=set)
    _taking: set[bytes] = field(default_factory=set)
    _lasting: set[bytes] = field(default_factory=set)
    _news: anyio.Event = field(default_factory=anyio.Event)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _transfers: dict[PlainShape, Transfers] = field(default_factory=dict)

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Return what an RPC server answers."""
        return {m.Describe: self._describe, m.Fill: self._fill}

    def counts(self) -> dict[str, int]:
        return {
            "fill_queued_blocks": len(self._queued) + len(self._taking),
            "filled": self.filled,
            "fill_failed": self.failed,
            "fill_dropped": self.dropped,
            "fill_refused": self.refused,
        }

    async def run(self) -> None:
        """Take copies, one span after the other, until cancelled."""
        while True:
            while self._queue:
                source, span, spare = self._queue.popleft()
                keys = {key for _, key in span.named()}
                # Told of once more from here on, they may be others: these were erased meanwhile.
                self._queued -= keys
                self._taking = keys
                try:
                    if not await self._take(source, span, spare):
                        await self._take(source, span, spare)  # as of what was erased since
                except KvassError:
                    self.failed += len(keys)
                finally:
                    self._taking = set()
                    self._make_last(keys & self._lasting)
                    self._lasting -= keys - self._queued
            await self._news.wait()
            self._news = anyio.Event()

    async def _describe(self, call: Call) -> m.Described:
        ledger = self.state.index.ledger
        shapes: list[m.Shape] = []
        named = m.named(request_of(call, m.Describe).spans)
        async with self.state.risen(list(named.values())):
            for index, key in named.items():
                entry = ledger.visible(key)
                if entry is not None and len(shapes) < m.BLOCKS_MAX:
                    h = entry.header
                    kind = (h.namespace, h.tenant, h.writer, h.token_count, h.length)
                    shapes.append(m.Shape(index, *kind, entry.head_groups))
        return m.Described(shapes=tuple(shapes))

    def _fill(self, call: Call) -> m.Filling:
        request = request_of(call, m.Fill)
        visible = self.state.index.ledger.visible
        below = self.found([key for span in request.spans for _, key in span.named()])
        missing: list[int] = []
        full: list[int] = []
        places = itertools.count()
        for span in request.spans:
            above = [
                (place, key)
                for (_, key), place in zip(span.named(), places, strict=False)
                if key not in below
            ]
            lacking = [(place, key) for place, key in above if visible(key) is None]
            until_it_lasts = request.lasting and self.has_flash
            missing += [place for place, _ in (above if until_it_lasts else lacking)]
            if request.spare:
                full += [place for place, key in lacking if self._found_no_room(key)]
                lacking = [each for each in lacking if not self._found_no_room(each[1])]
            self._queue_up(request.source, span, [key for _, key in lacking], request.spare)
            if request.lasting:
                self._lasting |= self._queued.intersection(key for _, key in lacking)
                self._make_last({key for _, key in span.named()})
        return m.Filling(missing=ranges(missing), full=ranges(full))

    def _make_last(self, keys: set[bytes]) -> None:
        """Of these, what is here goes to flash as if it had been asked for."""
        visible = self.state.index.ledger.visible
        self.state.on_asked([key for key in keys if visible(key) is not None])

    def _found_no_room(self, key: bytes) -> bool:
        """Whether a copy was refused just now for want of free room."""
        return self.state.now_s() - self._full.get(key, -FULL_S) < FULL_S

    def _queue_up(self, source: str, span: m.Span, missing: Sequence[bytes], spare: bool) -> None:
        fresh = [key for key in missing if key not in self._queued]
        if not fresh:
            return
        if len(self._queued) + len(fresh) > QUEUED_MAX:
            self.dropped += len(fresh)
            return
        self._queue.append((source, span, spare))
        self._queued.update(fresh)
        self._news.set()

    async def _take(self, source: str, span: m.Span, spare: bool) -> bool:
        """Copy what of a span is there and not here; returns whether nothing of it was erased here
        meanwhile."""
        link = self.router.link(source)
        as_of = await self.agree(link)
        described = await link.call(m.Describe(spans=(span,)), deadline_s=CALL_S)
        kinds: dict[Kind, list[int]] = {}
        for shape in described.shapes:
            if shape.block_size % shape.head_groups:
                continue  # no block is like that
            kind = (
                shape.namespace,
                shape.tenant,
                shape.writer,
                shape.token_count,
                shape.block_size,
                shape.head_groups,
            )
            kinds.setdefault(kind, []).append(shape.index)
        piece = m.Piece(span)
        own = {index for index, _ in span.named()}
        whole = True
        for kind, indices in kinds.items():
            named = sorted(own.intersection(indices))
            if not named:
                continue  # it was not asked about these
            order = self._order(piece, named, kind, spare, as_of)
            whole &= await self._copy(link, piece, order)
        return whole

    async def _copy(self, link: NodeLink, piece: m.Piece, order: PutOrder) -> bool:
        """Bring blocks of one kind into slots of their own, check them, and show them; returns
        whether none of them was erased here meanwhile."""
        index, now_s = self.state.index, self.state.now_s
        length = order.headers[0].length
        verdicts = index.put_begin(order, now_s())
        if order.spares:
            self._note_full(
                h.key for h, v in zip(order.headers, verdicts, strict=True) if v == "full"
            )
        keys = [header.key for header in order.headers]
        begun = index.begin_moves(order.put_id, OWN_SESSION, keys, now_s())
        moves = {
            header.index: move
            for header, move in zip(order.headers, begun, strict=True)
            if move is not None
        }
        outcome, begun_s, is_whole = PullOutcome(), now_s(), "erased" not in verdicts
        try:
            if moves:
                transfers = self._moving(PlainShape(length, order.head_groups))
                places = {i: move.offset for i, move in moves.items()}
                outcome = await pull(transfers, link, piece, places, ends_s=now_s() + TRANSFER_S)
        finally:
            checksums = outcome.checksums()
            for i, move in moves.items():
                stored = index.end_move(move, checksums.get(i))
                is_whole &= stored or i not in outcome.pulled  # else it was erased as it came
                self.filled += stored
                self.failed += not stored
            index.put_abort(order.put_id, OWN_SESSION, now_s())
            self.state.on_moved("fill", length * len(outcome.pulled), now_s() - begun_s)
            self.state.notify()
        return is_whole

    def _note_full(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.refused += 1
            self._full.pop(key, None)
            self._full[key] = self.state.now_s()
            if len(self._full) > FULL_MAX:
                del self._full[next(iter(self._full))]

    def _order(
        self, piece: m.Piece, indices: Sequence[int], kind: Kind, spare: bool, as_of: int
    ) -> PutOrder:
        namespace, tenant, writer, token_count, block_size, head_groups = kind
        headers = [
            BlockHeader(
                key=piece.key(index),
                parent=piece.parent(index),
                segment_key=piece.span.segment_key,
                index=index,
                namespace=namespace,
                tenant=tenant,
                writer=writer,
                token_count=token_count,
                length=block_size,
                checksums=(),
            )
            for index in indices
        ]
        return PutOrder(
            put_id=f"{OWN_SESSION}-{next(self._numbers)}",
            session=OWN_SESSION,
            headers=headers,
            head_groups=head_groups,
            groups=range(head_groups),
            ends_s=self.state.now_s() + 2 * TRANSFER_S,
            as_of=as_of,
            spares=spare,
        )

    def _moving(self, shape: PlainShape) -> Transfers:
        """Return the means for blocks of one shape; a cluster has one or two."""
        if shape not in self._transfers:
            if len(self._transfers) >= 16:
                self._transfers.clear()
            self._transfers[shape] = Transfers(
                _SlabSlots(self.slab, shape.block_size),
                shape,
                range(shape.head_groups),
                self.state.endpoints,
                self.executor,
                self.tasks,
            )
        return self._transfers[shape]
