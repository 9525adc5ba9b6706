"""RPC over real sockets: replies, streams, errors, cancellation, deadlines, lost and bad peers.

Everything runs on both event loops: protocol code must not know which one it is on.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.abc
import msgpack
import pytest

from kvass.common import errors, wire
from kvass.common.rpc import frames
from kvass.common.rpc import hello as rpc_hello
from kvass.common.rpc import server as rpc_server
from kvass.common.rpc.client import ITEMS_BUFFERED, Client, open_client
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Call, Handler, Server, listen
from kvass.common.wire import Message

pytestmark = pytest.mark.anyio

REPLIES = wire.Tags(wire.WORKER_REPLIES)
CLUSTER: dict[str, str | int] = {"block_tokens": 16, "kv_dtype": "fp8"}


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def hello(role: str = "decode", cluster: Mapping[str, str | int] = CLUSTER) -> Hello:
    return Hello(role, f"{role}-0", "host", f"start-{role}", 1, dict(cluster))


@dataclass
class Worker:
    """A server whose handlers do what the request's id says. Mutable: all fields."""

    cancelled: list[str] = field(default_factory=list)
    sent: int = 0
    left: list[str] = field(default_factory=list)
    address: str = ""

    async def over(self, call: Call) -> Message:
        assert isinstance(call.request, wire.PrefillOver)
        wanted = call.request.request_id
        if wanted == "hang":
            try:
                await anyio.sleep_forever()
            finally:
                self.cancelled.append(wanted)
        raised: dict[str, errors.KvassError] = {
            "invalid": errors.Invalid("no such thing", parameter="x", http_status=422),
            "overloaded": errors.Overloaded("full", retry_after_s=2.5),
            "unavailable": errors.Unavailable("left"),
            "incompatible": errors.Incompatible("a", 1, 2, who="b"),
            "corrupt": errors.BlockCorrupt("bits"),
        }
        if wanted in raised:
            raise raised[wanted]
        if wanted == "large":
            return wire.Delta(text="x" * (wire.FRAME_BYTES_MAX + 1))
        return wire.Done()

    async def generate(self, call: Call) -> None:
        assert isinstance(call.request, wire.Generate)
        try:
            for number in range(call.request.stop.max_tokens):
                text = "x" * 65536 if call.request.request_id == "large" else ""
                await call.send(wire.Delta(token_ids=(number,), text=text))
                self.sent += 1
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(call.request.request_id)
            raise

    async def leave(self, peer: Hello) -> None:
        self.left.append(peer.member_id)

    def server(self, ours: Hello) -> Server:
        handlers: dict[type[Message], Handler] = {
            wire.PrefillOver: self.over,
            wire.Generate: self.generate,
        }
        return Server(ours, handlers, on_leave=self.leave)


def generate(count: int, request_id: str = "r") -> wire.Generate:
    return wire.Generate(
        request_id=request_id,
        tokens=(1,),
        prompt_length=1,
        sampling=wire.Sampling(),
        stop=wire.Stop(max_tokens=count),
        deadline_s=5.0,
    )


@asynccontextmanager
async def serving(ours: Hello | None = None) -> AsyncIterator[Worker]:
    worker = Worker()
    listener, worker.address = await listen("127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, worker.server(ours or hello()).serve_connection)
        yield worker
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def connected(
    worker: Worker, ours: Hello | None = None
) -> AsyncIterator[tuple[Client, anyio.abc.TaskGroup]]:
    async with anyio.create_task_group() as tasks:
        dialer = Dialer(tasks, ours or hello("gateway"), REPLIES)
        yield await dialer.client(worker.address), tasks
        await dialer.hang_up(worker.address)


async def over(client: Client, request_id: str, *, deadline_s: float = 5.0) -> wire.Done:
    return await client.call(wire.PrefillOver(request_id=request_id), deadline_s=deadline_s)


async def until(true: object, *, within_s: float = 2.0) -> None:
    assert callable(true)
    with anyio.fail_after(within_s):
        while not true():  # noqa: ASYNC110 (nothing tells of it)
            await anyio.sleep(0.005)


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
        ("corrupt", errors.BlockCorrupt),
        ("incompatible", errors.Unavailable),  # not in the middle of a call: go elsewhere
    ],
)
async def test_errors_arrive_as_they_were_raised(name: str, kind: type[errors.KvassError]) -> None:
    async with serving() as worker, connected(worker) as (client, _):
        with pytest.raises(kind) as caught:
            await over(client, name)
        if isinstance(caught.value, errors.Invalid):
            assert (caught.value.parameter, caught.value.http_status) == ("x", 422)
        if isinstance(caught.value, errors.Overloaded):
            assert caught.value.retry_after_s == 2.5
        assert await over(client, "next") == wire.Done()


async def test_a_reply_over_the_limit_is_an_error_and_not_a_lost_connection() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        with pytest.raises(errors.Invalid, match="over the limit"):
            await over(client, "large")
        assert await over(client, "next") == wire.Done()


async def test_a_request_that_nobody_handles_is_refused() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        with pytest.raises(errors.Invalid, match="unknown message 'forget'"):
            await client.call(wire.Forget(), deadline_s=5)
        assert await over(client, "next") == wire.Done()


async def test_a_deadline_cancels_at_the_peer() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        with pytest.raises(errors.DeadlineExceeded, match=r"decode-0.*PrefillOver.*0\.05 s"):
            await over(client, "hang", deadline_s=0.05)
        await until(lambda: worker.cancelled == ["hang"])
        assert await over(client, "next") == wire.Done()


