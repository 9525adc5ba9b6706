"""A gateway under test: the real application, real RPC over loopback, workers that follow a script.

A scripted worker answers with the bytes of a given text, one token a byte, so that characters split
over tokens; it can pause, refuse, die and hang, and notes what it was asked and what was cancelled.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.abc
from prometheus_client import CollectorRegistry

from kvass.common import errors, wire
from kvass.common.clock import LoopClock
from kvass.common.config import ClusterConfig, GatewayConfig
from kvass.common.keys import Chain, Namespace, ranges_of
from kvass.common.membership import ROLES, Load, NodeTable, Peer, Role
from kvass.common.metrics import RequestMetrics
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Call, Handler, Server, listen
from kvass.common.wire import Delta, Done, Generate, Prefill, PrefillOver, PrefillProgress, Range
from kvass.gateway.admission import Admission
from kvass.gateway.api_keys import ApiKeys
from kvass.gateway.ask import Served
from kvass.gateway.fleet import Fleet
from kvass.gateway.routes import create_app
from kvass.gateway.server import HttpServer, bind
from trust import CREDENTIALS

MODEL = "bytes"
BLOCK_TOKENS = 4
WINDOW = 256
ANSWER = "Grüße 👩‍🚀!"


class ByteText:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        turns = "".join(f"<{each['role']}>{each['content']}" for each in messages)
        return self.encode(turns + ("<assistant>" if add_generation_prompt else ""))


def hello(role: Role, number: int) -> Hello:
    name = f"{role}-{number}"
    return Hello(role=role, member_id=name, host_id="h", start_id=f"{name}-s", pid=1, cluster={})


async def _go_on(_: int) -> None:
    pass


@dataclass(slots=True, eq=False)
class ScriptedWorker:
    """A prefill or decode worker that speaks the wire and follows a script."""

    role: Role
    number: int
    answer: str = ANSWER
    computed: tuple[Range, ...] = ()
    missing: tuple[Range, ...] = ()
    before_token: Callable[[int], Awaitable[None]] = _go_on
    before_answer: Callable[[], Awaitable[None]] | None = None
    refusal: errors.KvassError | None = None
    last_words: errors.KvassError | None = None
    address: str = ""
    own_hello: Hello | None = None
    requests: list[wire.Message] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _over: dict[str, anyio.Event] = field(default_factory=dict)

    @property
    def hello(self) -> Hello:
        return self.own_hello or hello(self.role, self.number)

    async def serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        handlers: dict[type[wire.Message], Handler] = {
            Generate: self._generate,
            Prefill: self._prefill,
            PrefillOver: self._prefill_over,
        }
        server = Server(self.hello, handlers, CREDENTIALS, last_words=self.last_words)
        listener, self.address = await listen("127.0.0.1")
        with self.scope:
            async with listener:
                task_status.started()
                await listener.serve(server.serve_connection)

    def die(self) -> None:
        """As kill -9, unless it has `last_words`: every connection is lost."""
        self.scope.cancel()

    async def _note(self, request_id: str, work: Awaitable[None]) -> None:
        try:
            if self.refusal is not None:
                raise self.refusal
            if self.before_answer is not None:
                await self.before_answer()
            await work
            self.finished.append(request_id)
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(request_id)
            raise
        finally:
            work.close()  # type: ignore[attr-defined]

    async def _generate(self, call: Call) -> None:
        request = call.request
        assert isinstance(request, Generate)
        self.requests.append(request)
        self._over[request.request_id] = anyio.Event()
        await self._note(request.request_id, self._decode(request, call))

    async def _decode(self, request: Generate, call: Call) -> None:
        if request.prefill_pending:
            await self._over[request.request_id].wait()
        answer = answer_of(self.answer, request.sampling.choice).encode()[: request.stop.max_tokens]
        done = bytes(request.tokens[request.prompt_length :])
        assert answer.startswith(done), "a resumed stream goes on where it stopped"
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        held = decoder.decode(done)[request.text_sent :]
        for position in range(len(done), len(answer)):
            await self.before_token(position)
            last = position + 1 == len(answer)
            text = held + decoder.decode(answer[position : position + 1], final=last)
            held = ""
            whole = last and len(answer) == len(
                answer_of(self.answer, request.sampling.choice).encode()
            )
            reason = ("stop" if whole else "length") if last else ""
            await call.send(Delta((answer[position],), text, reason, self.computed if last else ()))

    async def _prefill(self, call: Call) -> None:
        request = call.request
        assert isinstance(request, Prefill)
        self.requests.append(request)
        await self._note(request.job_id, self._fill(request, call))

    async def _fill(self, request: Prefill, call: Call) -> None:
        blocks = len(request.tokens) // BLOCK_TOKENS
        for index in range(blocks):
            await self.before_token(index)
            done = index + 1 == blocks
            await call.send(
                PrefillProgress(
                    ((0, (index + 1) * BLOCK_TOKENS),),
                    self.missing if done else (),
                    done=done,
                )
            )

    async def _prefill_over(self, call: Call) -> Done:
        assert isinstance(call.request, PrefillOver)
        self._over[call.request.request_id].set()
        return Done()

    def generates(self) -> list[Generate]:
        return [each for each in self.requests if isinstance(each, Generate)]

    def prefills(self) -> list[Prefill]:
        return [each for each in self.requests if isinstance(each, Prefill)]


def answer_of(answer: str, choice: int) -> str:
    return f"{choice}. {answer}" if choice else answer


class ScriptedStore:
    """What the gateway asks of the store, answered from a set of block indices."""

    def __init__(self) -> None:
        self.staged_s: list[float] = []
        self.stored: set[int] = set()
        self.lookups: list[Chain] = []
        self.released: list[str] = []
        self.error: errors.KvassError | None = None

    async def lookup(
        self, chain: Chain, ranges: Iterable[Range], *, deadline_s: float, stage_s: float = 0.0
    ) -> list[Range]:
        self.lookups.append(chain)
        self.staged_s.append(stage_s)
        if self.error is not None:
            raise self.error
        return ranges_of(sorted(i for i in self.stored if i < len(chain.keys)))

    async def release_hold(self, owner: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.released.append(owner)

    async def stats(self, *, deadline_s: float) -> list[dict[str, str | int]]:
        return [{"id": name, "blocks": len(self.stored)} for name in ("store-0", "store-1")]


class TableMembers:
    """A member's view, moved by hand."""

    def __init__(self) -> None:
        self.table = NodeTable(ROLES)
        self.clock = LoopClock()

    def live(self, role: Role) -> list[Peer]:
        return self.table.live(role, self.clock.now_s())

    def load_of(self, peer: Peer) -> Load:
        return self.table.load(peer.start_id)

    def refused(self, peer: Peer) -> None:
        self.table.refused(peer.start_id, self.clock.now_s())

    def add(self, who: Hello, address: str) -> None:
        peer = Peer(
            role=who.role,  # type: ignore[arg-type]
            member_id=who.member_id,
            start_id=who.start_id,
            host_id=who.host_id,
            pid=who.pid,
            state="ready",
            started_s=1.0,
            address=address,
        )
        self.table.saw_presence(peer, self.clock.now_s())


