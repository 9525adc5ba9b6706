"""Two nodes and one bucket in any order of puts, gets, drops, deaths and faults: never a wrong
byte, nothing erased comes back, no slot is lost, and the bucket stays within its bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import anyio
import pytest
import trio.testing

from kvass.common.errors import Unavailable
from kvass.kvstore.node.tiers import bucket
from memory_disk import MemoryDisk
from objects_sim import BLOCK_BYTES, BLOCKS, MemoryObjects, start
from store_sim import Cluster, Worker, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio
SEEDS = range(24)
STEPS = 40
LIST_S = 30.0  # so that it happens
TENANTS = ("red", "blue")
# A node makes room in what is its own, and hears late of what the other has put.
ROOM_BYTES = 6 * BLOCKS * BLOCK_BYTES


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@dataclass
class Life:
    """Mutable fields: `put` (chains that may be there, by tenant), `gone` (chains whose erasure was
    answered)."""

    sim: Cluster
    objects: MemoryObjects
    worker: Worker
    rng: random.Random
    disks: dict[str, MemoryDisk | None]
    put: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in TENANTS})
    gone: set[int] = field(default_factory=set)
    next: int = 0

    def start(self, name: str) -> None:
        start(
            self.sim, self.objects, name,
            total_bytes=ROOM_BYTES, host=f"host-of-{name}", disk=self.disks[name],
        )  # fmt: skip

    async def step(self) -> None:
        await self.rng.choices(
            [self.store, self.ask, self.read, self.erase, self.die, self.disturb, self.wait],
            [6, 6, 6, 1, 0.7, 1.5, 4],
        )[0]()
        self.sim.check()

    async def store(self) -> None:
        seed, self.next = self.next, self.next + 1
        tenant = self.rng.choice(TENANTS)
        self.put[tenant].add(seed)
        await push(self.worker, chain_of(BLOCKS, seed=seed), range(BLOCKS), tenant=tenant)

    def any(self) -> int:
        return self.rng.randrange(max(self.next - 10, 0), self.next) if self.next else 0

    async def ask(self) -> None:
        chain = chain_of(BLOCKS, seed=self.any())
        await self.worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=2)

    async def read(self) -> None:
        """`pull` asserts that what comes is right."""
        seed = self.rng.choice(sorted(self.gone)) if self.gone and self.rng.random() < 0.3 else None
        chosen = self.any() if seed is None else seed
        there = await pull(self.worker, chain_of(BLOCKS, seed=chosen), range(BLOCKS))
        assert not there or chosen not in self.gone, f"{chosen} came back"

    async def erase(self) -> None:
        tenant = self.rng.choice(TENANTS)
        chains, self.put[tenant] = self.put[tenant], set()
        try:
            await self.worker.store.drop(tenant=tenant)
        except Unavailable:
            self.put[tenant] |= chains
        else:
            self.gone |= chains

    async def die(self) -> None:
        name = self.rng.choice(sorted(self.sim.nodes))
        self.sim.kill_node(name)
        await anyio.sleep(self.rng.choice([0.1, 3.0]))
        self.start(name)

    async def disturb(self) -> None:
        objects, rng = self.objects, self.rng
        objects.waits_s = rng.choice([0.0, 0.02, 1.0])
        share = rng.choice([0.0, 0.0, 0.2, 1.0])
        objects.refuses = lambda what, name: "no" if rng.random() < share else None
        for name in [name for name in objects.stored if rng.random() < 0.1]:
            data = objects.stored[name].data
            at = rng.randrange(len(data) + 1)
            changed = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            objects.stored[name].data = rng.choice([changed, data[:at]])
        for name in [name for name in objects.stored if rng.random() < 0.05]:
            del objects.stored[name]

    async def wait(self) -> None:
        await anyio.sleep(self.rng.choice([0.05, 1.0, 5.0]))


@pytest.mark.parametrize("seed", SEEDS)
async def test_any_order_of_anything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "LIST_S", LIST_S)
    rng = random.Random(seed)
    async with cluster() as sim:
        disk = MemoryDisk() if seed % 2 else None
        life = Life(sim, MemoryObjects(), sim.add_worker(), rng, {"store-0": disk, "store-1": None})
        for name in life.disks:
            life.start(name)
        for _ in range(STEPS):
            await life.step()
        life.objects.refuses, life.objects.waits_s = lambda what, name: None, 0.0
        await anyio.sleep(2 * LIST_S)  # everything is listed, tried again, cleared
        for gone in sorted(life.gone):
            assert await pull(life.worker, chain_of(BLOCKS, seed=gone), range(BLOCKS)) == set()
        used = sum(len(each.data) for each in life.objects.stored.values())
        assert used <= 2 * ROOM_BYTES
        for node in sim.nodes.values():
            counts = node.node.counts()
            assert counts["bucket_unerased"] == 0
            assert counts["bucket_off"] == counts["corrupt"] == 0
            assert counts["writing_blocks"] == counts["quarantined_blocks"] == 0
