"""What the shells of prefill and decode workers share: an engine on a thread of its own, a place in
the cluster, load and pool metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.abc

from kvass.common import namesakes
from kvass.common.collector import spare_what_is_loaded
from kvass.common.config import Config, WorkerConfig
from kvass.common.costs import Costs
from kvass.common.errors import Leaving
from kvass.common.executor import ThreadExecutor
from kvass.common.keys import BlockKey
from kvass.common.member import Member
from kvass.common.metrics import WorkerMetrics, read
from kvass.common.model.engine import Engine, open_engine
from kvass.common.native import library
from kvass.common.pool.pool import BlockPool
from kvass.common.rpc.server import Call, Handler, Server, accept, listen
from kvass.common.wire import Done, Forget, Message

DETERMINISTIC = "deterministic"  # what a worker says of its arithmetic: "yes" or "no"


@dataclass(frozen=True, slots=True)
class Means:
    """What a worker computes with, and the thread that it computes in."""

    engine: Engine
    compute: ThreadExecutor
    costs: Costs


@asynccontextmanager
async def open_means(config: Config, worker: WorkerConfig, role: str) -> AsyncIterator[Means]:
    """Open the engine in the thread that will use it; raises as `open_engine`."""
    compute = ThreadExecutor("kvass-compute")
    try:
        engine = await compute.run(lambda: open_engine(config, worker, role))
        spare_what_is_loaded()
        yield Means(engine, compute, Costs(engine.tokens_per_s))
    finally:
        compute.close()


async def serve_calls(
    config: Config,
    member: Member,
    means: Means,
    handlers: Mapping[type[Message], Handler],
    task_status: anyio.abc.TaskStatus[Mapping[str, float]],
) -> None:
    """Answer calls until cancelled; the cluster and the starter hear of it once we listen, the
    starter with the seconds that opening the engine took. Raises Invalid for a namesake."""
    listener, address = await listen(config.host)
    leaving = Leaving("it is leaving")
    server = Server(member.hello, handlers, member.credentials, last_words=leaving)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(accept, listener, server.serve_connection)
        await namesakes.refuse(member)
        tasks.start_soon(namesakes.watch, member)
        await member.announce(address, details={DETERMINISTIC: _yes_or_no(means.engine)})
        task_status.started(means.engine.took_s)


def forgetting(pool: BlockPool) -> Handler:
    """Return what answers Forget: it drops blocks from the pool that no request uses."""

    async def forget(call: Call) -> Done:
        assert isinstance(call.request, Forget)
        pool.forget([BlockKey(key) for key in call.request.keys])
        return Done()

    return forget


class Totals(Protocol):
    """What a worker's loop counts, for load reports and metrics."""

    prompt_tokens: int
    computed_tokens: int


class Loop(Protocol):
    """What both workers' loops tell. `on_step` is called with the seconds of each step."""

    on_step: Callable[[float], None]

    @property
    def totals(self) -> Totals: ...


def pool_load(means: Means) -> dict[str, int | float | str]:
    """Return the part of a load report that both workers make."""
    engine, costs, pool = means.engine, means.costs, means.engine.pool
    return {
        "total_blocks": pool.total,
        "used_blocks": pool.used,
        "cached_blocks": pool.counts()["cached"],
        "emptied_count": pool.emptied_count,
        "prefill_tokens_s": round(costs.tokens_per_s, 1),
        "pull_bytes_s": round(costs.bytes_per_s),
        DETERMINISTIC: _yes_or_no(engine),
        "deterministic_reason": engine.deterministic_reason,
        "compiled": library.in_use(),
    }


def _yes_or_no(engine: Engine) -> str:
    return "yes" if engine.deterministic else "no"


def watch(
    metrics: WorkerMetrics,
    pool: BlockPool,
    loop: Loop,
    *,
    running: Callable[[], Sized],
    waiting: Callable[[], Sized],
) -> None:
    """Let the gauges read pool, loop and scheduler whenever they are scraped; time the steps."""
    read(metrics.total_blocks, lambda: pool.total)
    read(metrics.used_blocks, lambda: pool.used)
    read(metrics.usage_percent, lambda: 100 * pool.used / pool.total)
    read(metrics.running, lambda: len(running()))
    read(metrics.waiting, lambda: len(waiting()))
    metrics.prompt_tokens.read(lambda: loop.totals.prompt_tokens)
    metrics.computed_tokens.read(lambda: loop.totals.computed_tokens)
    loop.on_step = metrics.step_seconds.observe
