"""The cluster as an operator is shown it: who is there, who was lost, what is done without. Pure.

`wall_s` is the wall clock at `now_s`: people compare what they read with logs. It refuses to know
who asks; what it says of what is degraded names members and no addresses, for anybody may read it.
Programs go by a reason's code, which stays what it is; its sentence is for people, and may change.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from kvass.common.membership import Entry, NodeTable, Peer, Role
from kvass.kvstore.placement import copies_of, nodes_of


class Reason(NamedTuple):
    """Why nothing can be asked, or what is done without."""

    code: str
    message: str


NO_DECODE = Reason("no_decode", "no decode worker is ready")
ABSENT: dict[Role, Reason] = {
    "prefill": Reason("no_prefill", "no prefill worker is ready: decode workers compute prompts"),
    "store": Reason(
        "no_store", "no store node is ready: only what a decode worker holds itself is reused"
    ),
}
_UNLINKED = Reason(
    "broker_down",
    "the link to the broker is down: what is known goes on, and members that come or go are not "
    "noticed",
)
_LOSSES: dict[Role, str] = {
    "prefill": "others compute what it would have computed",
    "decode": "its answers go on at others where there are any",
    "store": "what it alone held is computed again",
    "gateway": "its clients have to ask another one",
}


def members(table: NodeTable, now_s: float, wall_s: float) -> list[dict[str, object]]:
    """Return every member that is known, and those that were lost."""
    known = [_listed(entry, table, now_s, wall_s) for entry in table.entries()]
    lost = [
        _facts(each.peer)
        | {"state": "lost", "lost_since": _clock(each.since_s, now_s, wall_s)}
        | {"load": {}, "details": dict(each.peer.details)}
        for each in table.lost(now_s)
    ]
    return known + lost


def degraded(table: NodeTable, now_s: float, wall_s: float) -> list[Reason]:
    """Return what is absent, or was lost, that completions do without, at a cost."""
    absent = [cost for role, cost in ABSENT.items() if not table.live(role, now_s)]
    lost = [(each.peer, each.since_s) for each in table.lost(now_s)]
    silent = [(e.peer, e.heard_s) for e in table.entries() if _is_silent(e, table, now_s)]
    losses = [
        Reason(
            f"{peer.role}_lost",
            f"{peer.role} {peer.member_id} is lost since {_clock(since_s, now_s, wall_s)}: "
            f"{_LOSSES[peer.role]}",
        )
        for peer, since_s in lost + silent
    ]
    unlinked = [] if table.is_linked else [_UNLINKED]
    aside = [
        Reason(
            "flash_off",
            f"store {entry.peer.member_id} goes on without its flash: see `kvass status --store`",
        )
        for entry in table.entries()
        if entry.peer.role == "store" and entry.load.get("flash_off")
    ]
    return [*absent, *losses, *aside, *_too_few_copies(table, now_s), *unlinked]


def _too_few_copies(table: NodeTable, now_s: float) -> list[Reason]:
    nodes = nodes_of(table.live("store", now_s))
    takers = sum(not node.draining for node in nodes)
    copies = copies_of(nodes)
    if not nodes or takers >= copies:
        return []
    if not takers:
        message = "no store node takes new blocks: what is computed now is not kept"
        return [Reason("no_store_takes", message)]
    message = (
        f"store.replicas is {copies}, and the store nodes that take blocks are {takers}: there "
        "are fewer copies until more join"
    )
    return [Reason("few_copies", message)]


def _is_silent(entry: Entry, table: NodeTable, now_s: float) -> bool:
    """Whether nothing is heard of a member; one that refused a connection speaks all the same."""
    return entry.demoted_until_s <= now_s and not table.is_live(entry, now_s)


def _listed(entry: Entry, table: NodeTable, now_s: float, wall_s: float) -> dict[str, object]:
    shown = _facts(entry.peer) | {
        "state": entry.peer.state if table.is_live(entry, now_s) else "lost",
        "load": dict(entry.load),
        "details": dict(entry.peer.details),
    }
    if _is_silent(entry, table, now_s):
        shown["lost_since"] = _clock(entry.heard_s, now_s, wall_s)
    return shown


def _facts(peer: Peer) -> dict[str, object]:
    return {
        "role": peer.role,
        "id": peer.member_id,
        "start_id": peer.start_id,
        "host_id": peer.host_id,
        "pid": peer.pid,
        "address": peer.address,
        "metrics_address": peer.metrics_address,
    }


def _clock(then_s: float, now_s: float, wall_s: float) -> str:
    """Return a moment as log lines have it, to the second."""
    moment = datetime.fromtimestamp(wall_s - (now_s - then_s), UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
