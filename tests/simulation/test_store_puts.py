"""A put on one host, call by call: an offer that the node reads, and what its writer says of it."""

from __future__ import annotations

from contextlib import suppress

import anyio
import msgspec
import pytest
import trio.testing

from kvass.common.checksum import sum_ranges
from kvass.common.errors import Invalid, KvassError
from kvass.common.keys import Chain
from kvass.kvstore import messages as m
from kvass.kvstore.links import NodeLink
from kvass.kvstore.words import packed
from memory_transport import Fault
from store_sim import LAYOUT, Worker, at_rest, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def put_of(
    worker: Worker, chain: Chain, blocks: int, *, put_id: str, size: int = LAYOUT.block_size
) -> m.PutRead:
    """Return an offer of a chain's first blocks, which are in the slots of their indices."""
    offer = m.Offer(
        put_id=put_id,
        spans=tuple(m.spans_of(chain, [(0, blocks)])),
        namespace=chain.namespace,
        tenant="",
        writer=worker.hello.member_id,
        token_count=4,
        block_size=size,
        head_groups=1,
        groups=(0, 1),
        deadline_s=3.0,
    )
    return m.PutRead(offer, worker.memory.addresses(range(blocks)).tobytes())


async def attached(worker: Worker) -> NodeLink:
    """Return the link to the one node, once it may be put to."""
    await worker.store.lookup(chain_of(1), [(0, 1)], deadline_s=1)
    (link,) = worker.store._router.links()
    await link.ways(deadline_s=1)
    return link


async def test_a_writer_that_hangs_after_its_offer_is_given_up_at_its_deadline() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        worker, other = sim.add_worker("a"), sim.add_worker("b")
        chain, link = chain_of(4), await attached(worker)
        put = put_of(worker, chain, 4, put_id="hanging")
        async with link.asked(put, deadline_s=4, limit_s=4) as asked:
            await anyio.sleep(2.5)
            assert await push(other, chain, range(4)) == ()
            await anyio.sleep(1.0)
            assert await push(other, chain, range(4)) == ((0, 4),)
            assert (await asked.reply()).stored == ()
            await asked.follow(m.PutSums(packed([1] * 4)))  # too late: nobody listens
        assert len(await worker.store.stats()) == 1
        await at_rest(sim)


async def test_nobody_may_keep_slots_for_longer_than_bytes_take() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0")
        worker = sim.add_worker("a")
        link = await attached(worker)
        put = put_of(worker, chain_of(4), 4, put_id="slow")
        offer = msgspec.structs.replace(put.offer, deadline_s=m.MOVE_MAX_S + 1)
        with pytest.raises(Invalid, match=r"<= 60.*deadline_s"):
            await link.call(msgspec.structs.replace(put, offer=offer), deadline_s=1)
        assert node.node.counts()["writing_blocks"] == 0
        await at_rest(sim)


async def test_a_put_that_is_asked_for_twice_at_once_is_stored_once() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0")
        worker = sim.add_worker("a")
        chain, link = chain_of(4), await attached(worker)
        for index in range(4):
            worker.memory.fill(index, chain.keys[index])
        sums = sum_ranges(worker.memory.addresses(range(4)), LAYOUT.block_size, 1)
        put = put_of(worker, chain, 4, put_id="twice")
        async with link.asked(put, deadline_s=4, limit_s=4) as first:
            await anyio.sleep(0.01)  # two that come together begin in either order
            async with link.asked(put, deadline_s=4, limit_s=4) as second:
                await second.follow(m.PutSums(sums.tobytes()))
                assert (await second.reply()).stored == (), "the other call reads them"
                assert node.node.counts()["writing_blocks"] == 4
            await first.follow(m.PutSums(sums.tobytes()))
            assert (await first.reply()).stored == ((0, 4),)
        await at_rest(sim)
        assert await pull(worker, chain, range(4)) == set(range(4))


