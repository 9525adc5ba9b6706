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

from kvass.launch.brief import NO_VALUE, brief, brief_size, percent, share, shown
from kvass.launch.flash_findings import flash
from kvass.launch.status import leaving_word, table_of

Counts = Mapping[str, Any]

# What is gone within this time is gone before people have read an answer and asked again.
TURNOVER_S = 60.0
FULL = 0.9  # of a share that something may take at most
COLUMNS = ("of", "used", "hits", "evict/s", "held", "quar.", "leases", "copies")


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node at two looks. `counts` is None when it does not answer, for `reason`, if that is
    known; `before` when it did not. `lost_since` is when it was last heard of; not `clustered`: it
    was asked by itself, and nobody knows of a cluster."""

    member_id: str
    state: str
    counts: Counts | None
    before: Counts | None
    interval_s: float
    reason: str = ""
    lost_since: str = ""
    clustered: bool = True

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


def views_of(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    interval_s: float,
    *,
    clustered: bool = True,
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
            str(members.get(name, {}).get("lost_since", "")),
            clustered,
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
        return [_absent(node)]
    return [text for look in FINDINGS for text in look(node)]


def _absent(node: NodeView) -> str:
    misses = "Until then what it alone has is missed"
    if node.clustered:  # one by itself may have anybody's tensors, which nobody computes
        misses += " and computed again"
    if node.state == "refuses":
        return f"refuses this command, and is not at fault: {node.reason}"
    if node.lost_since:
        return (
            f"is lost: nothing was heard of it since {node.lost_since}, and it did not say that it "
            f"leaves. See its log, and start it again; or, if it shall not come back: kvass forget "
            f"{node.member_id}. {misses}"
        )
    why = f" ({node.reason})" if node.reason else ""
    return f"does not answer{why}: see its log, and start it again if it is gone. {misses}"


def _refused(node: NodeView) -> str:
    refused = node.count("handover_refused")
    return f", {refused} of them since the others have no room" if refused else ""


def _leaving(node: NodeView) -> list[str]:
    left, name = node.count("handover_left"), node.member_id
    if not node.count("draining"):
        return []
    if node.count("drain_held"):
        return [
            f"cannot leave without loss: {left} blocks are nowhere else{_refused(node)}. Add a "
            "node: then it goes on by itself; let them be computed again: "
            f"kvass drain {name} --force; or let it stay: kvass drain {name} --cancel"
        ]
    if not node.count("drained"):
        return [
            f"drains: {left} copies are still to be taken by others; wait, then stop it, or let it "
            f"stay: kvass drain {name} --cancel"
        ]
    if left:
        return [f"is drained, and {left} blocks go with it and are computed again: stop it"]
    return ["is drained: others have all of its blocks; stop it"]


def _few_copies(node: NodeView) -> list[str]:
    copies, takers = node.count("replicas"), node.count("takers")
    if not node.clustered or node.count("draining") or takers >= copies:
        return []
    return [
        f"shall keep {copies} copies of each block (store.replicas), and there are only {takers} "
        "store nodes that take any: start those that are lost again, or add others"
    ]


def _corrupt(node: NodeView) -> list[str]:
    texts = []
    leave = "and run the node on another host until then"
    if node.clustered:
        leave = f"to let the node leave: kvass drain {node.member_id}"
    if node.count("corrupt"):
        texts.append(
            f"found {node.count('corrupt')} blocks corrupt in its memory and dropped them "
            f"({node.count('scrub_found')} by the scrub): test this host's memory; {leave}"
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
    if node.count("bugs"):
        texts.append(
            f"its own work met {node.count('bugs')} bugs since the start, and went on: please "
            "report what its log says of them"
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
    if node.count("too_large_bytes"):
        texts.append(
            f"its slab of {_size(node, 'total_bytes')}, of which "
            f"{_size(node, 'too_large_room_bytes')} may be used for it, holds no block of "
            f"{_size(node, 'too_large_bytes')}, so none is stored: raise store.slab_bytes"
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


def _bucket(node: NodeView) -> list[str]:
    texts = []
    if node.count("bucket_off"):
        texts.append(
            "the bucket does not answer: it is neither read nor written, and this node goes on "
            "without: its log says why; it asks again, every minute at most"
        )
    elif node.count("bucket_full"):
        texts.append(
            "the bucket takes nothing from it (its log says why), and what is there is still read: "
            "look at the bucket's permissions and quota"
        )
    if node.count("bucket_unerased"):
        texts.append(
            f"{node.count('bucket_unerased')} drops are not carried out in the bucket: it tries "
            "while it runs. If it is stopped before: drop again"
        )
    if node.count("bucket_corrupt"):
        texts.append(
            f"bucket: {node.count('bucket_corrupt')} blocks were corrupt since the start, and were "
            "deleted: who else writes there?"
        )
    return texts


FINDINGS = (_leaving, _few_copies, _corrupt, _failing, flash, _bucket, _crowded, _behind)


def _size(node: NodeView, name: str) -> str:
    return shown(name, node.count(name))


# --- how it looks ---


def word_of(node: NodeView) -> str:
    """Return the one word for a node."""
    if node.counts is None:
        return "silent" if node.state == "ready" else node.state or "silent"
    return leaving_word(node.counts) or ("unwell" if findings(node) else "well")


def table(nodes: Sequence[NodeView]) -> Table:
    """Return the nodes as a table that fits 80 columns."""
    looked_s = max((node.interval_s for node in nodes), default=0.0)
    made = table_of("")
    made.caption = f"hits: since each start; evict/s: over the last {looked_s:.1f} s"
    made.caption_justify = "left"
    below = [
        tier
        for tier in ("flash", "bucket")
        if any(node.count(f"{tier}_total_bytes") for node in nodes)
    ]
    made.add_column("id", overflow="fold")
    # Two more columns leave no room for all.
    columns = [name for name in COLUMNS if name != "leases" or len(below) < 2]
    for name in (*columns, *below):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("is", no_wrap=True)
    for node in nodes:
        cells = [_cells(node)[name] for name in columns]
        cells += [_tier_used(node, tier) for tier in below]
        style = "yellow" if findings(node) else ""
        made.add_row(node.member_id, *cells, word_of(node), style=style)
    return made


def _cells(node: NodeView) -> dict[str, str]:
    if node.counts is None:
        return dict.fromkeys(COLUMNS, NO_VALUE)
    rate = node.rate("evictions")
    cells = [
        brief_size(node.count("total_bytes")),
        percent(node.used),
        percent(node.hit_rate),
        NO_VALUE if rate is None else brief(rate),
        brief_size(node.count("held_bytes")),
        brief_size(node.count("quarantined_bytes")),
        brief(node.count("leases")),
        brief(node.count("copies_waiting") + node.count("fill_queued_blocks")),
    ]
    return dict(zip(COLUMNS, cells, strict=True))


def _tier_used(node: NodeView, tier: str) -> str:
    return percent(share(node.count(f"{tier}_used_bytes"), node.count(f"{tier}_total_bytes")))


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
