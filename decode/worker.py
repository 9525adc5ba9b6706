"""A decode worker's process: looks at the cluster, opens its engine, joins, answers Generate.

One request through this folder: worker (checks it, makes a ticket) → loop (admits, steps) → fetch
(pulls the prompt's blocks) → schedule (rows of each step) → sampler → stream (text) → back here, as
Delta messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack

import anyio
import anyio.abc

from kvass.common.config import Config
from kvass.common.errors import DeadlineExceeded, Invalid, Overloaded
from kvass.common.first_look import look
from kvass.common.keys import Chain, Salt
from kvass.common.member import Member
from kvass.common.metrics import BlockMetrics, WorkerMetrics
from kvass.common.model.engine import Engine
from kvass.common.model.tokenizer import Tokenizer
from kvass.common.pool.table import BlockTable
from kvass.common.rpc.server import Call, Handler
from kvass.common.wire import Delta, Done, Forget, Generate, Message, PrefillOver
from kvass.common.worker import Means, forgetting, open_means, pool_load, serve_calls, watch
from kvass.decode.fetch import Fetcher
from kvass.decode.loop import DecodeLoop, Ticket
from kvass.decode.offer import Offerer
from kvass.decode.sampler import RowState
from kvass.decode.schedule import Scheduler, Sequence
from kvass.decode.stream import TextStream
from kvass.kvstore.client.holds import unhold
from kvass.kvstore.client.store import StoreClient, open_client
from kvass.kvstore.placement import nodes_of


class Service:
    """Answers the wire's requests over one loop. Immutable; the loop owns the state."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        loop: DecodeLoop,
        store: StoreClient,
        tasks: anyio.abc.TaskGroup,
        *,
        queue_requests: int,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._loop = loop
        self._store = store
        self._tasks = tasks
        self._queue_requests = queue_requests

    def handlers(self) -> dict[type[Message], Handler]:
        return {
            Generate: self.generate,
            PrefillOver: self.prefill_over,
            Forget: forgetting(self._engine.pool),
        }

    async def generate(self, call: Call) -> None:
        """Stream a request's deltas; whatever ends this ends the request."""
        request = call.request
        assert isinstance(request, Generate)
        ticket = self._ticket(request)
        replayed = ticket.text.replayed
        if replayed.text or replayed.finish_reason:
            await call.send(
                Delta(
                    text=replayed.text,
                    finish_reason=replayed.finish_reason,
                    stop_reason=replayed.stop_reason,
                )
            )
        if replayed.finish_reason:
            return
        self._loop.submit(ticket)
        try:
            with anyio.fail_after(request.deadline_s):
                while True:
                    delta = await ticket.take()
                    await call.send(delta)
                    if delta.finish_reason:
                        return
        except TimeoutError:
            raise DeadlineExceeded(
                f"request {request.request_id} was not done within its {request.deadline_s:g} s"
            ) from None
        finally:
            self._loop.leave(ticket)

    async def prefill_over(self, call: Call) -> Done:
        """No more blocks will come for a request."""
        assert isinstance(call.request, PrefillOver)
        self._loop.prefill_over(call.request.request_id)
        return Done()

    def _ticket(self, request: Generate) -> Ticket:
        self._check(request)
        chain = Chain(
            self._engine.namespace,
            self._engine.layout.block_tokens,
            salt=Salt(request.salt),
        )
        chain.extend(request.tokens)
        table = BlockTable(self._engine.pool, chain)
        prompt = request.tokens[: request.prompt_length]
        generated = request.tokens[request.prompt_length :]
        eos = self._tokenizer.eos_token_ids
        ticket = Ticket(
            sequence=Sequence(request, table, list(request.tokens)),
            row=RowState(
                request.sampling,
                request.stop,
                prompt=prompt,
                eos_token_ids=eos,
                generated=generated,
            ),
            text=TextStream(
                self._tokenizer,
                prompt,
                request.stop,
                frozenset(eos),
                generated=generated,
                text_sent=request.text_sent if generated else None,
            ),
            on_settled=lambda indices: self._unhold(request, chain, indices),
            on_pulled=lambda: self._release_hold(request),
        )
        if not request.prefill_pending:
            ticket.prefill_over.set()
        return ticket

    def _check(self, request: Generate) -> None:
        """Refuse what cannot be served before it takes anything."""
        length, most = len(request.tokens), self._engine.max_model_len
        if not 1 <= request.prompt_length <= length:
            raise Invalid(f"prompt_length is {request.prompt_length} of {length} tokens")
        if max(request.tokens) >= self._engine.spec.vocab_size or min(request.tokens) < 0:
            raise Invalid(f"a token id is outside the vocabulary of {self._engine.spec.vocab_size}")
        total = request.prompt_length + request.stop.max_tokens
        if request.stop.max_tokens < 1 or total > most or length >= total:
            raise Invalid(
                f"{request.prompt_length} prompt tokens and max_tokens {request.stop.max_tokens} "
                f"(of which {length - request.prompt_length} are there) must be within {most}"
            )
        waiting = len(self._loop.scheduler.waiting)
        if waiting >= self._queue_requests:
            raise Overloaded(f"{waiting} requests wait on this decode worker", retry_after_s=1.0)

    def _unhold(self, request: Generate, chain: Chain, indices: Collection[int]) -> None:
        if request.hold_owner:
            unhold(self._store.router, request.hold_owner, chain, indices)

    def _release_hold(self, request: Generate) -> None:
        if request.hold_owner:
            self._tasks.start_soon(self._store.release_hold, request.hold_owner)


