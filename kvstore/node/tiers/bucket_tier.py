"""A store node's third tier: what it finds in the bucket, and brings up from it.

    lookup ─> the shelf alone: nothing is asked of the bucket
    get, stage ─> found on the shelf ─> `rises.py` ─> ranges of objects, each block checked
    asked for again ─> `uploads.py`

What is not as it should be is a miss, and its object is deleted. A bucket that does not answer
makes this tier step aside: all its blocks are misses, and the node goes on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.abc

from kvass.common.errors import Unavailable
from kvass.common.executor import Executor
from kvass.common.pacing import Pacing
from kvass.kvstore.flash.disk import PAGE
from kvass.kvstore.flash.fetched import Fetched
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.flash.table import U64, pages_in
from kvass.kvstore.node.keeping import Keeping
from kvass.kvstore.node.slab import Slab
from kvass.kvstore.node.state import NodeState
from kvass.kvstore.node.tiers.bucket import Bucket
from kvass.kvstore.node.tiers.flash_tier import STAGE_SHARE
from kvass.kvstore.node.tiers.rises import GET_S, Rises
from kvass.kvstore.node.tiers.uploads import Uploads
from kvass.kvstore.objects import contents

_log = logging.getLogger(__name__)

READS = 16  # requests in flight: each takes tens of milliseconds, and waits in most of them
DROP_S = 8.0  # whoever drops waits for ten
_COUNTS = (
    "hits", "staged", "read_bytes", "read_faults", "list_faults", "delete_faults", "corrupt",
    "vanished", "evicted_objects", "dropped_objects",
)  # fmt: skip


class BucketTier:
    """Mutable fields: `bucket`, the parts that read and write it, `_pacing` (of lines about corrupt
    blocks), and `closed`, which the owner sets: nothing is served from the bucket, and nothing goes
    there. It is a `rises.Source`;
    `executor` runs what is copied and hashed."""

    name = "bucket"

    def __init__(
        self,
        state: NodeState,
        slab: Slab,
        bucket: Bucket,
        executor: Executor,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self.bucket = bucket
        self.closed = False
        self._pacing = Pacing()
        self._state = state
        self._reads = anyio.CapacityLimiter(READS)
        self._uploads = Uploads(bucket, state, slab, executor)
        self._rises = Rises(state, slab, self, executor, tasks)

    async def run(self) -> None:
        """Do what nobody waits for, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.bucket.run)
            tasks.start_soon(self._uploads.run)

    @property
    def counts(self) -> Counter[str]:
        return self.bucket.counts

    def found(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of `keys` that the bucket has, as far as is known."""
        if not keys or self.closed or self.bucket.outage.is_on:
            return set()
        places = self.bucket.shelf.find(keys)
        return {key for key, place in zip(keys, places, strict=True) if place}

    def asked(self, keys: Sequence[bytes]) -> None:
        """Somebody asks for these blocks: those in memory become worth a place in the bucket."""
        if not self.closed:
            self._uploads.asked(keys)

    async def rise(self, keys: Sequence[bytes], keep: Keeping, limit_s: float = GET_S) -> None:
        """Bring blocks into memory; what cannot be had within the time is a miss."""
        places = self._wanted(keys)
        if places:
            await self._rises.rise(places, limit_s, keep)

    def stage(self, keys: Sequence[bytes], within_s: float) -> None:
        """Begin to bring blocks up, as many as a part of the memory holds."""
        room = int(self._state.index.ledger.extents.total * STAGE_SHARE)
        ahead: dict[bytes, int] = {}
        for key, place in self._wanted(keys).items():
            room -= pages_in(place) * PAGE
            if room < 0:
                break
            ahead[key] = place
        self.counts["staged"] += len(ahead)
        self._rises.stage(ahead, within_s)

    def _wanted(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        missing = [key for key in keys if key not in self._state.index.ledger.entries]
        if not missing or self.closed or self.bucket.outage.is_on:
            return {}
        shelf = self.bucket.shelf
        places = zip(missing, shelf.find(missing), strict=True)
        wanted = {key: place for key, place in places if place}
        shelf.use(wanted.values(), self._state.now_s())
        return wanted

    async def drop(self, order: DropOrder) -> U64:
        """Erase what matches, for good, when this returns; call it after the index's own drop.
        Returns which blocks those were, as `hashes_of` calls them; raises Unavailable when not all
        could be erased: none of it is found any more, and the rest is tried again."""
        return await self._in_time(lambda: self.bucket.drop(order, self._uploads.settled))

    async def bar(self, writer: str, wrong: Sequence[bytes]) -> U64:
        """As `drop`: what a writer wrote, these blocks, and what was computed upon either. Returns
        his."""
        return await self._in_time(lambda: self.bucket.bar(writer, wrong, self._uploads.settled))

    async def _in_time(self, erase: Callable[[], Awaitable[U64]]) -> U64:
        try:
            with anyio.fail_after(DROP_S):
                return await erase()
        except TimeoutError:
            why = Unavailable(f"bucket: not all was deleted within {DROP_S:.0f} s")
        except Unavailable as error:
            why = error
        self.bucket.failed(why)
        raise Unavailable(f"{why}; the node tries again while it runs")

    # --- reading: a `rises.Source` ---

    @asynccontextmanager
    async def fetched(self, places: Mapping[bytes, int]) -> AsyncIterator[Mapping[bytes, Fetched]]:
        """Read blocks, those of one object at once."""
        fetched: dict[bytes, Fetched] = {}
        by_object: dict[str, list[tuple[int, int, bytes]]] = {}
        for key, place in places.items():
            where = self.bucket.shelf.where(place)
            if where is not None:
                name, start, end = where
                by_object.setdefault(name, []).append((start, end, key))
        async with anyio.create_task_group() as tasks:
            for name, parts in by_object.items():
                tasks.start_soon(self._fetch, name, sorted(parts), places, fetched)
        yield fetched

    async def _fetch(
        self,
        name: str,
        parts: list[tuple[int, int, bytes]],
        places: Mapping[bytes, int],
        fetched: dict[bytes, Fetched],
    ) -> None:
        bucket = self.bucket
        try:
            async with self._reads:
                found = await bucket.objects.read(name, [(start, end) for start, end, _ in parts])
        except Unavailable as error:
            self.counts["read_faults"] += 1
            bucket.failed(error)
            return
        bucket.worked()
        if found is None:  # another node has deleted it
            self.counts["vanished"] += 1
            bucket.shelf.remove(name)
            return
        for (start, end, key), data in zip(parts, found, strict=True):
            self.counts["read_bytes"] += len(data)
            block = contents.read(name, data, start) if len(data) == end - start else None
            if block is None:
                self.found_wrong(key, places[key])
            elif block.header.key == key:  # else another one's, whose first bytes are the same
                fetched[key] = block

    def found_wrong(self, key: bytes, place: int) -> None:
        """An object is not what its name says: it goes."""
        where = self.bucket.shelf.where(place)
        if where is not None:
            self.counts["corrupt"] += 1
            more = self._pacing.more(self._state.now_s())
            if more is not None:
                text = "bucket: block %s is corrupt; object %s is deleted%s"
                _log.error(text, key.hex(), where[0], more)
            self.bucket.forget([where[0]])

    def totals(self) -> dict[str, int]:
        """Return the tier's counts under the names that a node shows."""
        bucket = self.bucket
        return {
            "bucket_total_bytes": bucket.total_bytes,
            "bucket_used_bytes": bucket.shelf.used_bytes,
            "bucket_objects": len(bucket.shelf),
            "bucket_blocks": bucket.shelf.blocks,
            "bucket_rising_blocks": len(self._rises),
            "bucket_risen": self._rises.counts["risen"],
            "bucket_off": int(bucket.outage.is_on),
            "bucket_unerased": bucket.unerased,
            **{f"bucket_{name}": self.counts[name] for name in _COUNTS},
            **{f"bucket_{name}": count for name, count in self._uploads.totals().items()},
        }
