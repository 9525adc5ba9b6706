"""Blocks that go down to flash and come up again: right bytes, or a miss, and no slot lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import anyio
import anyio.abc
import msgspec
import numpy as np
import pytest

from flash_model import SMALL, header_of, key_of, open_log, payload_of
from inline import InlineExecutor, ManualClock
from kvass.kvstore.flash.disk import PAGE, Disk
from kvass.kvstore.flash.fetched import Fetched
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.index.index import Index, Limits
from kvass.kvstore.index.puts import PutOrder
from kvass.kvstore.node.slab import Slab
from kvass.kvstore.node.state import NodeState
from kvass.kvstore.node.tiers import flash_tier, rises
from kvass.kvstore.node.tiers.flash_source import FlashSource
from kvass.kvstore.node.tiers.flash_tier import ASIDE_S, FlashTier
from memory_disk import MemoryDisk

pytestmark = pytest.mark.anyio
SLAB_BYTES = 64 << 10
T = TypeVar("T")


class Gate:
    """Reads that wait until the test lets them go, but for so many."""

    def __init__(self) -> None:
        self.opened = anyio.Event()
        self.opened.set()
        self.begun = self.free = 0

    async def run(self, function: Callable[[], T]) -> T:
        self.begun += 1
        if self.free:
            self.free -= 1
            return await InlineExecutor().run(function)
        await self.opened.wait()
        return await InlineExecutor().run(function)


@pytest.fixture
async def tasks() -> AsyncIterator[anyio.abc.TaskGroup]:
    async with anyio.create_task_group() as group:
        yield group
        group.cancel_scope.cancel()


class Stage:
    """A node's state and its tiers."""

    def __init__(self, disk: Disk, tasks: anyio.abc.TaskGroup) -> None:
        self.clock = ManualClock()
        self.slab = Slab(SLAB_BYTES)
        self.index = Index(SLAB_BYTES, Limits(epoch="e"))
        nothing = cast(Any, SimpleNamespace())
        self.state = NodeState(self.index, nothing, nothing, self.clock)
        self.readers = Gate()
        self.log = log = open_log(disk, SMALL)
        inline = InlineExecutor()
        self.tiers = FlashTier(self.state, self.slab, log, inline, self.readers, inline, tasks)

    def put(self, number: int) -> None:
        header = header_of(number)
        plain = msgspec.structs.replace(header, checksums=())
        order = PutOrder(f"p{number}", "s", [plain], 2, range(2), ends_s=1e9)
        assert self.index.put_begin(order, 0.0) == ["granted"]
        (move,) = self.index.begin_moves(order.put_id, "s", [header.key], 0.0)
        assert move is not None
        self.slab.view[move.offset : move.offset + move.size] = payload_of(number)
        assert self.index.end_move(move, header.checksums)

    async def rise(self, keys: Sequence[bytes], limit_s: float = rises.GET_S) -> None:
        with self.state.keeping(keys) as keep:
            await self.tiers.rise(keys, keep, limit_s)

    def read(self, number: int) -> bytes | None:
        entry = self.index.ledger.visible(key_of(number))
        if entry is None:
            return None
        assert entry.header == header_of(number)
        return bytes(self.slab.view[entry.slot.offset :][: entry.header.length])

    def evict(self, number: int) -> None:
        entry = self.index.ledger.visible(key_of(number))
        assert entry is not None
        self.index.ledger.remove(entry)


async def filled(disk: MemoryDisk, tasks: anyio.abc.TaskGroup) -> Stage:
    stage = Stage(disk, tasks)
    for number in range(6):
        stage.put(number)
    stage.tiers.asked([key_of(number) for number in range(4)])
    await stage.tiers.sink()
    return stage


async def test_what_was_asked_for_comes_back_and_what_was_not_is_gone(
    tasks: anyio.abc.TaskGroup,
) -> None:
    stage = await filled(MemoryDisk(), tasks)
    keys = [key_of(number) for number in range(6)]
    assert stage.tiers.found(keys) == set(keys[:4])
    for number in range(6):
        stage.evict(number)
    await stage.rise(keys)
    assert [stage.read(number) for number in range(4)] == [payload_of(n) for n in range(4)]
    assert stage.read(4) is None and stage.tiers.totals()["flash_risen"] == 4
    stage.index.ledger.check()


