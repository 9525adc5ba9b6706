"""One prompt's life, from its tokens to the last token of its last choice.

    lookup ──> plan ──┬── prefill job: one worker, then another, then left to decode ──┐
                      │                                        PrefillOver (to decode) │
                      └── first choice: Generate ──> first token ──> the other choices v
                             │ worker lost: prompt + tokens so far, to another one     end

Whatever happens, leaving `Session.run` leaves nothing behind: calls are cancelled at the workers,
and a hold that no decode worker took over is released. It refuses to know HTTP and text: a sink
takes the deltas.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import msgspec

from kvass.common import errors, wire
from kvass.common.rpc.client import Client
from kvass.common.wire import Range
from kvass.gateway import route
from kvass.gateway.ask import Ask
from kvass.gateway.fleet import Fleet, InFlight
from kvass.gateway.observe import note_failure
from kvass.gateway.replies import Usage

_log = logging.getLogger(__name__)

LOOKUP_S = 0.25  # a store node that takes longer is slower than computing the prompt's first blocks
DECODE_ATTEMPTS = 4  # a request that ends four workers is the likelier culprit
PREFILL_ATTEMPTS = 2  # then decode computes: a third detour costs more than it saves
FAILURES_OF_ONE = 2  # a lost connection may be the network's fault once
RESUME_WAIT_S = 10.0  # for a worker to come back to a stream that has begun
RESUME_POLL_S = 0.1
PREFILL_SLACK_S = 10.0  # beyond eight times the estimate: then the job is not slow, it hangs
PREFILL_OVER_S = 5.0
RELEASE_S = 2.0


class Sink(Protocol):
    """Takes deltas as they come; never blocks, for a client that reads slowly must not hold a
    worker's connection."""

    def put(self, choice: int, delta: wire.Delta) -> None: ...


