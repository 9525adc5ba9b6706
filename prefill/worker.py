"""A prefill worker's process: looks at the cluster, opens its engine, joins, answers Prefill.

One job through this folder: worker (checks it) → loop (admits, steps) → job (finds, claims, pulls)
→ schedule (chunks of each step) → publish (pushes full blocks) → back here, as PrefillProgress
messages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack

import anyio
import anyio.abc

from kvass.common.clock import LoopClock
from kvass.common.config import Config
from kvass.common.costs import Costs
from kvass.common.errors import DeadlineExceeded, Invalid, KvassError, Overloaded
from kvass.common.first_look import look
from kvass.common.keys import Chain, Salt
from kvass.common.member import Member
from kvass.common.membership import Role
from kvass.common.metrics import AuditMetrics, BlockMetrics, WorkerMetrics
from kvass.common.model import known_answer
from kvass.common.model.block_error import block_error, digest
from kvass.common.model.engine import Engine
from kvass.common.pool.table import BlockTable
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.server import Call, Handler
from kvass.common.wire import WORKER_REPLIES, Forget, Message, Prefill, PrefillProgress, Tags
from kvass.common.worker import Means, forgetting, open_means, pool_load, serve_calls, watch
from kvass.kvstore.client.store import StoreClient, open_client
from kvass.kvstore.placement import nodes_of
from kvass.prefill.audit import Arithmetic, Auditor, Bench
from kvass.prefill.job import Resolver, Run
from kvass.prefill.loop import PrefillLoop
from kvass.prefill.publish import Publisher
from kvass.prefill.schedule import Job, Scheduler, due_s

_log = logging.getLogger(__name__)

FORGET_S = 2.0
WORKERS: tuple[Role, ...] = ("prefill", "decode")  # they write blocks
REPORT_S = 1.0  # a job that waits says so: its caller tells waiting from hanging by it


class Service:
    """Answers the wire's requests over one loop. Immutable; the loop owns the state."""

    def __init__(
        self,
        engine: Engine,
        loop: PrefillLoop,
        store: StoreClient,
        costs: Costs,
        *,
        queue_requests: int,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._store = store
        self._costs = costs
        self._queue_requests = queue_requests
        self._clock = LoopClock()

    def handlers(self) -> dict[type[Message], Handler]:
        return {Prefill: self.prefill, Forget: forgetting(self._engine.pool)}

    async def prefill(self, call: Call) -> None:
        """Stream a job's progress; whatever ends this ends the job."""
        request = call.request
        assert isinstance(request, Prefill)
        run = self._run(request)
        if run is None:
            await call.send(PrefillProgress(computed=(), done=True))
            return
        ticket = self._loop.submit(run)
        try:
            with anyio.fail_after(request.deadline_s):
                while True:
                    moved, progress = run.moved, run.progress()
                    await call.send(progress)
                    if progress.done:
                        if progress.missing:
                            _log.warning("job %s: %s", request.job_id, run.not_stored())
                        return
                    if ticket.failure is not None:
                        raise ticket.failure
                    with anyio.move_on_after(REPORT_S):
                        await moved.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"prefill job {request.job_id} was not done within {request.deadline_s:g} s"
            ) from None
        finally:
            self._loop.leave(ticket)

    def _run(self, request: Prefill) -> Run | None:
        """Check a job before it takes anything; None when it has no full block."""
        engine = self._engine
        if len(request.tokens) > engine.max_model_len:
            raise Invalid(f"{len(request.tokens)} tokens; at most {engine.max_model_len} fit")
        if request.tokens and not 0 <= min(request.tokens) <= max(request.tokens) < (
            engine.spec.vocab_size
        ):
            raise Invalid(f"a token id is outside the vocabulary of {engine.spec.vocab_size}")
        chain = Chain(
            engine.namespace,
            engine.layout.block_tokens,
            salt=Salt(request.salt),
        )
        chain.extend(request.tokens)
        if not chain.keys:
            return None
        self._admit(request)
        table = BlockTable(engine.pool, chain)
        job = Job(request, table, due_s(request, self._clock.now_s()))
        return Run(job, Publisher(self._store, request, table), self._loop.wake)

    def _admit(self, request: Prefill) -> None:
        """Refuse early what would only wait here in vain."""
        scheduler = self._loop.scheduler
        if len(scheduler.waiting) >= self._queue_requests:
            raise Overloaded(f"{len(scheduler.waiting)} jobs wait on this prefill worker")
        queue_s = scheduler.left_tokens() / self._costs.tokens_per_s
        if queue_s > request.deadline_s:
            raise Overloaded(
                f"{queue_s:.0f} s of prefill are queued here; this job's deadline is "
                f"{request.deadline_s:.0f} s",
                retry_after_s=queue_s,
            )