async def test_a_restart_serves_what_was_synced(tasks: anyio.abc.TaskGroup) -> None:
    disk = MemoryDisk()
    await (await filled(disk, tasks)).tiers.sync()
    disk.crash(lambda size: 0)
    stage = Stage(disk, tasks)
    await stage.rise([key_of(number) for number in range(6)])
    assert [stage.read(number) for number in range(4)] == [payload_of(n) for n in range(4)]


async def test_a_flipped_bit_is_a_miss_and_the_slot_comes_back(tasks: anyio.abc.TaskGroup) -> None:
    disk = MemoryDisk()
    stage = await filled(disk, tasks)
    for number in range(6):
        stage.evict(number)
    (content,) = (each for each in disk.files.values() if payload_of(3)[:64] in each.data)
    content.data[content.data.index(payload_of(3)[:64]) + 5000] ^= 1
    await stage.rise([key_of(3), key_of(2)])
    assert stage.read(3) is None and stage.read(2) == payload_of(2)
    assert key_of(3) not in stage.tiers.found([key_of(3)])
    stage.index.ledger.check()
    assert stage.index.ledger.blocks["writing"] == stage.index.ledger.blocks["quarantined"] == 0


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_of_blocks_that_come_up_together_each_is_judged_for_itself(
    tasks: anyio.abc.TaskGroup, elsewhere: bool
) -> None:
    disk = MemoryDisk()
    stage = Stage(disk, tasks)
    numbers = [1, 5, 9, 13]  # of one size, so that they are one put
    for number in numbers:
        stage.put(number)
    stage.tiers.asked([key_of(number) for number in numbers])
    await stage.tiers.sink()
    for number in numbers:
        stage.evict(number)
    (content,) = (each for each in disk.files.values() if payload_of(5)[:64] in each.data)
    content.data[content.data.index(payload_of(5)[:64]) + 100] ^= 1
    stage.readers.opened = anyio.Event()
    tasks.start_soon(stage.rise, [key_of(number) for number in numbers])
    await anyio.wait_all_tasks_blocked()
    if elsewhere:  # meanwhile a writer puts one of them in another shape, which no put may mix
        plain = msgspec.structs.replace(header_of(9), checksums=())
        order = PutOrder("p", "s", [plain], 4, range(4), ends_s=1e9)
        assert stage.index.put_begin(order, 0.0) == ["granted"]
    stage.readers.opened.set()
    await anyio.wait_all_tasks_blocked()
    there = {number: stage.read(number) for number in numbers}
    nine = None if elsewhere else payload_of(9)
    assert there == {1: payload_of(1), 5: None, 9: nine, 13: payload_of(13)}
    totals = stage.tiers.totals()
    assert (totals["flash_corrupt"], totals["flash_rises_refused"]) == (1, int(elsewhere))
    assert stage.tiers.found([key_of(5), key_of(9)]) == {key_of(9)}
    assert stage.index.ledger.blocks["writing"] == int(elsewhere)
    stage.index.ledger.check()


async def go_down(stage: Stage, numbers: Sequence[int]) -> None:
    for number in numbers:
        if stage.read(number) is None:
            stage.put(number)
        stage.tiers.asked([key_of(number)])
        await stage.tiers.sink()


