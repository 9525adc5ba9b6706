"""The store's client and nodes on simulated wires: every promise of the protocol, and its
faults."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest
import trio.testing

from kvass.common.transport.memory import Attempt, Fault
from kvass.common.transport.route import Setting
from kvass.kvstore.placement import order
from store_sim import LAYOUT, TP_LAYOUT, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio
WAYS: list[Setting] = ["auto", "tcp"]


@pytest.fixture
def anyio_backend() -> Iterator[tuple[str, dict[str, object]]]:
    yield "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Setting:
    setting: Setting = request.param
    return setting


async def test_what_one_worker_pushes_another_pulls(way: Setting) -> None:
    async with cluster() as sim:
        sim.add_node("store-0", setting=way)
        writer, reader = sim.add_worker("a", setting=way), sim.add_worker("b", setting=way)
        chain = chain_of(40)
        assert await push(writer, chain, range(40)) == ((0, 40),)
        assert await reader.store.lookup(chain, [(0, 40)], deadline_s=1) == [(0, 40)]
        assert await pull(reader, chain, range(40)) == set(range(40))
        counts = sim.nodes["store-0"].node.counts()
        assert counts["visible_blocks"] == 40 and counts["leases"] == 0
        assert not reader.store.counts["pull_missing"]
