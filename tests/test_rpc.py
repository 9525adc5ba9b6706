"""RPC over real sockets: replies, streams, errors, cancellation, deadlines, lost and bad peers.

Everything runs on both event loops: protocol code must not know which one it is on.
"""

from __future__ import annotations

import errno
from typing import Any, cast

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from kvass.common import errors, wire
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.rpc import server
from kvass.common.rpc.client import ITEMS_BUFFERED, open_client
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.frames import CALL, FRAMES_A_TURN
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import listen
from rpc_stage import (
    CLUSTER,
    LATER,
    REPLIES,
    connected,
    dialled,
    generate,
    hello,
    over,
    serving,
    until,
)
from trust import CREDENTIALS

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[(BACKEND, dict(BACKEND_OPTIONS)), ("trio", {})], ids=["uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    backend: tuple[str, dict[str, object]] = request.param
    return backend


async def test_calls_and_streams_share_a_connection() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        assert (client.peer.role, client.peer.member_id) == ("decode", "decode-0")
        async with client.stream(generate(100), deadline_s=5) as deltas:
            assert await over(client, "quick") == wire.Done()
            numbers = [delta.token_ids[0] async for delta in deltas]
        assert numbers == list(range(100))
        assert not client._waiting
    assert worker.left == ["gateway-0"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("invalid", errors.Invalid),
        ("overloaded", errors.Overloaded),
        ("unavailable", errors.Unavailable),
        ("incompatible", errors.Unavailable),  # not in the middle of a call: go elsewhere
    ],
)
@pytest.mark.parametrize("later", ["", LATER])
async def test_errors_arrive_as_they_were_raised(
    name: str, kind: type[errors.KvassError], later: str
) -> None:
    async with serving() as worker, connected(worker) as (client, _):
        with pytest.raises(kind) as caught:
            await over(client, name + later)
        assert worker.noted == []
        if isinstance(caught.value, errors.Invalid):
            assert (caught.value.parameter, caught.value.http_status) == ("x", 422)
        if isinstance(caught.value, errors.Overloaded):
            assert caught.value.retry_after_s == 2.5
        assert await over(client, "next") == wire.Done()


@pytest.mark.parametrize("later", ["", LATER])
async def test_a_reply_over_the_limit_is_an_error_and_not_a_lost_connection(later: str) -> None:
    async with serving() as worker, connected(worker) as (client, _):
        with pytest.raises(errors.Invalid, match="over the limit"):
            await over(client, "large" + later)
        assert await over(client, "next") == wire.Done()


async def test_what_need_not_be_waited_for_is_done_after_the_answer() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        hanging = wire.PrefillOver(request_id="hang" + LATER)
        with pytest.raises(errors.DeadlineExceeded):
            await client.call(hanging, deadline_s=0.05)
        for number in range(3):
            for later in ("", LATER):
                await over(client, f"{number}{later}")
        await until(lambda: worker.noted == ["0", "0", "1", "1", "2", "2"])


async def test_what_follows_an_answer_is_done_when_its_caller_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "AFTER_S", 60.0)
    async with serving() as worker:
        async with connected(worker) as (client, _):
            await over(client, "last")
            assert worker.noted == []
        await until(lambda: worker.noted == ["last"])


async def test_what_follows_many_answers_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "AFTER_S", 60.0)
    async with serving() as worker, connected(worker) as (client, _):
        for _ in range(server.AFTER_MAX):
            assert worker.noted == []
            await over(client, "quick")
        await until(lambda: len(worker.noted) == server.AFTER_MAX)


async def test_many_calls_at_once_leave_others_their_turn() -> None:
    """Calls that are answered at once wait for nothing: a peer with many would be the only one."""
    async with serving() as worker, connected(worker) as (client, _):
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await anyio.lowlevel.checkpoint()
                turns += 1

        async with anyio.create_task_group() as tasks:
            quick = wire.PrefillOver(request_id="quick")
            packed = [wire.pack([CALL, 1000 + n, quick]) for n in range(20 * FRAMES_A_TURN)]
            many = b"".join(len(each).to_bytes(4, "little") + each for each in packed)
            tasks.start_soon(take_turns)
            await client._frames.stream.send(many)
            await until(lambda: len(worker.noted) == 20 * FRAMES_A_TURN)
            tasks.cancel_scope.cancel()
        assert turns >= 20


async def test_what_is_answered_at_once_is_answered_beside_calls_that_wait() -> None:
    async with serving() as worker, connected(worker) as (client, tasks):
        tasks.start_soon(over, client, "hang" + LATER)
        await until(lambda: len(client._waiting) == 1)
        for _ in range(server.CALLS_MAX + 1):
            assert await over(client, "quick") == wire.Done()
        tasks.cancel_scope.cancel()
        await anyio.sleep_forever()


async def test_a_request_that_nobody_handles_is_refused() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        with pytest.raises(errors.Invalid, match="unknown message 'forget'"):
            await client.call(wire.Forget(), deadline_s=5)
        assert await over(client, "next") == wire.Done()


async def test_a_deadline_cancels_at_the_peer() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        with pytest.raises(errors.DeadlineExceeded, match=r"decode-0.*PrefillOver.*0\.05 s"):
            await over(client, "hang" + LATER, deadline_s=0.05)
        await until(lambda: worker.cancelled == ["hang"])
        assert await over(client, "next") == wire.Done()


