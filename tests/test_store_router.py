"""Which nodes a client asks for a block: wherever it may have been put, and no more than that."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvass.kvstore.placement import Placement, StoreNode
from kvass.kvstore.router import NODES_BEYOND, Router

# Of each node its host, and whether it drains.
clusters = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=8)


def asked(router: Router, segment: bytes, *, writing: bool) -> list[str]:
    """Return the nodes that are gone to, one after the other, as long as none has the block."""
    tried: set[tuple[bytes, str]] = set()
    while (link := router.first(segment, tried, writing=writing)) is not None:
        tried.add((segment, link.node.member_id))
    return [name for _, name in tried]


@given(clusters, st.integers(1, 3), st.integers(0, 2**32))
def test_readers_look_wherever_writers_put(
    cluster: list[tuple[int, bool]], copies: int, seed: int
) -> None:
    nodes = [
        StoreNode(f"n{at}", f"a{at}", 1 << 20, f"h{host}", copies, draining)
        for at, (host, draining) in enumerate(cluster)
    ]
    unused: Any = None
    router = Router(unused, unused, unused, Counter(), lambda: 0.0)
    router.set_nodes(nodes)
    segment = random.Random(seed).randbytes(32)
    homes = {node.member_id for node in Placement(nodes).homes(segment, copies)}
    taking = Placement(node for node in nodes if not node.draining)
    read = asked(router, segment, writing=False)
    assert {*homes, *(node.member_id for node in taking.homes(segment, copies))} <= set(read)
    assert len(read) <= 2 * copies + NODES_BEYOND
    if len(taking.nodes) == len(nodes):
        assert len(read) <= copies + NODES_BEYOND
    drained = {node.member_id for node in nodes if node.draining}
    assert drained.isdisjoint(asked(router, segment, writing=True))
