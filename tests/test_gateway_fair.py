"""Tenants share the gateway's turns by their weights: the queue against its laws, and all of it."""

from __future__ import annotations

from hashlib import sha256

import anyio
import anyio.lowlevel
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_stage import MODEL, Stage, a_gateway, until
from kvass.common import errors
from kvass.gateway.admission import Admission, Room
from kvass.gateway.api_keys import ApiKeys
from kvass.gateway.fair import FairQueue, Waiting

WEIGHTS = {"a": 1.0, "b": 1.0, "c": 4.0}
COST_MAX = 8
TENANTS = sorted(WEIGHTS)


def served(queue: FairQueue) -> Waiting:
    one = queue.first()
    assert one is not None
    queue.serve(one)
    return one


costs = st.integers(1, COST_MAX)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(TENANTS), costs), st.sampled_from(["serve", "leave", "crowd"])
    ),
    max_size=80,
)


@given(steps)
def test_every_one_has_one_turn_in_its_tenants_order(steps: list[tuple[str, int] | str]) -> None:
    queue, waiting = FairQueue(WEIGHTS), list[Waiting]()
    for step in steps:
        if isinstance(step, tuple):
            waiting.append(queue.add(*step))
        elif step == "leave" and waiting:
            queue.remove(waiting.pop(len(waiting) // 2))
        elif step == "serve" and waiting:
            one = served(queue)
            assert one is next(each for each in waiting if each.tenant == one.tenant)
            waiting.remove(one)
        elif step == "crowd":
            out = queue.crowded_out("a")
            if out is not None:
                assert out is [each for each in waiting if each.tenant == out.tenant][-1]
                assert out.tenant != "a"
        assert len(queue) == len(waiting) and queue.cost == sum(each.cost for each in waiting)
        assert (queue.first() is None) == (not waiting)
    while waiting:
        waiting.remove(served(queue))
    queue.rest()
    assert not queue._next_s and not queue._waiting, "who waits no more costs nothing"


@given(st.lists(costs, min_size=30, max_size=30), st.lists(costs, min_size=30, max_size=30))
def test_who_always_waits_is_served_by_its_weight(first: list[int], second: list[int]) -> None:
    """Of two that wait all the time neither is ahead by more than a turn of each, by weight."""
    queue, done = FairQueue(WEIGHTS), {"a": 0.0, "c": 0.0}
    for a, c in zip(first, second, strict=True):
        queue.add("a", a)
        queue.add("c", c)
    bound = COST_MAX / WEIGHTS["a"] + COST_MAX / WEIGHTS["c"]
    while len(queue._waiting) == 2:
        one = served(queue)
        done[one.tenant] += one.cost / WEIGHTS[one.tenant]
        assert abs(done["a"] - done["c"]) <= bound


@given(st.integers(1, 200), st.integers(0, 199), costs)
def test_a_crowd_of_one_tenant_is_one_turn_ahead_of_another(n: int, turns: int, cost: int) -> None:
    queue = FairQueue()
    for _ in range(n):
        queue.add("crowd", cost)
    for _ in range(min(turns, n)):
        served(queue)
    late = queue.add("late", 1)
    order = [served(queue) for _ in range(min(2, len(queue)))]
    assert late in order


@given(st.integers(1, 50))
def test_who_was_away_has_saved_nothing_up(turns: int) -> None:
    queue = FairQueue()
    for _ in range(turns + 4):
        queue.add("a", 1)
    for _ in range(turns):
        served(queue)
    for _ in range(4):
        queue.add("b", 1)
    order = "".join(served(queue).tenant for _ in range(8))
    assert order in ("babababa", "abababab", "babababa"), order


def test_who_has_most_for_its_weight_makes_room() -> None:
    queue = FairQueue(WEIGHTS)
    for _ in range(4):
        queue.add("c", 1)
    assert queue.crowded_out("b") is None, "four of weight four are one"
    last = [queue.add("a", 1) for _ in range(3)][-1]
    assert queue.crowded_out("b") is last
    assert queue.crowded_out("a") is None, "nobody makes room for oneself"
    queue.add("b", 2)
    assert queue.crowded_out("b") is None, "it would have as much"


def test_who_wants_more_than_others_have_throws_nobody_out() -> None:
    queue = FairQueue(WEIGHTS)
    last = [queue.add("a", 1) for _ in range(3)][-1]
    assert queue.crowded_out("b", 1) is last
    assert queue.crowded_out("b", 39) is None


@pytest.mark.anyio
async def test_a_request_wider_than_the_room_waits_for_half_of_it() -> None:
    admission, room = Admission(), Room(served=8, choices=200)
    order: list[str] = []

    async def one(name: str, choices: int, ends: anyio.Event) -> None:
        async with admission.admit(name, choices, lambda: room, wait_s=60.0):
            order.append(name)
            await ends.wait()

    long, short = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        for name, choices, ends in (("a", 1, long), ("c", 7, short), ("b", 128, short)):
            tasks.start_soon(one, name, choices, ends)
            await until(lambda: admission.choices >= choices)  # noqa: B023 (awaited at once)
        assert order == ["a", "c"]
        short.set()
        await until(lambda: "b" in order)
        assert not long.is_set(), "it waits for no long answer"
        long.set()
    assert admission.served == 0


@pytest.mark.anyio
async def test_admission_counts_waits_refuses_and_leaves_nothing() -> None:
    admission, order = Admission(), list[str]()
    room = Room(served=2, choices=6)
    gates = {name: anyio.Event() for name in ("a1", "a2", "a3", "a4", "a5", "a6", "b1")}

    async def one(name: str, wait_s: float = 60.0) -> None:
        try:
            async with admission.admit(name[0], 1, lambda: room, wait_s=wait_s):
                order.append(name)
                await gates[name].wait()
        except (errors.Overloaded, errors.DeadlineExceeded) as error:
            order.append(f"{name} {type(error).__name__}")

    async with anyio.create_task_group() as tasks:
        for name in list(gates)[:6]:
            tasks.start_soon(one, name)
            await anyio.lowlevel.checkpoint()
        await until(lambda: order == ["a1", "a2"])
        assert (admission.choices, admission.served) == (6, 2)
        with pytest.raises(errors.Overloaded, match="6 answers are in flight here; at most 6"):
            async with admission.admit("a", 1, lambda: room, wait_s=1):
                pass
        tasks.start_soon(one, "b1")
        await until(lambda: "a6 Overloaded" in order)
        gates["a1"].set()
        await until(lambda: "b1" in order)
        assert order == ["a1", "a2", "a6 Overloaded", "b1"], "before a3"
        with pytest.raises(errors.DeadlineExceeded):
            async with admission.admit("c", 1, lambda: room, wait_s=0.01):
                pass
        tasks.cancel_scope.cancel()
    assert (admission.choices, admission.served, len(admission._turns)) == (0, 0, 0)


@pytest.mark.anyio
@pytest.mark.fault(number=38)
async def test_a_tenant_that_floods_delays_another_by_one_turn() -> None:
    names = ("flood", "other")
    keys = ApiKeys({sha256(f"sk-{name}-0123456789".encode()).digest(): name for name in names})
    async with a_gateway(keys=keys, choices_max=1024) as stage:
        load = {"running_max": 1, "waiting_max": 300, "total_blocks": 10_000}
        stage.members.table.saw_load(stage.decode.hello.start_id, load, anyio.current_time())
        gate = anyio.Event()
        stage.decode.before_answer = gate.wait
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=stage.url, limits=limits, timeout=60) as client,
            anyio.create_task_group() as tasks,
        ):
            for _ in range(200):
                tasks.start_soon(ask, client, "flood")
            await until(lambda: stage.fleet.admission.choices == 200)
            assert tenants(stage) == ["flood"] * 2, "one is served, one is next at the worker"
            tasks.start_soon(ask, client, "other")
            await until(lambda: stage.fleet.admission.choices == 201)
            gate.set()
        order = tenants(stage)
        assert len(order) == 201 and order.index("other") <= 3
        assert stage.fleet.admission.choices == 0


async def ask(client: httpx.AsyncClient, tenant: str) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    headers = {"authorization": f"Bearer sk-{tenant}-0123456789"}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text


def tenants(stage: Stage) -> list[str]:
    return [each.tenant for each in stage.decode.generates()]