async def test_cancelling_a_call_cancels_at_the_peer() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        async with anyio.create_task_group() as callers:
            callers.start_soon(over, client, "hang" + LATER)
            await until(lambda: len(client._waiting) == 1)
            await over(client, "quick")
            callers.cancel_scope.cancel()
        await until(lambda: worker.cancelled == ["hang"])
        assert not client._waiting


async def test_leaving_a_stream_early_cancels_at_the_peer() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        async with client.stream(generate(10**7), deadline_s=5) as deltas:
            async for delta in deltas:
                assert delta.token_ids == (0,)
                break
        await until(lambda: worker.cancelled == ["r"])


async def test_a_slow_reader_loses_its_own_stream_only() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        async with client.stream(generate(10**7, "slow"), deadline_s=5) as deltas:
            await until(lambda: worker.sent > 2 * ITEMS_BUFFERED)
            assert await over(client, "quick") == wire.Done()
            read = 0
            with pytest.raises(errors.Unavailable, match="faster than it was read"):
                async for _ in deltas:
                    read += 1
            assert read == ITEMS_BUFFERED
        await until(lambda: worker.cancelled == ["slow"])  # it does not go on for nobody


async def test_a_lost_connection_fails_its_calls_and_cancels_its_handlers() -> None:
    async with serving() as worker, connected(worker) as (client, tasks):
        outcome: list[BaseException] = []

        async def call() -> None:
            try:
                await over(client, "hang" + LATER)
            except errors.KvassError as error:
                outcome.append(error)

        tasks.start_soon(call)
        await until(lambda: len(client._waiting) == 1)
        await over(client, "quick")
        await client.close()
        await until(lambda: worker.cancelled == ["hang"] and outcome)
        assert isinstance(outcome[0], errors.Unavailable)
        with pytest.raises(errors.Unavailable):
            await over(client, "late")


async def test_a_dialer_opens_a_new_connection_after_a_lost_one() -> None:
    async with serving() as worker, anyio.create_task_group() as tasks:
        dialer = Dialer(tasks, hello("gateway"), REPLIES, CREDENTIALS)
        first = await dialer.client(worker.address)
        assert await dialer.client(worker.address) is first
        await first.close()
        await until(lambda: first.closed_because is not None)
        second = await dialer.client(worker.address)
        assert second is not first and await over(second, "quick") == wire.Done()
        await dialer.hang_up(worker.address)


@pytest.mark.parametrize(
    ("theirs", "name"),
    [
        (Hello("decode", "d", "h", "s", 1, CLUSTER | {"kv_dtype": "int8"}), "kv_dtype"),
        (Hello("decode", "d", "h", "s", 1, {"kv_dtype": "fp8"}), "block_tokens"),
        (Hello("decode", "d", "h", "s", 1, CLUSTER, protocol=0), "protocol"),
    ],
)
async def test_members_that_disagree_are_refused_with_the_field(theirs: Hello, name: str) -> None:
    async with serving(theirs) as worker:
        stream = await dialled(worker)
        with pytest.raises(errors.Incompatible) as caught:
            await open_client(stream, hello("gateway"), REPLIES, CREDENTIALS)
        assert caught.value.field == name
        assert "decode d" in str(caught.value)


async def test_a_member_that_serves_any_model_is_never_refused() -> None:
    async with serving(hello("store", {})) as worker, connected(worker) as (client, _):
        assert await over(client, "quick") == wire.Done()


@pytest.mark.parametrize("host", ["203.0.113.9", "no such host", "no..host"])
async def test_an_address_that_is_not_here_is_invalid(host: str) -> None:
    with pytest.raises(errors.Invalid, match=f"cannot listen on .*{host}.*setting host"):
        await listen(host)


async def test_a_process_without_descriptors_keeps_its_connections_and_looks_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended: every store node and worker could be stopped by connections that say nothing. Then
    its log had two lines a second."""
    monkeypatch.setattr(server, "ACCEPT_PAUSE_S", 0.0)
    served: list[int] = []

    class Listener:
        taken = 0

        async def serve(self, handler: Any, tasks: anyio.abc.TaskGroup) -> None:
            tasks.start_soon(handler, self.taken)
            self.taken += 1
            await until(lambda: len(served) == self.taken)
            number = errno.EMFILE if self.taken < 3 else errno.EBADF
            async with anyio.create_task_group():  # as a listener of several addresses raises
                raise OSError(number, "out of something")

    async def serve(number: int) -> None:
        served.append(number)

    with pytest.raises(BaseExceptionGroup) as caught:
        await server.accept(Listener(), cast(Any, serve))
    assert caught.group_contains(OSError, match="out of something")
    assert served == [0, 1, 2]
    assert caplog.text.count("no connection can be accepted") == 1, "now and then"


async def test_nobody_there() -> None:
    listener, address = await listen("127.0.0.1")
    await listener.aclose()
    for where in (address, "nonsense", "127.0.0.1:notaport"):
        with pytest.raises(errors.Unavailable):
            async with anyio.create_task_group() as tasks:
                try:
                    await Dialer(tasks, hello(), REPLIES, CREDENTIALS).client(where)
                except errors.Unavailable as error:
                    caught = error
                    tasks.cancel_scope.cancel()
            raise caught


async def test_where_nobody_can_be_is_told_in_words() -> None:
    listener, address = await listen("127.0.0.1")
    await listener.aclose()
    for where, why in ((address, "refused|failed"), (":1", "not known|No address|resolution")):
        async with anyio.create_task_group() as tasks:
            with pytest.raises(errors.Unavailable, match=why):
                await Dialer(tasks, hello(), REPLIES, CREDENTIALS).client(where)
