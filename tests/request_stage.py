"""A decode worker without its process, whose store and steps answer when they are told to.

The loop, the scheduler, the fetcher, the offerer and the pool are the real ones. Here are only the
ends of it: a model whose KV is a hash of everything before it, a store whose answers wait, and an
executor whose step does. A pull or step writes its slots when it ends, so a slot that was given
away too early shows as a wrong token or a wrong block. Nothing here refers to a clock: one order of
calls gives one result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar, cast

import anyio
import tokenizers
import torch

from inline import ManualClock
from kvass.common.costs import Costs
from kvass.common.errors import KvassError, Unavailable
from kvass.common.keys import Chain, Namespace, ranges_of
from kvass.common.model.runner import Rows
from kvass.common.model.tokenizer import Tokenizer
from kvass.common.pool.pool import BlockPool
from kvass.common.pool.table import BlockTable
from kvass.common.wire import Generate, Range, Sampling, Stop
from kvass.decode.fetch import Fetcher
from kvass.decode.loop import DecodeLoop, Ticket
from kvass.decode.offer import Offerer
from kvass.decode.sampler import RowState
from kvass.decode.schedule import Scheduler
from kvass.decode.schedule import Sequence as Request
from kvass.decode.stream import TextStream
from kvass.kvstore.client.store import StoreClient

BLOCK, SLOTS, CHUNK, BATCH = 2, 14, 6, 3
VOCABULARY = 8
PROMPT_MAX, ANSWER_MAX = 20, 9
SPIN = 40  # rounds of the event loop: more than the longest chain of wake-ups takes
T = TypeVar("T")


def kv_of(before: int, token: int) -> int:
    """The KV of a token after everything that `before` stands for."""
    return hash((before, token))


def reference(prompt: Sequence[int], count: int) -> list[int]:
    """What the model answers when nothing is shared, lost or suspended."""
    kv = 0
    for token in prompt:
        kv = kv_of(kv, token)
    answer: list[int] = []
    for _ in range(count):
        answer.append(kv % VOCABULARY)
        kv = kv_of(kv, answer[-1])
    return answer


@cache
def prompt_of(family: int, length: int) -> tuple[int, ...]:
    """Prompts of a family are prefixes of each other; all share their first three tokens."""
    return tuple(0 if i < 3 else hash((family, i)) % VOCABULARY for i in range(length))


def chain_of(tokens: Sequence[int]) -> Chain:
    chain = Chain(Namespace(bytes(32)), BLOCK)
    chain.extend(tokens)
    return chain


@dataclass
class Memory:
    """What each (slot, offset) holds, and what each block must hold. Also the model's `run`.

    `before`: of each KV that is right somewhere, the KV of the token before it."""

    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    expected: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)

    def register(self, tokens: Sequence[int]) -> None:
        """Note the right content of every block of a sequence."""
        kv, cells = 0, []
        for token in tokens:
            earlier, kv = kv, kv_of(kv, token)
            self.before[kv] = earlier
            cells.append(kv)
        for index, key in enumerate(chain_of(tokens).keys):
            self.expected[key] = tuple(cells[index * BLOCK : (index + 1) * BLOCK])

    def block(self, slot: int) -> tuple[int | None, ...]:
        return tuple(self.cells.get((slot, offset)) for offset in range(BLOCK))

    def fill(self, slot: int, content: Sequence[int]) -> None:
        self.cells.update({(slot, offset): kv for offset, kv in enumerate(content)})

    def run(self, pieces: Sequence[Rows]) -> torch.Tensor | None:
        last = [(piece, self._run(piece)) for piece in pieces]
        wanted = [kv for piece, kv in last if piece.logits]
        if not wanted:
            return None
        logits = torch.zeros(len(wanted), VOCABULARY)
        for row, kv in enumerate(wanted):
            logits[row, kv % VOCABULARY] = 1.0
        return logits

    def _run(self, piece: Rows) -> int:
        at = [(piece.slots[i // BLOCK], i % BLOCK) for i in range(piece.start + len(piece.tokens))]
        held = [0, *(self.cells.get(cell, -1) for cell in at[: piece.start])]
        for earlier, later in pairwise(held):
            assert self.before.get(later) == earlier, "a row attends to what is not there"
        kv = held[-1]
        for cell, token in zip(at[piece.start :], piece.tokens, strict=True):
            kv = kv_of(kv, token)
            if piece.write:
                self.cells[cell] = kv
        return self.cells[at[-1]]


@dataclass(eq=False)
class Pending:
    """Something that waits for the machine. `slots`: what it reads or writes until it ends."""

    name: str
    indices: tuple[int, ...]
    slots: tuple[int, ...] = ()
    chain: Chain | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)
    granted: tuple[int, ...] = ()
    fails: bool = False


@dataclass(frozen=True)
class Visible:
    """A wait's answer."""

    visible: tuple[Range, ...]


