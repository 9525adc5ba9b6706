"""An operator's command at the members' own ports: who it says it is, and its connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.abc

from kvass.common.config import Config
from kvass.common.errors import KvassError
from kvass.common.rpc.credentials import Credentials, credentials_of
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.hello import Hello
from kvass.common.transport.identity import own_identity
from kvass.common.wire import Tags
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.placement import StoreNode


@dataclass(frozen=True, slots=True)
class Operator:
    """One command, while its connections last."""

    hello: Hello
    credentials: Credentials
    tasks: anyio.abc.TaskGroup

    def dialer(self, replies: Tags) -> Dialer:
        """Return what members are dialled with."""
        return Dialer(self.tasks, self.hello, replies, self.credentials)

    def store(self, members: Iterable[Mapping[str, Any]]) -> StoreClient:
        """Return a client of these store nodes, as a gateway lists them."""
        client = StoreClient(self.hello, self.tasks, self.credentials)
        client.set_nodes([StoreNode(each["id"], each["address"], 1) for each in members])
        return client


@asynccontextmanager
async def operator(config: Config, command: str) -> AsyncIterator[Operator]:
    """Open connections for one command; they end with the block."""
    who = own_identity()
    hello = Hello("operator", f"kvass-{command}", who.host_id, who.start_id, who.pid, {})
    credentials = credentials_of(config.cluster)
    wrong: KvassError | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield Operator(hello, credentials, tasks)
        except KvassError as error:
            wrong = error  # raised in here, it would reach the program in a group, as a trace
        finally:
            tasks.cancel_scope.cancel()
    if wrong is not None:
        raise wrong
