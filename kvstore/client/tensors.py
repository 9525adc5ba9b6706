"""The store for anybody's arrays: numpy's or torch's, in named chains, from any process.

    async with open_store(["127.0.0.1:7600"], like=torch.empty(2, 16, 64), name="mine v1") as store:
        chain = store.chain(tokens)
        await store.put(chain, {0: first, 1: second})
        found = await store.get(chain)            # {index: tensor}; what is not there is missing

A chain names its blocks by all tokens up to the end of each, so equal tokens find equal blocks, in
whatever process. `name` says what else a block's content follows from (a model and its version,
say): two contents of one name must never be. The form of the blocks is part of the name.

Memory: what is given is copied before `put` returns and what is got is the caller's own; between
them lie `slots` slots of this process, all that ever is registered with a transport. Who wants no
copies uses `client.py` with memory of their own.

What is not there, or cannot be had in time, is missing from the answer, and what could not be
stored is said with the reason: neither is an exception. Raised are a caller's mistakes (Invalid)
and, when a store is opened, that no node answers (Unavailable). asyncio only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Generic

import anyio
import anyio.to_thread
import numpy as np

from kvass.common.checksum import Words
from kvass.common.clock import LoopClock
from kvass.common.config import ClusterConfig, Config
from kvass.common.errors import Invalid, Unavailable
from kvass.common.keys import Chain, Namespace, namespace_of, salt_of
from kvass.common.pages import shared_pages
from kvass.common.rpc.credentials import Credentials, credentials_of
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.hello import Hello
from kvass.common.secret import Secret
from kvass.common.transport.identity import own_identity
from kvass.common.transport.seam import Region
from kvass.common.wire import KEYS_MAX, Range, Tags
from kvass.kvstore import messages as m
from kvass.kvstore.client.forms import Array, Form, form_of
from kvass.kvstore.client.roster import Addresses, Broker, Roster
from kvass.kvstore.client.store import StoreClient, open_client
from kvass.kvstore.placement import StoreNode
from kvass.kvstore.results import PushResult
from kvass.kvstore.transfers import PlainShape

SLOTS = 64  # as many blocks are on their way at once, each way; of 2 MiB 128 MiB
FIND_S = 5.0  # a node that is there answers in milliseconds; one that starts, in seconds
DEADLINE_S = 5.0
TOKENS_MAX = 1 << 16  # of one block: what a node takes

# Takes chain indices, a slot for each, and the seconds that are left.
Move = Callable[[Sequence[int], list[int], float], Awaitable[None]]


class SlotPool:
    """This process's slots, taken in turns. Mutable fields: `_free`, `_came` (set when a slot is
    given back), `array` until `close`."""

    def __init__(self, block_size: int, slots: int) -> None:
        if slots < 1:
            raise Invalid(f"a store needs at least one slot, got {slots}")
        # Nobody computes here: nodes on this host read what is put fastest from shared pages.
        self._pages = shared_pages(slots * block_size)
        self.array = np.frombuffer(self._pages.view, dtype=np.uint8).reshape(slots, block_size)
        self.address = self._pages.address
        self.size = self.array.nbytes
        self._free = list(range(slots))
        self._turn = anyio.Lock()
        self._came = anyio.Event()

    @property
    def region(self) -> Region:
        """Return what transports register."""
        return self._pages.region

    def addresses(self, slots: Sequence[int]) -> Words:
        """Return the absolute addresses, uint64 [len(slots)], of the slots' first bytes."""
        size = np.uint64(self.array.shape[1])
        return np.array(slots, dtype=np.uint64) * size + np.uint64(self.address)

    def close(self) -> None:
        """Give the pages back, when no transfer is in flight any more."""
        self.array = self.array[:0].copy()
        self._pages.close()

    @asynccontextmanager
    async def some(self, most: int, *, wait_s: float) -> AsyncIterator[list[int]]:
        """Take up to `most` slots, as many as are free; none when none comes free in time. Who
        waits has a turn."""
        taken: list[int] = []
        with anyio.move_on_after(max(wait_s, 0)):
            async with self._turn:
                while not self._free:
                    self._came = anyio.Event()
                    await self._came.wait()
                taken, self._free = self._free[:most], self._free[most:]
        try:
            yield taken
        finally:
            self._free += taken
            self._came.set()


