"""Connections on asyncio: nothing is lost, doubled or out of order, and nothing waits unbounded."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
import pytest

from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.rpc import frames, sockets
from kvass.common.rpc.frames import CALL, Frames
from kvass.common.rpc.server import accept, listen
from kvass.common.rpc.sockets import (
    RECEIVED_MAX,
    SocketListener,
    SocketStream,
    dial,
    open_listener,
)
from rpc_stage import Worker, connected, dialled, hello, over, until

pytestmark = pytest.mark.anyio
MIB = 1 << 20


@pytest.fixture(params=[(BACKEND, dict(BACKEND_OPTIONS)), ("asyncio", {})], ids=["uvloop", "plain"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    backend: tuple[str, dict[str, object]] = request.param
    return backend


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[SocketStream, SocketStream]]:
    """Yield both ends of a connection."""
    listener = await open_listener("127.0.0.1", 0)
    assert isinstance(listener, SocketListener)
    port = int(listener.extra(anyio.abc.SocketAttribute.local_port))
    accepted: list[SocketStream] = []
    came = anyio.Event()

    async def take(stream: SocketStream) -> None:
        accepted.append(stream)
        came.set()
        await anyio.sleep_forever()

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, take)
        ours = await dial("127.0.0.1", port)
        await came.wait()
        assert isinstance(ours, SocketStream)
        async with ours, accepted[0]:
            yield ours, accepted[0]
        tasks.cancel_scope.cancel()


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


async def exactly(stream: SocketStream, size: int) -> bytes:
    taken = b""
    while len(taken) < size:
        taken += await stream.receive(1 << 18)
    return taken


async def fill(stream: SocketStream) -> int:
    """Send until neither kernel nor the other side takes any more; return how much it took."""
    sent = refused = 0
    while refused < 20:
        if stream.send_now(bytes(MIB)):
            sent, refused = sent + MIB, 0
            assert sent < 200 * MIB
        else:
            refused += 1
            await anyio.sleep(0.01)
    return sent


async def test_bytes_come_whole_and_in_order_whoever_sends_how() -> None:
    async with pair() as (ours, theirs), anyio.create_task_group() as tasks:
        pieces = [pattern(size) for size in (1, 5 * MIB, 3, 0, 70_000, 2 * MIB, 9)]

        async def send() -> None:
            for piece in pieces:
                if not ours.send_now(piece):
                    await ours.send(piece)

        tasks.start_soon(send)
        assert await exactly(theirs, sum(map(len, pieces))) == b"".join(pieces)
        theirs.send_now(b"back")
        assert await ours.receive(2) == b"ba"
        assert await ours.receive() == b"ck"


async def test_a_peer_that_takes_nothing_is_waited_for() -> None:
    async with pair() as (ours, theirs):
        sent = await fill(ours)
        waited = True
        with anyio.move_on_after(0.1):
            await ours.send(b"more")
            waited = False
        assert waited
        assert RECEIVED_MAX < theirs._waiting_bytes <= RECEIVED_MAX + MIB
        assert await exactly(theirs, sent) == bytes(sent)
        await ours.send(b"end")
        assert await theirs.receive() == b"end"


async def test_a_peer_that_takes_no_frame_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the loop has the rest of the frame, and nothing is sent after it."""
    monkeypatch.setattr(frames, "SEND_TIMEOUT_S", 0.2)
    async with pair() as (ours, _):
        await fill(ours)
        with anyio.fail_after(2), pytest.raises(anyio.BrokenResourceError):
            await Frames(ours).send(CALL, 1, b"more")
    async with pair() as (ours, theirs):
        theirs._transport.pause_reading()
        with anyio.fail_after(2), pytest.raises(anyio.BrokenResourceError):
            for _ in range(4):
                await Frames(ours).send(CALL, 1, bytes(7 * MIB))


async def test_frames_that_had_to_wait_keep_their_order() -> None:
    async with pair() as (ours, theirs), anyio.create_task_group() as tasks:
        sender, receiver = Frames(ours), Frames(theirs)
        receiver.bytes_max = 8 * MIB
        for number in range(40):
            tasks.start_soon(sender.send, CALL, number, pattern(MIB * (number % 3)))
        found = [await receiver.receive() for _ in range(40)]
        assert [call_id for _, call_id, _ in found] == list(range(40))
        assert all(body == pattern(MIB * (number % 3)) for _, number, body in found)