@pytest.mark.parametrize("how", ["get", "drain"])
async def test_what_comes_up_drives_nothing_out_that_is_about_to_be_read(
    tasks: anyio.abc.TaskGroup, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each block is a part of its own, and what was asked for often leaves last."""
    monkeypatch.setattr(rises, "PART_BYTES", 1)
    monkeypatch.setattr(flash_tier, "STAGE_SHARE", 0.75)
    stage = Stage(MemoryDisk(), tasks)
    visible = stage.index.ledger.visible
    wanted = [3, 7, 11, 15]  # of 9,000 bytes: seven of them fill the memory
    await go_down(stage, wanted)
    for number in wanted[1:]:
        stage.evict(number)
    favourites = [19, 23, 27, 31]
    for number in favourites:
        stage.put(number)
    for _ in range(20):
        stage.index.ledger.touch([key_of(number) for number in favourites])
    stage.index.catch_up()
    keys = [key_of(number) for number in wanted]
    there: list[set[bytes]] = []
    if how == "get":
        with stage.state.keeping(keys) as keep:
            await stage.tiers.rise(keys, keep)
            there.append({key for key in keys if visible(key)})
    else:
        async for batch, lost in stage.tiers.brought_up(lambda segments: segments == segments):
            assert lost == 0 and set(batch) == set(keys)
            there.append({key for key in batch if visible(key)})
    assert there == [set(keys)]
    leases = [entry.leases for entry in stage.index.ledger.entries.values()]
    assert leases == [0] * len(leases), "they are evictable again"
    stage.index.ledger.check()


async def test_what_is_staged_together_stays_until_all_of_it_is_there(
    tasks: anyio.abc.TaskGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rises, "PART_BYTES", 1)
    stage = await filled(MemoryDisk(), tasks)
    for number in range(6):
        stage.evict(number)
    begun, stage.readers.opened, stage.readers.free = stage.readers.begun, anyio.Event(), 1
    stage.tiers.stage([key_of(0), key_of(1)], within_s=1.0)
    await anyio.wait_all_tasks_blocked()
    entries = stage.index.ledger.entries
    assert stage.readers.begun == begun + 2 and list(entries) == [key_of(0)]
    assert entries[key_of(0)].leases == 1
    stage.readers.opened.set()
    await anyio.wait_all_tasks_blocked()
    assert {key: entry.leases for key, entry in entries.items()} == {key_of(0): 0, key_of(1): 0}


async def test_who_waits_no_longer_keeps_nothing(tasks: anyio.abc.TaskGroup) -> None:
    stage = await filled(MemoryDisk(), tasks)
    for number in range(6):
        stage.evict(number)
    stage.readers.opened = anyio.Event()
    await stage.rise([key_of(1)], limit_s=0.01)
    stage.readers.opened.set()
    with stage.state.keeping(()) as keep:  # one who came later, for what was on its way
        await stage.tiers.rise([key_of(1)], keep)
        assert stage.index.ledger.entries[key_of(1)].leases == 1
    assert stage.index.ledger.entries[key_of(1)].leases == 0


async def test_memory_is_read_into_again_when_nobody_looks_at_it(
    tasks: anyio.abc.TaskGroup,
) -> None:
    stage = await filled(MemoryDisk(), tasks)
    source = FlashSource(stage.log.catalog, InlineExecutor())
    (place_1, place_2) = stage.log.catalog.find([key_of(1), key_of(2)])

    def memory(found: Mapping[bytes, Fetched]) -> int:
        (block,) = found.values()
        assert block.is_right()
        return np.frombuffer(block.payload, dtype=np.uint8).ctypes.data

    async with source.fetched({key_of(1): place_1}) as one:
        first = memory(one)
        async with source.fetched({key_of(2): place_2}) as two:
            second = memory(two)
        assert abs(second - first) >= rises.PART_BYTES and memory(one) == first
    async with source.fetched({key_of(2): place_2}) as two:
        assert memory(two) == second
        with pytest.raises(ZeroDivisionError):
            async with source.fetched({key_of(1): place_1}) as one:
                third = memory(one)
                raise ZeroDivisionError
        async with source.fetched({key_of(1): place_1}) as one:
            assert memory(one) not in (second, third), "who failed may have left a read under way"


async def test_a_drop_reaches_flash(tasks: anyio.abc.TaskGroup) -> None:
    stage = await filled(MemoryDisk(), tasks)
    tenant = header_of(0).tenant
    stage.index.drop(lambda header: header.tenant == tenant, 0.0)
    assert await stage.tiers.drop(DropOrder(tenant=tenant)) == 2
    await stage.rise([key_of(0), key_of(3)])
    assert stage.read(0) is None and stage.read(3) is None and stage.read(1) is not None


async def test_a_full_disk_is_stepped_aside_from_and_tried_again(
    tasks: anyio.abc.TaskGroup,
) -> None:
    disk = MemoryDisk()
    disk.refuses = lambda what, name: "No space left on device" if what == "create" else None
    stage = await filled(disk, tasks)
    totals = stage.tiers.totals()
    assert (totals["flash_refused"], totals["flash_full"], totals["flash_off"]) == (4, 1, 0)
    assert stage.read(0) == payload_of(0), "memory goes on serving"
    assert stage.index.ledger.entries[key_of(0)].leases == 0
    disk.refuses = lambda what, name: None
    stage.tiers.asked([key_of(0)])
    await stage.tiers.sink()
    assert not stage.tiers.found([key_of(0)])
    stage.clock.time_s += ASIDE_S
    stage.tiers.asked([key_of(0)])
    await stage.tiers.sink()
    assert stage.tiers.found([key_of(0)]) == {key_of(0)}


async def test_a_drop_counts_a_block_once_that_is_in_both_tiers(
    tasks: anyio.abc.TaskGroup,
) -> None:
    stage = await filled(MemoryDisk(), tasks)
    tenant = header_of(0).tenant
    stage.evict(0)  # on flash only; block 3 is in both, of the same tenant
    before = set(stage.index.ledger.entries)
    stage.index.drop(lambda header: header.tenant == tenant, 0.0)
    gone = before - stage.index.ledger.entries.keys()
    assert gone == {key_of(3)}
    assert await stage.tiers.drop(DropOrder(tenant=tenant), list(gone)) == 1


async def test_a_get_waits_for_a_slow_disk_only_so_long(tasks: anyio.abc.TaskGroup) -> None:
    stage = await filled(MemoryDisk(), tasks)
    keys = [key_of(number) for number in range(4)]
    for number in range(6):
        stage.evict(number)
    stage.readers.opened = anyio.Event()
    with anyio.fail_after(5):
        await stage.rise(keys, limit_s=0.01)
        assert all(stage.read(number) is None for number in range(4)), "a miss"
        await stage.rise(keys, limit_s=0.01)
        assert stage.readers.begun == 4, "nothing is read twice at once"
        # Late for them, the blocks are there for the next one.
        stage.readers.opened.set()
        await stage.rise(keys)
    assert [stage.read(number) for number in range(4)] == [payload_of(n) for n in range(4)]


async def test_what_is_read_at_once_is_bounded(
    tasks: anyio.abc.TaskGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rises, "PART_BYTES", 1)
    monkeypatch.setattr(rises, "FLIGHT_BYTES", 2 * PAGE)  # two of the small ones
    stage = await filled(MemoryDisk(), tasks)
    for number in range(6):
        stage.evict(number)
    stage.readers.opened = anyio.Event()
    await stage.rise([key_of(number) for number in (0, 1, 2, 3)], limit_s=0.01)
    assert stage.readers.begun < 4 and stage.tiers.totals()["flash_rising_blocks"] == 4
    stage.readers.opened.set()
    await stage.rise([key_of(number) for number in (0, 1, 2, 3)])
    assert stage.tiers.totals()["flash_risen"] == 4
    monkeypatch.setattr(rises, "RISING_MAX", 0)
    stage.evict(1)
    await stage.rise([key_of(1)])
    assert stage.read(1) is None and stage.tiers.totals()["flash_rises_refused"] == 1


async def test_a_disk_that_hangs_is_stepped_aside_from(tasks: anyio.abc.TaskGroup) -> None:
    stage = await filled(MemoryDisk(), tasks)
    stage.evict(0)
    stage.readers.opened = anyio.Event()
    await stage.rise([key_of(0)], limit_s=0.01)
    stage.clock.time_s += rises.LIFT_S + 1
    assert stage.tiers.found([key_of(1)]) == set() and stage.tiers.totals()["flash_off"] == 1
    stage.readers.opened.set()
    await anyio.wait_all_tasks_blocked()
    assert stage.tiers.found([key_of(1)]) == set(), "not at once: the next read may hang as well"
    stage.clock.time_s += rises.LIFT_S + 2
    assert stage.tiers.found([key_of(1)]) == {key_of(1)}, "it hung for no longer either"


async def test_what_is_staged_is_there_before_it_is_asked_for(tasks: anyio.abc.TaskGroup) -> None:
    stage = await filled(MemoryDisk(), tasks)
    for number in range(6):
        stage.evict(number)
    stage.tiers.stage([key_of(number) for number in range(6)], within_s=1.0)
    await anyio.wait_all_tasks_blocked()
    there = [number for number in range(6) if stage.read(number)]
    assert there == [0, 1], "in order, as much as an eighth of the memory holds"


async def test_a_drain_brings_up_all_that_only_flash_has(tasks: anyio.abc.TaskGroup) -> None:
    stage = await filled(MemoryDisk(), tasks)
    for number in (0, 1, 2, 4, 5):
        stage.evict(number)
    stage.index.draining = True
    batches = [batch async for batch in stage.tiers.brought_up()]
    assert {key for keys, _ in batches for key in keys} == {key_of(n) for n in (0, 1, 2)}
    assert len(batches) > 1 and not any(lost for _, lost in batches)
    assert stage.read(2) == payload_of(2), "a node that drains still takes what is its own"