class SlowStore:
    """Answers when told to. Mutable fields: `pending`, `blocks` (keys that it has)."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.pending: list[Pending] = []
        self.blocks: set[bytes] = set()

    async def lookup(self, chain: Chain, ranges: list[Range], **_: object) -> list[Range]:
        return await self._look("lookup", chain, ranges)

    async def wait(self, chain: Chain, ranges: list[Range], **_: object) -> Visible:
        return Visible(tuple(await self._look("wait", chain, ranges)))

    async def _look(self, name: str, chain: Chain, ranges: list[Range]) -> list[Range]:
        indices = tuple(i for low, high in ranges for i in range(low, high))
        await self._answered(Pending(name, indices, chain=chain))
        return ranges_of(i for i in indices if chain.keys[i] in self.blocks)

    async def pull(
        self, chain: Chain, indices: list[int], slots: list[int], **_: object
    ) -> set[int]:
        """Write what the machine grants; a transfer in flight ends before its caller does."""
        call = Pending("pull", tuple(indices), tuple(slots), chain)
        with anyio.CancelScope(shield=True):
            await self._answered(call)
        for index in call.granted:
            slot = slots[indices.index(index)]
            self.memory.fill(slot, self.memory.expected[chain.keys[index]])
        await anyio.lowlevel.checkpoint_if_cancelled()
        return set(call.granted)

    async def push(
        self, chain: Chain, indices: tuple[int, ...], slots: tuple[int, ...], **_: object
    ) -> None:
        call = Pending("push", indices, slots, chain)
        await self._answered(call)
        for index, slot in zip(indices, slots, strict=True):
            key = chain.keys[index]
            assert self.memory.block(slot) == self.memory.expected[key], (
                "a block was offered under a name that is not its content's"
            )
            self.blocks.add(key)

    async def _answered(self, call: Pending) -> None:
        self.pending.append(call)
        try:
            await call.ended.wait()
        finally:
            self.pending.remove(call)


class SlowExecutor:
    """A step that runs until the machine ends it, and cannot be interrupted."""

    def __init__(self) -> None:
        self.pending: Pending | None = None

    async def run(self, function: Callable[[], T]) -> T:
        self.pending = Pending("step", ())
        with anyio.CancelScope(shield=True):
            await self.pending.ended.wait()
        fails, self.pending = self.pending.fails, None
        if fails:
            raise Unavailable("the step was made to fail")
        return function()


@dataclass(eq=False)
class Life:
    """One request and its handler's task. `ends`: what the handler saw last."""

    ticket: Ticket
    max_tokens: int
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


class Worker:
    """A decode worker without its process, stepped by hand from outside its event loop."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.store = SlowStore(self.memory)
        self.executor = SlowExecutor()
        self.pool = BlockPool(SLOTS)
        self.lives: list[Life] = []
        self._events = asyncio.new_event_loop()
        self._main = self._events.create_task(self._run())
        self.settle()

    async def _run(self) -> None:
        store = cast(StoreClient, self.store)
        costs = Costs(tokens_per_s=1.0)  # so slow that loading always pays
        self.scheduler = Scheduler(self.pool, chunk_tokens=CHUNK, batch_requests=BATCH)
        self.offerer = Offerer(store, self.pool)
        fetcher = Fetcher(store, costs, block_size=1)
        self.loop = DecodeLoop(
            self.scheduler,
            self.memory,
            self.executor,
            fetcher,
            self.offerer,
            costs,
            ManualClock(),  # steps take no time: what a step costs is never learned
        )
        async with anyio.create_task_group() as self.tasks:
            self.tasks.start_soon(self.offerer.run)
            self.tasks.start_soon(self.loop.run)

    def settle(self) -> None:
        """Let everything run that can."""

        async def spin() -> None:
            for _ in range(SPIN):
                await asyncio.sleep(0)

        self._events.run_until_complete(spin())
        if self._main.done():
            self._main.result()

    def call(self, function: Callable[[], object]) -> None:
        """Call something in the event loop, as a handler would, then settle."""

        async def inside() -> None:
            function()

        self._events.run_until_complete(inside())
        self.settle()

    def close(self) -> None:
        """End everything, whatever state it is in."""
        for _ in range(SPIN):
            self._main.cancel()
            for call in (self.executor.pending, *self.store.pending):
                if call is not None:
                    call.ended.set()
            self._events.run_until_complete(asyncio.wait([self._main], timeout=0.01))
        self._events.close()

    def arrive(self, prompt: tuple[int, ...], max_tokens: int, *, pending: bool) -> None:
        self.memory.register([*prompt, *reference(prompt, max_tokens)])
        request = Generate(
            request_id=str(len(self.lives)),
            tokens=prompt,
            prompt_length=len(prompt),
            sampling=Sampling(temperature=0.0),
            stop=Stop(max_tokens=max_tokens),
            deadline_s=60.0,
            prefill_pending=pending,
        )
        ticket = Ticket(
            sequence=Request(request, BlockTable(self.pool, chain_of(prompt)), list(prompt)),
            row=RowState(request.sampling, request.stop, prompt=prompt, eos_token_ids=()),
            text=TextStream(_tokenizer(), prompt, request.stop, frozenset()),
            on_pulled=lambda: None,
        )
        if not pending:
            ticket.prefill_over.set()
        self.call(lambda: self.tasks.start_soon(self._handle, ticket, max_tokens))

    async def _handle(self, ticket: Ticket, max_tokens: int) -> None:
        """Do what the worker's RPC handler does."""
        life = Life(ticket, max_tokens)
        self.lives.append(life)
        with life.scope:
            self.loop.submit(life.ticket)
            try:
                while True:
                    delta = await life.ticket.take()
                    life.tokens += delta.token_ids
                    if delta.finish_reason:
                        life.ends.append("finished")
                        return
            except KvassError:
                life.ends.append("failed")
            finally:
                self.loop.leave(life.ticket)
        if life.scope.cancelled_caught:
            life.ends.append("aborted")


@cache
def _tokenizer() -> Tokenizer:
    vocabulary = {f"t{index}": index for index in range(VOCABULARY)}
    model: Any = tokenizers.models.WordLevel(vocabulary, unk_token="t0")
    return Tokenizer(tokenizers.Tokenizer(model), eos_token_ids=())
