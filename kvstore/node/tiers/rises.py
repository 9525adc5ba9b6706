"""How blocks come up from a tier below into memory.

    get, stage, drain ─> found there ─> parts, within a bound on bytes ─> read
                         ─> a put of the node to itself ─> checked in its slot ─> visible

Parts are read in the background, so that a caller waits only as long as it likes, and what is late
for it is there for the next one. Coming up is a put like any other's: quotas, erasures and the
slots' conservation hold as they do for writers. It refuses to know who asks, and why, and what is
read: a `Source` is flash, or a bucket.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

import anyio
import anyio.abc
import msgspec

from kvass.common.block import BlockHeader
from kvass.common.errors import KvassError
from kvass.common.executor import Executor
from kvass.kvstore.flash.disk import PAGE
from kvass.kvstore.flash.fetched import Fetched, copy_all
from kvass.kvstore.flash.table import pages_in
from kvass.kvstore.index.puts import Move, PutOrder
from kvass.kvstore.node.chores import survived
from kvass.kvstore.node.keeping import Keeping
from kvass.kvstore.node.slab import Slab
from kvass.kvstore.node.state import NodeState

_log = logging.getLogger(__name__)

PART_BYTES = 4 << 20  # read between two looks at the index
FLIGHT_BYTES = 64 << 20  # read and not yet in a slot, of all callers: what a fast disk needs
RISING_MAX = 16_384  # blocks on their way or waiting for it, of all callers; more are misses
# Of a get, for what comes up: its caller shuns a node that needs `links.CALL_S` for an answer.
GET_S = 0.5
LIFT_S = 5.0  # in which a part begins, or is given up; one that takes longer is a disk that hangs


class Source(Protocol):
    """What blocks are read from."""

    @property
    def name(self) -> str:
        """One word, which no other source of the node has, and no process as its start id: the
        session of the puts that this node makes to itself."""
        ...

    def fetched(
        self, places: Mapping[bytes, int]
    ) -> AbstractAsyncContextManager[Mapping[bytes, Fetched]]:
        """Read all of these at once; what cannot be had is not in the answer. The bytes are the
        caller's until the block ends."""
        ...

    def found_wrong(self, key: bytes, place: int) -> None:
        """What was read there is not what was written."""
        ...


@dataclass(slots=True, eq=False)
class _Part:
    """Blocks that are read together: where they are, and who keeps what comes up. Mutable field:
    `keeps`."""

    places: dict[bytes, int]
    size: int
    keeps: list[Keeping]
    end: anyio.Event = field(default_factory=anyio.Event)


