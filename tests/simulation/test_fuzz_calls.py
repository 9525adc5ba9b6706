"""Every call of every listener, with real messages and spoilt ones, in any order: what comes back
is an answer or an error of ours, nothing is left over, and the next good call is served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from fuzz_stage import Peer, Step, fuzz, plain
from kvass.common import wire
from kvass.common.rpc.client import open_client
from kvass.common.rpc.hello import Hello
from kvass.common.transport.route import Setting
from kvass.kvstore import messages as m
from kvass.kvstore.erasure import Erasure, Exchange
from kvass.kvstore.words import packed
from lives import Life, live
from scenario import Member
from store_sim import LAYOUT, SPACE, SimNode, Worker, at_rest, chain_of, cluster, pull, push
from trust import CREDENTIALS
from wires import wire_pair

BLOCKS = 6
REST_S = 8.0  # longer than any claim, lease or put lasts without its connection


def store_examples(node: SimNode, worker: Worker) -> list[dict[str, Any]]:
    """One good message of each kind that a node answers, in an order that works."""
    chain = chain_of(BLOCKS, seed=7)
    spans = tuple(m.spans_of(chain, [(0, BLOCKS)]))
    there = tuple(m.spans_of(chain_of(BLOCKS), [(0, BLOCKS)]))
    endpoints = worker.store._transfers.endpoints if worker.store._transfers else None
    assert endpoints is not None
    size, groups = LAYOUT.block_size, (0, 1)
    landing = node.node._state.endpoints.card()
    loan = m.LoanCard(tag=b"tag", address=worker.memory.address, size=4 * size, card=landing)
    own = m.LoanCard(tag=b"tag", address=worker.memory.address, size=size, card=endpoints.card())
    addresses = worker.memory.addresses(range(BLOCKS)).tobytes()
    keys = tuple(chain.keys)
    offer = m.Offer("put", spans, SPACE, "tenant", "writer", 4, size, 1, groups, 2.0, "job")
    messages: tuple[wire.Message, ...] = (
        m.Attach(endpoints.card()),
        m.Lookup(there, again=True),
        m.Stage(there, 1.0),
        m.Claim("owner", spans),
        m.PutRead(offer, addresses),
        m.PutBegin(offer),
        m.PutCommit("put", keys, packed([1] * BLOCKS), 2.0),
        m.PutAbort("put", True),
        m.PutAbort("put", False),
        m.GetBegin(there, size, 1, groups),
        m.GetEnd(f"{node.identity.start_id}-1", tuple(chain_of(BLOCKS).keys)),
        m.GetRenew(f"{node.identity.start_id}-1"),
        m.GetWrite(there, size, 1, groups, own, 2.0),
        m.GetWrite(there, size, 1, groups, loan, 2.0),
        m.Wait(spans, "settled", 2.0),
        m.Wait(spans, "visible", 2.0),
        m.ReleaseClaims("owner"),
        m.ReleaseHold("job"),
        m.Pin("owner", there, 2.0),
        m.Unpin("owner"),
        m.Drop(keys=keys),
        m.Drop(namespace=SPACE, tenant="tenant", writer="writer"),
        m.Bar(writer="writer"),
        Exchange((b"i" * 16,), (Erasure(b"j" * 16, 1.0, tenant="tenant"),), True, b"k" * 16, 9.0),
        m.Describe(there),
        m.Fill("store-9", spans),
        m.Stats(),
        m.Drain(),
    )
    answered = set(node.node.handlers())
    assert answered == {type(each) for each in messages}, "each call has an example, or none is"
    return [plain(each) for each in messages]


def store_run(setting: Setting) -> Callable[[list[Step]], Awaitable[None]]:
    async def run(script: list[Step]) -> None:
        async with cluster() as sim, AsyncExitStack() as stack:
            node = sim.add_node("store-0", blocks=16, setting=setting)
            good = sim.add_worker("good-0", setting=setting)
            bad = sim.add_worker("bad-0", setting=setting)
            await push(good, chain_of(BLOCKS), range(BLOCKS))
            examples = store_examples(node, bad)
            sums = {"put_read": plain(m.PutSums(packed([1] * BLOCKS)))}
            peer = Peer(node.server, bad.hello, sim.tasks, first=examples[0], follows=sums)
            stack.push_async_callback(peer.hang_up)
            for step in script:
                await peer.say(step, examples)
                sim.check()
            await anyio.sleep(5.0)
            peer.check()
            await peer.hang_up()
            await anyio.sleep(REST_S)
            counts = await at_rest(sim)
            assert not counts["waited_blocks"] and not node.node._puts._lent
            assert set(node.node._puts._ways) <= {good.hello.start_id}
            node.index.draining = False
            chain = chain_of(2, seed=9)
            await good.store.drop(namespace=SPACE)
            assert await push(good, chain, range(2)) in (((0, 2),), ())
            await pull(good, chain, range(2))

    return run


@pytest.mark.parametrize("setting", ["auto", "tcp"])
def test_a_store_node_outlives_every_call(setting: Setting) -> None:
    fuzz(store_run(setting))


def worker_examples(role: str) -> list[dict[str, Any]]:
    tokens = tuple(index % 16 for index in range(9))
    stop = wire.Stop(max_tokens=3, strings=("t1",), token_ids=(3,))
    sampling = wire.Sampling(temperature=0.5, top_k=2, logit_bias={1: 2.0})
    messages: tuple[wire.Message, ...] = (
        wire.Prefill("job", tokens, "job", 2.0, salt=b"s" * 32, tenant="a"),
        wire.Generate("r", tokens, len(tokens), sampling, stop, 2.0, hold_owner="job"),
        wire.Generate("r", tokens, 7, wire.Sampling(temperature=0), stop, 2.0, text_sent=1),
        wire.Generate("r", tokens, 9, sampling, stop, 2.0, prefill_pending=True),
        wire.PrefillOver("r"),
        wire.Forget((b"k" * 32,)),
        wire.Forget(),
    )
    assert {type(each) for each in messages} == set(wire.WORKER_REQUESTS)
    other = wire.Generate if role == "prefill" else wire.Prefill
    return [plain(each) for each in messages if not isinstance(each, other)]


def worker_run(role: str) -> Callable[[list[Step]], Awaitable[None]]:
    async def run(script: list[Step]) -> None:
        async with cluster() as sim, anyio.create_task_group() as lives:
            sim.add_node("store-0", blocks=32)
            member = Member(f"{role}-0", 32, "auto", 1 << 20, "host-0", step_s=0.01)

            async def start(*, task_status: anyio.abc.TaskStatus[Life]) -> None:
                await live(
                    sim,
                    member,
                    window=64,
                    claim_s=2.0,
                    around=lambda _, handlers: handlers,
                    task_status=task_status,
                )

            life: Life = await lives.start(start)
            who = Hello("gateway", "bad-0", "host-0", "bad-start", 1, {})
            peer = Peer(life.server, who, sim.tasks)
            examples = worker_examples(role)
            for step in script:
                await peer.say(step, examples)
            await anyio.sleep(5.0)
            peer.check()
            await peer.hang_up()
            await anyio.sleep(REST_S)
            await _serves(life, role)
            await at_rest(sim)
            lives.cancel_scope.cancel()

    return run


async def _serves(life: Life, role: str) -> None:
    near, far = wire_pair("good-0", role)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(life.server.serve_connection, far)
        who = Hello("gateway", "good-0", "host-0", "good-start", 1, {})
        client = await open_client(near, who, wire.Tags(wire.WORKER_REPLIES), CREDENTIALS)
        tasks.start_soon(client.run)
        if role == "prefill":
            job = wire.Prefill("good", tuple(range(9)), "", 20.0)
            async with client.stream(job, deadline_s=20.0) as progress:
                assert [each.done async for each in progress][-1]
        else:
            stop = wire.Stop(max_tokens=2, ignore_eos=True)
            request = wire.Generate("good", (1, 2, 3), 3, wire.Sampling(temperature=0), stop, 20.0)
            async with client.stream(request, deadline_s=20.0) as deltas:
                assert [each.finish_reason async for each in deltas][-1] == "length"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_outlives_every_call(role: str) -> None:
    fuzz(worker_run(role))
