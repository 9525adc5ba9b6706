"""`kvass status`: the cluster as its gateway sees it, as tables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvass.launch.brief import figure

TIMEOUT_S = 10.0
KEY_VARIABLE = "KVASS_OPERATOR_KEY"  # the environment alone: an option's value is in every `ps`
MEMBER_COLUMNS = ("role", "id", "pid", "address", "state")
# What operators look at first, by the names of the nodes' counts; the rest is in /v1/cluster.
LOAD_COLUMNS = {
    "running": "running",
    "waiting": "waiting",
    "susp.": "suspended",
    "used": "used_blocks",
    "cached": "cached_blocks",
    "blocks": "total_blocks",
    "tok/s": "prefill_tokens_s",
    "step ms": "step_ms",
}
STORE_COLUMNS = {
    "blocks": "visible_blocks",
    "used": "visible_bytes",
    "of": "total_bytes",
    "held": "held_bytes",
    "hits": "hits",
    "misses": "misses",
    "stored": "stored",
    "evict.": "evictions",
    "corrupt": "corrupt",
}


def show_status(url: str, console: Console, *, as_json: bool = False) -> int:
    """Print the members and the store's counts; return the exit code."""
    cluster = cluster_at(url, complaints(console, as_json))
    if cluster is None:
        return 1
    if as_json:
        console.print_json(data=cluster)
        return 0
    console.print(_headline(cluster), highlight=False, markup=False, emoji=False)
    console.print(members_table(cluster["members"]))
    if any(shown_load(member) for member in cluster["members"]):
        console.print(load_table(cluster["members"]))
    costs = [reason["message"] for reason in cluster.get("degraded", [])]
    for line in [*costs, *doubts(cluster["members"])]:
        console.print(line, style="yellow")
    if cluster.get("store"):
        console.print(store_table(cluster["store"]))
    return 0


def complaints(console: Console, as_json: bool) -> Console:
    """Return where to say what is wrong: not among what a program reads."""
    return Console(stderr=True) if as_json else console


def _headline(cluster: Mapping[str, Any]) -> str:
    """Return what the cluster serves, and where a member that joins finds it."""
    told = ("model", "model"), ("weights", "weights"), ("kv_dtype", "KV"), ("broker", "broker")
    return ", ".join(f"{name} {cluster[key]}" for key, name in told if cluster.get(key))


def cluster_at(url: str, console: Console) -> dict[str, Any] | None:
    """Ask a gateway who is there; None when it does not say, which the console is told."""
    cluster = ask_gateway(url, console, "GET", "/v1/cluster")
    if cluster is not None and not isinstance(cluster.get("members"), list):
        console.print(
            f"{root_of(url)} is not a Kvass gateway: its members are no list", style="red"
        )
        return None
    return cluster


def forget(url: str, member_id: str, console: Console) -> int:
    """Let a gateway speak no more of a member that was lost; return the exit code."""
    if ask_gateway(url, console, "DELETE", f"/v1/cluster/lost/{quote(member_id, '')}") is None:
        return 1
    console.print(f"{member_id} is forgotten, until it is back.", highlight=False)
    return 0


