"""One of many computes: claims and waiters on several nodes, when claimants and nodes fail.

    200 requests ──> two prefill workers ──claim──> three store nodes

What is computed is counted by position, when by the virtual clock.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Literal

import anyio
import pytest
import trio.testing

from hash_model import BLOCK, HashModel, reference
from kvass.common.costs import Costs
from kvass.common.model.runner import Rows
from kvass.kvstore.links import CALL_S
from memory_transport import Fault
from store_sim import LAYOUT, Cluster, chain_of, cluster, push
from worker_sim import CLAIM_S, Prefiller, add_decoder, add_prefiller

pytestmark = pytest.mark.anyio

TOKENS = 256 * BLOCK  # as many blocks as 4,096 tokens are where a block is 16 tokens
REQUESTS = 200
# Beyond the claim: the tick that ends it, the step that had begun, and the calls about it.
SLICE_S = 0.5
JOBS_S = 60.0  # virtual seconds of all jobs together, whatever happens


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@dataclass(slots=True)
class Computed:
    """What workers computed. Mutable fields: `times` by position, `steps` (when, by worker),
    `half` (set when half of the positions were computed)."""

    times: Counter[int] = field(default_factory=Counter)
    steps: list[tuple[float, str]] = field(default_factory=list)
    half: anyio.Event = field(default_factory=anyio.Event)

    def gap_s(self, worker: str, since_s: float) -> float:
        """Return the longest time that a worker did nothing, from a moment to its last step."""
        times = [since_s, *(at_s for at_s, who in self.steps if who == worker and at_s > since_s)]
        return max((b - a for a, b in pairwise(times)), default=0.0)


@dataclass(slots=True)
class Watched:
    """A model whose steps are written down."""

    name: str
    model: HashModel
    computed: Computed

    def run(self, pieces: Sequence[Rows]) -> object:
        for piece in pieces:
            if piece.write:
                self.computed.times.update(range(piece.start, piece.start + len(piece.tokens)))
        self.computed.steps.append((anyio.current_time(), self.name))
        if len(self.computed.times) >= TOKENS // 2:
            self.computed.half.set()
        return self.model.run(pieces)


def watched(prefiller: Prefiller, name: str, computed: Computed) -> Prefiller:
    prefiller.loop._steps = Watched(name, prefiller.model, computed)
    return prefiller


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16) for _ in range(length)]


def add_stores(sim: Cluster, count: int = 3, blocks: int = TOKENS // BLOCK) -> None:
    for number in range(count):
        sim.add_node(f"store-{number}", blocks=blocks, claim_s=CLAIM_S)


def worker(sim: Cluster, number: int, computed: Computed) -> Prefiller:
    name = f"prefill-{number}"
    return watched(add_prefiller(sim, name, slots=9 * TOKENS // BLOCK, batch=8), name, computed)


async def many(prefiller: Prefiller, prompt: list[int], count: int, name: str) -> None:
    """Run jobs for one prompt, all at once; each must bring everything into the store."""

    async def one(number: int) -> None:
        progress = await prefiller.prefill(prompt, f"{name}-{number}")
        assert progress.done and not progress.missing

    with anyio.fail_after(JOBS_S):
        async with anyio.create_task_group() as tasks:
            for number in range(count):
                tasks.start_soon(one, number)


async def check_answer(sim: Cluster, prompt: list[int]) -> None:
    """The store has the whole prompt, rightly: a decode worker computes none of its KV."""
    decoder = add_decoder(sim, slots=len(prompt) // BLOCK + 8)
    answer, ranges = await decoder.answer(decoder.ticket(prompt, 3, name="asked"))
    assert answer == reference(prompt, 3)
    assert not ranges


async def test_many_requests_for_one_new_prefix_compute_each_block_once() -> None:
    async with cluster() as sim:
        add_stores(sim)
        computed, prompt = Computed(), prompt_of(TOKENS)
        async with anyio.create_task_group() as tasks:
            for number in range(2):
                prefiller = worker(sim, number, computed)
                tasks.start_soon(many, prefiller, prompt, REQUESTS // 2, f"job-{number}")
        assert computed.times == Counter(range(TOKENS))
        await check_answer(sim, prompt)


async def test_a_claimant_that_dies_costs_its_claim_and_no_more() -> None:
    async with cluster() as sim:
        add_stores(sim)
        computed, prompt = Computed(), prompt_of(TOKENS)
        other = worker(sim, 1, computed)
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as dying:
                claimant = add_prefiller(sim, slots=9 * TOKENS // BLOCK, tasks=dying)
                watched(claimant, "prefill-0", computed)
                dying.start_soon(many, claimant, prompt, REQUESTS // 2, "first")
                await anyio.sleep(0.2)
                tasks.start_soon(many, other, prompt, REQUESTS // 2, "second")
                await computed.half.wait()
                killed_s = anyio.current_time()
                sim.kill_worker(claimant.worker)
                dying.cancel_scope.cancel()
        assert set(computed.times) == set(range(TOKENS))
        twice = [position for position, times in computed.times.items() if times > 1]
        assert max(computed.times.values()) <= 2 and len(twice) <= 64 * BLOCK, "a segment ahead"
        assert computed.gap_s("prefill-1", killed_s) <= CLAIM_S + SLICE_S
        await check_answer(sim, prompt)


Trouble = Literal["dies", "hangs", "drains", "drains unseen"]


async def trouble(sim: Cluster, member_id: str, what: Trouble) -> None:
    """Let something happen to a node."""
    if what == "dies":
        sim.kill_node(member_id)
        del sim.nodes[member_id]
        await anyio.sleep(1.0)
        sim.share_view()
    elif what == "hangs":
        sim.hang_node(member_id, True)
        await anyio.sleep(8.0)
        sim.hang_node(member_id, False)
    else:
        sim.nodes[member_id].node.drain()
        await anyio.sleep(1.0 if what == "drains unseen" else 0.0)
        sim.share_view()


@pytest.mark.parametrize("what", ["dies", "hangs", "drains", "drains unseen"])
async def test_a_claims_home_in_trouble_costs_at_most_a_second_computing(what: Trouble) -> None:
    async with cluster() as sim:
        add_stores(sim, blocks=2 * TOKENS // BLOCK)
        computed, prompt = Computed(), prompt_of(TOKENS)
        async with anyio.create_task_group() as tasks:
            for number in range(2):
                prefiller = worker(sim, number, computed)
                tasks.start_soon(many, prefiller, prompt, 20, f"job-{number}")
            await computed.half.wait()
            claims = {name: len(node.index.claims) for name, node in sim.nodes.items()}
            home = max(sorted(claims), key=lambda name: claims[name])
            assert claims[home]
            begun_s = anyio.current_time()
            await trouble(sim, home, what)
        assert set(computed.times) == set(range(TOKENS))
        assert max(computed.times.values()) <= 2
        # A hanging node's silence is noticed by a call, and it is asked again once or twice.
        waited_s = max(computed.gap_s(f"prefill-{number}", begun_s) for number in range(2))
        assert waited_s <= CLAIM_S + 4 * CALL_S + SLICE_S
        sim.share_view()
        await check_answer(sim, prompt)


@pytest.mark.parametrize("lengths", [(96,), (24, 24, 24, 24)], ids=["one", "four"])
async def test_prompts_of_three_slabs_are_answered_and_what_is_held_is_pulled(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A working set of three times the slab, and others who fill it with what no request waits for:
    what was stored for a request is there when it is pulled, what was not is computed, and nobody
    waits for ever. Held bytes are counted at admission: for more the answer is `full`."""
    monkeypatch.setattr(Costs, "loading_pays", lambda costs, size, tokens: True)
    async with cluster() as sim:
        node = sim.add_node("store-0", blocks=32, claim_s=CLAIM_S)
        prefiller = add_prefiller(sim, slots=4 * 96)
        decoder = add_decoder(sim, slots=2 * 96)
        others = sim.add_worker("decode-1")
        slow = decoder.worker.hello.start_id  # it pulls later than prefill pushes
        sim.fabric.fault = lambda attempt: Fault(delay_s=2.0 * (attempt.target == slow))

        async def serve(number: int, blocks: int) -> None:
            prompt, name = prompt_of(blocks * BLOCK + 1, seed=number), f"r{number}"
            ticket = decoder.ticket(prompt, 3, name=name, prefill_pending=True)
            missing: set[int] = set()

            async def prefill() -> None:
                progress = await prefiller.prefill(prompt, name)
                missing.update(i for low, high in progress.missing for i in range(low, high))
                ticket.prefill_over.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(prefill)
                answer, ranges = await decoder.answer(ticket)
            assert answer == reference(prompt, 3)
            computed = {position // BLOCK for low, high in ranges for position in range(low, high)}
            assert computed - {blocks} <= missing, "a block was stored, and gone before its pull"

        async def crowd() -> None:
            """Store what is newer and more asked for than all that is held, more than the slab a
            second."""
            for seed in count():
                chain = chain_of(16, seed=1000 + seed)
                await push(others, chain, range(16))
                for _ in range(4):
                    await others.store.lookup(chain, [(0, 16)], deadline_s=1)
                held.append(int((await others.store.stats())[0]["held_bytes"]))
                await anyio.sleep(0.25)

        held: list[int] = []
        with anyio.fail_after(60):
            async with anyio.create_task_group() as crowding:
                crowding.start_soon(crowd)
                async with anyio.create_task_group() as tasks:
                    for number, blocks in enumerate(lengths):
                        tasks.start_soon(serve, number, blocks)
                crowding.cancel_scope.cancel()
        cap = node.index.guards.cap_bytes
        assert cap - LAYOUT.block_size < max(held) <= cap == node.slab.size // 2
        assert prefiller.worker.store.counts["push_full"]
        assert node.index.counts()["evictions"] > 2 * 32
