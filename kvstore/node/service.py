"""A store node as a process: its memory, its listener, its place in the cluster."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
from anyio import to_thread

from kvass.common import metrics, metrics_port, namesakes
from kvass.common.bus import check_name
from kvass.common.clock import LoopClock
from kvass.common.config import DEFAULT_BROKER, Config, StoreConfig
from kvass.common.errors import Invalid, Unavailable
from kvass.common.executor import Executor, ThreadExecutor
from kvass.common.member import GOODBYE_S, LOAD_INTERVAL_S, Member
from kvass.common.membership import State
from kvass.common.rpc.credentials import credentials_of
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Server, accept, listen
from kvass.common.seal import Command
from kvass.common.transport.identity import Identity, own_identity
from kvass.common.transport.nixl import open_endpoints
from kvass.common.wire import Tags
from kvass.kvstore import messages as m
from kvass.kvstore.eviction.policy import ChainLru, Eviction
from kvass.kvstore.eviction.reuse import ReuseEviction
from kvass.kvstore.flash.appender import DEPTH as WRITES
from kvass.kvstore.flash.disk import open_files_max
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.flash.own_folder import own_folder
from kvass.kvstore.flash.settings import LogSettings
from kvass.kvstore.index.index import Index, Limits
from kvass.kvstore.index.shares import Allotments
from kvass.kvstore.node.chores import survived
from kvass.kvstore.node.copies.leaving import Phase
from kvass.kvstore.node.node import Node
from kvass.kvstore.node.observe import Observer
from kvass.kvstore.node.slab import Slab
from kvass.kvstore.node.tiers.flash_source import FLASH_READS
from kvass.kvstore.objects.extra import require_client
from kvass.kvstore.placement import StoreNode, nodes_of
from kvass.kvstore.router import Router

_log = logging.getLogger(__name__)

# Python's full collections walk every object: a quarter of a second at 300,000 blocks, in which no
# lease is given and no call answered. An index has no cycles to collect, and what makes some
# (exceptions with their frames) dies young.
GC_THRESHOLDS = (50_000, 50, 1 << 30)
_POLICIES: dict[str, Callable[[], Eviction]] = {"reuse": ReuseEviction, "lru": ChainLru}
# Before a node is announced it is told what was erased; one that cannot be asked goes from the
# view after as long, and does not hold up the rest.
TOLD_S = 3.0
COPY_THREADS = 2  # hashing and copying beside the mover thread's reads; more only takes cores


async def serve(
    config: Config,
    *,
    member_id: str,
    task_status: anyio.abc.TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Run a store node until cancelled; starts with its RPC address. It serves any model."""
    gc.set_threshold(*GC_THRESHOLDS)
    if config.store.standalone:
        await _serve_alone(config, member_id, task_status)
        return
    if not config.cluster.broker:
        _log.info("no broker is named: joining at %s; --standalone needs none", DEFAULT_BROKER)
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
        node.watch(observer.moved)
        details = {"capacity_bytes": config.store.slab_bytes, "replicas": config.store.replicas}
        await namesakes.refuse(member)
        others = [peer for peer in member.live("store") if peer.member_id != member_id]
        node.set_nodes(nodes_of(others))
        with anyio.move_on_after(TOLD_S):
            await node.all_told()
        await member.announce(address, details=details)
        task_status.started(address)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(namesakes.watch, member)
            tasks.start_soon(member.follow, "store", lambda peers: node.set_nodes(nodes_of(peers)))
            phase: Phase = "serving"
            while True:
                phase = await node.leaving.after(phase)
                leaves = {} if phase == "serving" else {"draining": 1}
                state: State = "draining" if phase == "drained" else "ready"
                await member.announce(address, state=state, details={**details, **leaves})


