"""What goes wrong while a run runs, drawn from its seed: frames, transfers, calls that come twice.

It refuses to know what the frames and calls mean, beyond which of them a caller may repeat.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Coroutine
from typing import Any

import anyio

from kvass.common.errors import KvassError
from kvass.common.rpc.server import Answer, Call, Handler
from kvass.common.wire import Generate, Message, Prefill
from kvass.kvstore import messages as m
from memory_transport import Attempt, Fault, Outcome
from record import Record
from store_sim import Handlers, answered
from wires import Fate

# A call that waits is not repeated, a stream is resumed otherwise, and a written get is repeated
# with a loan of its own, which is a call of its own.
NEVER_TWICE = (m.Wait, m.GetWrite, Prefill, Generate)
BAD: tuple[Outcome, ...] = ("failed", "lost", "partial", "corrupt", "late")


class Disturbance:
    """Mutable fields: `is_on`, `spared` (member and start ids that meet no weather), the
    generators, the record."""

    def __init__(self, seed: int, record: Record, *, rough: bool) -> None:
        self.is_on = rough
        self.spared: set[str] = set()
        self._record = record
        self._frames = random.Random(f"frames {seed}")
        self._moves = random.Random(f"moves {seed}")
        self._calls = random.Random(f"calls {seed}")
        self._bad = self._moves.choice([0.02, 0.05, 0.15])
        self._twice = self._calls.choice([0.0, 0.05, 0.2])
        self._slow = self._frames.choice([0.02, 0.1])

    def frame(self, source: str, target: str) -> Fate:
        """Decide one frame's fate. The gateway's streams from decode are cut by mishaps only, since
        a request has so many attempts and no more."""
        if not self.is_on or not self.spared.isdisjoint((source, target)):
            return Fate()
        rng, delay_s = self._frames, 0.0
        if rng.random() < self._slow:
            delay_s = rng.choice([0.001, 0.05, 0.05, 1.5]) * rng.random()
        spared = "gateway" in source + target and "decode" in source + target
        fate = Fate(
            delay_s,
            doubled=rng.random() < 0.001 and not spared,
            cut=rng.random() < 0.001 and not spared,
        )
        for kind in ("doubled", "cut"):
            if getattr(fate, kind):
                self._note(f"frame {kind}", f"{source} to {target}")
        return fate

    def move(self, attempt: Attempt) -> Fault:
        """Decide one transfer's fate."""
        if not self.spared.isdisjoint((attempt.source, attempt.target)):
            return Fault()
        rng = self._moves
        outcome: Outcome = "whole"
        if self.is_on and rng.random() < self._bad:
            outcome = rng.choice(BAD)
            self._record.count(f"move {outcome}")
        slow = self.is_on and rng.random() < 0.3
        delay_s = rng.choice([0.001, 0.02, 0.7]) * rng.random() if slow else 0.0
        who = f"{attempt.source} to {attempt.target}"
        self._record.note(f"{attempt.verb} {who}, {attempt.size} bytes: {outcome} {delay_s:.4f}")
        return Fault(outcome, delay_s, late_s=rng.choice([0.1, 2.0, 8.0]) * rng.random())

    def around(self, member_id: str, handlers: Handlers) -> Handlers:
        """Wrap a member's calls: write each down, and deliver some twice."""
        return {cls: self._wrapped(member_id, cls, h) for cls, h in handlers.items()}

    def _wrapped(self, member_id: str, cls: type[Message], handler: Handler) -> Handler:
        async def once(call: Call) -> Message | None:
            begun_s = anyio.current_time()
            try:
                reply = await answered(handler, call)
            except KvassError:
                self._record.note(f"{member_id} refused {call.peer.member_id} {cls.__name__}")
                raise
            finally:
                took_s = anyio.current_time() - begun_s
                if took_s >= _deadline_s(call.request) and cls is not m.Wait:
                    self._note("call late", f"{member_id} {cls.__name__}{_named(call.request)}")
            said = "" if reply is None else f": {_short(reply)}"
            self._record.note(f"{member_id} did {call.peer.member_id} {cls.__name__}{said}")
            return reply

        async def lost(call: Call) -> None:
            try:
                await once(call)
            except KvassError:
                return  # as a call whose answer never came

        async def both(call: Call) -> Message | None:
            who, what = call.peer.member_id, _named(call.request)
            self._record.note(f"{member_id} hears {who} {cls.__name__}{what}")
            if cls in NEVER_TWICE or not self.is_on or self._calls.random() >= self._twice:
                return await once(call)
            self._note("call twice", f"{cls.__name__} of {call.peer.member_id}")
            if self._calls.random() < 0.5:
                await lost(call)
                return await once(call)
            return await self._together(once, lost, call)

        return both

    async def _together(
        self,
        once: Callable[[Call], Answer],
        lost: Callable[[Call], Coroutine[Any, Any, None]],
        call: Call,
    ) -> Message | None:
        reply: Message | None = None
        failure: KvassError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lost, call)
            try:
                reply = await once(call)
            except KvassError as error:
                failure = error  # raised outside, where it is in no group
        if failure is not None:
            raise failure
        return reply

    def _note(self, kind: str, what: str) -> None:
        self._record.count(kind)
        self._record.note(f"{kind}: {what}")


def _named(request: Message) -> str:
    """Which job, request, put, lease or owner a call is about."""
    names = ("request_id", "job_id", "put_id", "lease_id", "owner")
    about = request.offer if isinstance(request, m.PutRead | m.PutBegin) else request
    return "".join(f" {getattr(about, name)}" for name in names if hasattr(about, name))


def _deadline_s(request: Message) -> float:
    """How long a call may take."""
    about = request.offer if isinstance(request, m.PutRead | m.PutBegin) else request
    return getattr(about, "deadline_s", math.inf)


def _short(reply: Message) -> str:
    """What a reply says, without memory addresses: they differ from process to process."""
    if isinstance(reply, m.Places):
        return f"{reply.lease_id} {reply.indices}"
    if isinstance(reply, m.PutPlaces):
        return f"{reply.granted} {reply.visible} {reply.busy} {reply.full}"
    if isinstance(reply, m.Attached):
        return reply.put_way
    return str(reply)
