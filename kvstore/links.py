"""One store node as a client sees it: its connection, the exchange of cards, and how it behaves.

A node that does not answer is left alone for a while, so that one that hangs costs a deadline once
and not at every call. It refuses to know which blocks are whose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import anyio

from kvass.common.errors import DeadlineExceeded, Incompatible, KvassError, Unavailable
from kvass.common.rpc import Client
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
    """What `rpc.Dialer` is, and what the simulation puts in its place."""

    async def client(self, address: str) -> Client: ...

    async def hang_up(self, address: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Attached:
    start_id: str
    get_way: Way
    put_way: Way


@dataclass(slots=True, eq=False)
class NodeLink:
    """Mutable fields: `_shunned_until_s`, `_shun_s`, `_attached`, `counts` (shared by all
    links)."""

    node: StoreNode
    dialer: Dialer
    endpoints: Endpoints | None
    counts: Counter[str]
    now_s: Callable[[], float]
    _shunned_until_s: float = 0.0
    _shun_s: float = SHUN_S
    _attached: _Attached | None = None
    _attaching: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def usable(self) -> bool:
        """Whether it makes sense to ask this node now."""
        return self.now_s() >= self._shunned_until_s

    async def call(self, request: Request[R], *, deadline_s: float, limit_s: float = CALL_S) -> R:
        """Ask the node, waiting the shorter of both; raises KvassError. A node that does not answer
        is shunned."""
        limit_s = min(deadline_s, limit_s)
        if limit_s <= 0:
            raise DeadlineExceeded(f"no time left to ask {self.node.member_id}")
        ends_s = self.now_s() + limit_s
        try:
            with anyio.fail_after(limit_s):
                client = await self.dialer.client(self.node.address)
            reply = await client.call(request, deadline_s=max(ends_s - self.now_s(), 1e-3))
        except TimeoutError:
            self.shun("timeout")
            raise Unavailable(f"{self.node.member_id} does not take connections") from None
        except (Unavailable, DeadlineExceeded, Incompatible) as error:
            self.shun("timeout" if isinstance(error, DeadlineExceeded) else "unavailable")
            raise
        self._shun_s = SHUN_S
        return reply

    async def tell(self, request: Request[R]) -> None:
        """Tell the node what it would find out by itself later; shielded, short, and never
        raises."""
        with anyio.move_on_after(CLEAN_UP_S, shield=True):
            try:
                await self.call(request, deadline_s=CLEAN_UP_S)
            except KvassError:
                self.counts["tidy_failed"] += 1

    def shun(self, reason: str) -> None:
        """Leave the node alone for a while."""
        self.counts[f"node_{reason}"] += 1
        self._shunned_until_s = self.now_s() + self._shun_s
        self._shun_s = min(2 * self._shun_s, SHUN_MAX_S)

    async def ways(self, *, deadline_s: float) -> _Attached:
        """Return how bytes go from and to the node's present process; raises KvassError."""
        assert self.endpoints is not None
        async with self._attaching:
            client = await self._connect(deadline_s)
            start_id = client.peer.start_id
            if self._attached is None or self._attached.start_id != start_id:
                own = self.endpoints.card()
                reply = await self.call(m.Attach(card=own), deadline_s=deadline_s)
                if reply.card.start_id != start_id:
                    raise Unavailable(f"{self.node.member_id} was replaced just now")
                get_way = await self.endpoints.way_to(reply.card)
                self._attached = _Attached(start_id, get_way, reply.put_way)
            return self._attached

    async def _connect(self, deadline_s: float) -> Client:
        try:
            with anyio.fail_after(min(deadline_s, CALL_S)):
                return await self.dialer.client(self.node.address)
        except (TimeoutError, KvassError) as error:
            self.shun("unavailable")
            raise Unavailable(f"{self.node.member_id}: {error}") from None

    def detach(self) -> None:
        """A transfer failed: exchange cards again before the next one."""
        self._attached = None
