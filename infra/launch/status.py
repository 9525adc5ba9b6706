"""`kvass status`: the cluster as its gateway sees it, as a table."""

from __future__ import annotations

from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

TIMEOUT_S = 10.0


def show_status(url: str, console: Console) -> int:
    """Print the members and the store's counts; return the exit code."""
    try:
        with httpx.Client(trust_env=False, timeout=TIMEOUT_S) as client:
            response = client.get(f"{url.rstrip('/')}/v1/cluster")
            response.raise_for_status()
            cluster = response.json()
    except (httpx.ConnectError, httpx.TimeoutException):
        console.print(
            f"Nothing answers at {url}. Start a cluster with `kvass up`, or name another gateway "
            "with --url.",
            style="red",
        )
        return 1
    except (httpx.HTTPError, ValueError) as error:
        console.print(f"{url} is not a Kvass gateway: {error}", style="red")
        return 1
    console.print(members_table(cluster["members"]))
    for node in cluster.get("store", []):
        console.print(f"store: {counts_line(node)}")
    return 0


def members_table(members: list[dict[str, Any]]) -> Table:
    """Return the members as a table, in the gateway's order."""
    table = Table(header_style="bold")
    for name in ("role", "id", "pid", "address", "state", "load"):
        table.add_column(name, justify="right" if name == "pid" else "left", overflow="fold")
    for member in members:
        table.add_row(
            *(str(member.get(name, "")) for name in ("role", "id", "pid", "address", "state")),
            counts_line(member.get("load") or {}),
            style="dim" if member.get("state") == "lost" else "",
        )
    return table


def counts_line(counts: dict[str, Any]) -> str:
    """Return counts as `name value` pairs, fractions shortened."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in counts.items()
    )
