"""A store node whose answers cannot be answers: each is a counted miss at the client, and nothing
of it is used."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
import trio.testing

from kvass.common.errors import Overloaded
from kvass.common.rpc.server import Call, Handler
from kvass.common.transport.route import Setting
from kvass.common.wire import Message
from kvass.kvstore import messages as m
from kvass.kvstore.client import erase
from kvass.kvstore.words import packed
from store_sim import Cluster, Handlers, Worker, answered, chain_of, pull, push

pytestmark = pytest.mark.anyio
BLOCKS = 8
Lie = Callable[[Any], Any]
SETTINGS: tuple[Setting, ...] = ("auto", "tcp")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@asynccontextmanager
async def lying(
    kind: type[Message] | None, lie: Lie, setting: Setting = "auto"
) -> AsyncIterator[tuple[Cluster, Worker, list[bool]]]:
    """Run a node that answers calls of a kind (of every kind) by what `lie` makes of its answer,
    while the list says so."""
    lies = [False]

    def around(member_id: str, handlers: Handlers) -> Handlers:
        def wrapped(handler: Handler) -> Handler:
            async def answer(call: Call) -> Message | None:
                reply = await answered(handler, call)
                return lie(reply) if lies[0] else reply

            return answer

        return {
            each: wrapped(handler) if kind in (each, None) and each is not m.Attach else handler
            for each, handler in handlers.items()
        }

    async with anyio.create_task_group() as tasks:
        sim = Cluster(tasks, around=around)
        sim.add_node("store-0", setting=setting)
        yield sim, sim.add_worker(setting=setting), lies
        lies[0] = False
        await anyio.sleep(30)
        sim.check()
        tasks.cancel_scope.cancel()


def replaced(**fields: Any) -> Lie:
    def lie(reply: Any) -> Any:
        values = {name: f(getattr(reply, name)) for name, f in fields.items()}
        return msgspec.structs.replace(reply, **values)

    return lie


def plus(*ranges: tuple[int, int]) -> Callable[[m.Ranges], m.Ranges]:
    return lambda found: (*found, *ranges)


RANGES = {
    "others": plus((BLOCKS, BLOCKS + 1)),
    "far": plus((0, 1 << 24)),
    "many": plus(*((0, 1 << 24),) * 1000),
    "twice": lambda found: (*found, *found),
    "backwards": plus((5, 2), (BLOCKS, BLOCKS + 3)),
    "empty": plus((3, 3)),
}


@pytest.mark.parametrize("how", RANGES)
async def test_a_lookup_that_speaks_of_other_blocks_finds_nothing(how: str) -> None:
    for field in ("visible", "on_flash"):
        lie = replaced(**{field: RANGES[how], "visible": RANGES[how]})
        async with lying(m.Lookup, lie) as (_, worker, lies):
            await push(worker, chain_of(BLOCKS), range(BLOCKS))
            lies[0] = True
            chain, ranges = chain_of(BLOCKS + 1), [(0, BLOCKS)]
            assert await worker.store.lookup(chain, ranges, deadline_s=1, stage_s=1.0) == []
            assert worker.store.counts["node_wrong"] == 1
            assert await pull(worker, chain, range(BLOCKS)) == set(), "it is left alone"


@pytest.mark.parametrize("how", RANGES)
async def test_a_claim_that_speaks_of_other_blocks_grants_nothing(how: str) -> None:
    async with lying(m.Claim, replaced(granted=RANGES[how])) as (_, worker, lies):
        lies[0] = True
        claim = await worker.store.claim(chain_of(BLOCKS), [(0, BLOCKS)], owner="a", deadline_s=1)
        assert (claim.granted, claim.visible, claim.taken) == ([], [], [])


@pytest.mark.parametrize("answer", [None, replaced(visible=lambda found: ())])
async def test_a_node_that_cannot_wait_is_not_asked_without_a_pause(answer: Lie | None) -> None:
    asked: list[float] = []

    def lie(reply: m.Waited) -> m.Waited:
        asked.append(anyio.current_time())
        assert len(asked) < 1000, "it is asked as fast as it answers"
        if answer is None:
            raise Overloaded("1024 calls are open on this connection")
        said: m.Waited = answer(reply)
        return said

    async with lying(m.Wait, lie) as (_, worker, lies):
        chain = chain_of(BLOCKS)
        await push(worker, chain, range(BLOCKS))
        lies[0] = True
        found = await worker.store.wait(chain, [(0, BLOCKS)], until="visible", deadline_s=1)
        assert (found.visible, found.unclaimed) == ([], [])
        assert 50 <= len(asked) <= 110, "it is asked again, with a pause"


@pytest.mark.parametrize("how", RANGES)
async def test_a_wait_that_speaks_of_other_blocks_is_no_news(how: str) -> None:
    async with lying(m.Wait, replaced(visible=RANGES[how])) as (_, worker, lies):
        await push(worker, chain_of(BLOCKS), range(BLOCKS))
        lies[0] = True
        found = await worker.store.wait(
            chain_of(BLOCKS), [(0, BLOCKS)], until="visible", deadline_s=3
        )
        assert found.visible == [] and found.unclaimed == []


ONE = packed([1])
PLACES: dict[str, Lie] = {
    "others": replaced(indices=lambda i: (*i[:-1], 1000)),
    "more": lambda r: m.Places(
        r.lease_id, r.lease_s, (*r.indices, 99), r.addresses + ONE, r.checksums + ONE
    ),
    "twice": replaced(indices=lambda i: (i[0], *i[:-1])),
    "too few checksums": replaced(checksums=lambda c: c[:-8]),
    "half a checksum": replaced(checksums=lambda c: c[:-4]),
    "no checksums": replaced(checksums=lambda c: b""),
    "too many checksums": replaced(checksums=lambda c: c + ONE),
    "too few indices": replaced(indices=lambda i: i[:-1]),
}
SAME_HOST: dict[str, Lie] = {
    "too few addresses": replaced(addresses=lambda a: a[:-8]),
    "half an address": replaced(addresses=lambda a: a[:-4]),
    "no addresses": replaced(addresses=lambda a: b""),
}


@pytest.mark.parametrize("how", [*PLACES, *SAME_HOST])
@pytest.mark.parametrize("setting", SETTINGS)
async def test_a_get_whose_places_do_not_fit_is_a_miss(how: str, setting: Setting) -> None:
    kind = m.GetBegin if setting == "auto" else m.GetWrite
    if setting == "tcp" and how in SAME_HOST:
        return  # where nobody looks at them
    async with lying(kind, (PLACES | SAME_HOST)[how], setting) as (_, worker, lies):
        chain = chain_of(BLOCKS)
        await push(worker, chain, range(BLOCKS))
        lies[0] = True
        assert await pull(worker, chain, range(BLOCKS)) == set()
        assert worker.store.counts["node_wrong"] == 1
        assert worker.store.counts["missed_failed"] == BLOCKS
        lies[0] = False
        await anyio.sleep(2)
        assert await pull(worker, chain, range(BLOCKS)) == set(range(BLOCKS))


async def test_an_address_that_is_no_blocks_is_a_miss() -> None:
    """Its bytes are somebody else's: the checksum says so."""
    lie = replaced(addresses=lambda a: a[8:] + a[:8])
    async with lying(m.GetBegin, lie) as (_, worker, lies):
        chain = chain_of(BLOCKS)
        await push(worker, chain, range(BLOCKS))
        lies[0] = True
        assert await pull(worker, chain, range(BLOCKS)) == set()
        assert worker.store.counts["pull_corrupt"] == BLOCKS