async def serve(
    config: Config,
    *,
    member_id: str,
    task_status: anyio.abc.TaskStatus[Mapping[str, float]] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Run a decode worker until cancelled; starts with the seconds that its engine took."""
    worker = config.decode
    await look(config, "decode", member_id)
    async with AsyncExitStack() as stack:
        means = await stack.enter_async_context(open_means(config, worker, "decode"))
        engine = means.engine
        tokenizer = Tokenizer.load(engine.model_dir)
        member = Member(
            config,
            role="decode",
            member_id=member_id,
            cluster_fields=engine.fields,
            load=lambda: _load(means, loop, worker.queue_requests),
        )
        blocks = BlockMetrics(member.registry)
        store = await stack.enter_async_context(
            open_client(
                config.transport,
                member.hello,
                member.credentials,
                memory=engine.memory,
                layout=engine.layout,
                metrics=blocks,
            )
        )
        scheduler = Scheduler(
            engine.pool, chunk_tokens=worker.chunk_tokens, batch_requests=worker.batch_requests
        )
        offerer = Offerer(store, engine.pool)
        blocks.refusals.read(lambda: offerer.dropped_count, "dropped")
        fetcher = Fetcher(store, means.costs, engine.layout.block_size)
        loop = DecodeLoop(scheduler, engine.runner, means.compute, fetcher, offerer, means.costs)
        watch(
            WorkerMetrics(member.registry),
            engine.pool,
            loop,
            running=lambda: scheduler.admitted,
            waiting=lambda: scheduler.waiting,
        )
        await stack.enter_async_context(member)
        async with anyio.create_task_group() as tasks:
            service = Service(
                engine, tokenizer, loop, store, tasks, queue_requests=worker.queue_requests
            )
            tasks.start_soon(member.follow, "store", lambda peers: store.set_nodes(nodes_of(peers)))
            tasks.start_soon(offerer.run)
            tasks.start_soon(loop.run)
            await serve_calls(config, member, means, service.handlers(), task_status)


def _load(means: Means, loop: DecodeLoop, queue_requests: int) -> dict[str, int | float | str]:
    """Return what this worker says of itself twice a second."""
    return {
        **pool_load(means),
        "running": len(loop.scheduler.admitted),
        "running_max": loop.scheduler.batch_requests,
        "waiting": len(loop.scheduler.waiting),
        "waiting_max": queue_requests,
        "waiting_tokens": loop.waiting_tokens(),
        "suspended": loop.totals.suspended,
        "step_ms": round(loop.totals.step_s * 1e3, 3),
        "overhead_ms": round(loop.totals.overhead_s * 1e3, 3),
    }
