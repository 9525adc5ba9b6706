"""Checking, in idle time, that what other workers wrote is what this one computes.

    a job was served ──> its chain is remembered ──idle──> who wrote its blocks?
        blocks of others ──> pull some, compute them anew from the tokens, compare
            equal, or as near as rounding can be where somebody rounds otherwise ──> right
            not so ──> compute and pull again, and prove oneself on a known prompt;
                          then go back to the first block of the chain that is wrong
                the block before is the same writer's, and right ──> the writer is barred
                else ──> this block and those after it are dropped: who wrote it may have
                         computed upon another one's wrong block, which is gone
            and the workers' pools are emptied of what they do not use: who pulled a wrong block
            has it there, and would go on from it

Blocks carry no tokens, so a worker checks chains of its own jobs; blocks of a chain's beginning
only, since each must be computed from the first token on, and nothing that the store says is taken
for granted. It costs `audit_share` of the worker's time at most. No job waits for more than the
step under way; where the pool has no room for both, for the audit's end. A worker that fails its
own test ends itself: it must not commit blocks.

Workers of one namespace that are deterministic compute the same bits (`device_kind`): between them
one other bit is a fault. Where the auditor, or a writer up to the block, is not deterministic or
not known, a measured bound takes the place of equality (`block_error`), which small faults pass.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import anyio

from kvass.common.errors import KvassError, Unavailable
from kvass.common.executor import Executor
from kvass.common.keys import Chain
from kvass.common.membership import Peer
from kvass.common.model.runner import Rows
from kvass.common.pool.pool import BlockPool
from kvass.common.worker import DETERMINISTIC
from kvass.kvstore import messages as m
from kvass.kvstore.client import erase
from kvass.kvstore.client.store import StoreClient
from kvass.prefill.loop import PrefillLoop, Steps
from kvass.prefill.schedule import Job

_log = logging.getLogger(__name__)

CHAINS_KEPT = 8  # of the latest jobs
BLOCKS_MAX = 256  # of a chain, from its beginning: 4,096 tokens of the default block
RUN_BLOCKS = 8  # compared by one audit
WORKERS_KNOWN_MAX = 1024
LOOK_S = 1.0
Look = Literal["right", "wrong", "gone"]
CALL_S = 2.0
PULL_S = 10.0


@dataclass(frozen=True, slots=True)
class Bench:
    """What an auditor computes with and compares by. `error` of two slots is 0.0 where all bits are
    equal, and at most 1.0 where rounding explains it, as it can unless this worker is
    `deterministic`. `digest` names the bytes of slots. `probe` is a known prompt. `on_release`
    tells that slots came back: a job may wait for them."""

    pool: BlockPool
    steps: Steps
    executor: Executor
    error: Callable[[int, int], float]
    deterministic: bool
    digest: Callable[[Sequence[int]], bytes]
    probe: Sequence[int]
    block_tokens: int
    chunk_tokens: int
    on_release: Callable[[], None]

    @contextmanager
    def slots(self, count: int) -> Iterator[list[int]]:
        """Lend slots of the pool; empty when it has too few."""
        slots = self.pool.allocate(count) or []
        try:
            yield slots
        finally:
            self.pool.release(slots)
            self.on_release()

    async def compute(self, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """Prefill tokens from the first one on."""
        for start in range(0, len(tokens), self.chunk_tokens):
            rows = Rows(tokens[start : start + self.chunk_tokens], start, slots)
            await self.executor.run(lambda rows=rows: self.steps.run([rows]))  # type: ignore[misc]

    async def probed(self) -> bytes | None:
        """Compute the known prompt; return the name of what came out, None without room."""
        count = len(self.probe) // self.block_tokens
        with self.slots(count) as slots:
            if not slots:
                return None
            await self.compute(self.probe[: count * self.block_tokens], slots)
            return await self.executor.run(lambda: self.digest(slots))

    async def differ(self, one: int, other: int, *, exactly: bool) -> bool:
        """Compare two slots: bit by bit, if this worker is deterministic too."""
        error = await self.executor.run(lambda: self.error(one, other))
        return not error <= (0.0 if exactly and self.deterministic else 1.0)  # also when it is NaN


class Arithmetic:
    """What workers said of theirs, those that have gone included. Mutable field: `_exact`, whether
    a worker of this id was ever deterministic only, by id, in order of news."""

    def __init__(self) -> None:
        self._exact: dict[str, bool] = {}

    def heard(self, peers: Iterable[Peer]) -> None:
        """Take in who is there now."""
        for peer in peers:
            always = self._exact.pop(peer.member_id, True)
            self._exact[peer.member_id] = always and peer.details.get(DETERMINISTIC) == "yes"
        while len(self._exact) > WORKERS_KNOWN_MAX:
            del self._exact[next(iter(self._exact))]

    def is_exact(self, workers: Iterable[str]) -> bool:
        """Are all of these known, and deterministic?"""
        return all(self._exact.get(worker, False) for worker in workers)


@dataclass(slots=True, eq=False)
class Auditor:
    """`empty_pools` lets every worker forget the blocks in its pool that nobody uses.

    Mutable fields: `_jobs` (the latest served), `_known` (what the probe gave at first), and the
    counts of blocks found `right` and `wrong`, and of writers `barred`.
    """

    name: str
    store: StoreClient
    loop: PrefillLoop
    bench: Bench
    arithmetic: Arithmetic
    empty_pools: Callable[[], Awaitable[None]]
    share: float
    right: int = 0
    wrong: int = 0
    barred: int = 0
    _jobs: deque[Job] = field(default_factory=lambda: deque(maxlen=CHAINS_KEPT))
    _known: bytes | None = None
    _chance: random.Random = field(default_factory=lambda: random.Random(0))

    def served(self, job: Job) -> None:
        """A job is over: its chain may be looked at."""
        self._jobs.append(job)

    async def run(self) -> None:
        """Audit while there is nothing else to do, for ever; raises Unavailable when this worker
        itself computes wrong."""
        if not self.share:
            return
        self._known = await self.bench.probed()
        pause_s = LOOK_S
        while True:
            await anyio.sleep(pause_s)
            pause_s = LOOK_S
            if self._jobs and self._is_idle():
                begun_s = anyio.current_time()
                try:
                    await self.audit(self._jobs.pop())
                except Unavailable as error:
                    if isinstance(error, OwnFault):
                        raise
                    _log.debug("audit: %s", error)
                except KvassError as error:
                    _log.debug("audit: %s", error)
                spent_s = anyio.current_time() - begun_s
                pause_s = max(LOOK_S, spent_s * (1 / self.share - 1))

    def _is_idle(self) -> bool:
        scheduler = self.loop.scheduler
        return not scheduler.running and not scheduler.waiting

    async def audit(self, job: Job) -> None:
        """Compare some blocks of others in a chain with one's own."""
        chain, tokens = job.table.chain, job.request.tokens
        count = min(len(chain.keys), BLOCKS_MAX)
        writers = await erase.writers(self.store.router, chain, range(count), CALL_S)
        others = sorted(index for index, writer in writers.items() if writer != self.name)
        if not others:
            return
        first = self._chance.choice(others)
        chosen = [index for index in others if first <= index < first + RUN_BLOCKS]
        stop = chosen[-1] + 1
        with self.bench.slots(stop) as own, self.bench.slots(len(chosen)) as theirs:
            if not own or not theirs:
                return
            place = dict(zip(chosen, theirs, strict=True))
            await self.bench.compute(tokens[: stop * chain.block_tokens], own)
            landed = await self.store.pull(chain, chosen, theirs, deadline_s=PULL_S)
            for index in sorted(landed):
                exactly = self._is_exact(index, writers)
                if await self.bench.differ(own[index], place[index], exactly=exactly):
                    await self._suspect(chain, tokens, index, writers, own)
                    return
                self.right += 1

    async def _suspect(
        self,
        chain: Chain,
        tokens: Sequence[int],
        index: int,
        writers: dict[int, str],
        own: Sequence[int],
    ) -> None:
        """Look again at a block that is not as it should be, at oneself first; then act."""
        await self._prove_oneself(tokens[: (index + 1) * chain.block_tokens], index, own)
        if await self._look(chain, index, writers, own) != "wrong":
            return  # gone, or it was the transfer
        before: Look = "gone"
        while index and (before := await self._look(chain, index - 1, writers, own)) == "wrong":
            index -= 1  # what is wrong makes all wrong that is computed upon it
        writer = writers.get(index, self.name)
        same = before == "right" and writers.get(index - 1) == writer
        proved = writer != self.name and (not index or same)
        self.wrong += 1
        _log.error("block %d of a chain, written by %s, is wrong", index, writer)
        try:
            if proved:
                await self._bar(writer)
            else:
                await self.store.drop(keys=chain.keys[index:][: m.KEYS_MAX], deadline_s=CALL_S)
            await self.empty_pools()
        except KvassError as error:
            _log.error("what is wrong is not gone everywhere: %s", error)

    async def _bar(self, writer: str) -> None:
        self.barred += 1
        gone = await erase.bar(self.store.router, writer, CALL_S)
        _log.error(
            "%s computes wrong: nothing of it is stored any more, %d blocks erased. Check its "
            "memory, device and kernels, and start it anew under another name",
            writer,
            gone,
        )

    def _is_exact(self, index: int, writers: Mapping[int, str]) -> bool:
        """Must a block be equal to ours, bit by bit? It was computed upon those before it."""
        others = {writer for at, writer in writers.items() if at <= index}
        return self.arithmetic.is_exact(others - {self.name})

    async def _look(
        self, chain: Chain, index: int, writers: Mapping[int, str], own: Sequence[int]
    ) -> Look:
        """Pull one block and compare it."""
        with self.bench.slots(1) as slots:
            if not slots or not await self.store.pull(chain, [index], slots, deadline_s=PULL_S):
                return "gone"
            exactly = self._is_exact(index, writers)
            differs = await self.bench.differ(own[index], slots[0], exactly=exactly)
            return "wrong" if differs else "right"

    async def _prove_oneself(self, tokens: Sequence[int], index: int, own: Sequence[int]) -> None:
        """Compute again, and the known prompt too; raises OwnFault when either comes out
        otherwise."""
        with self.bench.slots(index + 1) as again:
            if not again:
                raise Unavailable("no room in the pool to look twice")
            await self.bench.compute(tokens, again)
            unsteady = await self.bench.differ(own[index], again[index], exactly=True)
        probed = await self.bench.probed()
        if unsteady or self._known is None or probed != self._known:
            raise OwnFault(
                "this worker does not compute what it computed when it started: it must not commit "
                "blocks; check its memory, device and kernels"
            )


class OwnFault(Unavailable):
    """The auditor itself computes wrong."""
