"""Bugs that are planted in what a node does by itself: each costs that piece of work, is counted
and said, and the node goes on; the work is done the next time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio.testing

from flash_sim import give_flash
from kvass.common.errors import Invalid
from kvass.kvstore.flash.catalog import Catalog
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.index.index import Index
from kvass.kvstore.index.puts import PutOrder, Verdict
from kvass.kvstore.node.calls.put_calls import PutCalls
from kvass.kvstore.node.copies.fills import Filler
from kvass.kvstore.node.copies.handover import Handover
from kvass.kvstore.node.scrub import Scrubber
from kvass.kvstore.node.tiers.flash_tier import FlashTier
from memory_disk import MemoryDisk
from store_sim import Cluster, SimNode, Worker, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio
BLOCKS = 12
CHAINS = 3  # of what 24 blocks of memory hold: some are evicted


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def plant(
    patch: pytest.MonkeyPatch,
    where: type,
    name: str,
    *,
    times: int = 1,
    bug: Exception | None = None,
) -> list[int]:
    """Let a method raise, so many times; returns how often that is still to come."""
    done: Callable[..., Any] = getattr(where, name)
    left = [times]

    def raises(*given: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise bug or RuntimeError("planted")
        return done(*given, **named)

    patch.setattr(where, name, raises)
    return left


async def fill(worker: Worker, chains: int = CHAINS) -> None:
    for seed in range(chains):
        chain = chain_of(BLOCKS, seed=seed)
        assert await push(worker, chain, range(BLOCKS)) == ((0, BLOCKS),)
        await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
        await anyio.sleep(2.0)


async def served(worker: Worker, seed: int) -> set[int]:
    """Ask until the node has had time for what it does by itself."""
    there: set[int] = set()
    for _ in range(3):
        there = await pull(worker, chain_of(BLOCKS, seed=seed), range(BLOCKS))
        await anyio.sleep(2.0)
    return there


def with_flash(sim: Cluster, disk: MemoryDisk) -> SimNode:
    node = sim.add_node("store-0", blocks=24)
    give_flash(node, disk, seed=1)
    return node


@pytest.mark.parametrize(
    ("where", "name"),
    [(FlashTier, "_next_down"), (FlashLog, "append"), (FlashLog, "flush"), (Catalog, "read")],
)
async def test_a_bug_of_the_flash_tier(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str
) -> None:
    left = plant(monkeypatch, where, name)
    async with cluster(bugs=True) as sim:
        node = with_flash(sim, MemoryDisk())
        worker = sim.add_worker()
        await fill(worker, 5)
        for seed in range(1, 4):  # what met the bug on its way down was not written
            assert await served(worker, seed) == set(range(BLOCKS)) or name != "read"
        assert not left[0] and node.node.counts()["bugs"] == 1
        assert node.node.counts()["flash_risen"] > 0, "it went on"


async def test_a_block_of_another_shape_on_flash_is_a_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin, asked = Index.put_begin, list[int]()
    other = chain_of(BLOCKS, seed=1).keys[2]

    def refuses(index: Index, order: PutOrder, now_s: float) -> list[Verdict]:
        if order.is_own and other in [header.key for header in order.headers]:
            asked.append(len(order.headers))
            raise Invalid("block 00 has 1 bytes in 1 head groups here; got 2 in 1")
        return begin(index, order, now_s)

    async with cluster(bugs=True) as sim:
        node = with_flash(sim, MemoryDisk())
        worker = sim.add_worker()
        await fill(worker, 5)
        monkeypatch.setattr(Index, "put_begin", refuses)
        assert await served(worker, 1) == set(range(BLOCKS)) - {2}
        assert max(asked) > 1, "it came up with others, which are served"
        assert node.node.counts()["flash_rises_refused"] == asked.count(1) == 3
        assert node.node.counts()["bugs"] == 0, "nor is it a bug"


@pytest.mark.parametrize(("where", "name"), [(Filler, "_take"), (Handover, "tell")])
async def test_a_bug_on_the_way_of_a_copy(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str
) -> None:
    left = plant(monkeypatch, where, name)
    async with cluster(replicas=2, bugs=True) as sim:
        nodes = [sim.add_node(f"store-{number}", host=f"host-{number}") for number in range(2)]
        sim.share_view()
        worker = sim.add_worker()
        await fill(worker)
        assert not left[0]
        assert sum(node.node.counts()["bugs"] for node in nodes) == 1
        held = [node.node.counts()["visible_blocks"] for node in nodes]
        assert sum(held) > CHAINS * BLOCKS, "the copies after it were taken"


async def test_a_bug_at_one_block_does_not_stop_the_scrub(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: Callable[[Scrubber, bytes], Awaitable[int]] = Scrubber._look
    bad = chain_of(BLOCKS).keys[3]

    async def look(scrubber: Scrubber, key: bytes) -> int:
        if key == bad:
            raise RuntimeError("planted")
        return await looked(scrubber, key)

    monkeypatch.setattr(Scrubber, "_look", look)
    async with cluster(bugs=True) as sim:
        node = sim.add_node("store-0", scrub_s=10.0)
        worker = sim.add_worker()
        await push(worker, chain_of(BLOCKS), range(BLOCKS))
        await anyio.sleep(30)
        counts = node.node.counts()
        assert counts["scrub_passes"] > 2 and counts["scrubbed_blocks"] >= 2 * (BLOCKS - 1)
        assert 2 < counts["bugs"] < 30, "nor does it take a core"


async def test_a_bug_when_something_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    left = plant(monkeypatch, PutCalls, "expire", times=3)
    async with cluster(bugs=True) as sim:
        node = sim.add_node("store-0")
        await anyio.sleep(10)
        assert not left[0] and node.node.counts()["bugs"] == 3
        worker = sim.add_worker()
        await push(worker, chain_of(BLOCKS), range(BLOCKS))
        assert await pull(worker, chain_of(BLOCKS), range(BLOCKS)) == set(range(BLOCKS))


async def test_a_drain_that_meets_a_bug_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    left = plant(monkeypatch, Handover, "_hand_over")
    async with cluster(bugs=True) as sim:
        node = sim.add_node("store-0")
        worker = sim.add_worker()
        await push(worker, chain_of(BLOCKS), range(BLOCKS))
        sim.add_node("store-1", host="host-1")
        sim.share_view()
        node.node.drain()
        with anyio.fail_after(60):
            assert await node.node.leaving.over() == 0
        assert not left[0] and node.node.counts()["bugs"] == 1
        assert sim.nodes["store-1"].node.counts()["visible_blocks"] == BLOCKS


async def test_a_broken_invariant_ends_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its index says can be trusted no more: misses are better than wrong bytes."""
    plant(monkeypatch, PutCalls, "expire", bug=AssertionError("planted"))
    with pytest.raises(BaseExceptionGroup) as group:
        async with cluster(bugs=True) as sim:
            sim.add_node("store-0")
            await anyio.sleep(10)
    assert group.group_contains(AssertionError, match="planted")
