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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.abc
import msgspec

from kvass.common.block import BlockHeader
from kvass.common.errors import KvassError
from kvass.common.executor import Executor
from kvass.kvstore.flash.catalog import Catalog, Fetched
from kvass.kvstore.flash.disk import PAGE, page_memory
from kvass.kvstore.flash.table import pages_in
from kvass.kvstore.index.puts import Move, PutOrder
from kvass.kvstore.node.chores import survived
from kvass.kvstore.node.slab import Slab
from kvass.kvstore.node.state import NodeState

_log = logging.getLogger(__name__)

PART_BYTES = 16 << 20  # read between two looks at the index
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

    async def fetch(self, places: Mapping[bytes, int]) -> dict[bytes, Fetched]:
        """Read all of these at once; what cannot be had is not in the answer."""
        ...

    def found_wrong(self, key: bytes, place: int) -> None:
        """What was read there is not what was written."""
        ...


@dataclass(frozen=True, slots=True)
class FlashSource:
    """Flash: `readers` runs as many reads as the disk wants in flight."""

    catalog: Catalog
    readers: Executor
    name: str = "flash"

    async def fetch(self, places: Mapping[bytes, int]) -> dict[bytes, Fetched]:
        fetched: dict[bytes, Fetched] = {}

        async def read(key: bytes, place: int) -> None:
            found = await self.readers.run(self._reading(key, place))
            if found is not None:
                fetched[key] = found

        async with anyio.create_task_group() as tasks:
            for key, place in places.items():
                tasks.start_soon(read, key, place)
        return fetched

    def _reading(self, key: bytes, place: int) -> Callable[[], Fetched | None]:
        return lambda: self.catalog.read(key, place, page_memory(pages_in(place) * PAGE))

    def found_wrong(self, key: bytes, place: int) -> None:
        self.catalog.found_wrong(key, place)


class Rises:
    """Mutable fields: `_rising` (keys on their way up, each with what ends it), `_begun_s` (when
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
        self._rising: dict[bytes, anyio.Event] = {}
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

    async def rise(self, places: dict[bytes, int], limit_s: float) -> None:
        """Bring blocks up; returns when they are there, or are misses, or the time is over. The
        places are those of now: what was erased here and there since is not brought."""
        self.start(places)
        ends = {id(end): end for key in places if (end := self._rising.get(key)) is not None}
        with anyio.move_on_after(limit_s):
            for end in ends.values():
                await end.wait()

    def start(self, places: dict[bytes, int], within_s: float = LIFT_S) -> None:
        """Bring blocks up in the background, as `rise` does, those that fit the bounds, and whose
        turn comes within the time."""
        part: dict[bytes, int] = {}
        size = 0
        for key, place in places.items():
            if key in self._rising:
                continue
            if len(self._rising) + len(part) >= RISING_MAX:
                self.counts["rises_refused"] += 1
                continue
            part[key] = place
            size += pages_in(place) * PAGE
            if size >= PART_BYTES:
                self._start(part, size, within_s)
                part, size = {}, 0
        if part:
            self._start(part, size, within_s)

    def _start(self, part: dict[bytes, int], size: int, within_s: float) -> None:
        end = anyio.Event()
        self._rising.update(dict.fromkeys(part, end))
        as_of = self._state.index.erasures.settled
        self._tasks.start_soon(self._lift, part, size, min(within_s, LIFT_S), end, as_of)

    async def _lift(
        self, part: dict[bytes, int], size: int, within_s: float, end: anyio.Event, as_of: int
    ) -> None:
        number = next(self._numbers)
        try:
            with anyio.move_on_after(within_s) as waiting:
                while self._begun_s and self._flight_bytes + size > FLIGHT_BYTES:
                    await self._room.wait()
            if waiting.cancelled_caught:
                self.counts["rises_refused"] += len(part)
                return
            self._begun_s[number] = self._state.now_s()
            self._flight_bytes += size
            try:
                with survived(f"bringing blocks up from {self._source.name}", self._state.faults):
                    await self._bring(part, as_of)
            finally:
                del self._begun_s[number]
                self._flight_bytes -= size
                self._room.set()
                self._room = anyio.Event()
        finally:
            for key in part:
                del self._rising[key]
            end.set()

    async def _bring(self, places: dict[bytes, int], as_of: int) -> None:
        """Read all at once, then show them in the order in which they will be asked for."""
        fetched = await self._source.fetch(places)
        for key in places:
            if key in fetched:
                await self._show(fetched[key], places[key], as_of)

    async def _show(self, fetched: Fetched, place: int, as_of: int) -> None:
        """Put a block that was read into a slot; it is visible when it is right there."""
        index, header = self._state.index, fetched.header
        order = self._order(header, as_of)
        try:
            verdicts = index.put_begin(order, self._state.now_s())
        except KvassError as error:  # too many puts, or a block of this name and another shape
            self.counts["rises_refused"] += 1
            _log.debug("%s of %s: %s", header.key.hex(), self._source.name, error)
            return
        if verdicts != ["granted"]:
            return  # no room, erased meanwhile, or here by now
        (move,) = index.begin_moves(order.put_id, order.session, [header.key], self._state.now_s())
        if move is None:
            return  # the process stood still, and its time is over
        right = False
        try:
            right = await self._copiers.run(lambda: self._copy(fetched, move))
        finally:
            stored = index.end_move(move, header.checksums if right else None)
            index.put_abort(order.put_id, order.session, self._state.now_s())
            self._state.notify()
        self.counts["risen"] += stored
        if not right:
            self._source.found_wrong(header.key, place)

    def _copy(self, fetched: Fetched, move: Move) -> bool:
        with self._slab.view[move.offset : move.offset + move.size] as target:
            return fetched.copy_to(target)

    def _order(self, header: BlockHeader, as_of: int) -> PutOrder:
        groups = len(header.checksums)
        return PutOrder(
            put_id=f"{self._source.name}-{next(self._numbers)}",
            session=self._source.name,
            headers=[msgspec.structs.replace(header, checksums=())],
            head_groups=groups,
            groups=range(groups),
            ends_s=self._state.now_s() + LIFT_S,
            as_of=as_of,
            is_own=True,
        )
