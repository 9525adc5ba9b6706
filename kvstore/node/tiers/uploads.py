"""What goes from a store node's memory into the bucket, and when.

    asked for (not by the job it is held for) ─> waits for its segment's others ─> an object

The same blocks that are worth a place on flash go up: what was asked for once after its put. Only a
segment's home puts them, so that it happens once. A bucket that takes nothing, and can be read
all the same, is left alone for a while.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import anyio

from kvass.common.block import BlockHeader
from kvass.common.errors import Unavailable
from kvass.common.executor import Executor
from kvass.kvstore.index.ledger import Entry
from kvass.kvstore.node.slab import Slab
from kvass.kvstore.node.state import NodeState
from kvass.kvstore.node.tiers.bucket import TICK_S, Bucket
from kvass.kvstore.node.tiers.flash_tier import ASIDE_S, WAITING_MAX
from kvass.kvstore.objects.contents import packed, runs_of
from kvass.kvstore.objects.names import name_of
from kvass.kvstore.objects.shelf import Listed

_log = logging.getLogger(__name__)

GATHER_S = 2.0  # for the rest of a segment: an object of one block costs as much as one of 32
UPLOADS = 4  # under way: 64 MiB of memory at most

Group = tuple[bytes, str, str, bytes]  # namespace, tenant, writer, segment key


@dataclass(slots=True)
class _Waiting:
    since_s: float
    keys: dict[bytes, None] = field(default_factory=dict)


class Uploads:
    """Mutable fields: `_waiting` (what is to go up, by group, oldest first), `_count` (of its
    blocks), `_flying` (blocks under way, by number of the upload), `_landed` (set when one has
    ended), `_again_s` (nothing is put before), `counts`."""

    def __init__(self, bucket: Bucket, state: NodeState, slab: Slab, executor: Executor) -> None:
        self._bucket = bucket
        self._state = state
        self._slab = slab
        self._executor = executor
        self._waiting: dict[Group, _Waiting] = {}
        self._count = 0
        self._flying: dict[int, list[bytes]] = {}
        self._numbers = itertools.count()
        self._landed = anyio.Event()
        self._again_s = -1.0
        self._places = anyio.Semaphore(UPLOADS)
        self.counts: Counter[str] = Counter()

    def asked(self, keys: Sequence[bytes]) -> None:
        """These blocks are worth a place in the bucket: those that are in memory, and not there."""
        index = self._state.index
        flying = {key for blocks in self._flying.values() for key in blocks}
        entries = [
            entry
            for key in keys
            if key not in flying and (entry := index.ledger.visible(key)) is not None
        ]
        places = self._bucket.shelf.find([entry.header.key for entry in entries])
        # What is hot in memory is not to leave the bucket, only to be put there again.
        self._bucket.shelf.use(filter(None, places), self._state.now_s())
        homes: dict[bytes, bool] = {}
        for entry, place in zip(entries, places, strict=True):
            header = entry.header
            segment = header.segment_key
            if place or header.key in index.guards or self._count >= WAITING_MAX:
                continue
            if segment not in homes:
                homes[segment] = self._bucket.is_home(segment)
            if homes[segment]:
                self._wait(header)

    def _wait(self, header: BlockHeader) -> None:
        group = (header.namespace, header.tenant, header.writer, header.segment_key)
        waiting = self._waiting.setdefault(group, _Waiting(self._state.now_s()))
        self._count += header.key not in waiting.keys
        waiting.keys[header.key] = None

    async def run(self) -> None:
        """Put what is worth it, until cancelled."""
        while True:
            await anyio.sleep(TICK_S)
            if self._state.index.draining:  # what is here goes to others, from memory
                self._waiting.clear()
                self._count = 0
            await self.put_ready()

    async def put_ready(self) -> None:
        """Put what has waited long enough."""
        async with anyio.create_task_group() as tasks:
            for keys in self._ready():
                headers = [entry.header for entry in self._entries(keys)]
                for run in runs_of(headers):
                    if self._bucket.outage.is_on or self._state.now_s() < self._again_s:
                        self.counts["refused"] += len(run)
                        continue
                    await self._places.acquire()  # given back when it has ended
                    tasks.start_soon(self._put, run)

    def _ready(self) -> Iterator[list[bytes]]:
        now_s = self._state.now_s()
        while self._waiting:
            group, waiting = next(iter(self._waiting.items()))
            if now_s - waiting.since_s < GATHER_S:
                return
            del self._waiting[group]
            self._count -= len(waiting.keys)
            yield list(waiting.keys)

    def _entries(self, keys: Sequence[bytes]) -> list[Entry]:
        """Return those blocks that are still in memory, and still not in the bucket."""
        visible = self._state.index.ledger.visible
        places = self._bucket.shelf.find(keys)
        found = [visible(key) for key, place in zip(keys, places, strict=True) if not place]
        return [entry for entry in found if entry is not None]

    async def _put(self, headers: list[BlockHeader]) -> None:
        number = next(self._numbers)
        self._flying[number] = [header.key for header in headers]
        try:
            await self._put_object(self._entries(self._flying[number]))
        finally:
            del self._flying[number]
            self._places.release()
            self._landed.set()
            self._landed = anyio.Event()

    async def _put_object(self, entries: list[Entry]) -> None:
        if not entries:
            return
        bucket = self._bucket
        name = name_of([entry.header for entry in entries]).text(bucket.root)
        data = await self._packed(name, entries)
        if not await bucket.make_room(len(data)):
            self.counts["refused"] += len(entries)
            return
        bucket.spare(name)
        bucket.reserved_bytes += len(data)
        bucket.takes_off(name)
        try:
            await bucket.objects.put(name, data)
        except Unavailable as error:
            self.counts["write_faults"] += 1
            self.counts["refused"] += len(entries)
            bucket.landed(name)
            bucket.forget([name])  # it may be there all the same
            if await bucket.answers(name):
                self._stop(error)
        else:
            if not bucket.landed(name):
                bucket.forget([name])
                return
            bucket.shelf.add([Listed(name, len(data), 0.0)], self._state.now_s())
            self.counts["written_bytes"] += len(data)
            self.counts["sunk"] += len(entries)
        finally:
            bucket.reserved_bytes -= len(data)

    def _stop(self, error: Unavailable) -> None:
        if self._state.now_s() >= self._again_s:
            _log.error("%s: nothing is put there for %.0f s", error, ASIDE_S)
        self._again_s = self._state.now_s() + ASIDE_S

    async def _packed(self, name: str, entries: Sequence[Entry]) -> memoryview:
        """Copy blocks out of memory; they are leased for no longer than that takes."""
        ledger = self._state.index.ledger
        headers = [entry.header for entry in entries]
        for entry in entries:
            ledger.lease([entry])
        views = [self._slab.view[e.slot.offset : e.slot.offset + e.header.length] for e in entries]
        try:
            return await self._executor.run(lambda: packed(name, headers, views))
        finally:
            for view in views:
                view.release()
            for entry in entries:
                ledger.unlease(entry)
            self._state.notify()

    async def settled(self) -> None:
        """Wait until all that is under way now has ended: what begins later is of the index as it
        is by then."""
        before = set(self._flying)
        while not before.isdisjoint(self._flying):
            await self._landed.wait()

    def totals(self) -> dict[str, int]:
        """Return the counts."""
        return {
            "waiting_blocks": self._count + sum(map(len, self._flying.values())),
            "full": int(self._state.now_s() < self._again_s),
            **{
                name: self.counts[name]
                for name in ("sunk", "refused", "written_bytes", "write_faults")
            },
        }
