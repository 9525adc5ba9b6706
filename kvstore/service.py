"""A store node as a process: its memory, its listener, its place in the cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import anyio.abc

from kvass.common.bus import Command
from kvass.common.clock import LoopClock
from kvass.common.config import Config, StoreConfig
from kvass.common.errors import Invalid
from kvass.common.executor import ThreadExecutor
from kvass.common.member import Member
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Server, accept, listen
from kvass.common.transport.identity import Identity
from kvass.common.transport.nixl import open_endpoints
from kvass.kvstore.index import Index, Limits
from kvass.kvstore.node import Node
from kvass.kvstore.observe import Observer
from kvass.kvstore.slab import Slab

COPY_THREADS = 2  # hashing and copying beside the mover thread's reads; more only takes cores


async def serve(
    config: Config,
    *,
    member_id: str,
    task_status: anyio.abc.TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Run a store node until cancelled; starts with its RPC address. It serves any model."""
    member = Member(
        config,
        role="store",
        member_id=member_id,
        cluster_fields={},
        load=lambda: _observed(node, observer),
        on_command=lambda command: _obey(command, node),
    )
    observer = Observer(member.registry)
    async with open_node(config, member.hello) as (node, address), member:
        details = {"capacity_bytes": config.store.slab_bytes}
        await member.announce(address, details=details)
        task_status.started(address)
        await anyio.sleep_forever()


@asynccontextmanager
async def open_node(config: Config, hello: Hello) -> AsyncIterator[tuple[Node, str]]:
    """Run a node and its listener, without membership; yields it with its address. asyncio only."""
    async with AsyncExitStack() as stack:
        slab = Slab(config.store.slab_bytes)
        stack.callback(slab.close)
        identity = Identity(hello.host_id, hello.start_id, hello.pid)
        endpoints = await open_endpoints(config.transport, identity, [slab.region])
        stack.callback(endpoints.close)
        executor = ThreadExecutor("kvass-copy", COPY_THREADS)
        stack.callback(executor.close)
        index = Index(slab.size, _limits(config.store, hello.start_id))
        node = Node(index, slab, endpoints, executor, LoopClock())
        server = Server(hello, node.handlers(), on_leave=node.on_leave)
        listener, address = await listen(config.host)
        await stack.enter_async_context(listener)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        tasks.start_soon(node.run)
        tasks.start_soon(accept, listener, server.serve_connection)
        try:
            yield node, address
        finally:
            tasks.cancel_scope.cancel()


def _limits(store: StoreConfig, epoch: str) -> Limits:
    return Limits(
        epoch=epoch,
        claim_s=store.claim_s,
        hold_s=store.hold_s,
        hold_share=store.hold_share,
        quarantine_share=store.quarantine_share,
    )


def _observed(node: Node, observer: Observer) -> dict[str, int | float | str]:
    """Return the node's load: its counts, shown as metrics too."""
    counts = node.counts()
    observer.update(counts)
    return dict(counts)


async def _obey(command: Command, node: Node) -> None:
    if command.verb != "drain":
        raise Invalid(f"a store node does not know the command {command.verb!r}; it knows drain")
    node.drain()
