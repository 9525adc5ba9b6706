"""Two looks at store nodes, a moment apart: by way of a gateway, or at the nodes themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import anyio
from rich.console import Console

from kvass.common.clock import LoopClock
from kvass.common.config import Config
from kvass.common.wire import Tags
from kvass.kvstore import messages as m
from kvass.kvstore.client.roster import Addresses
from kvass.kvstore.client.store import StoreClient
from kvass.launch import store_status
from kvass.launch.operator import operator
from kvass.launch.status import cluster_at, complaints
from kvass.launch.store_status import NodeView

INTERVAL_S = 1.0  # long enough for a rate, short enough to wait for
STATS_S = 2.0  # a node that needs longer for its counts is not well


def show_store(
    url: str, addresses: Sequence[str], config: Config, console: Console, *, as_json: bool
) -> int:
    """Print whether each store node is well; return the exit code: 1 when one is not."""
    if addresses:
        nodes = anyio.run(_at_nodes, addresses, config)
    else:
        found = _at_gateway(url, complaints(console, as_json))
        if found is None:
            return 1
        nodes = found
    if as_json:
        console.print_json(data=store_status.as_json(nodes))
    else:
        console.print(store_status.summary(nodes), style="bold", highlight=False)
        console.print(store_status.table(nodes))
        for line in store_status.lines(nodes):
            console.print(line, style="yellow", highlight=False)
    return int(any(store_status.findings(node) for node in nodes))


def _at_gateway(url: str, console: Console) -> list[NodeView] | None:
    first = cluster_at(url, console)
    if first is None:
        return None
    looked_s = time.monotonic()
    time.sleep(INTERVAL_S)
    second = cluster_at(url, console)
    if second is None:
        return None
    return store_status.views_of(first, second, time.monotonic() - looked_s)


async def _at_nodes(addresses: Sequence[str], config: Config) -> list[NodeView]:
    """Ask nodes by address, without a gateway; one that does not answer has its address as id."""
    async with operator(config, "status") as who:
        dialer = who.dialer(Tags(m.STORE_REPLIES))
        roster = Addresses(addresses, dialer, LoopClock().now_s)
        known = await roster.look()
        client = StoreClient(who.hello, who.tasks, dialer=dialer)
        client.set_nodes(known)
        before, looked_s = await client.stats(deadline_s=STATS_S), anyio.current_time()
        await anyio.sleep(INTERVAL_S)
        after, interval_s = await client.stats(deadline_s=STATS_S), anyio.current_time() - looked_s
    silent: list[dict[str, Any]] = [
        {
            "role": "store",
            "id": address,
            "reason": reason,
            "state": "refuses" if address in roster.refused else "ready",
        }
        for address, reason in roster.reasons.items()
    ]
    second = {"store": after, "members": silent}
    return store_status.views_of({"store": before}, second, interval_s, clustered=False)
