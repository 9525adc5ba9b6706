"""Framed request/response and streams over TCP, with deadlines, cancellation and a bounded window.

The first frame of each side is its `Hello`; members that disagree on the cluster are refused with
the field named. Frames, and errors on the wire, are in `frames.py`.

    caller   CALL(id, request) ───────────────────────────────> handler
             REPLY(id, message)  or  ITEM(id, message)* END(id) <───
             ERROR(id, …)                                       <───
             CANCEL(id) ──> the handler's scope is cancelled, nothing is answered

A lost connection cancels every handler that it started and fails every call that waits on it with
Unavailable. It refuses to retry: callers know what another attempt costs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn, TypeVar

import anyio
import anyio.abc
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from kvass.common import config, errors, wire
from kvass.common.frames import (
    CALL,
    CANCEL,
    END,
    ERROR,
    HELLO,
    ITEM,
    LOST,
    REPLY,
    Connection,
    Frames,
    pack_error,
    unpack_error,
)
from kvass.common.wire import Message, Request, Tags

CALLS_MAX = 1024  # per connection: a gateway's whole load on one worker, several times over
ITEMS_BUFFERED = 256  # per stream: a slow reader holds its sender, not the connection's memory
HELLO_TIMEOUT_S = 5.0

R = TypeVar("R", bound=Message)


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is at one end of a connection. `cluster` is empty for members that serve any model."""

    role: str
    member_id: str
    host_id: str
    start_id: str
    pid: int
    cluster: dict[str, str | int]
    protocol: int = wire.PROTOCOL_VERSION


async def _shake_hands(frames: Frames, ours: Hello, *, answer_first: bool) -> Hello:
    """Exchange Hellos; raises Incompatible naming the first field that differs."""
    with anyio.fail_after(HELLO_TIMEOUT_S):
        if answer_first:
            await frames.send(HELLO, 0, ours)
        kind, _, body = await frames.receive()
        if not answer_first:
            await frames.send(HELLO, 0, ours)
    if kind != HELLO:
        raise errors.Invalid(f"the first frame must be a hello; got kind {kind}")
    try:
        theirs = msgspec.convert(body, Hello)
    except msgspec.ValidationError as error:
        raise errors.Invalid(f"hello: {error}") from None
    who = f"{theirs.role} {theirs.member_id}"
    if theirs.protocol != ours.protocol:
        raise errors.Incompatible("protocol", ours.protocol, theirs.protocol, who=who)
    if ours.cluster and theirs.cluster:
        name = config.difference(ours.cluster, theirs.cluster)
        if name is not None:
            raise errors.Incompatible(
                name, ours.cluster.get(name), theirs.cluster.get(name), who=who
            )
    return theirs


class Call:
    """One call as its handler sees it: the request, who asks, and a way to stream answers."""

    __slots__ = ("_call_id", "_frames", "peer", "request")

    def __init__(self, request: Message, peer: Hello, frames: Frames, call_id: int) -> None:
        self.request = request
        self.peer = peer
        self._frames = frames
        self._call_id = call_id

    async def send(self, message: Message) -> None:
        """Add one message to the answer's stream."""
        await self._frames.send(ITEM, self._call_id, message)


# A handler returns the reply of a unary call, or None after it has streamed everything.
Handler = Callable[[Call], Awaitable[Message | None]]