def puts_of(first: str) -> dict[str, Lie]:
    """Return lies about a put whose answer speaks of all its blocks as `first`."""
    return {
        **{f"{first} {how}": replaced(**{first: lie}) for how, lie in RANGES.items()},
        **{
            f"visible {how}": replaced(visible=lie) for how, lie in RANGES.items() if how != "twice"
        },
        f"{first} and full": lambda r: msgspec.structs.replace(r, full=getattr(r, first)),
    }


READS = puts_of("stored")
LOANS: dict[str, Lie] = {
    **puts_of("granted"),
    "no loan": replaced(loan=lambda loan: None),
    "too small": replaced(loan=lambda loan: msgspec.structs.replace(loan, size=loan.size - 1)),
    "another's": replaced(
        loan=lambda loan: msgspec.structs.replace(
            loan, card=msgspec.structs.replace(loan.card, start_id="somebody")
        )
    ),
}


@pytest.mark.parametrize(
    ("way", "how"),
    [*(("read", how) for how in READS), *(("loan", how) for how in LOANS)],
)
async def test_a_put_whose_answer_does_not_fit_stores_nothing(way: str, how: str) -> None:
    reads = lying(m.PutRead, READS.get(how, replaced()))
    loans = lying(m.PutBegin, LOANS.get(how, replaced()), "tcp")
    async with reads if way == "read" else loans as (_, worker, lies):
        chain = chain_of(BLOCKS + 1)
        lies[0] = True
        assert await push(worker, chain, range(BLOCKS)) == ()
        assert worker.store.counts["node_wrong"] == 1
        lies[0] = False
        await anyio.sleep(2)
        assert await push(worker, chain, range(BLOCKS)) == ((0, BLOCKS),)


