"""One prefill job's life: find what is there, claim and compute the gaps, publish, report.

    for each segment, in chain order, one segment ahead of the compute:
        in the own pool ──────────────> share it
        in the store ─────────────────> pull it, if that is sooner than computing it
        nobody has it ────────────────> claim it: ours to compute
        somebody else computes it ────> wait until it is there, or free to claim

Blocks behind the last gap are not touched: the job's contract is that they exist in the store, and
they do. It holds no request state; cancelling it at any point loses time only, since what it
claimed runs out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from kvass.common import errors
from kvass.common.costs import Costs
from kvass.common.keys import indices_of, ranges_of, segments
from kvass.common.wire import PrefillProgress, Range
from kvass.kvstore.client.store import StoreClient
from kvass.prefill.publish import Publisher
from kvass.prefill.schedule import Job

LOOKUP_S = 2.0
PULL_S = 10.0
# Nodes may disagree for a while about who has a claim: one that is about to leave knows of none,
# and the next one says that it is taken. Between two looks at them this much passes, at least.
PAUSE_S = 0.01
WAIT_S = 2.0  # then look again, whatever happened to who claimed the blocks


@dataclass(slots=True, eq=False)
class Run:
    """A job that runs, with what its tasks share.

    `on_move` tells the loop that there may be something to compute. Mutable fields: `stored`
    (blocks known to be in the store), `computing` (keys of blocks that are there and computed all
    the same), `moved` (set and replaced whenever anything changes), `is_over`.
    """

    job: Job
    publisher: Publisher
    on_move: Callable[[], None]
    stored: set[int] = field(default_factory=set)
    computing: set[bytes] = field(default_factory=set)
    moved: anyio.Event = field(default_factory=anyio.Event)
    is_over: bool = False

    def move(self) -> None:
        """Wake everything that waits for this job."""
        self.moved.set()
        self.moved = anyio.Event()
        self.on_move()

    def progress(self) -> PrefillProgress:
        """Return the report of now."""
        return PrefillProgress(
            computed=tuple(self.job.computed),
            missing=tuple(self._missing()) if self.is_over else (),
            done=self.is_over,
        )

    def not_stored(self) -> str:
        """Say how many blocks are not in the store, and why; empty if all are."""
        missing = [i for i in range(self.job.block_count) if i not in self.stored]
        if not missing:
            return ""
        refused = self.publisher.refused
        reasons = Counter(refused.get(index, "not offered") for index in missing)
        why = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        return f"{len(missing)} of {self.job.block_count} blocks not stored: {why}"

    def _missing(self) -> list[Range]:
        return ranges_of(i for i in range(self.job.block_count) if i not in self.stored)


class Resolver:
    """Decides every block's fate for jobs of one worker.

    Mutable field: `_computing`, keys of blocks that a job computes though they are in the store.
    """

    def __init__(self, store: StoreClient, costs: Costs, block_size: int, claim_s: float) -> None:
        self._store = store
        self._costs = costs
        self._block_size = block_size
        self._claim_s = claim_s
        self._computing: set[bytes] = set()

    async def run(self, run: Run) -> None:
        """Bring a running job to its end; its blocks are computed by the loop meanwhile."""
        job, chain = run.job, run.job.table.chain
        # The gateway has looked, some time ago.
        found = await self._store.lookup(
            chain, [(0, job.block_count)], deadline_s=LOOKUP_S, again=True
        )
        run.stored.update(indices_of(found))
        gaps = [i for i in range(job.block_count) if i not in run.stored]
        failure: errors.KvassError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.publisher.run, run)
            tasks.start_soon(self._renew, run)
            # What this pool has and the store has lost is offered again.
            run.publisher.publish([i for i in gaps if job.table.ready[i]])
            to_compute = [i for i in gaps if not job.table.ready[i]]
            try:
                if to_compute:
                    await self._resolve(run, to_compute[-1] + 1)
                await run.publisher.flush()
            except errors.KvassError as error:
                failure = error  # raised outside, where it is in no group
            finally:
                self._computing -= run.computing
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        run.is_over = True
        run.move()

    async def _resolve(self, run: Run, stop: int) -> None:
        for low, high in segments(0, stop):
            # A segment ahead: claims must not run out before their turn comes.
            before = max(0, low - (high - low)) if low else 0
            await self._reach(run, before)
            await self._settle(run, low, high)
        await self._reach(run, stop)

    async def _reach(self, run: Run, block: int) -> None:
        """Wait until everything before `block` is in the pool."""
        table = run.job.table
        while True:
            table.advance()
            if table.frontier >= block * table.block_tokens:
                return
            await run.moved.wait()

    async def _settle(self, run: Run, low: int, high: int) -> None:
        """Give every block of [low, high) a fate: in the pool, or ours to compute."""
        job, table = run.job, run.job.table
        while True:
            open_blocks = [i for i in range(low, high) if not table.ready[i] and not job.ours[i]]
            shared = [i for i in open_blocks if table.share(i)]
            # Whoever computed it may have failed to publish it; a block that is there costs no
            # push.
            run.publisher.publish([i for i in shared if i not in run.stored])
            open_blocks = [i for i in open_blocks if i not in shared]
            if not open_blocks:
                run.move()
                return
            there = [i for i in open_blocks if i in run.stored]
            if there:
                await self._load(run, there)
            else:
                await self._claim(run, open_blocks)
            run.move()

    async def _load(self, run: Run, indices: list[int]) -> None:
        """Pull blocks where that pays; what did not come, or does not pay, is ours to compute.

        Of many jobs that want a block at once one may find computing it cheaper; the others pull.
        """
        job, table = run.job, run.job.table
        size, keys = self._block_size, run.job.table.chain.keys
        chosen: list[int] = []
        for low, high in ranges_of(indices):
            wanted = keys[low:high]
            count = high - low
            if not self._computing.isdisjoint(wanted) or self._costs.loading_pays(
                count * size, count * table.block_tokens
            ):
                chosen += range(low, high)
            else:
                self._computing.update(wanted)
                run.computing.update(wanted)
        if chosen:
            begun_s = anyio.current_time()
            slots = [table.slots[index] for index in chosen]
            with self._costs.pulling():
                landed = await self._store.pull(table.chain, chosen, slots, deadline_s=PULL_S)
                self._costs.pulled(len(landed) * size, anyio.current_time() - begun_s)
            for index in landed:
                table.landed(index)
        for index in indices:
            job.ours[index] = not table.ready[index]

    async def _claim(self, run: Run, indices: list[int]) -> None:
        """Claim what nobody has; wait for what others compute."""
        job, chain = run.job, run.job.table.chain
        ranges = ranges_of(indices)
        result = await self._store.claim(
            chain, ranges, owner=job.request.job_id, deadline_s=LOOKUP_S
        )
        run.stored.update(indices_of(result.visible))
        for index in indices_of(result.granted):
            job.ours[index] = True
        if result.granted or result.visible:
            return
        if result.taken:
            begun_s = anyio.current_time()
            settled = await self._store.wait(
                chain, result.taken, until="settled", deadline_s=WAIT_S
            )
            run.stored.update(indices_of(settled.visible))
            if not settled.visible and anyio.current_time() - begun_s < PAUSE_S:
                await anyio.sleep(PAUSE_S)
            return
        raise errors.Unavailable("no store node answers: blocks computed here would reach nobody")

    async def _renew(self, run: Run) -> None:
        """Renew claims while the job moves on; a job that hangs lets them run out."""
        job, chain = run.job, run.job.table.chain
        while True:
            moved = run.moved
            await anyio.sleep(self._claim_s / 3)
            left = [i for i in range(job.block_count) if i < len(job.ours) and job.ours[i]]
            left = [i for i in left if i not in run.stored]
            if left and moved.is_set():
                await self._store.claim(
                    chain, ranges_of(left), owner=job.request.job_id, deadline_s=LOOKUP_S
                )

    async def release(self, job: Job) -> None:
        """Give up the claims of a job that ends early."""
        await self._store.release_claims(job.request.job_id)
