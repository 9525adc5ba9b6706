"""Which nodes hold a segment: weighted rendezvous hashing. Pure.

Every client computes the same order of nodes for a segment from the same set of nodes; a node that
joins or leaves moves only the segments that it wins or held. Where views differ for a while, work
may be done twice, never wrongly. It refuses to know whether a node answers.

    order      all nodes by score                          A  B  C  D    (B on A's host)
    homes      where `copies` of it belong, apart          A  C
    where to look: the homes, then the rest                A  C  B  D
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvass.common.membership import Peer


@dataclass(frozen=True, slots=True)
class StoreNode:
    """A store node as others know it. `address` is `host:port` of its RPC listener.

    `replicas` is how many copies it wants each segment to have in the cluster; one that is
    `draining` is read from, and takes nothing new.
    """

    member_id: str
    address: str
    capacity_bytes: int
    host_id: str = ""
    replicas: int = 1
    draining: bool = False


def nodes_of(peers: Iterable[Peer]) -> list[StoreNode]:
    """Return store nodes from what they say of themselves in the membership."""
    return [
        StoreNode(
            member_id=peer.member_id,
            address=peer.address,
            capacity_bytes=int(peer.details.get("capacity_bytes", 0)),
            host_id=peer.host_id,
            replicas=int(peer.details.get("replicas", 1)),
            draining=bool(peer.details.get("draining", 0)),
        )
        for peer in peers
    ]


def copies_of(nodes: Iterable[StoreNode]) -> int:
    """Return how many copies a segment shall have: what the most careful node asks for."""
    return max((node.replicas for node in nodes), default=1)


class Placement:
    """Where segments belong among one set of nodes. Immutable.

    Scores are computed for all nodes at once, so a thousand nodes cost a client some 30 µs a
    segment; `order` sorts all of them, `homes` and `looked_at` only as many as are asked for.
    """

    def __init__(self, nodes: Iterable[StoreNode]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.member_id)  # ties fall alike everywhere
        self.copies = copies_of(self.nodes)
        seeds = [
            int.from_bytes(blake2b(node.member_id.encode(), digest_size=8).digest(), "little")
            for node in self.nodes
        ]
        self._seeds = np.array(seeds, dtype=np.uint64)
        self._weights = np.array([max(node.capacity_bytes, 1) for node in self.nodes], dtype=float)
        self._hosts = len({node.host_id for node in self.nodes})

    def order(self, segment_key: bytes) -> list[StoreNode]:
        """Return all nodes, the segment's home first, then where to go when it does not answer."""
        return self._best(segment_key, len(self.nodes))

    def homes(self, segment_key: bytes, copies: int) -> list[StoreNode]:
        """Return the nodes where `copies` of a segment belong, fewer when there are fewer nodes.

        In order, but no two on one host as long as another host has none.
        """
        copies = min(copies, len(self.nodes))
        if copies <= 1 or self._hosts == 1:
            return self._best(segment_key, copies)
        return _apart(self.order(segment_key), copies)

    def looked_at(self, segment_key: bytes, copies: int, beyond: int) -> list[StoreNode]:
        """Return the nodes that a reader asks for a segment: its homes, then `beyond` others."""
        first = self.homes(segment_key, copies)
        best = self._best(segment_key, len(first) + beyond)
        return first + [node for node in best if node not in first][:beyond]

    def _best(self, segment_key: bytes, count: int) -> list[StoreNode]:
        """Return the nodes with the highest scores: capacity ÷ -ln(hash in (0, 1)), so that each
        node wins a share of all segments that is proportional to its capacity (weighted rendezvous
        hashing, Schindelhauer and Schomaker 2005, logarithmic method)."""
        if len(self.nodes) <= 1:
            return list(self.nodes[:count])
        segment = np.uint64(int.from_bytes(segment_key[:8], "little"))  # a hash already
        # 53 bits, as many as a float holds: rounding must not make it 1.
        units = ((_mixed(self._seeds ^ segment) >> np.uint64(11)) + 0.5) / 2.0**53
        scores = self._weights / -np.log(units)
        ranked = np.argsort(-scores, kind="stable") if count > 1 else [scores.argmax()]
        return [self.nodes[i] for i in ranked[:count]]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all others (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _apart(ordered: Sequence[StoreNode], copies: int) -> list[StoreNode]:
    chosen: list[StoreNode] = []
    hosts: set[str] = set()
    for node in ordered:
        if len(chosen) < copies and node.host_id not in hosts:
            chosen.append(node)
            hosts.add(node.host_id)
    rest = [node for node in ordered if node not in chosen]
    return chosen + rest[: copies - len(chosen)]