async def _serve_alone(
    config: Config, member_id: str, task_status: anyio.abc.TaskStatus[str]
) -> None:
    """Run a node that belongs to no cluster: whoever knows its address and its secret uses it."""
    gc.set_threshold(*GC_THRESHOLDS)
    who = own_identity()
    name = check_name(member_id, "member id")
    hello = Hello("store", name, who.host_id, who.start_id, who.pid, {})
    registry = metrics.new_registry()
    observer = Observer(registry)
    async with open_node(config, hello) as (node, address):
        endpoint = metrics_port.serve(config.host, registry)
        node.watch(observer.moved)
        try:
            node.set_nodes([StoreNode(name, address, config.store.slab_bytes, who.host_id)])
            _log.info(
                "%s runs by itself: clients name %s, and need the secret from %s; metrics at "
                "http://%s/metrics",
                name,
                address,
                credentials_of(config.cluster).secret.source,
                endpoint.address,
            )
            task_status.started(address)
            while True:
                _observed(node, observer)
                await anyio.sleep(LOAD_INTERVAL_S)
        finally:
            with anyio.move_on_after(GOODBYE_S, shield=True):
                await endpoint.close()


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
        policy = _POLICIES[config.store.eviction]
        for text in idle_quotas(config.store):
            _log.warning("%s", text)
        index = Index(slab.size, _limits(config.store, hello.start_id), policy)
        index.ledger.copy_bytes = slab.copy
        listener, address = await listen(config.host, config.store.port)
        await stack.enter_async_context(listener)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        clock = LoopClock()
        credentials = credentials_of(config.cluster)
        dialer = Dialer(tasks, hello, Tags(m.STORE_REPLIES), credentials)
        router = Router(tasks, dialer, endpoints, Counter(), clock.now_s)
        node = Node(
            hello.member_id, index, slab, endpoints, executor, clock, router, tasks,
            scrub_s=config.store.scrub_s,
        )  # fmt: skip
        flash = stack.enter_context(ExitStack())
        await _open_flash(config.store, hello.member_id, identity, node, executor, flash)
        _open_bucket(config, node, flash)
        server = Server(hello, node.handlers(), credentials, on_leave=node.on_leave)
        tasks.start_soon(node.run)
        tasks.start_soon(accept, listener, server.serve_connection)
        try:
            yield node, address
        finally:
            tasks.cancel_scope.cancel()


async def _open_flash(
    store: StoreConfig,
    member_id: str,
    who: Identity,
    node: Node,
    copiers: Executor,
    stack: ExitStack,
) -> None:
    """Give the node its second tier; where the disk refuses, say so and go on without."""
    if not store.flash_dir:
        if store.flash_bytes != StoreConfig().flash_bytes:
            _log.warning("store.flash_bytes is set, store.flash_dir is not: this node has no flash")
        return
    settings = LogSettings(
        store.flash_bytes,
        store.flash_segment_bytes,
        store.flash_unsynced_bytes,
        files_max=open_files_max(),
    )
    writes = stack.enter_context(ThreadPoolExecutor(WRITES, thread_name_prefix="kvass-flash"))
    try:
        disk = await to_thread.run_sync(own_folder, Path(store.flash_dir), member_id, who)
        try:
            log = FlashLog(disk, settings, writes)
        except BaseException:
            disk.close()
            raise
    except Unavailable as error:
        _log.error(
            "%s: the node runs without flash. What is in %s is not served, and no drop erases it. "
            "Mend store.flash_dir, then start the node again",
            error,
            store.flash_dir,
        )
        node.lose_flash(str(error))
        return
    stack.callback(log.close)
    writer, readers = ThreadExecutor("kvass-sink"), ThreadExecutor("kvass-rise", FLASH_READS)
    stack.callback(readers.close)
    stack.callback(writer.close)
    _log.info("flash: %d blocks in %s", len(log.catalog), store.flash_dir)
    node.add_flash(log, writer, readers, copiers)


def _open_bucket(config: Config, node: Node, stack: ExitStack) -> None:
    """Give the node its third tier; whether it answers is seen later, and nobody waits for it."""
    address = config.store.bucket
    if not address:
        return
    require_client(address)
    from kvass.kvstore.objects.s3 import S3Bucket  # here, since its package is an extra

    executor = ThreadExecutor("kvass-bucket", COPY_THREADS)
    stack.callback(executor.close)
    _log.info("bucket: %s, up to %d bytes", address, config.store.bucket_bytes)
    name, size = check_name(config.cluster.name, "cluster.name"), config.store.bucket_bytes
    node.add_bucket(S3Bucket(address), name, size, executor)


def idle_quotas(store: StoreConfig) -> list[str]:
    """Say which quotas this node's memory can never reach."""
    named = {f"tenant_quotas.{name}": size for name, size in store.tenant_quotas.items()}
    return [
        f"store.{name} is {size}, more than store.slab_bytes ({store.slab_bytes}): it bounds "
        "nothing on this node; lower it, or raise store.slab_bytes"
        for name, size in {"tenant_quota": store.tenant_quota, **named}.items()
        if size > store.slab_bytes
    ]


def _limits(store: StoreConfig, epoch: str) -> Limits:
    return Limits(
        epoch=epoch,
        claim_s=store.claim_s,
        hold_s=store.hold_s,
        hold_share=store.hold_share,
        quarantine_share=store.quarantine_share,
        allotments=Allotments(store.tenant_quota, store.tenant_quotas, store.tenant_weights),
    )


def _observed(node: Node, observer: Observer) -> dict[str, int | float | str]:
    """Return the node's load: its counts, shown as metrics too."""
    counts: dict[str, int] = {}
    with survived("showing what it does", node.faults):
        counts = node.counts()
        observer.update(counts)
        observer.show_tenants(node.tenants())
    return dict(counts)


async def _obey(command: Command, node: Node) -> None:
    if command.verb != "drain":
        raise Invalid(f"a store node does not know the command {command.verb!r}; it knows drain")
    node.drain()
