"""`kvass status --store`: whether each store node is well, in one table and in words. Pure.

Rates come from two looks at a node's counts; what has only a total is since the node's start. A
node is well when nothing in `FINDINGS` speaks; what does says what is wrong and what to do. One
that is leaving is not well: somebody has to stop it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kvass.launch.status import shown, table_of

Counts = Mapping[str, Any]

# What is gone within this time is gone before people have read an answer and asked again.
TURNOVER_S = 60.0
FULL = 0.9  # of a share that something may take at most
NO_VALUE = "-"
COLUMNS = ("of", "used", "hits", "evict/s", "held", "quar.", "leases", "copies")


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node at two looks. `counts` is None when it does not answer, for `reason`, if that is
    known; `before` when it did not."""

    member_id: str
    state: str
    counts: Counts | None
    before: Counts | None
    interval_s: float
    reason: str = ""

    def count(self, name: str) -> int:
        """Return a count; 0 of a node that has none such."""
        return int((self.counts or {}).get(name, 0))

    def more(self, name: str) -> int:
        """Return by how much a total grew between the looks; 0 across a restart."""
        if self.counts is None or self.before is None:
            return 0
        return max(self.count(name) - int(self.before.get(name, 0)), 0)

    def rate(self, name: str) -> float | None:
        """Return a total's growth a second; None when there was only one look."""
        if self.counts is None or self.before is None or self.interval_s <= 0:
            return None
        return self.more(name) / self.interval_s

    @property
    def used(self) -> float | None:
        return share(
            self.count("total_bytes") - self.count("free_bytes"), self.count("total_bytes")
        )

    @property
    def hit_rate(self) -> float | None:
        return share(self.count("hits"), self.count("hits") + self.count("misses"))


def share(part: int, whole: int) -> float | None:
    """Return part ÷ whole; None when there is nothing to be a part of."""
    return part / whole if whole else None


def views_of(
    first: Mapping[str, Any], second: Mapping[str, Any], interval_s: float
) -> list[NodeView]:
    """Return the nodes of two answers of a gateway's `/v1/cluster`, those without counts too.

    One that is drained is no node of its clients any more: what it last said of itself stands.
    """
    before, counts = _counts_in(first), _counts_in(second)
    members = {m["id"]: m for m in second.get("members", []) if m.get("role") == "store"}
    return [
        NodeView(
            name,
            str(members.get(name, {}).get("state", "ready")),
            counts.get(name),
            before.get(name),
            interval_s,
            str(members.get(name, {}).get("reason", "")),
        )
        for name in sorted({*counts, *members})
    ]


def _counts_in(cluster: Mapping[str, Any]) -> dict[str, Counts]:
    leaving = [
        member
        for member in cluster.get("members", [])
        if (member.get("role"), member.get("state")) == ("store", "draining")
    ]
    said = {member["id"]: member["load"] for member in leaving if member.get("load")}
    return {**said, **{node["id"]: node for node in cluster.get("store", [])}}


# --- what is wrong ---


def findings(node: NodeView) -> list[str]:
    """Return what is wrong with a node, each with what to do; empty when it is well."""
    if node.counts is None:
        why = f" ({node.reason})" if node.reason else ""
        return [
            f"does not answer{why}: see its log, and start it again if it is gone. Until then its "
            "blocks are misses, which are computed"
        ]
    return [text for look in FINDINGS for text in look(node)]


def _leaving(node: NodeView) -> list[str]:
    left = node.count("handover_left")
    if not node.count("draining"):
        return []
    if not node.count("drained"):
        return [f"drains: {left} copies are still to be taken by others; wait, then stop it"]
    if left:
        return [
            f"is drained, but {left} copies found no taker: add a node with room and drain again, "
            "or stop it and let them be computed"
        ]
    return ["is drained: others have all of its blocks; stop it"]


def _corrupt(node: NodeView) -> list[str]:
    texts = []
    if node.count("corrupt"):
        texts.append(
            f"found {node.count('corrupt')} blocks corrupt in its memory and dropped them "
            f"({node.count('scrub_found')} by the scrub): test this host's memory; to let the node "
            f"leave: kvass drain {node.member_id}"
        )
    if node.count("put_corrupt") or node.count("get_suspect"):
        texts.append(
            f"{node.count('put_corrupt')} blocks came here, and {node.count('get_suspect')} went "
            "from here, with wrong bytes, and were refused: the log names the peers; test their "
            "memory and the network between"
        )
    return texts


def _failing(node: NodeView) -> list[str]:
    failed = node.more("put_failed") + node.more("get_failed")
    texts = []
    if failed:
        texts.append(
            f"{failed} blocks could not be moved in the last {node.interval_s:.0f} s: peers die or "
            "hang, or the network does; see its log"
        )
    if node.more("leases_lost"):
        texts.append(
            f"{node.more('leases_lost')} leases ran out in the last {node.interval_s:.0f} s: "
            "readers are slower than they were, or gone; look at the busiest worker's host"
        )
    return texts


def _crowded(node: NodeView) -> list[str]:
    texts = []
    cap = node.count("guard_cap_bytes")
    if cap and node.count("guarded_bytes") > FULL * cap:
        texts.append(
            f"held and pinned blocks take {_size(node, 'guarded_bytes')} of the "
            f"{_size(node, 'guard_cap_bytes')} that they may: decode workers do not take what was "
            "computed for them, or pins are not ended; or raise store.hold_share"
        )
    cap = node.count("quarantine_cap_bytes")
    if cap and node.count("quarantined_bytes") > FULL * cap:
        texts.append(
            f"{_size(node, 'quarantined_bytes')} wait for transfers of writers that vanished: when "
            "it does not go down in a minute, restart the node"
        )
    evicted = node.rate("evictions") or 0.0
    held_s = node.count("visible_blocks") / evicted if evicted else TURNOVER_S
    if held_s < TURNOVER_S:
        texts.append(
            f"replaces all that it holds within {held_s:.0f} s, at the rate of the last "
            f"{node.interval_s:.0f} s: when that lasts, raise store.slab_bytes, or add a node"
        )
    return texts