async def test_an_offer_that_is_refused_midway_leaves_nothing() -> None:
    """One of its blocks is there in another size; those before it had got their places."""
    async with cluster() as sim:
        node = sim.add_node("store-0")
        worker, other = sim.add_worker("a"), sim.add_worker("b")
        link = await attached(worker)
        long, short = chain_of(4), chain_of(2)
        async with link.asked(put_of(worker, long, 4, put_id="whole"), deadline_s=4) as asked:
            await asked.follow(m.PutSums(packed([1] * 4)))
            assert (await asked.reply()).corrupt == ((0, 4),)
        assert await push(other, short, range(1, 2)) == ((1, 2),)
        other_size = put_of(worker, long, 4, put_id="other", size=LAYOUT.block_size // 2)
        with pytest.raises(Invalid, match="has 1280 bytes in 1 head groups here; got 640"):
            await link.call(other_size, deadline_s=1)
        assert node.node.counts()["writing_blocks"] == 0
        assert await push(other, short, range(2)) == ((0, 2),)
        await at_rest(sim)


@pytest.mark.parametrize("count", [3, 5, 0])
async def test_checksums_of_another_number_of_blocks_store_nothing(count: int) -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0")
        worker = sim.add_worker("a")
        chain, link = chain_of(4), await attached(worker)
        with pytest.raises(Invalid, match=f"put_sums: {count} checksums; 4 blocks in 1 groups"):
            async with link.asked(put_of(worker, chain, 4, put_id="a"), deadline_s=4) as asked:
                await asked.follow(m.PutSums(packed([1] * count)))
                await asked.reply()
        assert node.node.counts()["writing_blocks"] == 0
        assert await push(worker, chain, range(4)) == ((0, 4),)
        await at_rest(sim)


async def test_a_commit_of_blocks_that_its_loan_is_not_for_is_refused() -> None:
    """The same put was asked for again, for another block."""
    async with cluster() as sim:
        node = sim.add_node("store-0", setting="tcp")
        worker = sim.add_worker("a", setting="tcp")
        chain, link = chain_of(2), await attached(worker)
        first = put_of(worker, chain, 1, put_id="grown").offer
        for blocks, granted in ((1, ((0, 1),)), (2, ())):
            offer = msgspec.structs.replace(first, spans=tuple(m.spans_of(chain, [(0, blocks)])))
            assert (await link.call(m.PutBegin(offer), deadline_s=1)).granted == granted
        commit = m.PutCommit("grown", tuple(chain.keys[:2]), packed([1, 1]), 1.0)
        with pytest.raises(Invalid, match="its loan has no room for"):
            await link.call(commit, deadline_s=1)
        await anyio.sleep(10)
        assert node.node.counts()["writing_blocks"] == 0
        await at_rest(sim)


async def test_a_writer_that_leaves_its_put_frees_it_at_once() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0")
        worker, other = sim.add_worker("a"), sim.add_worker("b")
        chain, link = chain_of(4), await attached(worker)
        async with link.asked(put_of(worker, chain, 4, put_id="left"), deadline_s=4):
            await anyio.sleep(0.1)
            assert node.node.counts()["writing_blocks"] == 4
        await anyio.sleep(0.01)
        assert node.node.counts()["writing_blocks"] == 0
        assert await push(other, chain, range(4)) == ((0, 4),)
        await at_rest(sim)


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("end", ["cancel", "cut", "twice", "garbage", "again"])
async def test_whatever_ends_a_put_its_blocks_are_free(end: str, after_s: float) -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=4)
        worker, other = sim.add_worker("a"), sim.add_worker("b")
        chain, wrong = chain_of(4), m.PutSums(packed([1] * 4))
        link, put = await attached(worker), put_of(worker, chain, 4, put_id="by hand")
        sim.fabric.fault = lambda attempt: Fault(delay_s=0.2)
        with suppress(KvassError):
            async with link.asked(put, deadline_s=4, limit_s=4) as asked:
                await anyio.sleep(after_s)
                if end == "cut":
                    sim.kill_worker(worker)
                elif end == "again":
                    async with link.asked(put, deadline_s=4, limit_s=4) as again:
                        await again.follow(wrong)
                        assert (await again.reply()).stored == ()
                elif end != "cancel":
                    await asked.follow(wrong)
                    await asked.follow(wrong if end == "twice" else m.PutAbort("x", started=False))
        sim.fabric.fault = lambda attempt: Fault()
        await anyio.sleep(0.5)
        assert await push(other, chain, range(4)) == ((0, 4),)
        assert await pull(other, chain, range(4)) == {0, 1, 2, 3}
        await at_rest(sim)
