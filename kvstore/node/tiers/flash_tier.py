"""A store node's second tier beside its first: what goes down to flash, and what comes up again.

    asked for (not by the job it is held for) ─> a bounded queue ─> leased, written, found on flash
    get, stage, drain ─> found on flash ─> `rises.py` ─> visible

A block goes down when it was asked for once after its put, however empty the memory is: then it is
on flash before it is evicted, and before the node is killed. A disk that fails or hangs makes this
tier step aside for a while: reads are misses, writes refused and counted, and the node goes on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from functools import partial

import anyio
import anyio.abc
import numpy as np
from numpy.typing import NDArray

from kvass.common.block import BlockHeader
from kvass.common.errors import Unavailable
from kvass.common.executor import Executor
from kvass.kvstore.flash.disk import PAGE
from kvass.kvstore.flash.lineage import Computed, computed_upon
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.flash.table import U64, Chosen, pages_in
from kvass.kvstore.index.ledger import Entry
from kvass.kvstore.node.keeping import Keeping
from kvass.kvstore.node.slab import Slab
from kvass.kvstore.node.state import NodeState
from kvass.kvstore.node.tiers.flash_source import FlashSource
from kvass.kvstore.node.tiers.rises import GET_S, LIFT_S, RISING_MAX, Rises

_log = logging.getLogger(__name__)

WAITING_MAX = 65_536  # blocks that are to go down: 12 GB of the default model's
BATCH_BYTES = 16 << 20  # written between two looks at the index
TICK_S = 0.05
STAGE_SHARE = 0.125  # of the slab, for what one call or a drain's batch brings up
BATCH_S = 30.0  # of a drain, for a batch: its blocks are nowhere else
ASIDE_S = 30.0  # a full disk may be emptied meanwhile
READ_FAULTS_MAX = 8  # in a row of looks; more is a broken disk, not a broken page


class FlashTier:
    """Mutable fields: `_waiting` (keys that are to go down, oldest first), `_sinking` (blocks that
    are being written), `_aside_until_s`, `_writes_again_s`, `_read_faults` (seen at the last look),
    `counts`; `closed`, which the owner sets: nothing is served from flash, and nothing goes there.

    `writer` runs one call of the log at a time, `readers` as many reads as the disk wants in
    flight, `copiers` what is copied into slots meanwhile."""

    def __init__(
        self,
        state: NodeState,
        slab: Slab,
        log: FlashLog,
        writer: Executor,
        readers: Executor,
        copiers: Executor,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self._state = state
        self._slab = slab
        self._log = log
        self._writer = writer
        self._rises = Rises(state, slab, FlashSource(log.catalog, readers), copiers, tasks)
        self._waiting: dict[bytes, None] = {}
        self._sinking = 0
        self._aside_until_s = self._writes_again_s = -1.0
        self._read_faults = 0
        self.closed = False
        self.counts: Counter[str] = Counter()

    def found(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of `keys` that are on flash."""
        if not keys or self._is_aside():
            return set()
        places = self._log.catalog.find(keys)
        return {key for key, place in zip(keys, places, strict=True) if place}

    def holds(self, hashes: U64) -> NDArray[np.bool_]:
        """Say which of these blocks are on flash."""
        return ~self._log.catalog.newest(hashes, np.zeros(len(hashes), dtype=np.uint64))

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
            if self._state.index.draining:  # what is here goes to others, from memory
                self._waiting.clear()
            while self._waiting and not self.closed:
                await self.sink()

    async def sink(self) -> None:
        """Write one batch down, its blocks leased meanwhile."""
        entries = self._next_down()
        if not entries:
            return
        ledger = self._state.index.ledger
        blocks = [(entry.header, self._bytes_of(entry)) for entry in entries]
        self._sinking += len(entries)
        try:
            await self._writer.run(lambda: self._write(blocks))
            self.counts["sunk"] += len(entries)
        except Unavailable as error:
            self.counts["refused"] += len(entries)
            self._stop_writing(error)
        finally:
            self._sinking -= len(entries)
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
            if self._is_aside() or self._state.now_s() < self._writes_again_s:
                self.counts["refused"] += 1
            elif not self._log.catalog.find([key])[0]:
                ledger.lease([entry])
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

    async def rise(self, keys: Sequence[bytes], keep: Keeping, limit_s: float = GET_S) -> None:
        """Bring those of `keys` that are on flash, and not in memory, into memory; what cannot be
        had within the time is a miss."""
        places = self._wanted(keys)
        if places:
            await self._rises.rise(places, limit_s, keep)
            self._look_at_faults()

    def stage(self, keys: Sequence[bytes], within_s: float) -> None:
        """Begin to bring blocks up, as many as a part of the memory holds, and one at least; those
        whose turn does not come within the time are not brought."""
        ahead = self._batch(self._wanted(keys))
        self.counts["staged"] += len(ahead)
        self._rises.stage(ahead, within_s)

    def _wanted(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Return where those are that only flash has, and count them as used."""
        wanted = self._places(keys)
        if wanted:
            self._log.catalog.use(list(wanted))
        return wanted

    def _places(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Return where those are that only flash has."""
        entries = self._state.index.ledger.entries
        missing = [key for key in keys if key not in entries]
        if not missing or self._is_aside():
            return {}
        places = self._log.catalog.find(missing)
        return {key: place for key, place in zip(missing, places, strict=True) if place}

    async def brought_up(
        self, chosen: Chosen | None = None
    ) -> AsyncIterator[tuple[list[bytes], int]]:
        """Bring up all that only flash has, or all that flash has of the chosen segments, batch
        after batch, each when the last one is done with, and kept until it is: the keys, and how
        many of them could not be had."""
        if self.closed:
            yield [], len(self._log.catalog)
            return
        for sequence in self._log.sequences():
            try:
                keys = await self._writer.run(partial(self._log.keys_in, sequence, chosen))
            except Unavailable as error:
                _log.error("%s: its blocks cannot be handed over", error)
                yield [], self._log.catalog.count_in(sequence)
                continue
            here = self._state.index.ledger.entries
            if chosen is None:
                keys = [key for key in keys if key not in here]
            places = dict(zip(keys, self._log.catalog.find(keys), strict=True))
            while places:
                batch = self._batch(places)
                with self._state.keeping(batch) as keep:
                    await self._rises.rise(self._places(list(batch)), BATCH_S, keep)
                    self._look_at_faults()
                    yield list(batch), sum(key not in here for key in batch)

    def _batch(self, places: dict[bytes, int]) -> dict[bytes, int]:
        """Take out as much as a part of the memory holds, one block at least."""
        room = int(self._state.index.ledger.extents.total * STAGE_SHARE)
        batch: dict[bytes, int] = {}
        while places and (room > 0 or not batch) and len(batch) < RISING_MAX // 4:
            key = next(iter(places))
            batch[key] = places.pop(key)
            room -= pages_in(batch[key]) * PAGE
        return batch

    # --- erasing, faults, counts ---

    async def drop(self, order: DropOrder, gone: Sequence[bytes] = ()) -> int:
        """Erase blocks on flash, for good; call it after the index's own drop, with the keys that
        this erased. Returns how many others there were. Raises Unavailable when not all could be
        erased."""

        def erase() -> int:
            both = sum(place > 0 for place in self._log.catalog.find(gone))
            return max(self._log.drop(order) - both, 0)

        return await self._writer.run(erase)

    async def computed_upon(self, writer: str, wrong: Collection[bytes]) -> Computed:
        """Return the blocks on flash that a writer wrote or that are wrong, and what was computed
        upon either; raises Unavailable."""
        return await self._writer.run(lambda: computed_upon(self._log.indexes(), writer, wrong))

    @property
    def blocks(self) -> int:
        """How many blocks are on flash."""
        return len(self._log.catalog)

    def noted(self) -> bytes | None:
        """Return what was written down beside the log."""
        text: bytes | None = self._log.notes.read()
        return text

    async def note(self, text: bytes) -> None:
        """Write down, beside the log, instead of what was there; raises Unavailable."""
        await self._writer.run(lambda: self._log.notes.write(text))

    async def sync(self) -> None:
        """Make all that is on flash last."""
        await self._writer.run(self._log.sync)

    def _is_aside(self) -> bool:
        if self.closed:
            return True
        waited_s = self._rises.waited_s
        if waited_s > LIFT_S:  # until it has ended, and as long again: then the disk answers
            why = f"flash: a read has taken {waited_s:.0f} s"
            self._step_aside(why, min(waited_s, ASIDE_S))
        return self._state.now_s() < self._aside_until_s

    def _stop_writing(self, why: object) -> None:
        """A disk that takes nothing more can still be read: what is on it stays to be had."""
        if self._state.now_s() >= self._writes_again_s:
            _log.error("%s: nothing is written to flash for %.0f s", why, ASIDE_S)
        self._writes_again_s = self._state.now_s() + ASIDE_S

    def _step_aside(self, why: object, time_s: float = ASIDE_S) -> None:
        if self._state.now_s() >= self._aside_until_s:
            _log.error("%s: the flash tier steps aside for %.0f s or more", why, time_s)
        self._aside_until_s = self._state.now_s() + time_s

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
            "flash_waiting_blocks": len(self._waiting) + self._sinking,
            "flash_rising_blocks": len(self._rises),
            "flash_off": int(self._is_aside() and not self.closed),
            "flash_closed": int(self.closed),
            "flash_unopened_files": self._log.unopened,
            "flash_full": int(self._state.now_s() < self._writes_again_s),
            **{f"flash_{name}": catalog.counts[name] for name in (*names, "freed_files")},
            **{
                f"flash_{name}": self.counts[name] for name in ("hits", "sunk", "staged", "refused")
            },
            **{f"flash_{name}": self._rises.counts[name] for name in ("risen", "rises_refused")},
        }