@pytest.mark.parametrize("how", RANGES)
async def test_a_commit_that_speaks_of_other_blocks_has_stored_nothing(how: str) -> None:
    async with lying(m.PutCommit, replaced(stored=RANGES[how]), "tcp") as (_, worker, lies):
        lies[0] = True
        assert await push(worker, chain_of(BLOCKS), range(BLOCKS)) == ()


@pytest.mark.parametrize("how", RANGES)
async def test_a_pin_that_speaks_of_other_blocks_pins_nothing(how: str) -> None:
    async with lying(m.Pin, replaced(visible=RANGES[how])) as (_, worker, lies):
        await push(worker, chain_of(BLOCKS), range(BLOCKS))
        lies[0] = True
        pinned = await worker.store.pin(
            chain_of(BLOCKS), [(0, BLOCKS)], owner="a", duration_s=5, deadline_s=1
        )
        assert pinned == []


async def test_writers_of_other_blocks_are_no_answer() -> None:
    def more(reply: m.Described) -> m.Described:
        shape = msgspec.structs.replace(reply.shapes[0], index=99)
        return m.Described(shapes=(*reply.shapes, shape))

    async with lying(m.Describe, more) as (_, worker, lies):
        await push(worker, chain_of(BLOCKS), range(BLOCKS))
        lies[0] = True
        found = await erase.writers(worker.store.router, chain_of(BLOCKS), range(4), 1.0)
        assert found == dict.fromkeys(range(4), "prefill-0")


def garbled(rng: random.Random) -> Lie:
    """Return a lie that changes any field of any answer to something that the wire lets through."""

    def value(old: Any) -> Any:
        if isinstance(old, bool):
            return not old
        if isinstance(old, int):
            return rng.choice((0, 1, 7, 8, 9, old + 1, 1 << 20, 1 << 40))
        if isinstance(old, tuple) and old:
            parts = list(old)
            how = rng.randrange(4)
            if how == 0:
                del parts[rng.randrange(len(parts))]
            elif how == 1:
                parts.insert(rng.randrange(len(parts)), parts[rng.randrange(len(parts))])
            elif how == 2:
                at = rng.randrange(len(parts))
                parts[at] = value(parts[at])
            else:
                rng.shuffle(parts)
            return tuple(parts)
        if isinstance(old, msgspec.Struct):
            return spoilt(old)
        return old

    def spoilt(reply: Any) -> Any:
        name = rng.choice(reply.__struct_fields__) if reply.__struct_fields__ else ""
        return (
            msgspec.structs.replace(reply, **{name: value(getattr(reply, name))}) if name else reply
        )

    return lambda reply: spoilt(reply) if rng.random() < 0.7 else reply


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(25))
async def test_whatever_it_answers_no_call_raises_and_no_byte_is_wrong(
    seed: int, setting: Setting
) -> None:
    """`pull` and `push` assert what they return of what they were asked; `pull` each byte."""
    rng = random.Random(seed)
    async with lying(None, garbled(rng), setting) as (_, worker, lies):
        every, chain = [(0, BLOCKS)], chain_of(BLOCKS + 2)
        await push(worker, chain, range(BLOCKS))
        lies[0] = True
        untouched = worker.memory.array[200:].copy()
        for _ in range(12):
            await push(worker, chain_of(BLOCKS, seed=rng.randrange(3)), range(BLOCKS))
            assert await pull(worker, chain, range(BLOCKS)) <= set(range(BLOCKS))
            found = await worker.store.lookup(chain, every, deadline_s=1, stage_s=1.0)
            assert all(0 <= first < stop <= BLOCKS for first, stop in found)
            claim = await worker.store.claim(chain, every, owner="a", deadline_s=1)
            for part in (claim.granted, claim.visible, claim.taken):
                assert all(0 <= first < stop <= BLOCKS for first, stop in part)
            await worker.store.wait(chain, every, until="settled", deadline_s=0.5)
            await worker.store.pin(chain, every, owner="p", duration_s=1, deadline_s=1)
            await anyio.sleep(rng.choice((0.1, 10.0)))
        assert (worker.memory.array[200:] == untouched).all(), "slots that nobody asked to fill"
