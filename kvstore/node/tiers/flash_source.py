"""Flash as what blocks come up from: many reads at once, into memory that is used again."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from kvass.common.executor import Executor
from kvass.kvstore.flash.catalog import Catalog
from kvass.kvstore.flash.disk import PAGE, page_memory
from kvass.kvstore.flash.fetched import Fetched
from kvass.kvstore.flash.table import pages_in
from kvass.kvstore.node.tiers.rises import FLIGHT_BYTES, PART_BYTES

FLASH_READS = 8  # in flight: one alone leaves a disk idle most of the time


@dataclass(frozen=True, slots=True)
class FlashSource:
    """A log's blocks; `readers` runs FLASH_READS reads at a time. `_spare` is memory that was read
    into before: new pages would take half as long as the reads."""

    catalog: Catalog
    readers: Executor
    name: str = "flash"
    _spare: list[memoryview] = field(default_factory=list)

    @asynccontextmanager
    async def fetched(self, places: Mapping[bytes, int]) -> AsyncIterator[Mapping[bytes, Fetched]]:
        """See `rises.Source`: each read is of several blocks, one after the other."""
        wanted = list(places.items())
        starts = [0, *itertools.accumulate(pages_in(place) * PAGE for place in places.values())]
        share = -(-len(wanted) // FLASH_READS)
        memory = self._memory(starts[-1])
        fetched: dict[bytes, Fetched] = {}

        async def read(first: int) -> None:
            lane = dict(wanted[first : first + share])
            room = memory[starts[first] :]
            fetched.update(await self.readers.run(lambda: self.catalog.read_all(lane, room)))

        async with anyio.create_task_group() as tasks:
            for first in range(0, len(wanted), share):
                tasks.start_soon(read, first)
        yield fetched
        if sum(map(len, self._spare)) + len(memory) <= FLIGHT_BYTES:
            self._spare.append(memory)  # nobody reads into it, and nobody looks at it

    def _memory(self, size: int) -> memoryview:
        for number, spare in enumerate(self._spare):
            if len(spare) >= size:
                return self._spare.pop(number)
        return page_memory(max(size, PART_BYTES))

    def found_wrong(self, key: bytes, place: int) -> None:
        self.catalog.found_wrong(key, place)
