"""The asking side: one connection, any number of calls on it at once."""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import anyio

from kvass.common import errors
from kvass.common.rpc import hello as handshake
from kvass.common.rpc.credentials import Credentials
from kvass.common.rpc.frames import (
    CALL,
    CANCEL,
    END,
    ERROR,
    ITEM,
    LOST,
    REPLY,
    TLS_REMEDY,
    Frames,
    pack_error,
    unpack_error,
)
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.sockets import Connection
from kvass.common.rpc.tls import reason_of
from kvass.common.wire import Message, Request, Tags

ITEMS_BUFFERED = 256  # per stream: a slow reader holds its sender, not the connection's memory

R = TypeVar("R", bound=Message)


class _Answers:
    """Frames of one call that have arrived and were not read yet. Mutable fields: all.

    `is_over`: no more will come, since the call has ended, the connection has, or too many wait.
    """

    __slots__ = ("_frames", "_news", "is_over")

    def __init__(self) -> None:
        self._frames: deque[tuple[int, object]] = deque()
        self._news = anyio.Event()
        self.is_over = False

    def put(self, kind: int, body: object) -> None:
        """Add a frame. One more than fits ends the call: its reader is told after what is there."""
        if self.is_over:
            return
        if len(self._frames) >= ITEMS_BUFFERED:
            self.end()
            return
        self._frames.append((kind, body))
        self._news.set()

    def end(self) -> None:
        """Let the reader read what is there, and no more."""
        self.is_over = True
        self._news.set()

    async def next(self) -> tuple[int, object] | None:
        """Return the next frame; None when no more will come."""
        while not self._frames:
            if self.is_over:
                return None
            if self._news.is_set():
                self._news = anyio.Event()
            await self._news.wait()
        return self._frames.popleft()


@dataclass(frozen=True, slots=True)
class Asked(Generic[R]):
    """A call that waits for its reply: `reply` awaits it, `follow` sends what follows the
    request (`Request.followed_by`). Both once."""

    reply: Callable[[], Awaitable[R]]
    follow: Callable[[Message], Awaitable[None]]


class Client:
    """One connection to a peer. Open it with `open_client`. Mutable fields: `_waiting`, `_next_id`,
    `_cancels` (ids of calls that the peer must hear are over; at most as many as were open),
    `_has_cancels`, `closed_because`, `_is_left` (it was closed by a peer that said that it leaves).

    Safe to use from any number of tasks of one event loop.
    """

    def __init__(self, frames: Frames, peer: Hello, replies: Tags) -> None:
        self._frames = frames
        self._replies = replies
        self._waiting: dict[int, _Answers] = {}
        self._next_id = 1
        self._cancels: deque[int] = deque()
        self._has_cancels = anyio.Event()
        self.peer = peer
        self.closed_because: str | None = None
        self._is_left = False

    async def call(self, request: Request[R], *, deadline_s: float) -> R:
        """Send a request and return its reply; raises what the peer raised, DeadlineExceeded after
        `deadline_s` seconds, or Unavailable when the connection is lost."""
        call_id, answers = self._begin()
        try:
            with anyio.move_on_after(deadline_s):
                await self._send(CALL, call_id, request)
                return await self._reply(answers, request)
            raise self._late(request, deadline_s)
        finally:
            self._end(call_id)

    @asynccontextmanager
    async def asked(self, request: Request[R], *, deadline_s: float) -> AsyncIterator[Asked[R]]:
        """Send a request, and yield what awaits its reply, once, as `call` does: until then the
        caller may do something else. Leaving the context early cancels the call at the peer."""
        call_id, answers = self._begin()
        try:
            with anyio.move_on_after(deadline_s) as scope:
                await self._send(CALL, call_id, request)
                yield Asked(
                    reply=partial(self._reply, answers, request),
                    follow=partial(self._send, ITEM, call_id),
                )
            if scope.cancelled_caught:
                raise self._late(request, deadline_s)
        finally:
            self._end(call_id)

    async def _reply(self, answers: _Answers, request: Request[R]) -> R:
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
        call_id, answers = self._begin()
        try:
            with anyio.move_on_after(deadline_s) as scope:
                await self._send(CALL, call_id, request)
                async with aclosing(self._items(answers, request)) as items:
                    yield items
            if scope.cancelled_caught:
                raise self._late(request, deadline_s)
        finally:
            self._end(call_id)

    async def _items(self, answers: _Answers, request: Request[R]) -> AsyncGenerator[R, None]:
        while True:
            kind, body = await self._next(answers, request)
            if kind == END:
                return
            yield self._replies.decode(body)  # type: ignore[misc]

    @property
    def _who(self) -> str:
        return self.peer.member_id  # which says its role, as a rule

    def _late(self, request: Message, deadline_s: float) -> errors.DeadlineExceeded:
        what = type(request).__name__
        return errors.DeadlineExceeded(f"{self._who} did not answer {what} in {deadline_s:.3g} s")

    async def _next(self, answers: _Answers, request: Message) -> tuple[int, object]:
        frame = await answers.next()
        if frame is None:
            reason = self.closed_because or "it answered faster than it was read"
            raise self._gone(f"{self._who} did not answer {type(request).__name__}: {reason}")
        kind, body = frame
        if kind == ERROR:
            raise unpack_error(body)
        return kind, body

    def _gone(self, what: str) -> errors.Unavailable:
        """Return what a call ends with, for want of a connection."""
        if self._is_left:
            return errors.Leaving(f"{self._who} is leaving")
        return errors.Unavailable(what)

    def _begin(self) -> tuple[int, _Answers]:
        if self.closed_because is not None:
            raise self._gone(f"{self._who}: {self.closed_because}")
        call_id, self._next_id = self._next_id, self._next_id + 1
        answers = self._waiting[call_id] = _Answers()
        return call_id, answers

    async def _send(self, kind: int, call_id: int, message: Message) -> None:
        try:
            await self._frames.send(kind, call_id, message)
        except LOST as error:
            raise errors.Unavailable(f"{self._who}: {error!r}") from None

    def _end(self, call_id: int) -> None:
        """Forget a call; one that is not over is cancelled at the peer.

        `run` says so, however long the peer takes nothing: whoever leaves a call must not wait for
        it, and a peer that never heard would go on with the call until its deadline.
        """
        if self._waiting.pop(call_id, None) is not None and self.closed_because is None:
            self._cancels.append(call_id)
            self._has_cancels.set()

    async def _send_cancels(self) -> None:
        while True:
            await self._has_cancels.wait()
            self._has_cancels = anyio.Event()
            while self._cancels:
                try:
                    await self._frames.send(CANCEL, self._cancels.popleft(), None)
                except LOST:
                    return  # gone already, and its handlers with it

    async def run(self) -> None:
        """Receive frames until the connection ends; run it in the caller's task group."""
        reason = "the connection was closed"
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_cancels)
                reason = await self._receive()
                tasks.cancel_scope.cancel()
        finally:
            self.closed_because = reason
            for waiting in self._waiting.values():
                waiting.end()
            self._waiting.clear()
            with anyio.move_on_after(1.0, shield=True):
                await self._frames.stream.aclose()

    async def _receive(self) -> str:
        """Take in frames until the connection ends; return why it did."""
        try:
            while True:
                kind, call_id, body = await self._frames.receive()
                if call_id == 0 and kind == ERROR:
                    raise unpack_error(body)
                self._deliver(kind, call_id, body)
        except LOST:
            return "the connection was lost"
        except errors.KvassError as error:
            self._is_left = isinstance(error, errors.Leaving)
            return str(error)

    async def close(self) -> None:
        """Close the connection; calls that wait on it fail with Unavailable."""
        await self._frames.stream.aclose()

    def _deliver(self, kind: int, call_id: int, body: object) -> None:
        answers = self._waiting.get(call_id)
        if answers is None:
            return  # cancelled here while the answer was on its way
        answers.put(kind, body)
        if kind in (REPLY, END, ERROR) and not answers.is_over:
            answers.end()
            del self._waiting[call_id]