async def serve(
    config: Config,
    *,
    member_id: str,
    task_status: anyio.abc.TaskStatus[Mapping[str, float]] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Run a prefill worker until cancelled; starts with the seconds that its engine took."""
    worker = config.prefill
    await look(config, "prefill", member_id)
    async with AsyncExitStack() as stack:
        means = await stack.enter_async_context(open_means(config, worker, "prefill"))
        engine = means.engine
        member = Member(
            config,
            role="prefill",
            member_id=member_id,
            cluster_fields=engine.fields,
            load=lambda: _load(means, loop, worker.queue_requests),
        )
        store = await stack.enter_async_context(
            open_client(
                config.transport,
                member.hello,
                member.credentials,
                memory=engine.memory,
                layout=engine.layout,
                metrics=BlockMetrics(member.registry),
            )
        )
        scheduler = Scheduler(
            chunk_tokens=worker.chunk_tokens, batch_requests=worker.batch_requests
        )
        resolver = Resolver(store, means.costs, engine.layout.block_size, config.store.claim_s)
        loop = PrefillLoop(scheduler, engine.runner, means.compute, resolver, means.costs)
        watch(
            WorkerMetrics(member.registry),
            engine.pool,
            loop,
            running=lambda: scheduler.running,
            waiting=lambda: scheduler.waiting,
        )
        await stack.enter_async_context(member)
        async with anyio.create_task_group() as tasks:
            dialer = Dialer(tasks, member.hello, Tags(WORKER_REPLIES), member.credentials)
            auditor = _auditor(config, member, store, loop, means, dialer)
            service = Service(
                engine, loop, store, means.costs, queue_requests=worker.queue_requests
            )
            tasks.start_soon(member.follow, "store", lambda peers: store.set_nodes(nodes_of(peers)))
            tasks.start_soon(loop.run)
            tasks.start_soon(auditor.run)
            for role in WORKERS:
                tasks.start_soon(member.follow, role, auditor.arithmetic.heard)
            await serve_calls(config, member, means, service.handlers(), task_status)


def _auditor(
    config: Config,
    member: Member,
    store: StoreClient,
    loop: PrefillLoop,
    means: Means,
    dialer: Dialer,
) -> Auditor:
    """Let the loop's served jobs be looked at again, in idle time."""
    engine, memory, layout = means.engine, means.engine.memory, means.engine.layout
    bench = Bench(
        pool=engine.pool,
        steps=engine.runner,
        executor=means.compute,
        error=lambda one, other: block_error(memory, layout, one, other),
        deterministic=engine.deterministic,
        digest=lambda slots: digest(memory, layout, slots),
        probe=known_answer.prompt(engine.spec),
        block_tokens=layout.block_tokens,
        chunk_tokens=config.prefill.chunk_tokens,
        on_release=loop.wake,
    )
    auditor = Auditor(
        name=member.hello.member_id,
        store=store,
        loop=loop,
        bench=bench,
        arithmetic=Arithmetic(),
        empty_pools=lambda: _empty_pools(member, dialer),
        share=config.prefill.audit_share,
    )
    loop.on_served = auditor.served
    shown = AuditMetrics(member.registry)
    shown.blocks.read(lambda: auditor.right, "right")
    shown.blocks.read(lambda: auditor.wrong, "wrong")
    shown.barred.read(lambda: auditor.barred)
    return auditor


async def _empty_pools(member: Member, dialer: Dialer) -> None:
    """Let all workers, this one too, forget the blocks that they do not use; raises when one does
    not answer."""
    failures: list[KvassError] = []
    for peer in [peer for role in WORKERS for peer in member.live(role)]:
        try:
            client = await dialer.client(peer.address)
            await client.call(Forget(), deadline_s=FORGET_S)
        except KvassError as error:
            failures.append(error)  # the others are told all the same
    if failures:
        raise failures[0]


def _load(means: Means, loop: PrefillLoop, queue_requests: int) -> dict[str, int | float | str]:
    """Return what this worker says of itself twice a second."""
    return {
        **pool_load(means),
        "running": len(loop.scheduler.running),
        "waiting": len(loop.scheduler.waiting),
        "waiting_max": queue_requests,
        "waiting_tokens": loop.scheduler.left_tokens(),
        "step_ms": round(loop.totals.step_s * 1e3, 3),
    }
