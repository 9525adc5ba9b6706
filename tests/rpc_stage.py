"""A server with handlers that do as they are told, and clients of it, for tests of RPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.abc
import anyio.lowlevel

from kvass.common import errors, wire
from kvass.common.rpc.client import Client
from kvass.common.rpc.credentials import Credentials
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Answer, Call, Handler, Server, listen
from kvass.common.wire import Message
from trust import CREDENTIALS

REPLIES = wire.Tags(wire.WORKER_REPLIES)
LATER = " later"
CLUSTER: dict[str, str | int] = {"block_tokens": 16, "kv_dtype": "fp8"}


def hello(role: str = "decode", cluster: Mapping[str, str | int] = CLUSTER) -> Hello:
    return Hello(role, f"{role}-0", "host", f"start-{role}", 1, dict(cluster))


@dataclass
class Worker:
    """A server whose handlers do what the request's id says. Mutable: all fields."""

    cancelled: list[str] = field(default_factory=list)
    sent: int = 0
    left: list[str] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)  # of calls whose answer was on its way
    address: str = ""
    credentials: Credentials = CREDENTIALS
    handlers: Mapping[type[Message], Handler] = field(default_factory=dict)  # besides its own

    def over(self, call: Call) -> Message | Answer:
        """Answer at once, or in a task if the request's id ends so."""
        assert isinstance(call.request, wire.PrefillOver)
        wanted, later, _ = call.request.request_id.partition(LATER)
        call.later(lambda: self._note(wanted))
        return self._later(wanted) if later else self._answer(wanted)

    def _note(self, wanted: str) -> None:
        if wanted == "bug after":
            raise ZeroDivisionError("nobody thought of what follows")
        self.noted.append(wanted)

    async def _later(self, wanted: str) -> Message:
        await anyio.lowlevel.checkpoint()
        if wanted == "hang":
            try:
                await anyio.sleep_forever()
            finally:
                self.cancelled.append(wanted)
        return self._answer(wanted)

    def _answer(self, wanted: str) -> Message:
        raised: dict[str, errors.KvassError] = {
            "invalid": errors.Invalid("no such thing", parameter="x", http_status=422),
            "overloaded": errors.Overloaded("full", retry_after_s=2.5),
            "unavailable": errors.Unavailable("left"),
            "incompatible": errors.Incompatible("a", 1, 2, who="b"),
        }
        if wanted in raised:
            raise raised[wanted]
        if wanted == "bug":
            raise ZeroDivisionError("nobody thought of this")
        if wanted == "no disk":
            raise OSError("nobody thought of this")
        if wanted == "broken":
            raise AssertionError("free + used != total")
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
            **self.handlers,
        }
        return Server(ours, handlers, self.credentials, on_leave=self.leave)


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
async def serving(
    ours: Hello | None = None,
    credentials: Credentials = CREDENTIALS,
    handlers: Mapping[type[Message], Handler] | None = None,
) -> AsyncIterator[Worker]:
    worker = Worker(credentials=credentials, handlers=handlers or {})
    listener, worker.address = await listen("127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, worker.server(ours or hello()).serve_connection)
        yield worker
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def connected(
    worker: Worker, ours: Hello | None = None, credentials: Credentials = CREDENTIALS
) -> AsyncIterator[tuple[Client, anyio.abc.TaskGroup]]:
    async with anyio.create_task_group() as tasks:
        dialer = Dialer(tasks, ours or hello("gateway"), REPLIES, credentials)
        yield await dialer.client(worker.address), tasks
        await dialer.hang_up(worker.address)


async def over(client: Client, request_id: str, *, deadline_s: float = 5.0) -> wire.Done:
    return await client.call(wire.PrefillOver(request_id=request_id), deadline_s=deadline_s)


async def until(true: object, *, within_s: float = 2.0) -> None:
    assert callable(true)
    with anyio.fail_after(within_s):
        while not true():  # noqa: ASYNC110 (nothing tells of it)
            await anyio.sleep(0.005)


async def dialled(worker: Worker) -> anyio.abc.SocketStream:
    host, _, port = worker.address.rpartition(":")
    return await anyio.connect_tcp(host, int(port))
