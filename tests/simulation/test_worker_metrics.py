"""What a worker's metrics say: each of them moves, and each reason is what had happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import anyio
import pytest
import trio.testing
from prometheus_client import CollectorRegistry

from hash_model import BLOCK
from kvass.common.block import BlockLayout
from kvass.common.metrics import BlockMetrics, WorkerMetrics
from store_sim import LAYOUT, Cluster, chain_of, cluster, faults, pull, push
from test_worker_loops import disaggregated, prompt_of
from worker_sim import add_decoder, add_prefiller

pytestmark = pytest.mark.anyio
SLOTS = 24
SMALL = BlockLayout(layers=1, kv_heads=1, head_dim=32, block_tokens=4, kv_dtype="fp8")
LOOK_S = 0.005


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def shown(registry: CollectorRegistry) -> dict[str, dict[str, float]]:
    """Return what a scrape says: every sample of every metric."""
    return {
        family.name: {
            f"{sample.name} {sample.labels}": sample.value
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
        for family in registry.collect()
    }


def unused() -> CollectorRegistry:
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    BlockMetrics(registry)
    return registry


async def test_every_metric_of_a_worker_moves() -> None:
    registries = [CollectorRegistry(), CollectorRegistry()]
    at_first = [shown(registry) for registry in (unused(), unused())]
    still = [set(each) for each in at_first]

    async def look() -> None:
        while True:
            for each, first, registry in zip(still, at_first, registries, strict=True):
                for name, samples in shown(registry).items():
                    if any(value != first[name].get(of, 0.0) for of, value in samples.items()):
                        each.discard(name)
            await anyio.sleep(LOOK_S)

    async with cluster() as sim, anyio.create_task_group() as tasks:
        sim.add_node("store-0", blocks=SLOTS // 2)  # full, soon
        prefiller = add_prefiller(sim, slots=SLOTS, registry=registries[0])
        decoder = add_decoder(sim, slots=SLOTS, registry=registries[1])
        for registry in registries:
            assert "kvass_prefix_cache_hit_rate" not in shown(registry), "idle, there is none"
        tasks.start_soon(look)
        async with anyio.create_task_group() as requests:
            for seed in range(6):
                prompt = prompt_of(8 * BLOCK + 1, seed=seed % 3)
                for worker in (prefiller, decoder):
                    requests.start_soon(
                        disaggregated, prefiller, decoder, prompt, 9, f"{seed} {type(worker)}"
                    )
        chain = chain_of(1)  # nobody has it
        for store in (prefiller.worker.store, decoder.worker.store):
            assert await store.pull(chain, [0], [0], deadline_s=1) == set()
        sim.kill_node("store-0")
        await disaggregated(prefiller, decoder, prompt_of(3 * BLOCK, seed=9), 9, "no store")
        await anyio.sleep(10 * LOOK_S)
        tasks.cancel_scope.cancel()
    assert still == [set(), set()]


def corrupt(sim: Cluster) -> None:
    faults(sim, "read", "corrupt")


def fail(sim: Cluster) -> None:
    faults(sim, "read", "failed")


def lose(sim: Cluster) -> None:
    for key in chain_of(4).keys:
        index = sim.nodes["store-0"].index
        index.drop(lambda header, key=key: header.key == key, 0.0)  # type: ignore[misc]


def leave(sim: Cluster) -> None:
    sim.workers[0].store.set_nodes([])


def nothing(sim: Cluster) -> None:
    pass


@pytest.mark.parametrize(
    ("happens", "misses", "refusals"),
    [
        (nothing, {}, {}),
        (corrupt, {"corrupt": 1}, {"corrupt": 1}),
        (fail, {"failed": 4}, {"failed": 4}),
        (lose, {"gone": 4}, {}),
        (leave, {"unavailable": 4}, {"unavailable": 4}),
    ],
)
async def test_misses_and_refusals_say_why(
    happens: Callable[[Cluster], None], misses: dict[str, int], refusals: dict[str, int]
) -> None:
    registry = CollectorRegistry()

    def counted(name: str) -> Counter[str]:
        families = [each for each in registry.collect() if each.name == name]
        return +Counter({s.labels["reason"]: int(s.value) for s in families[0].samples})

    async with cluster() as sim:
        sim.add_node("store-0", blocks=8)
        worker = sim.add_worker(metrics=BlockMetrics(registry))
        await push(worker, chain_of(4), range(4))
        happens(sim)
        await pull(worker, chain_of(4), range(4))
        assert counted("kvass_block_misses") == misses
        assert not counted("kvass_block_refusals")
        await push(worker, chain_of(4, seed=1), range(4))
        assert counted("kvass_block_refusals") == refusals
        assert not counted("kvass_store_failed_calls")


async def test_a_job_says_why_its_blocks_are_not_stored() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=8)  # half of it for blocks that are held
        prefiller = add_prefiller(sim)
        await prefiller.prefill(prompt_of(4 * BLOCK), "fits")
        assert prefiller.not_stored == ""
        await prefiller.prefill(prompt_of(4 * BLOCK, seed=1), "full")
        assert prefiller.not_stored == "4 of 4 blocks not stored: full (4)"


async def test_a_node_says_once_that_no_block_fits(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=1, layout=SMALL)
        worker = sim.add_worker()
        for seed in range(3):
            result = await worker.store.push(
                chain_of(1, seed=seed), [0], [0], hold_owner=None, tenant="", deadline_s=1
            )
            assert result.refused == {0: "full"}
    (line,) = [each for each in caplog.messages if "no block" in each]
    assert str(LAYOUT.block_size) in line and f"leaves {SMALL.block_size} for blocks" in line


async def test_a_block_that_is_stored_already_moves_no_bytes() -> None:
    registry = CollectorRegistry()
    async with cluster() as sim:
        sim.add_node("store-0", blocks=8)
        worker = sim.add_worker(metrics=BlockMetrics(registry))
        for _ in range(2):
            assert await push(worker, chain_of(4), range(4)) == ((0, 4),)
    pushed = registry.get_sample_value("kvass_transfer_bytes_total", {"direction": "push"})
    assert pushed == worker.memory.array[:4].nbytes
