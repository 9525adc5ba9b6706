"""The verdict's look at a node's flash: a disk that fails meanwhile, or failed before, hides
nothing; a block that is found there and is not there is seen."""

from __future__ import annotations

import anyio
import pytest
import trio.testing

from flash_sim import give_flash
from kvass.kvstore.flash.disk import PAGE
from kvass.kvstore.flash.segment import name_of
from memory_disk import MemoryDisk
from store_sim import LAYOUT, Cluster, SimNode, chain_of, cluster, content, push
from verdict import on_flash

pytestmark = pytest.mark.anyio
BLOCKS = 40  # two files and a half
CHAIN = chain_of(BLOCKS)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def fill(sim: Cluster, disk: MemoryDisk) -> SimNode:
    """Return a node that wants all blocks on its disk, and has tried to bring them there."""
    node = sim.add_node("store-0")
    give_flash(node, disk, seed=1)
    worker = sim.add_worker(slots=BLOCKS)
    await push(worker, CHAIN, range(BLOCKS))
    await worker.store.lookup(CHAIN, [(0, BLOCKS)], deadline_s=1)
    await anyio.sleep(1)
    return node


def look(node: SimNode) -> int:
    """Return how many blocks are right; all that are found must be."""
    found = dict(on_flash(node))
    assert len(found) == node.node.counts()["flash_blocks"]
    assert None not in found.values()
    return len(found)


@pytest.mark.parametrize("what", ["read", ""])
async def test_a_disk_that_fails_while_it_is_looked_at_hides_nothing(what: str) -> None:
    """Seed 1764520825."""
    async with cluster() as sim:
        disk = MemoryDisk()
        node = await fill(sim, disk)
        disk.refuses = lambda doing, name: "Input/output error" if what in doing else None
        assert look(node) == BLOCKS


async def test_a_disk_that_failed_before_hides_nothing() -> None:
    """Seed 1764590108: a file could not be sealed, and the next one not be written."""
    looked = []
    for works in range(0, 60, 2):
        async with cluster() as sim:
            disk, left = MemoryDisk(), [works]

            def refuses(what: str, name: str, left: list[int] = left) -> str | None:
                left[0] -= what in ("write", "sync")
                return "No space left on device" if left[0] < 0 else None

            disk.refuses = refuses
            looked.append(look(await fill(sim, disk)))
    assert min(looked) == 0 and max(looked) == BLOCKS and len(set(looked)) > 3


@pytest.mark.parametrize("index_too", [False, True])
async def test_a_block_that_is_found_and_not_there_is_seen(index_too: bool) -> None:
    """Also where the file, read through without its index, has no such record any more."""
    async with cluster() as sim:
        disk = MemoryDisk()
        node = await fill(sim, disk)
        data = disk.files[name_of(1)].data
        at = data.index(content(CHAIN.keys[3], LAYOUT.block_size).tobytes())
        data[at : at + 64] = bytes(64)
        if index_too:
            data[-PAGE:] = bytes(PAGE)
        with pytest.raises(AssertionError):
            look(node)