class Rises:
    """Mutable fields: `_rising` (keys on their way up, each with its part), `_begun_s` (when
    the parts that are being read were begun, by number), `_flight_bytes` (of them), `_room` (set
    when there is more), `counts`. `copiers` runs what is copied into slots, and hashed."""

    def __init__(
        self,
        state: NodeState,
        slab: Slab,
        source: Source,
        copiers: Executor,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self._state = state
        self._slab = slab
        self._source = source
        self._copiers = copiers
        self._tasks = tasks
        self._rising: dict[bytes, _Part] = {}
        self._begun_s: dict[int, float] = {}
        self._flight_bytes = 0
        self._room = anyio.Event()
        self._numbers = itertools.count()
        self.counts: Counter[str] = Counter()

    @property
    def waited_s(self) -> float:
        """How long the oldest part is being read."""
        now_s = self._state.now_s()
        return max((now_s - begun_s for begun_s in self._begun_s.values()), default=0.0)

    def __len__(self) -> int:
        return len(self._rising)

    async def rise(self, places: dict[bytes, int], limit_s: float, keep: Keeping) -> None:
        """Bring blocks up, and keep them; returns when they are there, or are misses, or the time
        is over. The places are those of now: what was erased here and there since is not
        brought."""
        self._start(places, LIFT_S, keep)
        parts = {id(part): part for key in places if (part := self._rising.get(key)) is not None}
        for part in parts.values():
            if keep not in part.keeps:  # somebody else's, too
                part.keeps.append(keep)
        with anyio.move_on_after(limit_s):
            for part in parts.values():
                await part.end.wait()

    def stage(self, places: dict[bytes, int], within_s: float) -> None:
        """Bring blocks up in the background, as `rise` does, those whose turn comes within the
        time; each is kept until all are there."""
        keep = self._state.keeping(())
        parts = self._start(places, within_s, keep)
        if parts:
            self._tasks.start_soon(_keep_until_all_are_up, keep, parts)

    def _start(self, places: dict[bytes, int], within_s: float, keep: Keeping) -> list[_Part]:
        """Begin with those that nobody brings up yet, as far as the bounds allow."""
        parts: list[_Part] = []
        chosen: dict[bytes, int] = {}
        size = 0
        for key, place in places.items():
            if key in self._rising:
                continue
            if len(self._rising) + len(chosen) >= RISING_MAX:
                self.counts["rises_refused"] += 1
                continue
            chosen[key] = place
            size += pages_in(place) * PAGE
            if size >= PART_BYTES:
                parts.append(_Part(chosen, size, [keep]))
                chosen, size = {}, 0
        if chosen:
            parts.append(_Part(chosen, size, [keep]))
        as_of = self._state.index.erasures.settled
        for part in parts:
            self._rising.update(dict.fromkeys(part.places, part))
            self._tasks.start_soon(self._lift, part, min(within_s, LIFT_S), as_of)
        return parts

    async def _lift(self, part: _Part, within_s: float, as_of: int) -> None:
        number = next(self._numbers)
        try:
            with anyio.move_on_after(within_s) as waiting:
                while self._begun_s and self._flight_bytes + part.size > FLIGHT_BYTES:
                    await self._room.wait()
            if waiting.cancelled_caught:
                self.counts["rises_refused"] += len(part.places)
                return
            self._begun_s[number] = self._state.now_s()
            self._flight_bytes += part.size
            try:
                with survived(f"bringing blocks up from {self._source.name}", self._state.faults):
                    await self._bring(part, as_of)
            finally:
                del self._begun_s[number]
                self._flight_bytes -= part.size
                self._room.set()
                self._room = anyio.Event()
        finally:
            for key in part.places:
                del self._rising[key]
            part.end.set()

    async def _bring(self, part: _Part, as_of: int) -> None:
        """Read all at once, then show them in the order in which they will be asked for."""
        async with self._source.fetched(part.places) as fetched:
            there = [fetched[key] for key in part.places if key in fetched]
            for _, blocks in itertools.groupby(there, key=attrgetter("shape")):
                await self._show(list(blocks), part, as_of)

    async def _show(self, blocks: Sequence[Fetched], part: _Part, as_of: int) -> None:
        """Put blocks of one shape into slots; they are visible when they are right there."""
        index, now_s = self._state.index, self._state.now_s
        order = self._order([block.header for block in blocks], as_of)
        try:
            verdicts = index.put_begin(order, now_s())
        except KvassError as error:  # too many puts, or a block of this name and another shape
            index.put_abort(order.put_id, order.session, now_s())
            if len(blocks) > 1:
                for block in blocks:
                    await self._show([block], part, as_of)
                return
            self.counts["rises_refused"] += 1
            _log.debug("%s of %s: %s", blocks[0].header.key.hex(), self._source.name, error)
            return
        # The others: no room, erased meanwhile, or here by now.
        granted = [
            block for block, verdict in zip(blocks, verdicts, strict=True) if verdict == "granted"
        ]
        keys = [block.header.key for block in granted]
        begun = index.begin_moves(order.put_id, order.session, keys, now_s())
        # None: the process stood still, and the put's time is over.
        pairs = [
            (block, move) for block, move in zip(granted, begun, strict=True) if move is not None
        ]
        right = [False] * len(pairs)
        try:
            if pairs:
                right = await self._copiers.run(lambda: self._copy(pairs))
        finally:
            sums = [
                block.header.checksums if is_right else None
                for (block, _), is_right in zip(pairs, right, strict=True)
            ]
            stored = index.end_moves([move for _, move in pairs], sums)
            there = [move.entry for (_, move), is_in in zip(pairs, stored, strict=True) if is_in]
            for keep in part.keeps:
                keep.add(there)
            index.put_abort(order.put_id, order.session, now_s())
            self._state.notify()
        self.counts["risen"] += len(there)
        for (block, _), is_right in zip(pairs, right, strict=True):
            if not is_right:
                self._source.found_wrong(block.header.key, part.places[block.header.key])

    def _copy(self, pairs: Sequence[tuple[Fetched, Move]]) -> list[bool]:
        addresses = [self._slab.address + move.offset for _, move in pairs]
        return copy_all([block for block, _ in pairs], addresses)

    def _order(self, headers: Sequence[BlockHeader], as_of: int) -> PutOrder:
        groups = len(headers[0].checksums)
        return PutOrder(
            put_id=f"{self._source.name}-{next(self._numbers)}",
            session=self._source.name,
            headers=[msgspec.structs.replace(header, checksums=()) for header in headers],
            head_groups=groups,
            groups=range(groups),
            ends_s=self._state.now_s() + LIFT_S,
            as_of=as_of,
            is_own=True,
        )


async def _keep_until_all_are_up(keep: Keeping, parts: Sequence[_Part]) -> None:
    with keep:
        for part in parts:
            await part.end.wait()
