"""`kvass drain`: let a store node leave without losing what it alone holds, and watch it do so."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
from rich.console import Console

from kvass.common.config import Config
from kvass.common.errors import KvassError
from kvass.common.rpc.credentials import credentials_of
from kvass.common.rpc.hello import Hello
from kvass.common.transport.identity import own_identity
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.placement import StoreNode
from kvass.launch.status import TIMEOUT_S, root_of

LOOK_S = 0.5
LOST_LOOKS = 6  # answers that may fail to come before the node counts as gone


async def drain(config: Config, url: str, member_id: str, console: Console) -> int:
    """Tell the node to leave, and wait until it has handed over what it could; return the exit
    code: 0 when others have everything."""
    members = await _members(url, console)
    if members is None:
        return 1
    stores = {m["id"]: m for m in members if m.get("role") == "store" and m.get("address")}
    if member_id not in stores:
        there = ", ".join(sorted(stores)) or "none"
        console.print(f"No store node is called {member_id!r}; there are: {there}.", style="red")
        return 1
    who = own_identity()
    hello = Hello("operator", "kvass-drain", who.host_id, who.start_id, who.pid, {})
    async with anyio.create_task_group() as tasks:
        store = StoreClient(hello, tasks, credentials_of(config.cluster))
        store.set_nodes([StoreNode(member_id, stores[member_id]["address"], 1)])
        try:
            await store.drain(member_id, deadline_s=TIMEOUT_S)
            code = await _watch(store, member_id, console)
        except KvassError as error:
            console.print(f"{member_id} did not take it: {error}", style="red")
            code = 1
        tasks.cancel_scope.cancel()
    return code


async def _members(url: str, console: Console) -> list[dict[str, Any]] | None:
    url = root_of(url)
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
            response = await client.get(f"{url}/v1/cluster")
            members: list[dict[str, Any]] = response.raise_for_status().json()["members"]
            return members
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        console.print(
            f"No Kvass gateway answers at {url} ({error}); name it by --url.", style="red"
        )
        return None


async def _watch(store: StoreClient, member_id: str, console: Console) -> int:
    """Show what is left until the node says that it is done."""
    shown: int | None = None
    lost = 0
    while lost < LOST_LOOKS:
        found = await store.stats(deadline_s=TIMEOUT_S)
        if not found:
            lost += 1
        else:
            lost = 0
            counts = found[0]
            left = int(counts["handover_left"])
            if counts["drained"]:
                return _done(member_id, left, int(counts["visible_blocks"]), console)
            if left != shown:
                console.print(f"{member_id}: {left} copies are still to be taken")
                shown = left
        await anyio.sleep(LOOK_S)
    console.print(f"{member_id} answers no more, and did not say that it was done.", style="red")
    return 1


def _done(member_id: str, left: int, blocks: int, console: Console) -> int:
    if left:
        console.print(
            f"{member_id}: {left} of {blocks} blocks found no taker (is there another store node "
            "with room?). Stopping it costs their recomputation, no more.",
            style="yellow",
        )
        return 1
    console.print(f"{member_id} is drained: others have all {blocks} blocks. It may be stopped.")
    return 0
