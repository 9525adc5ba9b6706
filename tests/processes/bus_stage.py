"""Members over a real broker, in this process and in others, for tests of the bus."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
from anyio.streams.text import TextReceiveStream

from kvass.common import bus, config
from kvass.common.member import CommandHandler, Member
from kvass.common.membership import Peer, Role
from kvass.common.rpc.credentials import credentials_of
from kvass.common.seal import Seal
from ports import free_port

PROCESS = Path(__file__).parent / "member_process.py"
SEAL = Seal(credentials_of(config.ClusterConfig()).secret)
FIELDS: dict[str, str | int] = {"kv_dtype": "fp8", "block_tokens": 16}
DEAD = Peer(
    role="decode",
    member_id="decode-9",
    start_id="dead",
    host_id="h",
    pid=1,
    state="ready",
    started_s=1.0,
    cluster=FIELDS | {"kv_dtype": "bf16"},  # nobody is refused for what it said
)
DEAD_TOPIC = bus.Topics("local").presence(DEAD.role, DEAD.member_id, DEAD.start_id)


def free_broker() -> str:
    """Return an address where a broker may listen."""
    return f"127.0.0.1:{free_port()}"


def member(
    broker: str,
    role: Role,
    member_id: str,
    fields: dict[str, str | int] | None = None,
    obey: CommandHandler | None = None,
    cluster: str = "local",
) -> Member:
    return Member(
        config.load(None, [f"cluster.broker={broker!r}", f"cluster.name={cluster!r}"]),
        role=role,
        member_id=member_id,
        cluster_fields=FIELDS if fields is None else fields,
        load=lambda: {"running": 0},
        on_command=obey,
    )


class Words:
    """What a member process says, one JSON object at a time. Mutable field: `_rest`."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdout is not None
        self.process = process
        self._text = TextReceiveStream(process.stdout)
        self._rest = ""

    async def next(self) -> dict[str, object]:
        while "\n" not in self._rest:
            self._rest += await self._text.receive()
        line, _, self._rest = self._rest.partition("\n")
        said: dict[str, object] = json.loads(line)
        return said


@asynccontextmanager
async def started(
    broker: str,
    role: Role,
    member_id: str,
    fields: dict[str, str | int] | None = None,
    **environment: str,
) -> AsyncIterator[Words]:
    text = json.dumps(FIELDS if fields is None else fields)
    command = [sys.executable, "-W", "error", str(PROCESS), broker, role, member_id, text]
    env = os.environ | environment
    async with await anyio.open_process(command, stderr=None, env=env) as process:
        try:
            yield Words(process)
        finally:
            if process.returncode is None:
                process.kill()


async def live(watcher: Member, role: Role, starts: list[object], *, within_s: float) -> None:
    with anyio.fail_after(within_s):
        while [each.start_id for each in watcher.live(role)] != starts:
            await watcher.changed()


async def until(true: Callable[[], bool], *, within_s: float) -> None:
    with anyio.fail_after(within_s):
        while not true():  # noqa: ASYNC110 (nothing tells of it)
            await anyio.sleep(0.01)


@asynccontextmanager
async def silent_way(broker: str) -> AsyncIterator[tuple[str, anyio.Event]]:
    """A way to a broker that carries no more answers from when the event is set."""
    host, port = broker.split(":")
    silence = anyio.Event()

    async def carry(one: anyio.abc.SocketStream) -> None:
        async with one, await anyio.connect_tcp(host, int(port)) as other:

            async def answers() -> None:
                async for data in other:
                    if not silence.is_set():
                        await one.send(data)

            async with anyio.create_task_group() as ways:
                ways.start_soon(answers)
                async for data in one:
                    await other.send(data)
                ways.cancel_scope.cancel()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    address = listener.extra(anyio.abc.SocketAttribute.local_address)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, carry)
        yield f"{address[0]}:{address[1]}", silence
        tasks.cancel_scope.cancel()