def _behind(node: NodeView) -> list[str]:
    lost = node.more("fill_dropped")
    if not lost:
        return []
    return [
        f"takes copies slower than they are asked for ({lost} dropped in the last "
        f"{node.interval_s:.0f} s): fewer replicas, or a faster network"
    ]


def _flash(node: NodeView) -> list[str]:
    texts = []
    if node.count("flash_off"):
        texts.append(
            "its flash tier has stepped aside, and it goes on with DRAM alone: its log says why; "
            "it tries again every half minute, or, where it could not be opened, at its next start"
        )
    if node.count("flash_full"):
        texts.append(
            "its flash takes nothing more (its log says why), and what is on it is still read: "
            "make room on the disk, or give it less with store.flash_bytes"
        )
    faults = node.count("flash_read_faults") + node.count("flash_write_faults")
    if faults or node.count("flash_corrupt"):
        texts.append(
            f"flash: {faults} faults of the disk, {node.count('flash_corrupt')} corrupt records "
            "since the start: see its log and the disk's own health report"
        )
    return texts


FINDINGS = (_leaving, _corrupt, _failing, _flash, _crowded, _behind)


def _size(node: NodeView, name: str) -> str:
    return shown(name, node.count(name))


# --- how it looks ---


def word_of(node: NodeView) -> str:
    """Return the one word for a node."""
    if node.counts is None:
        return "silent" if node.state == "ready" else node.state or "silent"
    if node.count("drained"):
        return "drained"
    if node.count("draining"):
        return "drains"
    return "unwell" if findings(node) else "well"


def table(nodes: Sequence[NodeView]) -> Table:
    """Return the nodes as a table that fits 80 columns."""
    looked_s = max((node.interval_s for node in nodes), default=0.0)
    made = table_of("")
    made.caption = f"hits: since each start; evict/s: over the last {looked_s:.1f} s"
    made.caption_justify = "left"
    flash = any(node.count("flash_total_bytes") for node in nodes)
    made.add_column("id", overflow="fold")
    for name in (*COLUMNS, *(["flash"] if flash else [])):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("is", no_wrap=True)
    for node in nodes:
        cells = [*_cells(node), *([_flash_used(node)] if flash else [])]
        style = "yellow" if findings(node) else ""
        made.add_row(node.member_id, *cells, word_of(node), style=style)
    return made


def _cells(node: NodeView) -> list[str]:
    if node.counts is None:
        return [NO_VALUE] * len(COLUMNS)
    rate = node.rate("evictions")
    return [
        brief_size(node.count("total_bytes")),
        percent(node.used),
        percent(node.hit_rate),
        NO_VALUE if rate is None else brief(rate),
        brief_size(node.count("held_bytes")),
        brief_size(node.count("quarantined_bytes")),
        brief(node.count("leases")),
        brief(node.count("copies_waiting") + node.count("fill_queued_blocks")),
    ]


def _flash_used(node: NodeView) -> str:
    return percent(share(node.count("flash_used_bytes"), node.count("flash_total_bytes")))


def brief(value: float) -> str:
    """Return a number in at most five characters."""
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"


def brief_size(size_bytes: float) -> str:
    """Return bytes in at most seven characters."""
    number, unit = shown("_bytes", size_bytes).split()
    return f"{float(number):.3g} {unit}" if float(number) >= 10 else f"{float(number):.2g} {unit}"


def percent(value: float | None) -> str:
    """Return a share as people read it; never 100 % of what is not whole, nor 0 % of some."""
    if value is None:
        return NO_VALUE
    if 0 < value < 0.01:
        return "<1 %"
    if 0.99 < value < 1:
        return ">99 %"
    return f"{value:.0%}".replace("%", " %")


def summary(nodes: Sequence[NodeView]) -> str:
    """Return all nodes in one line."""
    if not nodes:
        return "No store node is known: start one with `kvass store`."
    answering = [node for node in nodes if node.counts is not None]
    well = sum(not findings(node) for node in nodes)
    counted = f"{len(nodes)} store node{'s' * (len(nodes) != 1)}, {well} well"
    if not answering:
        return counted
    used = sum(node.count("total_bytes") - node.count("free_bytes") for node in answering)
    total = sum(node.count("total_bytes") for node in answering)
    hits = sum(node.count("hits") for node in answering)
    lookups = hits + sum(node.count("misses") for node in answering)
    return (
        f"{counted}; {shown('_bytes', used)} of {shown('_bytes', total)} used, "
        f"{percent(share(hits, lookups))} of lookups hit"
    )


def lines(nodes: Sequence[NodeView]) -> list[str]:
    """Return what is wrong, a line for each finding, with the node's name."""
    return [f"{node.member_id} {text}" for node in nodes for text in findings(node)]


def as_json(nodes: Sequence[NodeView]) -> list[dict[str, Any]]:
    """Return the nodes for programs: all counts, the rates, and the findings."""
    return [
        {
            **(node.counts or {}),
            "id": node.member_id,
            "state": node.state,
            "answers": node.counts is not None,
            "is": word_of(node),
            "findings": findings(node),
            "interval_s": round(node.interval_s, 3),
            "evictions_s": node.rate("evictions"),
            "hits_s": node.rate("hits"),
            "misses_s": node.rate("misses"),
            "stored_s": node.rate("stored"),
        }
        for node in nodes
    ]
