"""The asking side: one connection, any number of calls on it at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from kvass.common import errors
from kvass.common.rpc.frames import (
    CALL,
    CANCEL,
    END,
    ERROR,
    LOST,
    REPLY,
    Connection,
    Frames,
    unpack_error,
)
from kvass.common.rpc.hello import HELLO_TIMEOUT_S, Hello, shake_hands
from kvass.common.wire import Message, Request, Tags

ITEMS_BUFFERED = 256  # per stream: a slow reader holds its sender, not the connection's memory

R = TypeVar("R", bound=Message)


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
        peer = await shake_hands(frames, hello, answer_first=True)
    except BaseException as error:
        await anyio.aclose_forcefully(stream)
        if isinstance(error, TimeoutError):
            raise errors.Unavailable(f"the peer said nothing for {HELLO_TIMEOUT_S:g} s") from None
        if isinstance(error, LOST):
            raise errors.Unavailable(f"the peer closed the connection: {error!r}") from None
        raise
    return Client(frames, peer, replies)
