"""`kvass drop`: erase stored blocks of a tenant, a model's namespace or a writer, everywhere.

Store nodes know whose a block is, also on flash and in a bucket; workers' pools don't, and can only
be emptied whole. So they are left alone where every node says that it had nothing of the name: it
may be mistyped. What only a pool still holds is erased by `pools`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kvass.common import wire
from kvass.common.config import Config
from kvass.common.errors import Invalid, KvassError
from kvass.common.keys import KEY_BYTES, Namespace
from kvass.common.rpc.dial import Dialer
from kvass.kvstore.client.store import StoreClient
from kvass.launch.operator import operator
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


async def drop(
    config: Config, url: str, which: Chosen, console: Console, *, pools: bool = False
) -> int:
    """Erase in the store, empty the workers' unused pools, and erase what those had put meanwhile;
    return the exit code: 0 when all have done it, 1 also when no node had anything of the name and
    `pools` is not set."""
    cluster = cluster_at(url, console)
    if cluster is None:
        return 1
    members: list[dict[str, Any]] = [m for m in cluster["members"] if m.get("address")]
    code = 0
    async with operator(config, "drop") as who:
        stores = [m for m in members if m["role"] == "store"]
        nodes = [m for m in stores if m["state"] != "lost"]
        store, dialer = who.store(nodes), who.dialer(wire.Tags(wire.WORKER_REPLIES))
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
        # A node that could not be told may have what the others have not.
        if blocks or failures or pools or len(nodes) < len(stores):
            for worker in workers:
                await done(_forget(dialer, worker))
            await done(_erase(store, which))
        else:
            console.print(_nothing(which, len(nodes), len(workers)), style="red", markup=False)
            return 1
        for lost in (m["id"] for m in stores if m["state"] == "lost"):
            others = "the other nodes tell it when it is back, before it serves from its disk"
            what = others if nodes else "drop again when it is back or gone"
            text = f"{lost} does not answer and was not told: {what}."
            console.print(text, style="red")
            code = 1
        if failures:
            console.print(f"Not all is erased: {failures[-1]}. Try again.", style="red")
            code = 1
        else:
            console.print(
                f"Store: {counted(blocks, 'block')} erased on {counted(len(nodes), 'node')}. "
                f"Workers: the pools of {len(workers)} were emptied of all that no request uses, "
                "of every tenant. Requests under way may store their blocks again."
            )
    return code


def _nothing(which: Chosen, nodes: int, workers: int) -> str:
    names = {
        "tenant": which.tenant,
        "namespace": which.namespace and which.namespace.hex(),
        "writer": which.writer,
    }
    named = " and ".join(f"{what} {name!r}" for what, name in names.items() if name is not None)
    return (
        f"Nothing of {named} is on {counted(nodes, 'store node')}: nothing was erased. Is the name "
        f"right? The pools of {counted(workers, 'worker')} were left as they are: they cannot tell "
        "whose a block is. If the name is right, --pools empties them."
    )


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


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