@dataclass(slots=True, eq=False)
class Choice:
    """One of the `n` answers. All fields but `index` change."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text_sent: int = 0
    finish_reason: str = ""
    begun: anyio.Event = field(default_factory=anyio.Event)
    over: anyio.Event = field(default_factory=anyio.Event)


class Session:
    """One prompt with its choices, to be done by `end_s` on the fleet's clock.

    Mutable fields: `_choices`; `_computed` (token ranges that workers said they computed);
    `_prefilling` and `_told` (calls that were told that a prefill job fills the store, with their
    request ids); `_held` (blocks may be held under this request's id); `_stored` and `_missing`
    (ranges of blocks that the store had at first, of tokens that it lacked); `_failure` (the first
    error that ends it); `_meet` (tells the fleet that the first call was made).
    """

    def __init__(self, fleet: Fleet, ask: Ask, sink: Sink, *, end_s: float) -> None:
        self._fleet = fleet
        self._ask = ask
        self._sink = sink
        self._chain = fleet.chain(ask.tokens, ask.salt)
        self._choices = [Choice(index) for index in range(ask.choices)]
        self._computed: list[Range] = []
        self._stored: list[Range] = []
        self._missing: list[Range] = []
        self._prefilling = self._held = False
        self._told: dict[str, tuple[Client, InFlight]] = {}
        self._failure: errors.KvassError | None = None
        self._meet: Callable[[], None] = lambda: None
        self._end_s = end_s

    async def run(self) -> Usage:
        """Serve the prompt; raises KvassError when it cannot be, DeadlineExceeded when too late."""
        try:
            with anyio.move_on_after(self._left_s) as scope:
                await self._run()
            if self._failure is not None:
                raise self._failure
            if scope.cancelled_caught:
                raise errors.DeadlineExceeded(
                    f"the request was not done in {self._fleet.config.request_timeout_s:g} s"
                )
        finally:
            if self._held and not all(choice.finish_reason for choice in self._choices):
                await self._release()
        return Usage(
            prompt_tokens=len(self._ask.tokens),
            completion_tokens=sum(len(choice.token_ids) for choice in self._choices),
            cached_tokens=route.cached_tokens(len(self._ask.tokens), self._computed),
        )

    @property
    def _left_s(self) -> float:
        return max(0.0, self._end_s - self._fleet.clock.now_s())

    async def _release(self) -> None:
        with anyio.move_on_after(RELEASE_S, shield=True):
            try:
                await self._fleet.store.release_hold(self._ask.request_id)
            except errors.KvassError as error:
                _log.info("hold %s runs out by itself: %s", self._ask.request_id, error)

    async def _run(self) -> None:
        self._refuse_too_big()
        stored = self._stored = await self._lookup()
        served = self._fleet.served
        self._missing = route.missing_ranges(len(self._ask.tokens), served.block_tokens, stored)
        planned = self._plan(self._fleet.workers("decode"))
        with self._fleet.expect(planned.decode.start_id) as self._meet:
            await self._run_choices(planned)

    async def _run_choices(self, planned: route.Route) -> None:
        async with anyio.create_task_group() as tasks:
            if planned.prefill is not None:
                self._prefilling = self._held = True
                tasks.start_soon(self._prefill, planned.prefill, planned.missing_tokens)
            first, *others = self._choices
            tasks.start_soon(self._answer, first, planned, tasks.cancel_scope)
            # The others share the first one's prompt: once it has a token, its blocks are there.
            await first.begun.wait()
            for choice in others:
                tasks.start_soon(self._answer, choice, planned, tasks.cancel_scope)
            for choice in self._choices:
                await choice.over.wait()
            tasks.cancel_scope.cancel()  # a prefill job that nobody waits for any more

    def _refuse_too_big(self) -> None:
        """Refuse at admission what no pool could ever hold."""
        tokens = len(self._ask.tokens) + 1
        served = self._fleet.served
        most = route.largest_pool_tokens(served.block_tokens, self._fleet.workers("decode"))
        if most is not None and tokens > most:
            raise errors.Invalid(
                f"the prompt has {tokens - 1} tokens; the largest KV pool here holds {most}, "
                "the answer included",
                parameter="prompt",
            )

    async def _lookup(self) -> list[Range]:
        if not self._chain.keys:
            return []
        try:
            return await self._fleet.store.lookup(
                self._chain,
                [(0, len(self._chain.keys))],
                deadline_s=LOOKUP_S,
                stage_s=self._fleet.config.stage_s,
            )
        except errors.KvassError as error:
            _log.info("lookup for %s: %s", self._ask.request_id, error)
            return []

    def _plan(self, decodes: list[route.Worker]) -> route.Route:
        served, fleet = self._fleet.served, self._fleet
        prompt = route.Prompt(
            len(self._ask.tokens), served.block_tokens, served.block_bytes, self._stored
        )
        keys = self._chain.keys
        return route.plan(
            prompt,
            decodes,
            fleet.workers("prefill"),
            local={each.start_id: fleet.affinity.blocks(each, keys) for each in decodes},
            prefill_tokens_min=fleet.config.prefill_tokens_min,
        )

    # --- prefill ----------------------------------------------------------------------------------

    async def _prefill(self, worker: route.Worker, missing_tokens: int) -> None:
        tried: set[str] = set()
        for attempt in range(PREFILL_ATTEMPTS):
            tried.add(worker.start_id)
            try:
                await self._prefill_on(worker, missing_tokens, attempt)
                break
            except errors.KvassError as error:
                note_failure(_log, error, f"prefill {self._ask.request_id} on {worker.member_id}")
            picked = route.pick_prefill(
                missing_tokens, self._fleet.workers("prefill"), excluded=tried
            )
            if picked is None:
                break
            worker = picked[0]
        self._prefilling = False
        for request_id, (client, flight) in list(self._told.items()):
            await self._tell_over(request_id, client, flight)

    async def _prefill_on(self, worker: route.Worker, missing_tokens: int, attempt: int) -> None:
        bound_s = self._left_s
        if worker.has_measured:
            estimate_s = worker.queue_s + missing_tokens / worker.prefill_tokens_s
            bound_s = min(bound_s, PREFILL_SLACK_S + 8 * estimate_s)
        request = wire.Prefill(
            job_id=f"{self._ask.request_id}.{attempt}",
            tokens=self._ask.tokens,
            hold_owner=self._ask.request_id,
            deadline_s=bound_s,
            salt=self._ask.salt,
            tenant=self._ask.tenant,
        )
        peer, client = await self._fleet.client("prefill", worker.start_id)
        with self._distrusting(), self._fleet.call(peer, client, missing_tokens):
            async with client.stream(request, deadline_s=request.deadline_s) as progress:
                done = False
                async for step in progress:
                    self._computed = route.union([*self._computed, *step.computed])
                    self._note_not_stored(worker, step.missing)
                    done = done or step.done
            if not done:
                raise errors.Unavailable("its job ended without saying how")

    def _note_not_stored(self, worker: route.Worker, missing: Sequence[Range]) -> None:
        """Say of a job that is over how much of its work is lost to everybody else."""
        count = sum(stop - first for first, stop in missing)
        if not count:
            return
        self._fleet.metrics.blocks_not_stored.inc(count)
        _log.warning(
            "prefill %s on %s: %d of %d blocks not stored (its log says why): decode computes them",
            self._ask.request_id,
            worker.member_id,
            count,
            len(self._chain.keys),
        )

    async def _tell_over(self, request_id: str, client: Client, flight: InFlight) -> None:
        try:
            await client.call(wire.PrefillOver(request_id), deadline_s=PREFILL_OVER_S)
        except (errors.Invalid, errors.Leaving):
            pass  # the request ended meanwhile, or its worker does: its stream tells
        except errors.KvassError as error:
            flight.lose(f"it could not be told that prefill is over: {error}")

    @contextmanager
    def _distrusting(self) -> Iterator[None]:
        """A worker that fails, or is not heard to the end, may have computed anything that was
        missing, without saying so."""
        try:
            yield
        except (errors.Overloaded, errors.Invalid):
            raise  # it refused before it computed
        except (errors.KvassError, anyio.get_cancelled_exc_class()):
            self._computed.extend(self._missing)
            raise

    # --- decode -----------------------------------------------------------------------------------

    async def _answer(
        self, choice: Choice, planned: route.Route, all_tasks: anyio.CancelScope
    ) -> None:
        try:
            await self._decode(choice, planned)
        except errors.KvassError as error:
            self._failure = self._failure or error
            all_tasks.cancel()
        finally:
            choice.begun.set()
            choice.over.set()

    async def _decode(self, choice: Choice, planned: route.Route) -> None:
        failures: Counter[str] = Counter()
        failure: errors.KvassError = errors.Unavailable("no decode worker is ready")
        worker = planned.decode
        for attempt in range(DECODE_ATTEMPTS):
            if attempt:
                worker = await self._another(choice, worker, failures, failure)
                if choice.token_ids:
                    self._note_resumed(choice, worker)
            try:
                await self._decode_on(choice, worker, planned.missing_tokens, attempt)
            except errors.KvassError as error:
                if choice.finish_reason:
                    return  # lost after its last word
                if not error.retryable:
                    raise
                note_failure(_log, error, f"{self._ask.request_id} on {worker.member_id}")
                failure = error
                refused = isinstance(error, errors.Overloaded)
                failures[worker.start_id] += FAILURES_OF_ONE if refused else 1
            if choice.finish_reason or self._is_complete(choice):
                return
        raise failure

    def _note_resumed(self, choice: Choice, worker: route.Worker) -> None:
        self._fleet.metrics.resumed.inc()
        name, count = self._ask.request_id, len(choice.token_ids)
        _log.info("%s resumed on %s after %d tokens", name, worker.member_id, count)

    def _is_complete(self, choice: Choice) -> bool:
        """Whether a stream was lost between its last token and its end."""
        if len(choice.token_ids) < self._ask.stop.max_tokens:
            return False
        choice.finish_reason = "length"
        self._sink.put(choice.index, wire.Delta(finish_reason="length"))
        return True

    async def _another(
        self,
        choice: Choice,
        lost: route.Worker,
        failures: Counter[str],
        failure: errors.KvassError,
    ) -> route.Worker:
        """Choose a worker after a failure. A stream that has begun waits for one to appear."""
        count, is_told = len(choice.token_ids), False
        give_up_s = self._fleet.clock.now_s() + (RESUME_WAIT_S if count else 0.0)
        while True:
            live = self._fleet.workers("decode")
            fewest = min((failures[each.start_id] for each in live), default=FAILURES_OF_ONE)
            left = [each for each in live if failures[each.start_id] == fewest]
            if left and fewest < FAILURES_OF_ONE:
                try:
                    return self._plan(left).decode
                except errors.Overloaded as error:
                    failure = error
            if self._fleet.clock.now_s() >= give_up_s:
                if not count or isinstance(failure, errors.Overloaded):
                    raise failure
                said = f"{lost.member_id} was lost after {count} tokens, and no decode worker came"
                raise errors.Unavailable(f"{said} within {RESUME_WAIT_S:g} s") from failure
            if not is_told:
                is_told = True
                said = "%s: no other decode worker is ready: waiting up to %g s for one"
                _log.warning(said, self._ask.request_id, RESUME_WAIT_S)
            await anyio.sleep(RESUME_POLL_S)
            if isinstance(failure, errors.Overloaded):
                failures.clear()

    async def _decode_on(
        self, choice: Choice, worker: route.Worker, missing_tokens: int, attempt: int
    ) -> None:
        peer, client = await self._fleet.client("decode", worker.start_id)
        request = self._request(choice, attempt)
        with self._distrusting(), self._fleet.call(peer, client, missing_tokens) as flight:
            self._meet()
            # No await between reading `_prefilling` and queuing the frame: PrefillOver comes later.
            if request.prefill_pending:
                self._told[request.request_id] = (client, flight)
            try:
                async with client.stream(request, deadline_s=request.deadline_s) as deltas:
                    async for delta in deltas:
                        self._take(choice, delta, flight)
            finally:
                self._told.pop(request.request_id, None)
        if not choice.finish_reason:
            raise errors.Unavailable(f"{peer.member_id} ended the stream without a reason")

    def _request(self, choice: Choice, attempt: int) -> wire.Generate:
        ask, first = self._ask, choice.index == 0
        return wire.Generate(
            request_id=f"{ask.request_id}.{choice.index}.{attempt}",
            tokens=(*ask.tokens, *choice.token_ids),
            prompt_length=len(ask.tokens),
            sampling=msgspec.structs.replace(ask.sampling, choice=choice.index),
            stop=ask.stop,
            deadline_s=self._left_s,
            text_sent=choice.text_sent,
            prefill_pending=first and self._prefilling,
            hold_owner=ask.request_id if first else "",
            salt=ask.salt,
            tenant=ask.tenant,
        )

    def _take(self, choice: Choice, delta: wire.Delta, flight: InFlight) -> None:
        if delta.token_ids and flight.missing_tokens:
            flight.missing_tokens = 0  # its prompt is done
            self._fleet.note_pool(flight.peer, self._chain)
        choice.token_ids.extend(delta.token_ids)
        choice.text_sent += len(delta.text)
        self._computed = route.union([*self._computed, *delta.computed])
        if delta.finish_reason:
            choice.finish_reason = delta.finish_reason
            self._note_whole(choice, flight)
        self._sink.put(choice.index, delta)
        if choice.token_ids or choice.finish_reason:
            choice.begun.set()

    def _note_whole(self, choice: Choice, flight: InFlight) -> None:
        """The worker has the answer's blocks too: a conversation's next turn starts with them."""
        chain = self._fleet.chain((*self._ask.tokens, *choice.token_ids), self._ask.salt)
        self._fleet.note_pool(flight.peer, chain)