async def test_cancelling_a_call_cancels_at_the_peer() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        async with anyio.create_task_group() as callers:
            callers.start_soon(over, client, "hang")
            await until(lambda: len(client._waiting) == 1)
            await over(client, "quick")
            callers.cancel_scope.cancel()
        await until(lambda: worker.cancelled == ["hang"])
        assert not client._waiting


async def test_leaving_a_stream_early_cancels_at_the_peer() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        async with client.stream(generate(10**9), deadline_s=5) as deltas:
            async for delta in deltas:
                assert delta.token_ids == (0,)
                break
        await until(lambda: worker.cancelled == ["r"])


async def test_a_slow_reader_loses_its_own_stream_only() -> None:
    async with serving() as worker, connected(worker) as (client, _):
        async with client.stream(generate(10**9, "slow"), deadline_s=5) as deltas:
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
                await over(client, "hang")
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
        dialer = Dialer(tasks, hello("gateway"), REPLIES)
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
            await open_client(stream, hello("gateway"), REPLIES)
        assert caught.value.field == name
        assert "decode d" in str(caught.value)


async def test_a_member_that_serves_any_model_is_never_refused() -> None:
    async with serving(hello("store", {})) as worker, connected(worker) as (client, _):
        assert await over(client, "quick") == wire.Done()


async def test_nobody_there() -> None:
    listener, address = await listen("127.0.0.1")
    await listener.aclose()
    for where in (address, "nonsense", "127.0.0.1:notaport"):
        with pytest.raises(errors.Unavailable):
            async with anyio.create_task_group() as tasks:
                try:
                    await Dialer(tasks, hello(), REPLIES).client(where)
                except errors.Unavailable as error:
                    caught = error
                    tasks.cancel_scope.cancel()
            raise caught


def framed(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return struct.pack("<I", len(packed)) + packed


HELLO = framed([frames.HELLO, 0, wire.unpack(wire.pack(hello("gateway")))])
CALL = framed([frames.CALL, 1, {"t": "prefill_over", "request_id": "hang"}])


async def dialled(worker: Worker) -> anyio.abc.SocketStream:
    host, _, port = worker.address.rpartition(":")
    return await anyio.connect_tcp(host, int(port))


async def send_raw(worker: Worker, data: bytes) -> bytes:
    """Send bytes, end the sending side, and return all that comes back."""
    answer = b""
    async with await dialled(worker) as stream:
        try:
            await stream.send(data)
            await stream.send_eof()
            while True:
                answer += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            return answer


async def test_bytes_that_end_anywhere_leave_nothing_behind() -> None:
    whole = HELLO + CALL
    async with serving() as worker:
        for size in range(len(whole) + 1):
            await send_raw(worker, whole[:size])
        await until(lambda: len(worker.left) == len(CALL) + 1)
        assert worker.cancelled in ([], ["hang"])
        async with connected(worker) as (client, _):
            assert await over(client, "quick") == wire.Done()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "over"),
        (struct.pack("<I", wire.FRAME_BYTES_MAX + 1), "over"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "not a msgpack frame"),
        (framed([1, 2]), "array of three"),
        (framed(["x", 0, None]), "must be integers"),
        (framed([frames.CALL, 1, {}]), "first frame must be a hello"),
        (framed([frames.HELLO, 0, {"role": "x"}]), "hello:"),
        (HELLO + framed([frames.REPLY, 1, {}]), "not expected"),
        (HELLO + CALL + CALL, "not expected"),
        (HELLO + framed([7, 1, None]), "not expected"),
    ],
)
async def test_bad_frames_end_their_connection_with_the_reason(data: bytes, reason: str) -> None:
    async with serving() as worker:
        assert reason in (await send_raw(worker, data)).decode("latin-1")
        async with connected(worker) as (client, _):  # the listener and others go on
            assert await over(client, "quick") == wire.Done()


async def test_a_message_that_is_wrong_costs_its_call_only() -> None:
    async with serving() as worker:
        bad = framed([frames.CALL, 1, {"t": "prefill_over", "request_id": 7}])
        good = framed([frames.CALL, 2, {"t": "prefill_over", "request_id": "quick"}])
        async with await dialled(worker) as stream:
            await stream.send(HELLO + bad + good)
            answer = b""
            with anyio.fail_after(5):
                while not (b"Invalid" in answer and b"done" in answer):
                    answer += await stream.receive()


async def test_too_many_calls_are_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "CALLS_MAX", 2)
    async with serving() as worker, connected(worker) as (client, _):
        async with anyio.create_task_group() as callers:
            for _ in range(2):
                callers.start_soon(over, client, "hang")
            await until(lambda: len(client._waiting) == 2)
            with pytest.raises(errors.Overloaded):
                await over(client, "quick")
            callers.cancel_scope.cancel()
        await until(lambda: len(worker.cancelled) == 2)
        assert await over(client, "quick") == wire.Done()


async def test_a_peer_that_hangs_does_not_hold_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "SEND_TIMEOUT_S", 0.2)
    async with serving() as worker:
        large = wire.unpack(wire.pack(generate(10**9, "large")))
        async with await dialled(worker) as stream:
            await stream.send(HELLO + framed([frames.CALL, 1, large]))
            await until(lambda: worker.left == ["gateway-0"])  # we never read


async def test_a_server_that_says_nothing_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_hello, "HELLO_TIMEOUT_S", 0.1)

    async def say_nothing(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await anyio.sleep_forever()

    listener, address = await listen("127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, say_nothing)
        with pytest.raises(errors.Unavailable, match="said nothing"):
            await Dialer(tasks, hello(), REPLIES).client(address)
        tasks.cancel_scope.cancel()
