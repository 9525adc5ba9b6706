"""The answering side: calls of any number of connections. What is answered without waiting is
answered as it comes; every other call has a task of its own."""

from __future__ import annotations

import errno
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel

from kvass.common import errors
from kvass.common.addresses import address_named
from kvass.common.pacing import Pacing
from kvass.common.rpc import hello as handshake
from kvass.common.rpc.credentials import Credentials
from kvass.common.rpc.door import TELL_EVERY_S, Door
from kvass.common.rpc.frames import (
    CALL,
    CANCEL,
    END,
    ERROR,
    ITEM,
    LOST,
    REPLY,
    Frames,
    pack_error,
)
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.sockets import Connection, open_listener
from kvass.common.rpc.tls import reason_of
from kvass.common.wire import Message, Request, Tags

_log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

ACCEPT_PAUSE_S = 0.5  # when descriptors have run out
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
CALLS_MAX = 1024  # per connection: a gateway's whole load on one worker, several times over
AFTER_S = 0.001  # how long what follows an answer waits
AFTER_MAX = 256  # and how much of it, of one connection


class _Afterwards:
    """What is left to do when callers have their answers. It waits for a moment: on the same host
    whoever was just answered may be waiting for this very core.

    Mutable fields: `_todo`, and `_is_more`.
    """

    def __init__(self) -> None:
        self._todo: list[tuple[str, Callable[[], None]]] = []
        self._is_more = anyio.Event()

    def add(self, what: str, work: Callable[[], None]) -> None:
        """Do something soon, for the call `what`; where too much waits, now."""
        self._todo.append((what, work))
        self._is_more.set()
        if len(self._todo) >= AFTER_MAX:
            self.do()

    async def run(self) -> None:
        """Do what comes, until cancelled; raises a broken invariant."""
        while True:
            await self._is_more.wait()
            await anyio.sleep(AFTER_S)
            self.do()

    def do(self) -> None:
        """Do all there is. The callers have their answers: a bug here is nobody's failure."""
        todo, self._todo, self._is_more = self._todo, [], anyio.Event()
        for what, work in todo:
            try:
                work()
            except Exception as error:
                if errors.breaks_an_invariant(error):
                    raise
                _log.exception("what follows %s met a bug", what)


class Call:
    """One call as its handler sees it: the request, who asks, and a way to stream answers. Mutable
    fields: `_later`, what is left to do when it is answered; `_followed`, told when `_next` has
    come: what follows the request."""

    __slots__ = (
        *("_afterwards", "_call_id", "_followed", "_frames", "_later", "_next"),
        *("peer", "request"),
    )

    def __init__(
        self, request: Message, peer: Hello, frames: Frames, call_id: int, afterwards: _Afterwards
    ) -> None:
        self.request = request
        self.peer = peer
        self._frames = frames
        self._call_id = call_id
        self._afterwards = afterwards
        self._later: tuple[Callable[[], None], ...] = ()
        self._followed: anyio.Event | None = None
        self._next: Message | None = None

    async def followed(self, cls: type[M]) -> M:
        """Return what follows the request (`Request.followed_by`), when it has come."""
        if self._followed is None:
            self._followed = anyio.Event()
        if self._next is None:
            await self._followed.wait()
        assert isinstance(self._next, cls)
        return self._next

    def follow(self, message: Message) -> None:
        """What follows the request has come; raises Invalid the second time."""
        if self._next is not None:
            raise errors.Invalid(f"{type(self.request).__name__} is followed twice")
        self._next = message
        if self._followed is not None:
            self._followed.set()

    async def send(self, message: Message) -> None:
        """Add one message to the answer's stream."""
        await anyio.lowlevel.checkpoint()  # whoever streams on and on may be cancelled here
        await self._frames.send(ITEM, self._call_id, message)

    def later(self, work: Callable[[], None]) -> None:
        """Do something a moment after the reply, since the caller need not wait for it. It is not
        done where there is no reply: the call failed, or its caller is gone."""
        self._later += (work,)

    async def reply(self, message: Message | None) -> None:
        """Answer: with a message, or with the end of what was streamed."""
        try:
            await self._frames.send(END if message is None else REPLY, self._call_id, message)
        except errors.Invalid as too_large:
            await self.fail(too_large)
            return
        for work in self._later:
            self._afterwards.add(type(self.request).__name__, work)

    async def fail(self, error: errors.KvassError) -> None:
        """Say why there is no answer."""
        await self._frames.send(ERROR, self._call_id, pack_error(error))


