"""What a caller sends after its request, while the call is under way."""

from __future__ import annotations

import anyio
import pytest

from kvass.common import errors, wire
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.rpc.frames import ITEM
from kvass.common.rpc.server import Call, Handler
from rpc_stage import connected, generate, over, serving

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[(BACKEND, dict(BACKEND_OPTIONS)), ("trio", {})], ids=["uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    backend: tuple[str, dict[str, object]] = request.param
    return backend


class Rest(wire.Message, frozen=True, tag="rest"):
    text: str


class Begin(wire.Request[wire.Delta], frozen=True, tag="begin"):
    """Answered by its text and the rest; at once if `whole`, after a while if `slow`."""

    followed_by = Rest

    text: str
    whole: bool = False
    slow: bool = False


async def joined(call: Call) -> wire.Delta:
    assert isinstance(call.request, Begin)
    if call.request.whole:
        return wire.Delta(text=call.request.text)
    if call.request.slow:
        await anyio.sleep(0.1)
    rest = await call.followed(Rest)
    return wire.Delta(text=call.request.text + rest.text)


HANDLERS: dict[type[wire.Message], Handler] = {Begin: joined}


@pytest.mark.parametrize("slow", [False, True])
async def test_what_follows_reaches_its_call(slow: bool) -> None:
    async with serving(handlers=HANDLERS) as worker, connected(worker) as (client, _):
        async with (
            client.asked(Begin("a", slow=slow), deadline_s=5) as first,
            client.asked(Begin("b", slow=slow), deadline_s=5) as second,
        ):
            assert await over(client, "quick") == wire.Done()
            await second.follow(Rest("2"))
            await first.follow(Rest("1"))
            assert await first.reply() == wire.Delta(text="a1")
            assert await second.reply() == wire.Delta(text="b2")


async def test_a_call_that_is_over_has_no_use_for_it() -> None:
    async with serving(handlers=HANDLERS) as worker, connected(worker) as (client, _):
        async with client.asked(Begin("a", whole=True), deadline_s=5) as asked:
            assert await asked.reply() == wire.Delta(text="a")
            await asked.follow(Rest("1"))
        assert await over(client, "next") == wire.Done()


async def test_a_call_that_nothing_follows_ends_at_its_deadline() -> None:
    async with serving(handlers=HANDLERS) as worker, connected(worker) as (client, _):
        with pytest.raises(errors.DeadlineExceeded, match="Begin"):
            async with client.asked(Begin("a"), deadline_s=0.05) as asked:
                await asked.reply()
        assert await over(client, "next") == wire.Done()


@pytest.mark.parametrize(
    ("follows", "reason"),
    [
        ([Rest("1"), Rest("2")], "Begin is followed twice"),
        ([wire.Done()], "unknown message 'done'"),
        ([wire.Forget()], "unknown message 'forget'"),
    ],
)
async def test_what_must_not_follow_ends_the_connection(
    follows: list[wire.Message], reason: str
) -> None:
    async with serving(handlers=HANDLERS) as worker, connected(worker) as (client, _):
        with pytest.raises(errors.Unavailable, match=reason):
            async with client.asked(Begin("a", slow=True), deadline_s=5) as asked:
                for each in follows:
                    await asked.follow(each)
                await asked.reply()


async def test_what_follows_a_call_of_another_kind_ends_the_connection() -> None:
    async with serving(handlers=HANDLERS) as worker, connected(worker) as (client, _):
        with pytest.raises(errors.Unavailable, match="nothing follows Generate"):
            async with client.stream(generate(10**6), deadline_s=5) as deltas:
                await client._frames.send(ITEM, client._next_id - 1, Rest("1"))
                async for _ in deltas:
                    pass
