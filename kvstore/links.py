"""One store node as a client sees it: its connection, the exchange of cards, and how it behaves.

A node that does not answer, or answers what cannot be an answer, is left alone for a while, so that
one that hangs costs a deadline once and not at every call. It refuses to know which blocks are
whose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import anyio

from kvass.common.errors import DeadlineExceeded, KvassError, Unavailable
from kvass.common.rpc.client import Asked, Client
from kvass.common.transport.endpoints import Endpoints
from kvass.common.transport.route import Way
from kvass.common.wire import Message, Request
from kvass.kvstore import messages as m
from kvass.kvstore.placement import StoreNode

R = TypeVar("R", bound=Message)

# A control call takes half a millisecond; a node that needs a second for one is not worth waiting
# for.
CALL_S = 1.0
# How long a node that did not answer is left alone; doubled each time, since a dead one only goes
# when membership notices (3 s).
SHUN_S = 0.5
SHUN_MAX_S = 8.0
CLEAN_UP_S = 0.5  # of calls that only tidy up: the node does it by itself later


class Dialer(Protocol):
    """What `rpc.dial.Dialer` is, and what the simulation puts in its place."""

    async def client(self, address: str) -> Client: ...

    async def hang_up(self, address: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Ways:
    """How bytes go between this process and the one that runs the node now."""

    start_id: str
    get_way: Way
    put_way: Way


@dataclass(slots=True, eq=False)
class NodeLink:
    """Mutable fields: `_client` (the open connection), `_ways` (exchanged on it),
    `_shunned_until_s`, `_shun_s`, and `counts`, which all links share."""

    node: StoreNode
    dialer: Dialer
    endpoints: Endpoints | None
    counts: Counter[str]
    now_s: Callable[[], float]
    _client: Client | None = None
    _ways: Ways | None = None
    _attaching: anyio.Lock = field(default_factory=anyio.Lock)
    _shunned_until_s: float = 0.0
    _shun_s: float = SHUN_S

    @property
    def usable(self) -> bool:
        """Whether it makes sense to ask this node now."""
        return self.now_s() >= self._shunned_until_s

    async def call(self, request: Request[R], *, deadline_s: float, limit_s: float = CALL_S) -> R:
        """Ask the node, waiting the shorter of both; raises KvassError. A node that does not answer
        is shunned."""
        client, left_s = await self._client_within(deadline_s, limit_s)
        with self._judged():
            return await client.call(request, deadline_s=left_s)

    @asynccontextmanager
    async def asked(
        self, request: Request[R], *, deadline_s: float, limit_s: float = CALL_S
    ) -> AsyncIterator[Asked[R]]:
        """As `call`, but yield what awaits the reply: something else may be done until then."""
        client, left_s = await self._client_within(deadline_s, limit_s)
        with self._judged():
            async with client.asked(request, deadline_s=left_s) as asked:
                yield asked

    async def _client_within(self, deadline_s: float, limit_s: float) -> tuple[Client, float]:
        """Return the open connection, and the seconds that are left for a call on it."""
        limit_s = min(deadline_s, limit_s)
        if limit_s <= 0:
            raise DeadlineExceeded(f"no time left to ask {self.node.member_id}")
        ends_s = self.now_s() + limit_s
        client = await self._connected(limit_s)
        return client, max(ends_s - self.now_s(), 1e-3)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """Leave the node alone if it does not answer."""
        try:
            yield
        except (Unavailable, DeadlineExceeded) as error:
            self._shun("timeout" if isinstance(error, DeadlineExceeded) else "unavailable")
            raise
        self._shun_s = SHUN_S

    async def tell(self, request: Request[R]) -> None:
        """Tell the node what it would find out by itself later; shielded, short, and never
        raises."""
        with anyio.move_on_after(CLEAN_UP_S, shield=True):
            try:
                await self.call(request, deadline_s=CLEAN_UP_S)
            except KvassError:
                self.counts["tidy_failed"] += 1

    def told(self, asked: Collection[int], *parts: m.Ranges) -> list[set[int]]:
        """Return what an answer says of the blocks that were asked about, each in one part at most;
        raises Unavailable for an answer that cannot be one to that, of which nothing is used."""
        sizes = [stop - first for part in parts for first, stop in part]
        if sum(sizes) <= len(asked) and min(sizes, default=1) > 0:
            found = [{i for first, stop in part for i in range(first, stop)} for part in parts]
            union = set().union(*found)
            if len(union) == sum(sizes) and union.issubset(asked):
                return found
        raise self.wrong("it speaks of other blocks than it was asked about, or twice of one")

    def wrong(self, why: str) -> Unavailable:
        """Return what to raise for an answer that cannot be one: the node is left alone."""
        self._shun("wrong")
        return Unavailable(f"{self.node.member_id} answers wrong: {why}")

    async def start_id(self, *, deadline_s: float) -> str:
        """Return which start of the node answers now; raises KvassError."""
        return (await self._connected(deadline_s)).peer.start_id

    async def ways(self, *, deadline_s: float) -> Ways:
        """Return how bytes go from and to the node, exchanging cards once a connection; raises
        KvassError."""
        await self._connected(deadline_s)
        if self._ways is not None:
            return self._ways
        assert self.endpoints is not None
        async with self._attaching:
            if self._ways is None:
                client = await self._connected(deadline_s)
                request = m.Attach(card=self.endpoints.card())
                reply = await self.call(request, deadline_s=deadline_s)
                if reply.card.start_id != client.peer.start_id:
                    raise self.wrong("a card of another process")
                get_way = await self.endpoints.way_to(reply.card)
                if client is not self._client:
                    raise Unavailable(f"{self.node.member_id} was replaced just now")
                self._ways = Ways(client.peer.start_id, get_way, reply.put_way)
            return self._ways

    async def _connected(self, limit_s: float) -> Client:
        """Return the open connection, or open one. What was exchanged on the last one is void."""
        if self._client is not None and self._client.closed_because is None:
            return self._client
        try:
            with anyio.fail_after(max(min(limit_s, CALL_S), 1e-3)):
                client = await self.dialer.client(self.node.address)
        except (TimeoutError, KvassError) as error:
            self._shun("unreachable")
            raise Unavailable(f"{self.node.member_id}: {str(error) or 'no answer'}") from None
        if client is not self._client:
            self._client, self._ways = client, None
        return client

    def detach(self) -> None:
        """A transfer failed: exchange cards again before the next one."""
        self._ways = None

    def _shun(self, reason: str) -> None:
        """Leave the node alone for a while; calls that fail together do so once."""
        if self.usable:
            self.counts[f"node_{reason}"] += 1
            self._shunned_until_s = self.now_s() + self._shun_s
            self._shun_s = min(2 * self._shun_s, SHUN_MAX_S)