async def test_an_end_is_told_after_all_that_came_before() -> None:
    async with pair() as (ours, theirs):
        await ours.send(b"last words")
        await ours.send_eof()
        assert await theirs.receive() == b"last words"
        with pytest.raises(anyio.EndOfStream):
            await theirs.receive()
        await theirs.send(b"heard")  # the other direction goes on
        assert await ours.receive() == b"heard"


async def test_a_closed_connection_is_told_to_both_sides() -> None:
    async with pair() as (ours, theirs), anyio.create_task_group() as tasks:

        async def wait() -> None:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await theirs.receive()

        tasks.start_soon(wait)
        await anyio.sleep(0.01)
        await ours.aclose()
        assert not ours.send_now(b"x")
        for use in (ours.send(b"x"), ours.receive()):
            with pytest.raises(anyio.ClosedResourceError):
                await use


async def test_a_send_that_waits_is_told_of_the_end() -> None:
    async with pair() as (ours, theirs), anyio.create_task_group() as tasks:
        await fill(ours)

        async def wait() -> None:
            with pytest.raises(anyio.BrokenResourceError):
                await ours.send(b"more")

        tasks.start_soon(wait)
        await anyio.sleep(0.01)
        await theirs.aclose()


async def test_one_task_receives_at_a_time() -> None:
    async with pair() as (ours, _), anyio.create_task_group() as tasks:
        tasks.start_soon(ours.receive)
        await anyio.sleep(0.01)
        with pytest.raises(anyio.BusyResourceError):
            await ours.receive()
        tasks.cancel_scope.cancel()


async def test_a_receive_that_was_given_up_takes_nothing() -> None:
    async with pair() as (ours, theirs):
        with anyio.move_on_after(0.01):
            await ours.receive()
        await theirs.send(b"kept")
        await anyio.sleep(0.01)
        assert await ours.receive() == b"kept"


def reset(port: int, said: bytes) -> None:
    """Connect, say something, and be gone without a goodbye, as whoever scans ports is."""
    with socket.create_connection(("127.0.0.1", port)) as rude:
        rude.sendall(said)
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"])
async def test_a_stranger_that_is_gone_already_ends_no_server(said: bytes) -> None:
    """Nobody can say any more where it was, and what it said is wrong all the same."""
    worker = Worker()
    listener, worker.address = await listen("127.0.0.1")
    port = int(worker.address.rpartition(":")[2])
    async with listener, anyio.create_task_group() as tasks:
        for _ in range(3):
            reset(port, said)
        tasks.start_soon(accept, listener, worker.server(hello()).serve_connection)
        for _ in range(3):
            await anyio.sleep(0.01)
            reset(port, said)
        async with connected(worker) as (client, _):
            await over(client, "still there")
        tasks.cancel_scope.cancel()


class DyingFirst:
    """An event loop whose first two connections are gone when they are looked at. Mutable:
    `lives`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.lives = 0

    async def sock_accept(self, listening: socket.socket) -> tuple[socket.socket, Any]:
        self.lives += 1
        if self.lives == 1:
            raise ConnectionAbortedError
        return await self._loop.sock_accept(listening)

    async def connect_accepted_socket(self, protocol: Any, accepted: socket.socket) -> Any:
        if self.lives == 2:
            raise OSError(errno.EINVAL, "it is gone")
        return await self._loop.connect_accepted_socket(protocol, accepted)


async def test_a_connection_that_dies_while_it_is_accepted_ends_no_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, loop = Worker(), DyingFirst(asyncio.get_running_loop())
    listener, worker.address = await listen("127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        with monkeypatch.context() as patch:
            patch.setattr(sockets, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
            tasks.start_soon(accept, listener, worker.server(hello()).serve_connection)
            await until(lambda: loop.lives)
        async with await dialled(worker) as refused:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await refused.receive()
        async with connected(worker) as (client, _):
            await over(client, "the listener goes on")
        tasks.cancel_scope.cancel()