class Server:
    """Answers calls on any number of connections.

    `hello` is what this member says of itself. `handlers` maps request classes to handlers; each
    call runs in a task of its own, under its connection's scope.
    """

    def __init__(
        self,
        hello: Hello,
        handlers: Mapping[type[Message], Handler],
        *,
        on_leave: Callable[[Hello], Awaitable[None]] | None = None,
    ) -> None:
        self._hello = hello
        self._tags = Tags(handlers)
        self._handlers = dict(handlers)
        self._on_leave = on_leave

    async def serve_connection(self, stream: Connection) -> None:
        """Serve one connection until it ends; a bad frame ends it, with the reason sent first."""
        frames = Frames(stream)
        peer: Hello | None = None
        try:
            async with stream:
                try:
                    peer = await _shake_hands(frames, self._hello, answer_first=False)
                    await self._serve_calls(frames, peer)
                except errors.KvassError as error:
                    with anyio.move_on_after(1.0, shield=True):
                        await frames.send(ERROR, 0, pack_error(error))
        except LOST:
            pass  # the peer left, the ordinary end; or it connected and said nothing
        finally:
            if peer is not None and self._on_leave is not None:
                with anyio.move_on_after(5.0, shield=True):
                    await self._on_leave(peer)

    async def _serve_calls(self, frames: Frames, peer: Hello) -> None:
        """Run the calls of a connection until it ends; raises Invalid for a frame that is wrong."""
        ended: Exception
        async with anyio.create_task_group() as tasks:
            try:
                await self._start_calls(frames, peer, tasks)
            except (*LOST, errors.KvassError) as error:
                ended = error  # raised after the group, so that it stays what it is
            tasks.cancel_scope.cancel()
        raise ended

    async def _start_calls(
        self, frames: Frames, peer: Hello, tasks: anyio.abc.TaskGroup
    ) -> NoReturn:
        scopes: dict[int, anyio.CancelScope] = {}
        while True:
            kind, call_id, body = await frames.receive()
            if kind == CANCEL:
                if call_id in scopes:
                    scopes[call_id].cancel()
                continue
            if kind != CALL or call_id in scopes:
                raise errors.Invalid(f"frame kind {kind}, call {call_id}: not expected")
            if len(scopes) >= CALLS_MAX:
                busy = errors.Overloaded(f"{CALLS_MAX} calls are open on this connection")
                await frames.send(ERROR, call_id, pack_error(busy))
                continue
            scopes[call_id] = anyio.CancelScope()
            tasks.start_soon(self._run_call, frames, peer, call_id, body, scopes)

    async def _run_call(
        self,
        frames: Frames,
        peer: Hello,
        call_id: int,
        body: object,
        scopes: dict[int, anyio.CancelScope],
    ) -> None:
        try:
            with scopes[call_id]:
                try:
                    request = self._tags.decode(body)
                    call = Call(request, peer, frames, call_id)
                    reply = await self._handlers[type(request)](call)
                    if reply is None:
                        await frames.send(END, call_id, None)
                    else:
                        await frames.send(REPLY, call_id, reply)
                except errors.KvassError as error:
                    await frames.send(ERROR, call_id, pack_error(error))
        except LOST:
            pass  # nobody is left to answer; the connection's own task ends it
        finally:
            del scopes[call_id]


class Client:
    """One connection to a peer. Open it with `connect`. Mutable fields: `_waiting`, `_next_id`,
    `closed_because`.

    Safe to use from any number of tasks of one event loop.
    """

    def __init__(self, frames: Frames, peer: Hello, replies: Tags) -> None:
        self._frames = frames
        self._replies = replies
        self._waiting: dict[int, MemoryObjectSendStream[tuple[int, object]]] = {}
        self._next_id = 1
        self.peer = peer
        self.closed_because: str | None = None

    async def call(self, request: Request[R], *, deadline_s: float) -> R:
        """Send a request and return its reply; raises what the peer raised, DeadlineExceeded after
        `deadline_s` seconds, or Unavailable when the connection is lost."""
        async with self._open(request, deadline_s=deadline_s) as answers:
            kind, body = await self._next(answers, request)
            if kind != REPLY:
                raise errors.Unavailable(f"{self._who}: frame kind {kind} where a reply was due")
            return self._replies.decode(body)  # type: ignore[return-value]

    @asynccontextmanager
    async def stream(
        self, request: Request[R], *, deadline_s: float
    ) -> AsyncIterator[AsyncIterator[R]]:
        """Send a request and iterate over what is streamed back; leaving the context early cancels
        the call at the peer."""
        async with self._open(request, deadline_s=deadline_s) as answers:
            async with aclosing(self._items(answers, request)) as items:
                yield items

    async def _items(
        self, answers: MemoryObjectReceiveStream[tuple[int, object]], request: Request[R]
    ) -> AsyncGenerator[R, None]:
        while True:
            kind, body = await self._next(answers, request)
            if kind == END:
                return
            yield self._replies.decode(body)  # type: ignore[misc]

    @property
    def _who(self) -> str:
        return f"{self.peer.role} {self.peer.member_id}"

    async def _next(
        self, answers: MemoryObjectReceiveStream[tuple[int, object]], request: Message
    ) -> tuple[int, object]:
        try:
            kind, body = await answers.receive()
        except anyio.EndOfStream:
            reason = self.closed_because or "it answered faster than it was read"
            raise errors.Unavailable(
                f"{self._who} did not answer {type(request).__name__}: {reason}"
            ) from None
        if kind == ERROR:
            raise unpack_error(body)
        return kind, body

    @asynccontextmanager
    async def _open(
        self, request: Message, *, deadline_s: float
    ) -> AsyncIterator[MemoryObjectReceiveStream[tuple[int, object]]]:
        if self.closed_because is not None:
            raise errors.Unavailable(f"{self._who}: {self.closed_because}")
        call_id, self._next_id = self._next_id, self._next_id + 1
        send, receive = anyio.create_memory_object_stream[tuple[int, object]](ITEMS_BUFFERED)
        self._waiting[call_id] = send
        try:
            with anyio.move_on_after(deadline_s) as scope, receive:
                try:
                    await self._frames.send(CALL, call_id, request)
                except LOST as error:
                    raise errors.Unavailable(f"{self._who}: {error!r}") from None
                yield receive
            if scope.cancelled_caught:
                raise errors.DeadlineExceeded(
                    f"{self._who} did not answer {type(request).__name__} in {deadline_s:.3g} s"
                )
        finally:
            unfinished = self._waiting.pop(call_id, None)
            if unfinished is not None:
                unfinished.close()
                if self.closed_because is None:
                    with anyio.move_on_after(1.0, shield=True):
                        await self._cancel(call_id)

    async def _cancel(self, call_id: int) -> None:
        try:
            await self._frames.send(CANCEL, call_id, None)
        except LOST:
            pass  # gone already, and its handlers with it

    async def run(self) -> None:
        """Receive frames until the connection ends; run it in the caller's task group."""
        reason = "the connection was closed"
        try:
            while True:
                kind, call_id, body = await self._frames.receive()
                if call_id == 0 and kind == ERROR:
                    raise unpack_error(body)
                self._deliver(kind, call_id, body)
        except LOST:
            reason = "the connection was lost"
        except errors.KvassError as error:
            reason = str(error)
        finally:
            self.closed_because = reason
            for waiting in self._waiting.values():
                waiting.close()
            self._waiting.clear()
            with anyio.move_on_after(1.0, shield=True):
                await self._frames.stream.aclose()

    async def close(self) -> None:
        """Close the connection; calls that wait on it fail with Unavailable."""
        await self._frames.stream.aclose()

    def _deliver(self, kind: int, call_id: int, body: object) -> None:
        waiting = self._waiting.get(call_id)
        if waiting is None:
            return  # cancelled here while the answer was on its way
        try:
            waiting.send_nowait((kind, body))
        except anyio.WouldBlock:
            waiting.close()  # its reader is told when it has read what is buffered, and cancels
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # its reader has left, or was too slow before
        else:
            if kind in (REPLY, END, ERROR):
                waiting.close()
                del self._waiting[call_id]


