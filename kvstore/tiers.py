"""A store node's second tier beside its first: what goes down to flash, and what comes up again.

    asked for (not by the job it is held for) ─> a bounded queue ─> leased, written, found on flash
    get, stage ─> read ─> a put of the node to itself ─> checked in its slot ─> visible

A block goes down when it was asked for once after its put, and as soon as memory begins to fill:
then it is on flash before it is evicted. Coming up is a put like any other's: quotas, erasures and
the slots' conservation hold as they do for writers. A disk that fails makes this tier step aside
for a while: reads are misses, writes refused and counted, and the node goes on.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection, Sequence

import anyio
import msgspec

from kvass.common.block import BlockHeader
from kvass.common.errors import Unavailable
from kvass.common.executor import Executor
from kvass.kvstore.flash.catalog import Fetched
from kvass.kvstore.flash.disk import PAGE, page_memory
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.flash.table import pages_in
from kvass.kvstore.ledger import Entry
from kvass.kvstore.node_state import NodeState
from kvass.kvstore.puts import Move, PutOrder
from kvass.kvstore.slab import Slab

_log = logging.getLogger(__name__)

OWN_SESSION = "flash"  # no process's start id: the puts that this node makes to itself
WAITING_MAX = 65_536  # blocks that are to go down: 12 GB of the default model's
BATCH_BYTES = 16 << 20  # written, or read, between two looks at the index
FULL_SHARE = 0.5  # of the slab in use: from here on blocks go down
TICK_S = 0.05
RISE_S = 2.0  # of one call, for what comes up: as long as a slow disk takes for a long prompt
ASIDE_S = 30.0  # a full disk may be emptied meanwhile
READ_FAULTS_MAX = 8  # in a row of looks; more is a broken disk, not a broken page


class Tiers:
    """Mutable fields: `_waiting` (keys that are to go down, oldest first), `_rising` (keys on their
    way up), `_aside_until_s`, `_read_faults` (seen at the last look), `counts`.

    `writer` runs one call of the log at a time, `readers` as many reads as the disk wants in
    flight."""

    def __init__(
        self, state: NodeState, slab: Slab, log: FlashLog, writer: Executor, readers: Executor
    ) -> None:
        self._state = state
        self._slab = slab
        self._log = log
        self._writer = writer
        self._readers = readers
        self._waiting: dict[bytes, None] = {}
        self._rising: dict[bytes, anyio.Event] = {}
        self._aside_until_s = -1.0
        self._read_faults = 0
        self._numbers = itertools.count()
        self.counts: Counter[str] = Counter()

    def found(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of `keys` that are on flash."""
        if not keys or self._is_aside():
            return set()
        places = self._log.catalog.find(keys)
        return {key for key, place in zip(keys, places, strict=True) if place}

    def asked(self, keys: Collection[bytes]) -> None:
        """Somebody asks for these blocks: those in memory become worth a place on flash."""
        index = self._state.index
        for key in keys:
            if key in index.ledger.entries and key not in index.guards:
                if len(self._waiting) < WAITING_MAX:
                    self._waiting[key] = None

    # --- down ---

    async def run(self) -> None:
        """Write down what is worth it, until cancelled."""
        while True:
            await anyio.sleep(TICK_S)
            extents = self._state.index.ledger.extents
            while self._waiting and extents.free_bytes < extents.total * (1 - FULL_SHARE):
                await self.sink()

    async def sink(self) -> None:
        """Write one batch down, its blocks leased meanwhile."""
        entries = self._next_down()
        if not entries:
            return
        ledger = self._state.index.ledger
        blocks = [(entry.header, self._bytes_of(entry)) for entry in entries]
        try:
            await self._writer.run(lambda: self._write(blocks))
            self.counts["sunk"] += len(entries)
        except Unavailable as error:
            self.counts["refused"] += len(entries)
            self._step_aside(error)
        finally:
            for _, view in blocks:
                view.release()
            for entry in entries:
                ledger.unlease(entry)
            self._state.notify()

    def _next_down(self) -> list[Entry]:
        ledger = self._state.index.ledger
        entries: list[Entry] = []
        size = 0
        while self._waiting and size < BATCH_BYTES:
            key = next(iter(self._waiting))
            del self._waiting[key]
            entry = ledger.visible(key)
            if entry is None:
                continue
            if self._is_aside():
                self.counts["refused"] += 1
            elif not self._log.catalog.find([key])[0]:
                ledger.lease(entry)
                entries.append(entry)
                size += entry.header.length
        return entries

    def _write(self, blocks: Sequence[tuple[BlockHeader, memoryview]]) -> None:
        self._log.append(blocks)
        self._log.flush()

    def _bytes_of(self, entry: Entry) -> memoryview:
        offset = entry.slot.offset
        return self._slab.view[offset : offset + entry.header.length]

    # --- up ---

    async def rise(self, keys: Sequence[bytes], limit_s: float = RISE_S) -> None:
        """Bring those of `keys` that are on flash, and not in memory, into memory; what cannot be
        had within the time is a miss."""
        entries = self._state.index.ledger.entries
        wanted = [key for key in self.found(keys) if key not in entries]
        self._log.catalog.use(wanted)
        ends_s = self._state.now_s() + limit_s
        fresh = [key for key in wanted if key not in self._rising]
        others = [self._rising[key] for key in wanted if key in self._rising]
        done = anyio.Event()
        self._rising.update(dict.fromkeys(fresh, done))
        try:
            while fresh and self._state.now_s() < ends_s:
                part, fresh = self._part(fresh)
                await self._rise(part)
        finally:
            for key in [key for key, event in self._rising.items() if event is done]:
                del self._rising[key]
            done.set()
        with anyio.move_on_after(max(ends_s - self._state.now_s(), 0.0)):
            for event in others:
                await event.wait()

    def _part(self, keys: list[bytes]) -> tuple[dict[bytes, int], list[bytes]]:
        """Cut off what one look reads."""
        places = self._log.catalog.find(keys)
        size = count = 0
        while count < len(keys) and size < BATCH_BYTES:
            size += pages_in(places[count]) * PAGE
            count += 1
        return dict(zip(keys[:count], places[:count], strict=True)), keys[count:]

    async def _rise(self, places: dict[bytes, int]) -> None:
        fetched: dict[bytes, Fetched] = {}

        async def read(key: bytes, place: int) -> None:
            found = await self._readers.run(lambda: self._read(key, place))
            if found is not None:
                fetched[key] = found

        async with anyio.create_task_group() as tasks:
            for key, place in places.items():
                if place:
                    tasks.start_soon(read, key, place)
        self._look_at_faults()
        for key in sorted(fetched, key=lambda key: fetched[key].header.index):
            await self._show(fetched[key], places[key])

    def _read(self, key: bytes, place: int) -> Fetched | None:
        return self._log.catalog.read(key, place, page_memory(pages_in(place) * PAGE))

    async def _show(self, fetched: Fetched, place: int) -> None:
        """Put a block that was read into a slot; it is visible when it is right there."""
        index, header = self._state.index, fetched.header
        order = self._order(header)
        if index.put_begin(order, self._state.now_s()) != ["granted"]:
            return  # no room, erased meanwhile, or here by now
        (move,) = index.begin_moves(order.put_id, OWN_SESSION, [header.key], self._state.now_s())
        assert move is not None
        right = False
        try:
            right = await self._readers.run(lambda: self._copy(fetched, move))
        finally:
            stored = index.end_move(move, header.checksums if right else None)
            index.put_abort(order.put_id, OWN_SESSION, self._state.now_s())
            self._state.notify()
        self.counts["hits"] += stored
        if not right:
            self._log.catalog.found_wrong(header.key, place)

    def _copy(self, fetched: Fetched, move: Move) -> bool:
        with self._slab.view[move.offset : move.offset + move.size] as target:
            return fetched.copy_to(target)

    def _order(self, header: BlockHeader) -> PutOrder:
        groups = len(header.checksums)
        return PutOrder(
            put_id=f"{OWN_SESSION}-{next(self._numbers)}",
            session=OWN_SESSION,
            headers=[msgspec.structs.replace(header, checksums=())],
            head_groups=groups,
            groups=range(groups),
            ends_s=self._state.now_s() + RISE_S,
            is_copy=True,
        )

    # --- erasing, faults, counts ---

    async def drop(self, order: DropOrder) -> int:
        """Erase blocks on flash, for good; call it after the index's own drop. Raises Unavailable
        when not all could be erased."""
        return await self._writer.run(lambda: self._log.drop(order))

    async def sync(self) -> None:
        """Make all that is on flash last."""
        await self._writer.run(self._log.sync)

    def _is_aside(self) -> bool:
        return self._state.now_s() < self._aside_until_s

    def _step_aside(self, why: object) -> None:
        if not self._is_aside():
            _log.error("%s: the flash tier steps aside for %.0f s", why, ASIDE_S)
        self._aside_until_s = self._state.now_s() + ASIDE_S

    def _look_at_faults(self) -> None:
        faults = self._log.catalog.counts["read_faults"]
        if faults - self._read_faults > READ_FAULTS_MAX:
            self._step_aside(f"flash: {faults - self._read_faults} reads failed")
        self._read_faults = faults

    def totals(self) -> dict[str, int]:
        """Return the tier's counts under the names that a node shows."""
        catalog = self._log.catalog
        segments = list(catalog.segments.values())
        names = ("appended_bytes", "copied_bytes", "read_faults", "write_faults", "corrupt")
        return {
            "flash_total_bytes": self._log.total_bytes,
            "flash_used_bytes": sum(each.head.size for each in segments),
            "flash_blocks": len(catalog),
            "flash_index_bytes": catalog.index_bytes,
            "flash_waiting_blocks": len(self._waiting),
            "flash_aside": int(self._is_aside()),
            **{f"flash_{name}": catalog.counts[name] for name in (*names, "freed_files")},
            **{f"flash_{name}": self.counts[name] for name in ("hits", "sunk", "refused")},
        }