def ask_gateway(url: str, console: Console, method: str, path: str) -> dict[str, Any] | None:
    """Ask a gateway, with the operator's key if there is one; None when it does not answer, or
    refuses, which the console is told."""
    url, key = root_of(url), os.environ.get(KEY_VARIABLE, "")
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(trust_env=False, timeout=TIMEOUT_S, headers=headers) as client:
            response = client.request(method, f"{url}{path}")
            answer = _json_in(response)
            refusal = _refusal_in(answer)
            if refusal and response.status_code in (401, 403):
                console.print(f"{url} {_keyless(refusal, bool(key))}", style="red", markup=False)
                return None
            if refusal and response.status_code == 404 and method == "DELETE":
                console.print(refusal, style="red", markup=False, highlight=False)
                return None
            if response.status_code != 200 or not isinstance(answer, dict):
                kind = response.headers.get("content-type", "nothing said of its type")
                raise ValueError(f"it answers {response.status_code} to {method} {path} ({kind})")
            return answer
    except (httpx.ConnectError, httpx.TimeoutException):
        console.print(
            f"Nothing answers at {url}. Start a cluster with `kvass up`, or name another gateway "
            "with --url, --port or KVASS_PORT; or your gateway still waits for its broker: see its "
            "log.",
            style="red",
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        console.print(f"{url} is not a Kvass gateway: {error}", style="red", markup=False)
    return None


def _json_in(response: httpx.Response) -> object:
    try:
        return response.json()
    except ValueError:
        return None


def _refusal_in(answer: object) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""


def _keyless(refusal: str, sent: bool) -> str:
    how = f"the key that {KEY_VARIABLE} holds" if sent else f"no key, for {KEY_VARIABLE} is not set"
    return (
        f"asks for an operator's key, and got {how}: {refusal}. Set {KEY_VARIABLE} to a key of "
        "[operators] in the gateway's gateway.api_keys_file."
    )


def root_of(url: str) -> str:
    """Return a gateway's address without what people add (`/v1`) or leave out (`http://`)."""
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def members_table(members: list[dict[str, Any]]) -> Table:
    """Return the members as a table, in the gateway's order."""
    table = table_of("members")
    for name in MEMBER_COLUMNS:
        if name in ("id", "address"):
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, no_wrap=True, justify="right" if name == "pid" else "left")
    for member in members:
        # As they are: to rich, brackets of an IPv6 address are markup, and `:1234:` an emoji.
        cells = (Text(str(member.get(name, ""))) for name in MEMBER_COLUMNS[:-1])
        table.add_row(*cells, _state(member), style=_style(member))
    return table


def load_table(members: list[dict[str, Any]]) -> Table:
    """Return the loads of those who have any, as a table; what is zero is left out."""
    loads = [(member, shown_load(member)) for member in members]
    columns = {
        title: name
        for title, name in LOAD_COLUMNS.items()
        if any(name in load for _, load in loads)
    }
    table = _counts_table("load", columns)
    for member, load in loads:
        if load:
            table.add_row(*_counts_row(member, load, columns), style=_style(member))
    return table


def shown_load(member: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of a member's load; of a store node nothing, for its load is its counts,
    which have a table of their own."""
    load = {} if member.get("role") == "store" else member.get("load") or {}
    return {name: load[name] for name in LOAD_COLUMNS.values() if load.get(name)}


def _style(member: Mapping[str, Any]) -> str:
    return "dim" if member.get("state") == "lost" else ""


def _state(member: Mapping[str, Any]) -> str:
    """Return the one word for a member; of a store node that leaves, how far it is."""
    state = str(member.get("state", ""))
    if member.get("role") != "store" or state == "lost":
        return state
    return leaving_word(member.get("load") or {}) or state


def leaving_word(counts: Mapping[str, Any]) -> str:
    """Return the one word for how far a store node is with leaving; empty while it stays."""
    if counts.get("drained"):
        return "drained"
    if counts.get("draining"):
        return "held up" if counts.get("drain_held") else "drains"
    return ""


def doubts(members: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with members that serve all the same."""
    loads = [(member, member.get("load") or {}) for member in members]
    return [
        f"{member.get('id')} is not deterministic: {load.get('deterministic_reason')}"
        for member, load in loads
        if load.get("deterministic") == "no"
    ] + [
        f"{member.get('id')} computes without the compiled library, several times slower: "
        f"{load['compiled']}"
        for member, load in loads
        if str(load.get("compiled", "")).startswith("none")
    ]


def store_table(nodes: list[dict[str, Any]]) -> Table:
    """Return the store nodes' counts as a table; of corrupt blocks only where there were any."""
    columns = {
        title: name
        for title, name in STORE_COLUMNS.items()
        if title != "corrupt" or any(node.get(name) for node in nodes)
    }
    table = _counts_table("store", columns)
    for node in nodes:
        table.add_row(*_counts_row(node, node, columns))
    return table


def _counts_table(title: str, columns: Mapping[str, str]) -> Table:
    table = table_of(title)
    table.add_column("id", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _counts_row(
    member: Mapping[str, Any], counts: Mapping[str, Any], columns: Mapping[str, str]
) -> list[str]:
    """Return a member's id, and its counts in the order of the columns."""
    return [str(member.get("id", ""))] + [
        figure(name, counts.get(name, "")) for name in columns.values()
    ]


def table_of(title: str) -> Table:
    """Return an empty table that fits 80 columns: most terminals, and most bug reports."""
    return Table(
        title=title or None,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        collapse_padding=True,
    )
