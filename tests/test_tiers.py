"""Blocks that go down to flash and come up again: right bytes, or a miss, and no slot lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from flash_model import SMALL, header_of, key_of, open_log, payload_of
from kvass.common.clock import ManualClock
from kvass.common.executor import InlineExecutor
from kvass.kvstore.flash.memory_disk import MemoryDisk
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.index import Index, Limits
from kvass.kvstore.node_state import NodeState
from kvass.kvstore.puts import PutOrder
from kvass.kvstore.slab import Slab
from kvass.kvstore.tiers import ASIDE_S, Tiers

pytestmark = pytest.mark.anyio
SLAB_BYTES = 64 << 10


class Stage:
    """A node's state and its tiers, on a disk in memory."""

    def __init__(self, disk: MemoryDisk) -> None:
        self.clock = ManualClock()
        self.slab = Slab(SLAB_BYTES)
        self.index = Index(SLAB_BYTES, Limits(epoch="e"))
        nothing = cast(Any, SimpleNamespace())
        self.state = NodeState(self.index, nothing, nothing, self.clock)
        log = open_log(disk, SMALL)
        self.tiers = Tiers(self.state, self.slab, log, InlineExecutor(), InlineExecutor())

    def put(self, number: int) -> None:
        header = header_of(number)
        plain = msgspec.structs.replace(header, checksums=())
        order = PutOrder(f"p{number}", "s", [plain], 2, range(2), ends_s=1e9)
        assert self.index.put_begin(order, 0.0) == ["granted"]
        (move,) = self.index.begin_moves(order.put_id, "s", [header.key], 0.0)
        assert move is not None
        self.slab.view[move.offset : move.offset + move.size] = payload_of(number)
        assert self.index.end_move(move, header.checksums)

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


async def filled(disk: MemoryDisk) -> Stage:
    stage = Stage(disk)
    for number in range(6):
        stage.put(number)
    stage.tiers.asked([key_of(number) for number in range(4)])
    await stage.tiers.sink()
    return stage


async def test_what_was_asked_for_comes_back_and_what_was_not_is_gone() -> None:
    stage = await filled(MemoryDisk())
    keys = [key_of(number) for number in range(6)]
    assert stage.tiers.found(keys) == set(keys[:4])
    for number in range(6):
        stage.evict(number)
    await stage.tiers.rise(keys)
    assert [stage.read(number) for number in range(4)] == [payload_of(n) for n in range(4)]
    assert stage.read(4) is None and stage.tiers.totals()["flash_hits"] == 4
    stage.index.ledger.check()


async def test_a_restart_serves_what_was_synced() -> None:
    disk = MemoryDisk()
    await (await filled(disk)).tiers.sync()
    disk.crash(lambda size: 0)
    stage = Stage(disk)
    await stage.tiers.rise([key_of(number) for number in range(6)])
    assert [stage.read(number) for number in range(4)] == [payload_of(n) for n in range(4)]


async def test_a_flipped_bit_is_a_miss_and_the_slot_comes_back() -> None:
    disk = MemoryDisk()
    stage = await filled(disk)
    for number in range(6):
        stage.evict(number)
    for content in disk.files.values():
        at = content.data.index(payload_of(3)[:64])
        content.data[at + 5000] ^= 1
    await stage.tiers.rise([key_of(3), key_of(2)])
    assert stage.read(3) is None and stage.read(2) == payload_of(2)
    assert key_of(3) not in stage.tiers.found([key_of(3)])
    stage.index.ledger.check()
    assert stage.index.ledger.blocks["writing"] == stage.index.ledger.blocks["quarantined"] == 0


async def test_a_drop_reaches_flash() -> None:
    stage = await filled(MemoryDisk())
    tenant = header_of(0).tenant
    stage.index.drop(lambda header: header.tenant == tenant, 0.0)
    assert await stage.tiers.drop(DropOrder(tenant=tenant)) == 2
    await stage.tiers.rise([key_of(0), key_of(3)])
    assert stage.read(0) is None and stage.read(3) is None and stage.read(1) is not None


async def test_a_full_disk_is_stepped_aside_from_and_tried_again() -> None:
    disk = MemoryDisk()
    disk.refuses = lambda what, name: "No space left on device" if what == "create" else None
    stage = await filled(disk)
    assert stage.tiers.totals()["flash_refused"] == 4 and stage.tiers.totals()["flash_aside"] == 1
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
