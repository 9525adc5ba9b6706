"""Bugs that seeds of the whole cluster found, each by the shortest way to it."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest
import trio.testing

from hash_model import BLOCK, reference
from kvass.common.keys import Chain
from kvass.common.rpc.client import open_client
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Call, Server
from kvass.common.wire import WORKER_REPLIES, Done, Forget, PrefillOver, Range, Tags
from kvass.decode.loop import Ticket
from kvass.decode.offer import Offerer
from kvass.decode.schedule import Piece
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.results import ClaimResult, WaitResult
from store_sim import chain_of, cluster
from trust import CREDENTIALS
from wires import Fate, wire_pair
from worker_sim import Decoder, add_decoder, add_prefiller

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def test_a_worker_that_stops_in_mid_step_drops_its_offers() -> None:
    """The step ends after the offerer: its blocks met a closed queue, and the stop was a crash."""
    async with cluster() as sim:
        decoder = add_decoder(sim)
        offerer = Offerer(decoder.worker.store, decoder.pool)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(offerer.run)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        slots = decoder.pool.allocate(2)
        assert slots is not None
        offerer.offer(chain_of(2), [0, 1], slots, "")
        assert offerer.dropped_count == 2
        decoder.pool.release(slots)
        assert decoder.pool.used == 0


async def test_nodes_that_disagree_about_a_claim_are_not_asked_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was about to leave knew of no claim, the next one of another's: the job of seed
    1764704044 asked both in turn, for ever where calls take no time."""
    asked = 0
    claim = StoreClient.claim

    async def taken_for_a_second(
        self: StoreClient, chain: Chain, ranges: list[Range], **terms: Any
    ) -> ClaimResult:
        nonlocal asked
        asked += 1
        if anyio.current_time() - began_s < 1.0 and asked < 10_000:
            return ClaimResult(granted=[], visible=[], taken=list(ranges))
        return await claim(self, chain, ranges, **terms)

    async def settled_at_once(
        self: StoreClient, chain: Chain, ranges: list[Range], **terms: Any
    ) -> WaitResult:
        return WaitResult(visible=[], unclaimed=list(ranges))

    monkeypatch.setattr(StoreClient, "claim", taken_for_a_second)
    monkeypatch.setattr(StoreClient, "wait", settled_at_once)
    async with cluster() as sim:
        sim.add_node("store-0")
        prefiller = add_prefiller(sim)
        began_s = anyio.current_time()
        with anyio.fail_after(10):
            assert (await prefiller.prefill(range(4 * BLOCK), "job")).done
    assert asked < 200


def suspend_later(decoder: Decoder, ticket: Ticket) -> anyio.Event:
    """Suspend a request between two steps, once it has computed four blocks that nobody was
    offered, and give its old slots to others; the event says that it is done."""
    scheduler, done = decoder.loop.scheduler, anyio.Event()
    next_step = scheduler.next_step

    def suspend_and_choose() -> list[Piece]:
        if len(ticket.sequence.unoffered) >= 4 and not done.is_set():
            scheduler._suspend(ticket.sequence)
            decoder.pool.forget()
            decoder.loop.wake()
            done.set()
        return next_step()

    scheduler.next_step = suspend_and_choose  # type: ignore[method-assign]
    return done


async def test_a_suspended_request_that_leaves_offers_no_slot_it_has_not_filled() -> None:
    """Blocks computed before a suspension were offered from the slots that it got after it, where
    nothing had been computed: wrong bytes in the store under right names."""
    async with cluster() as sim:
        sim.add_node("store-0")
        decoder, other = add_decoder(sim), add_decoder(sim, "decode-1")
        prompt = list(range(2 * BLOCK))
        ticket = decoder.ticket(prompt, 40, name="r")
        suspended = suspend_later(decoder, ticket)
        decoder.loop.submit(ticket)
        await suspended.wait()
        sim.hang_node("store-0", True)
        await anyio.wait_all_tasks_blocked()
        assert ticket.sequence.state == "fetching"
        decoder.loop.leave(ticket)
        sim.hang_node("store-0", False)
        await anyio.sleep(30)
        assert decoder.pool.used == 0
        turn = prompt + reference(prompt, 20)
        answer, _ = await other.answer(other.ticket(turn, 5, name="next"))
        assert answer == reference(turn, 5)


async def test_prefill_over_may_overtake_its_request() -> None:
    """Both calls were started by one read, in either order; told too early, decode waited for a
    prefill job that had ended."""
    async with cluster() as sim:
        sim.add_node("store-0")
        decoder = add_decoder(sim)
        prompt = list(range(2 * BLOCK))
        decoder.loop.prefill_over("r")
        with anyio.fail_after(10):
            ticket = decoder.ticket(prompt, 3, name="r", prefill_pending=True)
            answer, _ = await decoder.answer(ticket)
        assert answer == reference(prompt, 3)


async def test_a_call_that_is_left_ends_at_a_peer_that_was_slow_to_take_it() -> None:
    """A cancel that could not be sent within a second was never sent: the call went on at the
    worker until its deadline, with its slots."""
    ended: list[str] = []

    async def wait(call: Call) -> Done:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(type(call.request).__name__)
        return Done()

    hello = Hello("decode", "d", "h", "s", 1, {})
    server = Server(hello, {Forget: wait, PrefillOver: wait}, CREDENTIALS)
    frame_s = [0.0]
    near, far = wire_pair("g", "d", lambda source, target: Fate(frame_s[0]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve_connection, far)
        client = await open_client(near, hello, Tags(WORKER_REPLIES), CREDENTIALS)
        tasks.start_soon(client.run)
        with anyio.move_on_after(1):
            async with anyio.create_task_group() as calls:
                calls.start_soon(partial(client.call, Forget(), deadline_s=100))
                await anyio.sleep(0.9)
                frame_s[0] = 4.0  # another call's frame is on its way when this one is left
                tasks.start_soon(partial(client.call, PrefillOver("r"), deadline_s=100))
                await anyio.sleep(0.1)
        await anyio.sleep(10)
        assert ended == ["Forget"]
        tasks.cancel_scope.cancel()