# A handler returns the reply of a unary call, or None after it has streamed everything. One that
# never waits is a plain function, and one that seldom does returns the coroutine when it must: a
# task for each call would take longer than most of them.
Answer = Coroutine[Any, Any, Message | None]
Handler = Callable[[Call], Message | Answer]


@dataclass(slots=True)
class _Open:
    """A call in a task of its own."""

    call: Call
    scope: anyio.CancelScope
    answer: Answer


class Server:
    """Answers calls on any number of connections.

    `hello` is what this member says of itself, `credentials` what it proves it with. `handlers`
    maps request classes to handlers; a call that must wait runs in a task of its own, under its
    connection's scope. Only peers that have proved who they are call anything; `on_leave` hears of
    them alone. `last_words` is what they are told when this process ends their connections, so that
    they can tell a leave from a death.
    """

    def __init__(
        self,
        hello: Hello,
        handlers: Mapping[type[Message], Handler],
        credentials: Credentials,
        *,
        on_leave: Callable[[Hello], Awaitable[None]] | None = None,
        last_words: errors.KvassError | None = None,
    ) -> None:
        self._hello = hello
        self._credentials = credentials
        self._door = Door()
        self._tags = Tags(handlers)
        self._handlers = dict(handlers)
        self._follows: dict[type[Message], Tags] = {
            request: Tags([request.followed_by])
            for request in handlers
            if issubclass(request, Request) and request.followed_by is not None
        }
        self._on_leave = on_leave
        self._last_words = last_words

    async def serve_connection(self, stream: Connection) -> None:
        """Serve one connection until it ends; a bad frame ends it, with the reason sent first."""
        try:
            async with stream:
                met: tuple[Frames, Hello] | None = None
                with self._door.stranger():
                    met = await self._meet(stream)
                if met is not None:
                    await self._serve_peer(*met)
        except LOST:
            pass  # the peer left, the ordinary end; or it connected and said nothing

    async def _meet(self, stream: Connection) -> tuple[Frames, Hello] | None:
        """Let a stranger prove who it is; None when it does not, and is told so."""
        frames = Frames(stream)
        try:
            with anyio.fail_after(handshake.HELLO_TIMEOUT_S):
                if self._credentials.tls is not None:
                    frames = Frames(await self._credentials.tls.accepted(stream))
                return frames, await handshake.answer(frames, self._hello, self._credentials.secret)
        except ssl.SSLError as error:
            reason = f"TLS: {reason_of(error)}"
            self._door.tell(lambda: f"{_address_of(stream)}: {reason}")
        except errors.KvassError as error:
            refusal = error
            self._door.tell(lambda: f"{_address_of(stream)}: {refusal}")
            await _say_why(frames, error)
        return None

    async def _serve_peer(self, frames: Frames, peer: Hello) -> None:
        try:
            with self._door.peer():
                await self._serve_calls(frames, peer)
        except errors.KvassError as error:
            await _say_why(frames, error)
        except anyio.get_cancelled_exc_class():
            if self._last_words is not None:
                with suppress(*LOST):
                    await _say_why(frames, self._last_words)
            raise
        finally:
            if self._on_leave is not None:
                with anyio.move_on_after(5.0, shield=True):
                    await self._on_leave(peer)

    async def _serve_calls(self, frames: Frames, peer: Hello) -> None:
        """Run the calls of a connection until it ends; raises Invalid for a frame that is wrong."""
        ended: Exception
        calls: dict[int, _Open] = {}
        afterwards = _Afterwards()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(afterwards.run)
                try:
                    await self._take_calls(frames, peer, calls, tasks, afterwards)
                except (*LOST, errors.KvassError) as error:
                    ended = error  # raised after the group, so that it stays what it is
                tasks.cancel_scope.cancel()
        finally:
            for call in calls.values():  # their tasks were cancelled before they had begun
                call.answer.close()
            afterwards.do()
        raise ended

    async def _take_calls(
        self,
        frames: Frames,
        peer: Hello,
        calls: dict[int, _Open],
        tasks: anyio.abc.TaskGroup,
        afterwards: _Afterwards,
    ) -> NoReturn:
        while True:
            kind, call_id, body = await frames.receive()
            if kind == CANCEL:
                if call_id in calls:
                    calls[call_id].scope.cancel()
                continue
            if kind == ITEM:
                if call_id in calls:  # else it was answered while this was on its way
                    self._follow(calls[call_id].call, body)
                continue
            if kind != CALL or call_id in calls:
                raise errors.Invalid(f"frame kind {kind}, call {call_id}: not expected")
            if len(calls) >= CALLS_MAX:
                busy = errors.Overloaded(f"{CALLS_MAX} calls are open on this connection")
                await frames.send(ERROR, call_id, pack_error(busy))
                continue
            what = "a call"
            try:
                request = self._tags.decode(body)
                what = type(request).__name__
                call = Call(request, peer, frames, call_id, afterwards)
                answer = self._handlers[type(request)](call)
            except Exception as error:
                await frames.send(ERROR, call_id, pack_error(_failure(error, what, peer)))
                continue
            if isinstance(answer, Message):
                await call.reply(answer)
            else:
                calls[call_id] = _Open(call, anyio.CancelScope(), answer)
                tasks.start_soon(self._finish, call_id, calls)

    def _follow(self, call: Call, body: object) -> None:
        """Hand a call what follows its request; raises Invalid if nothing such does."""
        tags = self._follows.get(type(call.request))
        if tags is None:
            raise errors.Invalid(f"nothing follows {type(call.request).__name__}")
        call.follow(tags.decode(body))

    async def _finish(self, call_id: int, calls: dict[int, _Open]) -> None:
        """Wait for a call's answer, and send it."""
        mine = calls[call_id]
        call = mine.call
        try:
            with mine.scope:
                try:
                    await call.reply(await mine.answer)
                except LOST:
                    raise
                except Exception as error:
                    await call.fail(_failure(error, type(call.request).__name__, call.peer))
        except LOST:
            pass  # nobody is left to answer; the connection's own task ends it
        finally:
            del calls[call_id]


