"""Which node holds a segment: weighted rendezvous hashing. Pure.

Every client computes the same order of nodes for a segment from the same set of nodes; a node that
joins or leaves moves only the segments that it wins or held. Where views differ for a while, work
may be done twice, never wrongly. It refuses to know whether a node answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kvass.common.membership import Peer


@dataclass(frozen=True, slots=True)
class StoreNode:
    """A store node as its clients know it. `address` is `host:port` of its RPC listener."""

    member_id: str
    address: str
    capacity_bytes: int
    host_id: str = ""


def nodes_of(peers: Iterable[Peer]) -> list[StoreNode]:
    """Return store nodes from what they say of themselves in the membership."""
    return [
        StoreNode(
            member_id=peer.member_id,
            address=peer.address,
            capacity_bytes=int(peer.details.get("capacity_bytes", 0)),
            host_id=peer.host_id,
        )
        for peer in peers
    ]


def order(segment_key: bytes, nodes: Sequence[StoreNode]) -> list[StoreNode]:
    """Return all nodes, the segment's home first, then where to go when it does not answer."""
    return sorted(nodes, key=lambda node: (-score(segment_key, node), node.member_id))


def score(segment_key: bytes, node: StoreNode) -> float:
    """Return a node's score for a segment: -capacity ÷ ln(hash in (0, 1)), so that each node wins a
    share of all segments that is proportional to its capacity (weighted rendezvous hashing,
    Schindelhauer and Schomaker 2005, logarithmic method)."""
    digest = blake2b(segment_key + node.member_id.encode(), digest_size=8)
    # 53 bits, as many as a float holds: rounding must not make it 1.
    unit = ((int.from_bytes(digest.digest(), "little") >> 11) + 0.5) / 2.0**53
    return -max(node.capacity_bytes, 1) / math.log(unit)
