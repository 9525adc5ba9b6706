"""TCP connections of RPC: byte streams whose sender seldom waits, and the listener they come from.

A call is a frame there and a frame back, of a kilobyte each, between processes that wait for each
other: the kernel takes it at once, so nothing is gained by a task that waits until it has. anyio's
own streams let the loop turn once for each send, and ask the kernel each time whether they may
read; that takes twice as long as the two system calls of a frame. It refuses to know what a frame
is.

On other event loops than asyncio's (trio, in tests and the simulation) connections are anyio's.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import anyio
import anyio.abc
import anyio.lowlevel

Connection = anyio.abc.ByteStream
Serve = Callable[[Any], Awaitable[None]]  # as anyio has it

RECEIVED_MAX = 1 << 20  # bytes that wait to be taken, and one piece more; then the peer waits


class SocketStream(asyncio.Protocol, anyio.abc.ByteStream):
    """One connection, on asyncio. Made by an event loop, for a transport that it then hands over.

    Mutable fields: all. `_received` (pieces that nobody has taken, of `_waiting_bytes`), `_waiter`
    (of whoever receives), `_drained` (of whoever sends more than the kernel takes), `_has_ended`
    (the peer sends no more), `_lost` (the connection is gone, and why), `_is_closed` (by us),
    `_peer` (its address, if it was still there when it was asked for).
    """

    def __init__(self) -> None:
        self._received: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Event | None = None
        self._has_ended = False
        self._lost: tuple[Exception | None] | None = None
        self._is_closed = False
        self._peer: Any = None
        self._transport: asyncio.Transport

    # --- what the event loop calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._transport.set_write_buffer_limits(0)  # what the kernel did not take is waited for
        # Asked for now: of a connection that is gone event loops answer None, or not at all.
        self._peer = self._transport.get_extra_info("peername")

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > RECEIVED_MAX:
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._has_ended = True
        self._wake()
        return True  # the other direction goes on

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = (exc,)
        self._wake()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._drained = asyncio.Event()

    def resume_writing(self) -> None:
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- what the owner calls ---

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return what has come, at most so many bytes; waits for the first one."""
        if self._received:
            await anyio.lowlevel.checkpoint()
        while not self._received:
            self._raise_if_closed()
            if self._lost is not None and self._lost[0] is not None:
                raise anyio.BrokenResourceError from self._lost[0]
            if self._has_ended or self._lost is not None:
                raise anyio.EndOfStream
            if self._waiter is not None:
                raise anyio.BusyResourceError("reading from")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._taken(max_bytes)

    def _taken(self, max_bytes: int) -> bytes:
        piece = self._received.popleft()
        if len(piece) > max_bytes:
            piece, rest = piece[:max_bytes], piece[max_bytes:]
            self._received.appendleft(rest)
        was_full = self._waiting_bytes > RECEIVED_MAX
        self._waiting_bytes -= len(piece)
        if was_full and self._waiting_bytes <= RECEIVED_MAX and not self._transport.is_closing():
            self._transport.resume_reading()
        return piece

    def send_now(self, item: bytes) -> bool:
        """Send without waiting: the kernel takes the bytes, and the loop what the kernel does not.
        Returns False, with nothing sent, while earlier bytes wait or when the connection is over:
        `send` waits, and says why."""
        if self._drained is not None or self._transport.is_closing():
            return False
        self._transport.write(item)
        return True

    @property
    def is_drained(self) -> bool:
        """Whether the kernel has taken everything."""
        return self._drained is None

    async def drain(self) -> None:
        """Wait until the kernel has taken everything."""
        if self._drained is not None:
            await self._drained.wait()
        self._raise_if_closed()
        if self._lost is not None:
            raise anyio.BrokenResourceError from self._lost[0]

    async def send(self, item: bytes) -> None:
        """Send, and wait until the kernel has taken everything. Cancelled, it may have sent all,
        some or nothing."""
        await anyio.lowlevel.checkpoint()
        while not self.send_now(item):
            self._raise_if_closed()
            if self._drained is None or self._transport.is_closing():
                raise anyio.BrokenResourceError
            await self._drained.wait()
        await self.drain()

    async def send_eof(self) -> None:
        """Say that no more will be sent."""
        self._transport.write_eof()

    async def aclose(self) -> None:
        """Close at once: what the kernel has not taken is not sent."""
        self._is_closed = True
        self._transport.abort()
        await anyio.lowlevel.checkpoint()

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise anyio.ClosedResourceError

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Say who is at the other end; nothing of one that left before it was accepted."""
        if self._peer is None:
            return {}
        return {anyio.abc.SocketAttribute.remote_address: lambda: self._peer}


async def dial(host: str, port: int) -> Connection:
    """Connect; raises OSError."""
    loop = _asyncio_loop()
    if loop is None:
        return await anyio.connect_tcp(host, port)
    _, stream = await loop.create_connection(SocketStream, host, port)
    return stream


class SocketListener(anyio.abc.Listener[Connection]):
    """Listening sockets, on asyncio. Owns `listener`, anyio's, which opened them."""

    def __init__(self, listener: anyio.abc.Listener[Any]) -> None:
        self._listener = listener
        several = getattr(listener, "listeners", [listener])
        self._sockets = [each.extra(anyio.abc.SocketAttribute.raw_socket) for each in several]

    async def serve(self, handler: Serve, task_group: anyio.abc.TaskGroup | None = None) -> None:
        """Serve each connection in a task of its own, until cancelled; raises OSError, in a
        group."""
        async with anyio.create_task_group() as tasks:
            for each in self._sockets:
                tasks.start_soon(self._accept, each, handler, task_group or tasks)

    async def _accept(
        self, listening: socket.socket, handler: Serve, tasks: anyio.abc.TaskGroup
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except ConnectionAbortedError:
                continue  # it is gone already: that ends no listener
            try:
                _, stream = await loop.connect_accepted_socket(SocketStream, accepted)
            except OSError:
                accepted.close()  # as well
                continue
            tasks.start_soon(cast(Any, handler), stream)

    async def aclose(self) -> None:
        """Close the sockets."""
        await self._listener.aclose()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Say where it listens."""
        return self._listener.extra_attributes


async def open_listener(host: str, port: int) -> anyio.abc.Listener[Connection]:
    """Listen; raises OSError."""
    listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
    return listener if _asyncio_loop() is None else SocketListener(listener)


def _asyncio_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