@dataclass(slots=True, eq=False)
class Stage:
    """Everything of one test."""

    fleet: Fleet
    members: TableMembers
    store: ScriptedStore
    decodes: list[ScriptedWorker]
    prefills: list[ScriptedWorker]
    tasks: anyio.abc.TaskGroup
    registry: CollectorRegistry
    url: str = ""
    server: HttpServer | None = None

    @property
    def decode(self) -> ScriptedWorker:
        return self.decodes[0]

    @property
    def prefill(self) -> ScriptedWorker:
        return self.prefills[0]

    async def start(self, worker: ScriptedWorker) -> None:
        """Bring a worker up and let the gateway see it."""
        await self.tasks.start(worker.serve)
        self.members.add(worker.hello, worker.address)


def served() -> Served:
    return Served(
        name=MODEL,
        created_s=1,
        window=WINDOW,
        vocabulary=256,
        namespace=Namespace(b"n" * 32),
        block_tokens=BLOCK_TOKENS,
        block_bytes=1024,
        text=ByteText(),
    )


@asynccontextmanager
async def a_stage(
    *,
    decodes: int = 1,
    prefills: int = 0,
    choices_max: int = 64,
    config: GatewayConfig | None = None,
) -> AsyncIterator[Stage]:
    """Set up workers and a fleet, without HTTP."""
    async with anyio.create_task_group() as tasks:
        members, store, registry = TableMembers(), ScriptedStore(), CollectorRegistry()
        fleet = Fleet(
            served=served(),
            members=members,
            dialer=Dialer(tasks, hello("gateway", 0), wire.Tags(wire.WORKER_REPLIES), CREDENTIALS),
            store=store,
            metrics=RequestMetrics(registry),
            config=config or GatewayConfig(prefill_tokens_min=8, body_bytes_max=20_000),
            clock=LoopClock(),
            admission=Admission(choices_max),
        )
        stage = Stage(
            fleet,
            members,
            store,
            [ScriptedWorker("decode", number) for number in range(decodes)],
            [ScriptedWorker("prefill", number) for number in range(prefills)],
            tasks,
            registry,
        )
        for worker in stage.decodes + stage.prefills:
            await stage.start(worker)
        tasks.start_soon(fleet.patrol)
        yield stage
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def a_gateway(
    *,
    decodes: int = 1,
    prefills: int = 0,
    choices_max: int = 64,
    config: GatewayConfig | None = None,
    keys: ApiKeys | None = None,
) -> AsyncIterator[Stage]:
    """The same behind a real HTTP server on loopback."""
    async with a_stage(
        decodes=decodes, prefills=prefills, choices_max=choices_max, config=config
    ) as stage:
        app = create_app(stage.fleet, stage.registry, cluster=ClusterConfig(name="test"), keys=keys)
        stage.server = HttpServer(app, grace_s=2)
        with bind("127.0.0.1", 0) as bound:
            stage.tasks.start_soon(stage.server.run_on, bound)
            await stage.server.accepting.wait()
            stage.url = "http://{}:{}".format(*bound.getsockname())
            yield stage
            await stage.server.drain()


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait for something that other tasks bring about."""
    with anyio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - it watches other tasks' plain fields
            await anyio.sleep(0.005)
