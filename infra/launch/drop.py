"""`kvass drop`: erase stored blocks of a tenant, a model's namespace or a writer, everywhere."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
from rich.console import Console

from kvass.common import wire
from kvass.common.config import Config
from kvass.common.errors import Invalid, KvassError
from kvass.common.keys import KEY_BYTES, Namespace
from kvass.common.rpc.credentials import credentials_of
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.hello import Hello
from kvass.common.transport.identity import own_identity
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.placement import StoreNode
from kvass.launch.status import TIMEOUT_S, cluster_at

WORKERS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which blocks go: those that match all that is given."""

    tenant: str | None
    namespace: Namespace | None
    writer: str | None


def chosen(tenant: str | None, namespace: str | None, writer: str | None) -> Chosen:
    """Check what was asked for; raises Invalid."""
    if tenant is None and namespace is None and writer is None:
        raise Invalid("drop: give --tenant, --namespace or --writer")
    try:
        space = None if namespace is None else bytes.fromhex(namespace)
    except ValueError:
        space = b""
    if space is not None and len(space) != KEY_BYTES:
        raise Invalid(
            f"drop: a namespace has {2 * KEY_BYTES} hex digits, as `kvass status --json` shows it"
        )
    return Chosen(tenant, None if space is None else Namespace(space), writer)


async def drop(config: Config, url: str, which: Chosen, console: Console) -> int:
    """Erase in the store, empty the workers' unused pools, and erase what those had put meanwhile;
    return the exit code: 0 when all have done it."""
    cluster = cluster_at(url, console)
    if cluster is None:
        return 1
    members: list[dict[str, Any]] = [m for m in cluster["members"] if m.get("address")]
    who = own_identity()
    hello = Hello("operator", "kvass-drop", who.host_id, who.start_id, who.pid, {})
    credentials = credentials_of(config.cluster)
    code = 0
    async with anyio.create_task_group() as tasks:
        store = StoreClient(hello, tasks, credentials)
        stores = [m for m in members if m["role"] == "store"]
        nodes = [m for m in stores if m["state"] != "lost"]
        store.set_nodes([StoreNode(m["id"], m["address"], 1) for m in nodes])
        dialer = Dialer(tasks, hello, wire.Tags(wire.WORKER_REPLIES), credentials)
        workers = [m for m in members if m["role"] in WORKERS and m["state"] != "lost"]
        blocks, failures = 0, list[KvassError]()

        async def done(what: Awaitable[int]) -> None:
            """What one cannot do, the others do all the same."""
            nonlocal blocks
            try:
                blocks += await what
            except KvassError as error:
                failures.append(error)

        await done(_erase(store, which))
        for worker in workers:
            await done(_forget(dialer, worker))
        await done(_erase(store, which))
        for lost in (m["id"] for m in stores if m["state"] == "lost"):
            text = f"{lost} does not answer and was not told: drop again when it is back or gone."
            console.print(text, style="red")
            code = 1
        if failures:
            console.print(f"Not all is erased: {failures[-1]}. Try again.", style="red")
            code = 1
        else:
            console.print(
                f"{blocks} blocks erased on {len(nodes)} store nodes, and {len(workers)} workers "
                "keep nothing that they do not use now. Requests that are under way may store "
                "their blocks again."
            )
        tasks.cancel_scope.cancel()
    return code


async def _erase(store: StoreClient, which: Chosen) -> int:
    return await store.drop(
        tenant=which.tenant,
        namespace=which.namespace,
        writer=which.writer,
        deadline_s=TIMEOUT_S,
    )


async def _forget(dialer: Dialer, worker: Mapping[str, Any]) -> int:
    """Empty a worker's own pool of what it does not use; that counts as no stored block."""
    client = await dialer.client(worker["address"])
    await client.call(wire.Forget(), deadline_s=TIMEOUT_S)
    return 0
