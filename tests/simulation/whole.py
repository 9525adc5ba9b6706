"""A whole cluster run from one seed: clients, the gateway's sessions, both workers, store nodes.

    scenario (drawn) ──> members start ──> conversations │ mishaps, disturbance ──> rest ──> verdict

What is real: session, fleet, RPC, services, loops, pools, store clients, nodes. What is simulated:
the model, wires, transports, time, and membership, whose news comes late and differently to each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import anyio
import anyio.abc
from prometheus_client import CollectorRegistry

import deterministic
from disturbance import Disturbance
from hash_model import BLOCK, VOCABULARY
from kvass.common.clock import LoopClock
from kvass.common.config import GatewayConfig
from kvass.common.errors import KvassError
from kvass.common.keys import Salt
from kvass.common.metrics import RequestMetrics
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.hello import Hello
from kvass.common.wire import WORKER_REPLIES, Sampling, Stop, Tags
from kvass.decode.loop import DecodeLoop
from kvass.gateway.ask import Ask, Served, Text
from kvass.gateway.fleet import Fleet
from kvass.gateway.session import Session
from kvass.kvstore.client.store import StoreClient
from members import Members
from mishaps import Mishaps
from record import Record
from scenario import Conversation, Scenario, Turn, draw
from store_sim import LAYOUT, SPACE
from verdict import Request, check_audits, check_bytes, check_request, check_rest
from wires import SimDialer, Wire

REQUEST_S = 300.0
AUDIT_S = 10.0  # for idle workers, to look at what has not been looked at
CALM_REST_S = 4.0  # then nothing may be in use, where nothing went wrong
# Of a node's counts, those that show what a run has reached.
COUNTED = (
    *("evictions", "put_corrupt", "leases_lost", "get_suspect", "corrupt", "dropped"),
    *("filled", "fill_failed", "copies_untold", "hot_segments"),
    *("flash_sunk", "flash_hits", "flash_risen", "flash_staged", "flash_refused", "flash_corrupt"),
)
# Leases, landing memory that is rebuilt, a put's deadline and a shunned node's return.
REST_S = 25.0


class Whole:
    """One run. Mutable fields: `requests`, `record`, and the members."""

    def __init__(self, scenario: Scenario, record: Record, tasks: anyio.abc.TaskGroup) -> None:
        self.scenario = scenario
        self.record = record
        self.tasks = tasks
        rough = scenario.weather == "rough"
        self.disturbance = Disturbance(scenario.seed, record, rough=rough)
        self.members = Members(scenario, self.disturbance, record, tasks)
        self.requests: list[Request] = []
        self.store, self.fleet = self._gateway()
        self.members.gateway_stores.append(self.store)
        self.mishaps = Mishaps(self.members, self.store, record)

    def _gateway(self) -> tuple[StoreClient, Fleet]:
        hello = Hello("gateway", "gateway-0", "host-0", "gateway-start", 1, {})
        wires: list[Wire] = []
        members, tasks = self.members, self.tasks
        store = StoreClient(hello, tasks, dialer=members.sim.dialer(hello, tasks, wires))
        replies, weather = Tags(WORKER_REPLIES), self.disturbance.frame
        dialer = SimDialer(tasks, members.lives, hello, wires, replies, weather)
        served = Served(
            name="hashes",
            created_s=1,
            window=self.scenario.window,
            vocabulary=VOCABULARY,
            namespace=SPACE,
            block_tokens=BLOCK,
            block_bytes=LAYOUT.block_size,
            text=cast(Text, None),
        )
        minimum = self.scenario.prefill_tokens_min
        fleet = Fleet(
            served=served,
            members=members.view,
            dialer=cast(Dialer, dialer),
            store=store,
            metrics=RequestMetrics(CollectorRegistry()),
            config=GatewayConfig(prefill_tokens_min=minimum, request_timeout_s=REQUEST_S),
            clock=LoopClock(),
        )
        return store, fleet

    # --- clients ---

    async def converse(self, conversation: Conversation) -> None:
        """Hold a conversation until its end, or until a turn has no answer."""
        await anyio.sleep(conversation.start_s)
        tokens: tuple[int, ...] = ()
        for number, turn in enumerate(conversation.turns):
            tokens += turn.tokens
            request = await self.ask(f"{conversation.name}.{number}", tokens, turn, conversation)
            if request.usage is None:
                return
            tokens += tuple(request.reader.tokens[0])
            await anyio.sleep(turn.think_s)

    async def ask(
        self, name: str, tokens: tuple[int, ...], turn: Turn, conversation: Conversation
    ) -> Request:
        """Ask once, as the gateway's HTTP side does, and write down how it ended."""
        ask = Ask(
            request_id=name,
            tokens=tokens,
            choices=turn.choices,
            sampling=Sampling(temperature=0.0),
            stop=Stop(max_tokens=turn.count),
            salt=Salt(conversation.salt),
        )
        now_s = anyio.current_time()
        request = Request(ask, now_s)
        self.requests.append(request)
        self.record.note(f"{name} asks: {len(tokens)} tokens, {turn.count} x {turn.choices}")
        with anyio.move_on_after(turn.patience_s):
            session = Session(self.fleet, ask, request.reader, end_s=now_s + REQUEST_S)
            try:
                request.usage = await session.run()
            except KvassError as error:
                request.failure = error
        request.ended_s = anyio.current_time()
        self.record.note(f"{name} {request.outcome}: {request.reader.tokens}")
        return request

    # --- the run ---

    async def run(self) -> None:
        """Do everything, and judge it."""
        await self.members.start()
        self.tasks.start_soon(self.fleet.patrol)
        async with anyio.create_task_group() as tasks:
            for mishap in self.scenario.mishaps:
                tasks.start_soon(self.mishaps.happen, mishap)
            for conversation in self.scenario.conversations:
                tasks.start_soon(self.converse, conversation)
        self.record.note("all conversations are over")
        self.disturbance.is_on = False
        if self.scenario.audits:
            await anyio.sleep(AUDIT_S)
        for life in self.members.lives.values():
            life.audits.cancel()
        check_audits(self.members.lives.values())
        undisturbed = self.scenario.weather == "calm" and not self.scenario.mishaps
        for request in self.requests:
            try:
                check_request(request, self.requests, answers_due=self.scenario.answers_due)
            except AssertionError as error:
                raise AssertionError(f"{request.ask.request_id}: {error}") from error
        late = self.record.counts.get("call late", 0)
        assert not (undisturbed and late), f"{late} calls were not done in their time"
        self._count_reached()
        self.members.share()
        await anyio.sleep(CALM_REST_S if undisturbed else REST_S + self.scenario.hold_s)
        check_rest(self.members.lives.values(), self.members.sim.nodes.values(), self.fleet)
        seen = self.members.prober.seen
        looked = check_bytes(self.members.sim, self.members.lives.values(), self.requests, seen)
        self.record.note(f"{looked} blocks are right")

    def _count_reached(self) -> None:
        """Count what happened inside: a simulation that never gets there proves nothing."""
        for life in self.members.lives.values():
            for kind, count in life.worker.store.counts.items():
                self.record.count(kind, count)
            if life.auditor is not None:
                self.record.count("audited", life.auditor.right)
            if isinstance(life.loop, DecodeLoop):
                self.record.count("suspended", life.loop.totals.suspended)
        for node in self.members.sim.nodes.values():
            counts = node.node.counts()
            for kind in COUNTED:
                self.record.count(kind, counts.get(kind, 0))
        resumed = self.fleet.metrics.resumed.collect()
        self.record.count("resumed", int(sum(each.samples[0].value for each in resumed)))


@dataclass(slots=True)
class Outcome:
    """How a seed's run went. `failures`: what was raised, none if all was right."""

    seed: int
    record: Record
    failures: list[BaseException]

    def summary(self) -> str:
        """Return one line, which for a failure says how to repeat it."""
        if not self.failures:
            return f"seed {self.seed}: right, {len(self.record.lines)} events"
        first = self.failures[0]
        return (
            f"seed {self.seed}: {type(first).__name__}: {first}\n"
            f"  repeat it: python tests/simulation/repeat.py {self.seed} --trace"
        )


def run_seed(seed: int) -> Outcome:
    """Run a seed's scenario to its end."""
    record = Record()
    failures: list[BaseException] = []

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            await Whole(draw(seed), record, tasks).run()
            tasks.cancel_scope.cancel()

    try:
        deterministic.run(seed, run)
    except Exception as error:
        failures.extend(_leaves(error))
    return Outcome(seed, record, failures)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error
