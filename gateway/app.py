"""The gateway's process: what it needs to know of the model, its place in the cluster, its server.

Order matters at both ends: the cluster knows the gateway once it can answer; and it stops
accepting, lets answers end, and only then lets go of the workers. It refuses to load torch or a
transport.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from kvass.common import namesakes, wire
from kvass.common.clock import RealClock
from kvass.common.config import DEFAULT_MODEL, ClusterConfig, Config
from kvass.common.first_look import look
from kvass.common.keys import Canonical, namespace_of
from kvass.common.member import Member
from kvass.common.metrics import RequestMetrics
from kvass.common.model.fetch import resolve_model
from kvass.common.model.identity import cluster_fields, layout_of, max_model_len
from kvass.common.model.spec import load_spec
from kvass.common.model.tokenizer import Tokenizer
from kvass.common.rpc.dial import Dialer
from kvass.gateway.admission import Admission
from kvass.gateway.api_keys import ApiKeys, load_keys
from kvass.gateway.ask import Served
from kvass.gateway.fair import FairQueue
from kvass.gateway.fleet import Fleet
from kvass.gateway.routes import create_app
from kvass.gateway.server import HttpServer, bind, is_loopback
from kvass.kvstore.client.store import open_client
from kvass.kvstore.placement import nodes_of

_log = logging.getLogger(__name__)

GRACE_S = 20.0  # for answers that are under way when the process is told to stop
GOODBYE_S = 2.0


def served_name(cluster: ClusterConfig) -> str:
    """Return the name under which clients ask for the model."""
    if cluster.served_model_name or cluster.model == DEFAULT_MODEL:
        return cluster.served_model_name or DEFAULT_MODEL
    return Path(cluster.model).resolve().name


def load_served(config: Config) -> tuple[Served, Mapping[str, str | int]]:
    """Read the served model's facts and what all members must agree on; blocks on the disk."""
    cluster = config.cluster
    model_dir = resolve_model(cluster.model, progress=False)
    spec = load_spec(model_dir)
    fields = cluster_fields(model_dir, spec, cluster)
    served = Served(
        name=served_name(cluster),
        created_s=int(time.time()),
        window=max_model_len(spec, cluster),
        vocabulary=spec.vocab_size,
        namespace=namespace_of(dict[str, Canonical](fields)),
        block_tokens=cluster.block_tokens,
        block_bytes=layout_of(spec, cluster).block_size,
        text=Tokenizer.load(model_dir),
        salt_secret=os.environ.get("KVASS_SALT_SECRET", "").encode(),
        prefix_reuse=config.gateway.prefix_reuse,
    )
    return served, fields


async def serve(
    config: Config,
    *,
    member_id: str,
    task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Run a gateway until cancelled, then drain it; starts with its `host:port`."""
    keys = await anyio.to_thread.run_sync(load_keys, config.gateway.api_keys_file)
    if keys and not keys.operators:
        _log.warning(
            "%s has no [operators]: nobody may look at /v1/cluster, and `kvass status` can not",
            config.gateway.api_keys_file,
        )
    life = _Life()
    with bind(config.gateway.host, config.gateway.port) as bound:
        if not keys and not is_loopback(bound):
            _log.warning(
                "HTTP is served on %s and no API key is asked for: whoever reaches it may ask for "
                "completions, and look at /v1/cluster; gateway.api_keys_file names who has which "
                "key",
                config.gateway.host,
            )
        # Before the model's facts: where no digest of the weights is kept, they are read for it.
        await look(config, "gateway", member_id)
        served, fields = await anyio.to_thread.run_sync(load_served, config)
        if keys and not served.salt_secret:
            _log.warning(
                "gateway.api_keys_file is set and KVASS_SALT_SECRET is not: tenants' blocks have "
                "names of their own, which whoever knows a tenant's name and texts can compute"
            )
        async with anyio.create_task_group() as told:
            told.start_soon(life.until_cancelled)
            with life.work:
                await _serve(config, served, fields, keys, member_id, bound, life, task_status)


@dataclass(slots=True, eq=False)
class _Life:
    """A cancellation, turned into a request to drain. Mutable field: `is_serving`.

    Before it serves, the process just ends; after that `work` goes on until it has drained.
    """

    stopping: anyio.Event = field(default_factory=anyio.Event)
    work: anyio.CancelScope = field(default_factory=lambda: anyio.CancelScope(shield=True))
    is_serving: bool = False

    async def until_cancelled(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self.stopping.set()
            if not self.is_serving:
                self.work.cancel()


async def _serve(
    config: Config,
    served: Served,
    fields: Mapping[str, str | int],
    keys: ApiKeys,
    member_id: str,
    bound: socket.socket,
    life: _Life,
    task_status: TaskStatus[str],
) -> None:
    admission = Admission(queue=FairQueue(config.store.tenant_weights))
    async with (
        Member(
            config,
            role="gateway",
            member_id=member_id,
            cluster_fields=fields,
            load=lambda: {"running": admission.choices},
        ) as member,
        open_client(config.transport, member.hello, member.credentials) as store,
        anyio.create_task_group() as tasks,
    ):
        fleet = Fleet(
            served=served,
            members=member,
            dialer=Dialer(tasks, member.hello, wire.Tags(wire.WORKER_REPLIES), member.credentials),
            store=store,
            metrics=RequestMetrics(member.registry),
            config=config.gateway,
            clock=RealClock(),
            admission=admission,
        )
        tasks.start_soon(fleet.patrol)
        tasks.start_soon(member.follow, "store", lambda peers: store.set_nodes(nodes_of(peers)))
        app = create_app(fleet, member.registry, cluster=config.cluster, keys=keys)
        server = HttpServer(app, grace_s=GRACE_S)
        tasks.start_soon(server.run_on, bound)
        await server.accepting.wait()
        await namesakes.refuse(member)
        tasks.start_soon(namesakes.watch, member)
        host, port = bound.getsockname()[:2]
        await member.announce(f"{host}:{port}")
        life.is_serving = True
        task_status.started(f"{host}:{port}")
        await life.stopping.wait()
        with anyio.move_on_after(GOODBYE_S):
            await member.announce(f"{host}:{port}", state="draining")
        await server.drain()
        tasks.cancel_scope.cancel()