class TensorStore(Generic[Array]):
    """See the module; made by `open_store`. Safe to use from any number of tasks of one event loop.

    `client` is what it stands on, for claims, waiting and counts. `deadline_s` bounds each call,
    waiting for slots included. Owns its slots; no other mutable field.
    """

    def __init__(
        self,
        client: StoreClient,
        form: Form[Array],
        pool: SlotPool,
        namespace: Namespace,
        *,
        block_tokens: int,
        tenant: str,
    ) -> None:
        self.client = client
        self.namespace = namespace
        self._form: Form[Array] = form
        self._pool = pool
        self._block_tokens = block_tokens
        self._tenant = tenant
        self._now_s = LoopClock().now_s

    def chain(self, tokens: Iterable[int], *, salt: str = "") -> Chain:
        """Name blocks: one for each `block_tokens` tokens. Whoever does not know `salt` (and the
        tenant) finds none of them."""
        chain = Chain(self.namespace, self._block_tokens, salt=salt_of(b"", self._tenant, salt))
        chain.extend(tokens)
        return chain

    async def put(
        self, chain: Chain, blocks: Mapping[int, Array], *, deadline_s: float = DEADLINE_S
    ) -> PushResult:
        """Store blocks by their index in the chain; those that are there already stay.

        Returns which were stored, and of the others why not (`counts.REFUSALS`). Of more than fit
        together, in the nodes' memory or the tenant's quota, the later ones make room for
        themselves: `lookup` says what is there in the end. Raises Invalid for an index that the
        chain has not, or a block of another form.
        """
        wanted = _indices(chain, [(index, index + 1) for index in blocks])
        result = PushResult(set(), dict.fromkeys(wanted, "unavailable"))

        async def move(part: Sequence[int], slots: list[int], left_s: float) -> None:
            await anyio.to_thread.run_sync(self._write, [blocks[i] for i in part], slots)
            done = await self.client.push(
                chain, part, slots, hold_owner=None, tenant=self._tenant, deadline_s=left_s
            )
            result.stored.update(done.stored)
            result.refused.update(done.refused)

        await self._in_parts(wanted, move, deadline_s)
        for index in result.stored:
            del result.refused[index]
        return result

    async def get(
        self,
        chain: Chain,
        ranges: Iterable[Range] | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> dict[int, Array]:
        """Load these of a chain's blocks, or all: those that are there, by index, checked by
        checksum."""
        found: dict[int, Array] = {}

        async def move(part: Sequence[int], slots: list[int], left_s: float) -> None:
            there = await self.client.pull(chain, part, slots, deadline_s=left_s)
            place = dict(zip(part, slots, strict=True))
            pulled = sorted(there)
            blocks = await anyio.to_thread.run_sync(self._read, [place[i] for i in pulled])
            found.update(zip(pulled, blocks, strict=True))

        await self._in_parts(_indices(chain, ranges), move, deadline_s)
        return found

    async def lookup(
        self,
        chain: Chain,
        ranges: Iterable[Range] | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> list[Range]:
        """Return which of a chain's blocks are there now. Protects nothing."""
        return await self.client.lookup(chain, _checked(chain, ranges), deadline_s=deadline_s)

    async def pin(
        self,
        chain: Chain,
        ranges: Iterable[Range] | None = None,
        *,
        owner: str,
        duration_s: float,
        deadline_s: float = DEADLINE_S,
    ) -> list[Range]:
        """Keep blocks from eviction for a while; returns those that are: here, and within the
        owner's quota on their node."""
        return await self.client.pin(
            chain,
            _checked(chain, ranges),
            owner=owner,
            duration_s=duration_s,
            deadline_s=deadline_s,
        )

    async def unpin(self, owner: str) -> None:
        """End an owner's pins."""
        await self.client.unpin(owner)

    async def drop(
        self,
        chain: Chain,
        ranges: Iterable[Range] | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> int:
        """Erase these of a chain's blocks; returns how many copies went.

        Raises Unavailable when a node could not be told: an erasure must not be half done unseen.
        """
        keys = [chain.key(index) for index in _indices(chain, ranges)]
        gone = 0
        for first in range(0, len(keys), KEYS_MAX):
            part = keys[first : first + KEYS_MAX]
            gone += await self.client.drop(
                namespace=chain.namespace, keys=part, deadline_s=deadline_s
            )
        return gone

    async def drop_all(self, *, deadline_s: float = DEADLINE_S) -> int:
        """Erase every block of this name and form (and tenant, where there is one); as `drop`."""
        tenant = self._tenant or None
        return await self.client.drop(
            namespace=self.namespace, tenant=tenant, deadline_s=deadline_s
        )

    async def _in_parts(self, left: Sequence[int], move: Move, deadline_s: float) -> None:
        """Move blocks, as many at once as slots are free, until all are or the time is over."""
        ends_s = self._now_s() + deadline_s
        while left:
            async with self._pool.some(len(left), wait_s=ends_s - self._now_s()) as slots:
                left_s = ends_s - self._now_s()
                if not slots or left_s <= 0:
                    return
                await move(left[: len(slots)], slots, left_s)
                left = left[len(slots) :]

    def _write(self, blocks: Sequence[Array], slots: Sequence[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            self._form.write(block, self._pool.array[slot])

    def _read(self, slots: Sequence[int]) -> list[Array]:
        return [self._form.read(self._pool.array[slot]) for slot in slots]


def _checked(chain: Chain, ranges: Iterable[Range] | None) -> list[Range]:
    """Return ranges of blocks that a chain has, all of them by default; raises Invalid."""
    count = len(chain.keys)
    asked = [(0, count)] if ranges is None else list(ranges)
    for first, stop in asked:
        if not 0 <= first <= stop <= count:
            raise Invalid(f"blocks {first} to {stop} of a chain that has {count}")
    return asked


def _indices(chain: Chain, ranges: Iterable[Range] | None) -> list[int]:
    asked = _checked(chain, ranges)
    return sorted({index for first, stop in asked for index in range(first, stop)})


@asynccontextmanager
async def open_store(
    addresses: Sequence[str] = (),
    *,
    like: Array,
    name: str,
    broker: str = "",
    block_tokens: int = 16,
    slots: int = SLOTS,
    tenant: str = "",
    secret: str = "",
    find_s: float = FIND_S,
    config: Config = Config(),  # noqa: B008 (immutable)
) -> AsyncIterator[TensorStore[Array]]:
    """Open the store of a cluster, by the addresses of nodes or else by its broker.

    Blocks look as `like`: one shape and one type of numbers. `slots` of them are this process's own
    memory for moving them. `secret` is the cluster's; where it is not given it is looked for as
    members do (`common/secret.py`). `config` says what is not said here: the cluster's name, TLS,
    transports. Addresses must be the nodes of one cluster, all of them, as every client must give.

    Raises Invalid for what is wrong with these, Unavailable when no node answers within `find_s`.
    """
    form = form_of(like)
    if not 1 <= block_tokens <= TOKENS_MAX:
        raise Invalid(f"block_tokens is {block_tokens}; expected 1 to {TOKENS_MAX}")
    cluster = replace(config.cluster, broker=broker or config.cluster.broker)
    credentials = credentials_of(cluster)
    if secret:
        credentials = Credentials(Secret(secret, "open_store"), credentials.tls)
    hello = _hello()
    shape = PlainShape(form.size_bytes)
    pool = SlotPool(form.size_bytes, slots)
    namespace = namespace_of({"tensors": name, "block_tokens": block_tokens, **form.identity()})
    async with AsyncExitStack() as stack:
        stack.callback(pool.close)
        client = await stack.enter_async_context(
            open_client(config.transport, hello, credentials, memory=pool, layout=shape)
        )
        await stack.enter_async_context(
            _known(client, list(addresses), cluster, credentials, hello, find_s)
        )
        yield TensorStore(client, form, pool, namespace, block_tokens=block_tokens, tenant=tenant)


@asynccontextmanager
async def _known(
    client: StoreClient,
    addresses: Sequence[str],
    cluster: ClusterConfig,
    credentials: Credentials,
    hello: Hello,
    find_s: float,
) -> AsyncIterator[None]:
    """Keep a client told of the nodes; enters when one is there."""
    found = anyio.Event()
    failure: Exception | None = None

    def apply(nodes: list[StoreNode]) -> None:
        client.set_nodes(nodes)
        if nodes:
            found.set()

    async with anyio.create_task_group() as tasks:
        try:
            roster: Roster
            if addresses:
                dialer = Dialer(tasks, hello, Tags(m.STORE_REPLIES), credentials)
                roster = Addresses(addresses, dialer, LoopClock().now_s)
            else:
                roster = Broker(cluster, credentials, hello)
            tasks.start_soon(roster.run, apply)
            with anyio.move_on_after(find_s):
                await found.wait()
            if not found.is_set():
                raise Unavailable(f"no store node is found: {roster.complaint()}")
            yield
        except Exception as error:  # stays itself, in no group
            failure = error
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def _hello() -> Hello:
    who = own_identity()
    name = f"client-{socket.gethostname().split('.')[0]}-{os.getpid()}"
    return Hello("client", name[-64:], who.host_id, who.start_id, who.pid, {})