def _failure(error: Exception, what: str, peer: Hello) -> errors.KvassError:
    """Return what a caller is told of its call's failure; raises a broken invariant, which is more
    than that."""
    if isinstance(error, errors.KvassError):
        return error
    if errors.breaks_an_invariant(error):
        raise error
    _log.error("%s of %s %s met a bug", what, peer.role, peer.member_id, exc_info=error)
    return errors.Unavailable(f"{what} met a bug, see the log here: {error!r}")


async def _say_why(frames: Frames, error: errors.KvassError) -> None:
    """Tell the peer why its connection ends, if it still listens; a stranger hears nothing of where
    our secret is kept."""
    if isinstance(error, handshake.AnotherSecret):
        error = errors.Unauthorized("another cluster secret than this member has")
    with anyio.move_on_after(1.0, shield=True):
        await frames.send(ERROR, 0, pack_error(error))


def _address_of(stream: Connection) -> str:
    address = stream.extra(anyio.abc.SocketAttribute.remote_address, ("somewhere",))
    return ":".join(str(part) for part in address[:2])


async def accept(listener: Any, serve: Callable[[Connection], Awaitable[None]]) -> None:
    """Serve a listener's connections, each in a task of its own, until cancelled.

    A process that has no descriptor left goes on with the connections that it has, and looks again.
    """
    pacing = Pacing(TELL_EVERY_S)
    async with anyio.create_task_group() as tasks:
        while True:
            try:
                await listener.serve(serve, tasks)
            except* OSError as group:
                if any(error.errno not in _EXHAUSTED for error in _leaves(group)):
                    raise
                more = pacing.more(anyio.current_time())
                if more is not None:
                    why = next(_leaves(group))
                    _log.warning("no connection can be accepted: %s%s", why, more)
            await anyio.sleep(ACCEPT_PAUSE_S)


def _leaves(group: BaseExceptionGroup[OSError]) -> Iterator[OSError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def listen(host: str, port: int = 0) -> tuple[Any, str]:
    """Bind a TCP listener; return it with its `host:port` (port 0 picks a free one).

    Raises Invalid, with the address named, when this process cannot listen there.
    """
    with address_named(host, port):
        listener = await open_listener(host, port)
    bound = listener.extra(anyio.abc.SocketAttribute.local_address)
    return listener, f"{bound[0]}:{bound[1]}"