async def open_client(
    stream: Connection, hello: Hello, replies: Tags, credentials: Credentials
) -> Client:
    """Shake hands over `stream` and return a client whose `run` the caller must start.

    Raises Unauthorized when either side cannot prove that it is of the cluster, Incompatible,
    Invalid, or Unavailable when the peer does not answer.
    """
    frames = Frames(stream)
    try:
        with anyio.fail_after(handshake.HELLO_TIMEOUT_S):
            if credentials.tls is not None:
                frames = Frames(await credentials.tls.dialled(stream))
            peer = await handshake.ask(frames, hello, credentials.secret)
    except BaseException as error:
        if isinstance(error, errors.KvassError):
            await _say_why(frames, error)
        await anyio.aclose_forcefully(stream)
        raise _mapped(error, over_tls=credentials.tls is not None) from None
    return Client(frames, peer, replies)


async def _say_why(frames: Frames, error: errors.KvassError) -> None:
    """Tell the peer why it is refused, so that both sides' logs say the same."""
    with anyio.move_on_after(1.0, shield=True):
        try:
            await frames.send(ERROR, 0, pack_error(error))
        except LOST:
            pass  # it has closed already


def _mapped(error: BaseException, *, over_tls: bool) -> BaseException:
    """Return what ended a handshake as an error of ours; what is none of ours stays itself."""
    if isinstance(error, ssl.SSLError):
        why = reason_of(error)
        if TLS_REMEDY not in why:
            why += (
                "; its cluster.tls_cert must be signed by this process's cluster.tls_ca, and the "
            )
            why += "other way round"
        return errors.Unauthorized(f"TLS with the peer failed: {why}")
    if isinstance(error, TimeoutError):
        return errors.Unavailable(f"the peer said nothing for {handshake.HELLO_TIMEOUT_S:g} s")
    if isinstance(error, LOST):
        why = (
            "it may refuse this process's certificate (cluster.tls_cert)"
            if over_tls
            else f"does one side speak TLS and the other not? ({TLS_REMEDY})"
        )
        return errors.Unavailable(
            f"the other side closed the connection during the handshake: {why}; its log says more"
        )
    return error
