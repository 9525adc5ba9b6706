"""Connections by address, kept and shared."""

from __future__ import annotations

import os

import anyio
import anyio.abc

from kvass.common import errors
from kvass.common.rpc import sockets
from kvass.common.rpc.client import Client, open_client
from kvass.common.rpc.credentials import Credentials
from kvass.common.rpc.hello import HELLO_TIMEOUT_S, Hello
from kvass.common.rpc.sockets import Connection
from kvass.common.wire import Tags


class Dialer:
    """Open connections by address, kept and shared. Mutable fields: `_clients`, `_locks`.

    Connections live in `tasks`, the owner's task group, and end with it.
    """

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        hello: Hello,
        replies: Tags,
        credentials: Credentials,
    ) -> None:
        self._tasks = tasks
        self._hello = hello
        self._credentials = credentials
        self._replies = replies
        self._clients: dict[str, Client] = {}
        self._locks: dict[str, anyio.Lock] = {}

    async def client(self, address: str) -> Client:
        """Return the open connection to `host:port`, or open one; raises as `open_client`."""
        async with self._locks.setdefault(address, anyio.Lock()):
            client = self._clients.get(address)
            if client is None or client.closed_because is not None:
                client = await open_client(
                    await _dial(address), self._hello, self._replies, self._credentials
                )
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
            return await sockets.dial(host, int(port))
    except (OSError, TimeoutError, ValueError) as error:
        number = error.errno if isinstance(error, OSError) else None
        # asyncio's own text names the address again; numbers below 0 are of names that do not
        # resolve, and say so themselves.
        why = os.strerror(number) if number and number > 0 else error
        raise errors.Unavailable(f"cannot connect to {address}: {why}") from None
