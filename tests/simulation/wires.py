"""Connections in memory: byte streams that can be slow, doubled, cut and hung, and who dials them.

What happens to each frame is the caller's function, so this knows neither chance nor time but the
event loop's. As on TCP, bytes arrive in order and whole until the connection is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.abc
import anyio.lowlevel

from kvass.common.errors import Unavailable
from kvass.common.rpc.client import Client, open_client
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Server
from kvass.common.wire import Tags
from trust import CREDENTIALS


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to one frame. `doubled`: it arrives twice; `cut`: it is the connection's last
    one, and does not arrive."""

    delay_s: float = 0.0
    doubled: bool = False
    cut: bool = False


Weather = Callable[[str, str], Fate]  # by the member ids of both sides


def calm(source: str, target: str) -> Fate:
    """Let every frame arrive at once."""
    return Fate()


class Wire(anyio.abc.ByteStream):
    """One end of a connection. Mutable fields: all but `name`, the member at this end."""

    def __init__(self, name: str, weather: Weather) -> None:
        self.name = name
        self.other: Wire
        self.hung = False
        self._weather = weather
        self._buffer = bytearray()
        self._news = anyio.Event()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed or self.other._closed

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def send(self, item: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        fate = self._weather(self.name, self.other.name)
        if fate.delay_s:
            await anyio.sleep(fate.delay_s)
        while self.hung and not self._closed:
            await self._news.wait()
        if self._closed:
            raise anyio.ClosedResourceError
        if self.other._closed:
            raise anyio.BrokenResourceError
        if fate.cut:
            self.cut()
            raise anyio.BrokenResourceError
        self.other._buffer += item * (1 + fate.doubled)
        self.other._wake()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.lowlevel.checkpoint()
        while True:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._buffer and not self.hung:
                taken = bytes(self._buffer[:max_bytes])
                del self._buffer[:max_bytes]
                return taken
            if self.other._closed and not self.hung:
                raise anyio.EndOfStream
            await self._news.wait()

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        self.cut()
        await anyio.lowlevel.checkpoint()

    def cut(self) -> None:
        """Lose the connection, both ways."""
        self._closed = True
        self._wake()
        self.other._wake()

    def hang(self, hung: bool) -> None:
        """Stop or continue the process at this end, as far as the connection goes."""
        self.hung = hung
        self._wake()


def wire_pair(source: str, target: str, weather: Weather = calm) -> tuple[Wire, Wire]:
    one, two = Wire(source, weather), Wire(target, weather)
    one.other, two.other = two, one
    return one, two


class Listening(Protocol):
    """A process that can be dialled. Its connections live in `tasks`."""

    @property
    def member_id(self) -> str: ...

    @property
    def server(self) -> Server: ...

    @property
    def alive(self) -> bool: ...

    @property
    def wires(self) -> list[Wire]: ...

    @property
    def tasks(self) -> anyio.abc.TaskGroup: ...


class SimDialer:
    """What rpc.Dialer is, over wires. Mutable fields: `_clients`, `_locks`, `is_over` (its process
    is dead: it dials nobody any more)."""

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        listening: Mapping[str, Listening],
        hello: Hello,
        wires: list[Wire],
        replies: Tags,
        weather: Weather = calm,
    ) -> None:
        self.is_over = False
        self._tasks = tasks
        self._listening = listening
        self._hello = hello
        self._wires = wires
        self._replies = replies
        self._weather = weather
        self._clients: dict[str, Client] = {}
        self._locks: dict[str, anyio.Lock] = {}

    async def client(self, address: str) -> Client:
        async with self._locks.setdefault(address, anyio.Lock()):
            client = self._clients.get(address)
            if client is None or client.closed_because is not None:
                wire = self._dial(address)
                client = await open_client(wire, self._hello, self._replies, CREDENTIALS)
                self._clients[address] = client
                self._tasks.start_soon(client.run)
            return client

    def _dial(self, address: str) -> Wire:
        peer = self._listening.get(address)
        if peer is None or not peer.alive or self.is_over:
            raise Unavailable(f"cannot connect to {address}")
        ours, theirs = wire_pair(self._hello.member_id, peer.member_id, self._weather)
        for wires, wire in ((self._wires, ours), (peer.wires, theirs)):
            if any(other.hung for other in wires):
                wire.hang(True)
            wires[:] = [other for other in wires if not other.is_closed] + [wire]
        peer.tasks.start_soon(peer.server.serve_connection, theirs)
        return ours

    async def hang_up(self, address: str) -> None:
        client = self._clients.pop(address, None)
        self._locks.pop(address, None)
        if client is not None:
            await client.close()