async def open_client(stream: Connection, hello: Hello, replies: Tags) -> Client:
    """Shake hands over `stream` and return a client whose `run` the caller must start.

    Raises Incompatible, Invalid, or Unavailable when the peer does not answer.
    """
    frames = Frames(stream)
    try:
        peer = await _shake_hands(frames, hello, answer_first=True)
    except BaseException as error:
        await anyio.aclose_forcefully(stream)
        if isinstance(error, TimeoutError):
            raise errors.Unavailable(f"the peer said nothing for {HELLO_TIMEOUT_S:g} s") from None
        if isinstance(error, LOST):
            raise errors.Unavailable(f"the peer closed the connection: {error!r}") from None
        raise
    return Client(frames, peer, replies)


class Dialer:
    """Open connections by address, kept and shared. Mutable fields: `_clients`, `_locks`.

    Connections live in `tasks`, the owner's task group, and end with it.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup, hello: Hello, replies: Tags) -> None:
        self._tasks = tasks
        self._hello = hello
        self._replies = replies
        self._clients: dict[str, Client] = {}
        self._locks: dict[str, anyio.Lock] = {}

    async def client(self, address: str) -> Client:
        """Return the open connection to `host:port`, or open one; raises as `open_client`."""
        async with self._locks.setdefault(address, anyio.Lock()):
            client = self._clients.get(address)
            if client is None or client.closed_because is not None:
                client = await open_client(await _dial(address), self._hello, self._replies)
                self._clients[address] = client
                self._tasks.start_soon(client.run)
            return client

    async def hang_up(self, address: str) -> None:
        """Close the connection to `address`, if there is one."""
        client = self._clients.pop(address, None)
        self._locks.pop(address, None)
        if client is not None:
            await client.close()


async def _dial(address: str) -> Connection:
    host, _, port = address.rpartition(":")
    try:
        with anyio.fail_after(HELLO_TIMEOUT_S):
            return await anyio.connect_tcp(host, int(port))
    except (OSError, TimeoutError, ValueError) as error:
        raise errors.Unavailable(f"cannot connect to {address}: {error}") from None


async def listen(host: str, port: int = 0) -> tuple[Any, str]:
    """Bind a TCP listener; return it with its `host:port` (port 0 picks a free one)."""
    listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
    bound = listener.extra(anyio.abc.SocketAttribute.local_address)
    return listener, f"{bound[0]}:{bound[1]}"
