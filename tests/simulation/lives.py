"""Workers as processes: a start, calls over wires, a stop, a death, and a new start.

The services, loops, pools and store clients are the real ones; only the model, the wires and the
transports are simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TypeVar, cast

import anyio
import anyio.abc

from audit_sim import auditor_of, bench_of
from hash_model import BLOCK, VOCABULARY, HashModel
from kvass.common.clock import LoopClock
from kvass.common.costs import Costs
from kvass.common.membership import Load, Role
from kvass.common.model.engine import Engine
from kvass.common.pool.pool import BlockPool
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Server
from kvass.decode import worker as decode
from kvass.decode.fetch import Fetcher
from kvass.decode.loop import DecodeLoop
from kvass.decode.offer import Offerer
from kvass.decode.schedule import Scheduler as DecodeScheduler
from kvass.prefill import worker as prefill
from kvass.prefill.audit import Auditor
from kvass.prefill.job import Resolver
from kvass.prefill.loop import PrefillLoop
from kvass.prefill.schedule import Scheduler as PrefillScheduler
from scenario import Member
from store_sim import LAYOUT, SPACE, Cluster, Handlers, Worker
from trust import CREDENTIALS
from wires import Wire
from worker_sim import tokenizer

T = TypeVar("T")
WRITERS = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(2)]
Around = Callable[[str, Handlers], Handlers]


class Compute:
    """An executor whose calls take `step_s` of virtual time each, and that stops with its process.

    As in a thread, one call after the other, and none can be interrupted. Mutable field: `_go`.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._one = anyio.Lock()
        self._go = anyio.Event()
        self._go.set()

    async def run(self, function: Callable[[], T]) -> T:
        with anyio.CancelScope(shield=True):
            async with self._one:
                await anyio.sleep(self._step_s)
                await self._go.wait()
                result = function()
        return result

    def hang(self, hung: bool) -> None:
        """Stop or go on."""
        if not hung:
            self._go.set()
        elif self._go.is_set():  # else who waits for it would never be let go
            self._go = anyio.Event()


@dataclass(eq=False)
class Life:
    """One start of one worker. Mutable fields: `alive`, `hung`, `wires`, `auditor` (of a prefill
    worker), `audits` (cancelled to end them)."""

    role: Role
    member: Member
    worker: Worker
    server: Server
    tasks: anyio.abc.TaskGroup
    pool: BlockPool
    loop: PrefillLoop | DecodeLoop
    compute: Compute
    wires: list[Wire]
    alive: bool = True
    hung: bool = False
    auditor: Auditor | None = None
    audits: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    @property
    def member_id(self) -> str:
        return self.member.member_id

    @property
    def hello(self) -> Hello:
        return self.worker.hello

    def load(self) -> Load:
        """Return what the worker says of itself twice a second."""
        waiting = self.loop.scheduler.waiting
        common = {
            "total_blocks": self.pool.total,
            "waiting": len(waiting),
            "waiting_max": self.member.queue,
            "prefill_tokens_s": self.member.chunk_blocks * BLOCK / self.member.step_s,
        }
        if isinstance(self.loop, DecodeLoop):
            running, tokens = self.loop.scheduler.admitted, self.loop.waiting_tokens()
            return {**common, "running": len(running), "waiting_tokens": tokens}
        tokens = self.loop.scheduler.left_tokens()
        return {**common, "running": len(self.loop.scheduler.running), "waiting_tokens": tokens}


async def live(
    sim: Cluster,
    member: Member,
    *,
    window: int,
    claim_s: float,
    around: Around,
    audits: bool = False,
    task_status: anyio.abc.TaskStatus[Life],
) -> None:
    """Run a worker until it is killed; starts with its life."""
    async with anyio.create_task_group() as tasks:
        worker = sim.add_worker(
            member.member_id,
            tasks=tasks,
            slots=member.size,
            host=member.host,
            setting=member.setting,
            landing_bytes=member.landing_bytes,
        )
        pool = BlockPool(member.size)
        engine = cast(
            Engine,
            SimpleNamespace(
                namespace=SPACE,
                layout=LAYOUT,
                pool=pool,
                max_model_len=window,
                spec=SimpleNamespace(vocab_size=VOCABULARY),
            ),
        )
        start = _start_decode if member.member_id.startswith("decode") else _start_prefill
        life = start(worker, member, engine, tasks, claim_s, around)
        task_status.started(life)
        if audits and life.auditor is not None:
            with life.audits:
                await life.auditor.run()
        await anyio.sleep_forever()


def _start_prefill(
    worker: Worker,
    member: Member,
    engine: Engine,
    tasks: anyio.abc.TaskGroup,
    claim_s: float,
    around: Around,
) -> Life:
    costs, compute = Costs(member.tokens_per_s), Compute(member.step_s)
    model = HashModel(worker.memory)
    loop = PrefillLoop(
        PrefillScheduler(chunk_tokens=member.chunk_blocks * BLOCK, batch_requests=member.batch),
        model,
        compute,
        Resolver(worker.store, costs, LAYOUT.block_size, claim_s),
        costs,
    )
    # Believed rates decide between loading and computing; admission must not refuse by them.
    admits = Costs(1e9)
    service = prefill.Service(engine, loop, worker.store, admits, queue_requests=member.queue)
    server = Server(worker.hello, around(member.member_id, service.handlers()), CREDENTIALS)
    tasks.start_soon(loop.run)
    pool = engine.pool
    life = Life("prefill", member, worker, server, tasks, pool, loop, compute, worker.wires)
    bench = bench_of(worker.memory, pool, model, loop)
    life.auditor = auditor_of(worker, loop, bench, [pool], WRITERS)
    return life


def _start_decode(
    worker: Worker,
    member: Member,
    engine: Engine,
    tasks: anyio.abc.TaskGroup,
    claim_s: float,
    around: Around,
) -> Life:
    costs, compute, pool = Costs(member.tokens_per_s), Compute(member.step_s), engine.pool
    offerer = Offerer(worker.store, pool)
    loop = DecodeLoop(
        DecodeScheduler(
            pool, chunk_tokens=member.chunk_blocks * BLOCK, batch_requests=member.batch
        ),
        HashModel(worker.memory),
        compute,
        Fetcher(worker.store, costs, LAYOUT.block_size),
        offerer,
        costs,
        LoopClock(),
    )
    service = decode.Service(
        engine, tokenizer(), loop, worker.store, tasks, queue_requests=member.queue
    )
    server = Server(worker.hello, around(member.member_id, service.handlers()), CREDENTIALS)
    tasks.start_soon(offerer.run)
    tasks.start_soon(loop.run)
    return Life("decode", member, worker, server, tasks, pool, loop, compute, worker.wires)
