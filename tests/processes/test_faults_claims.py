"""Many ask for one new prefix at once: it is computed once, and a claimant's death costs its claim.

The simulation has the same with hundreds of requests: `tests/simulation/test_store_claims.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
import pytest

from cluster import Cluster, cluster
from cluster_control import BLOCK, Control
from kvass.common.errors import KvassError
from kvass.common.keys import Chain, indices_of, ranges_of
from kvass.common.rpc.dial import Dialer
from kvass.common.wire import Prefill, PrefillProgress
from kvass.kvstore.client.store import StoreClient

pytestmark = [pytest.mark.process, pytest.mark.model]

TOKENS = 64 * BLOCK
REQUESTS = 20  # on each of two prefill workers
JOB_S = 600.0  # so long that no worker refuses a job: it takes each for all of its tokens
CLAIM_S = 2.0  # `store.claim_s`
SLACK_S = 4.0  # two steps of a worker that shares its cores with all that a machine does besides


@dataclass
class Jobs:
    """What became of jobs. Mutable fields: `computed` (times by token), `done`, `lost` (why),
    `begun` (a worker has said something of one)."""

    computed: Counter[int] = field(default_factory=Counter)
    done: int = 0
    lost: list[str] = field(default_factory=list)
    begun: anyio.Event = field(default_factory=anyio.Event)

    async def run(
        self, up: Cluster, dialer: Dialer, member_id: str, tokens: Sequence[int], name: str
    ) -> None:
        """Run one job to its end, or to its worker's."""
        client = await dialer.client(up.member(member_id)["address"])
        job = Prefill(name, tuple(tokens), "", deadline_s=JOB_S)
        try:
            async with client.stream(job, deadline_s=JOB_S) as stream:
                progress = PrefillProgress(())
                async for progress in stream:  # noqa: B007 (the last one)
                    self.begun.set()
        except KvassError as error:
            self.lost.append(repr(error))
            return
        assert progress.done and not progress.missing
        self.done += 1
        self.computed.update(i for low, high in progress.computed for i in range(low, high))


@pytest.mark.fault(number=29)
def test_many_jobs_for_one_prefix_compute_it_once_and_a_dead_claimant_is_not_waited_for() -> None:
    up_with = ("--prefill", "2", "--max-model-len", "2048", "--chunk-tokens", "128")
    with cluster(*up_with) as up:
        control = Control(up, ("cluster.max_model_len=2048",))
        anyio.run(each_block_is_computed_once, up, control)
        anyio.run(a_claimant_dies, up, control)
        up.until_idle()


async def each_block_is_computed_once(up: Cluster, control: Control) -> None:
    jobs, prompt = Jobs(), control.prompt(TOKENS, seed=1)
    async with control._dialer() as (dialer, _), anyio.create_task_group() as tasks:
        for number in range(2 * REQUESTS):
            member_id = f"prefill-{number % 2}"
            tasks.start_soon(jobs.run, up, dialer, member_id, prompt, f"once-{number}")
    assert jobs.done == 2 * REQUESTS, jobs.lost
    assert jobs.computed == Counter(range(TOKENS))


async def watch(store: StoreClient, chain: Chain, moved: list[float]) -> None:
    """Note when blocks come into the store, until all are there."""
    left = set(range(len(chain.keys)))
    while left:
        news = await store.wait(chain, ranges_of(sorted(left)), until="visible", deadline_s=JOB_S)
        assert news.visible
        left -= set(indices_of(news.visible))
        moved.append(time.monotonic())


async def a_claimant_dies(up: Cluster, control: Control) -> None:
    first, second, prompt = Jobs(), Jobs(), control.prompt(TOKENS, seed=2)
    moved: list[float] = []
    async with control._dialer() as (dialer, store), anyio.create_task_group() as tasks:
        for number in range(REQUESTS):
            run = partial(first.run, up, dialer, "prefill-0", prompt, f"first-{number}")
            tasks.start_soon(run)
        chain = control.chain(prompt)
        every = [(0, len(chain.keys))]
        assert (await store.wait(chain, every, until="visible", deadline_s=JOB_S)).visible
        for number in range(REQUESTS):
            run = partial(second.run, up, dialer, "prefill-1", prompt, f"second-{number}")
            tasks.start_soon(run)
        with anyio.fail_after(30):
            await second.begun.wait()
            found = indices_of(await store.lookup(chain, every, deadline_s=JOB_S))
            left = sorted(set(range(len(chain.keys))) - set(found))
            assert left, "it was too late"
            # From here on it waits for what the other one computes.
            await store.wait(chain, ranges_of(left), until="visible", deadline_s=JOB_S)
        up.kill("prefill-0")
        killed_s = time.monotonic()
        tasks.start_soon(watch, store, chain, moved)
    assert first.lost and second.done == REQUESTS and not second.lost
    assert max(second.computed.values(), default=1) == 1, "twice by one worker"
    waited_s = max(b - a for a, b in zip([killed_s, *moved], moved, strict=False))
    assert waited_s < CLAIM_S + SLACK_S
