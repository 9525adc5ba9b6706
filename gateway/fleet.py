"""The workers and the store as the gateway's requests use them: views, connections, calls.

It knows who is live, what this process has sent to whom, and when to give up on a peer that hangs
instead of dying. It refuses to know what a request means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import anyio

from kvass.common import errors
from kvass.common.clock import Clock
from kvass.common.config import GatewayConfig
from kvass.common.keys import Chain, Namespace, Salt
from kvass.common.membership import Load, NodeTable, Peer, Role
from kvass.common.metrics import RequestMetrics
from kvass.common.model.identity import namespace_in
from kvass.common.rpc.client import Client
from kvass.common.rpc.dial import Dialer
from kvass.common.wire import Range
from kvass.gateway.admission import Admission, Room
from kvass.gateway.ask import Served
from kvass.gateway.overview import NO_DECODE, Reason
from kvass.gateway.route import Affinity, Worker

PATROL_S = 0.25  # a lost peer is given up within the membership's 3 s and this


class Members(Protocol):
    """What the gateway needs of `common.member.Member`."""

    @property
    def table(self) -> NodeTable: ...

    def live(self, role: Role) -> list[Peer]: ...

    def load_of(self, peer: Peer) -> Load: ...

    def refused(self, peer: Peer) -> None: ...


class Store(Protocol):
    """What the gateway needs of `kvstore.client.StoreClient`."""

    async def lookup(
        self, chain: Chain, ranges: Iterable[Range], *, deadline_s: float, stage_s: float = 0.0
    ) -> list[Range]: ...

    async def release_hold(self, owner: str) -> None: ...

    async def stats(self, *, deadline_s: float) -> Sequence[Mapping[str, str | int]]: ...


@dataclass(slots=True, eq=False)
class InFlight:
    """One call to a worker. `missing_tokens` is what it must compute before its first token."""

    peer: Peer
    missing_tokens: int
    scope: anyio.CancelScope
    lost: str = ""

    def lose(self, reason: str) -> None:
        """End the call as if its connection had been lost."""
        self.lost = self.lost or reason
        self.scope.cancel()


@dataclass(slots=True, eq=False)
class Fleet:
    """Everything that the requests of one gateway share.

    Mutable fields: `admission`, `affinity`, `_calls` (in flight), `_expected` (by start id: choices
    that are on their way to a worker and no calls yet), `_used_s` (by start id: when a worker was
    last sent something, or first looked at; of those that are live).
    """

    served: Served
    members: Members
    dialer: Dialer
    store: Store
    metrics: RequestMetrics
    config: GatewayConfig
    clock: Clock
    admission: Admission = field(default_factory=Admission)
    affinity: Affinity = field(default_factory=Affinity)
    _calls: list[InFlight] = field(default_factory=list)
    _expected: Counter[str] = field(default_factory=Counter)
    _used_s: dict[str, float] = field(default_factory=dict)

    def workers(self, role: Role) -> list[Worker]:
        """Return the views of a role's live workers; what this process sent since their last load
        is counted in."""
        views = [self._view(peer) for peer in self.members.live(role)]
        least_s = min((view.unused_s for view in views), default=0.0)
        return [replace(view, unused_s=view.unused_s - least_s) for view in views]

    def room(self) -> Room | None:
        """Return how many choices the decode workers have room for; None while they have not said.

        Their batches twice, so that none is empty while the next ones are looked up, and the rest
        waits here; where several gateways serve, each takes its part.
        """
        live = self.members.live("decode")
        workers = [self._said(peer) for peer in live]
        if not workers or not all(worker.running_max for worker in workers):
            return None
        batches = sum(worker.running_max for worker in workers)
        queues = sum(worker.waiting_max for worker in workers)
        gateways = self.members.live("gateway")
        serving = sum(bool(self.members.load_of(peer).get("running")) for peer in gateways)
        served = (batches + min(batches, queues)) // max(serving, 1)
        return Room(max(served, 1), batches + queues)

    def namespace(self) -> Namespace | None:
        """Return what the workers' keys begin with: it depends on their device, so they say it."""
        roles: tuple[Role, ...] = ("decode", "prefill")
        peers = (peer for role in roles for peer in self.members.live(role))
        return next((found for peer in peers if (found := namespace_in(peer.cluster))), None)

    def chain(self, tokens: Sequence[int], salt: Salt) -> Chain:
        """Name the blocks of a private token sequence as the workers do."""
        return self.served.chain(tokens, salt, self.namespace())

    def note_pool(self, peer: Peer, chain: Chain) -> None:
        """Note that a decode worker has a chain's blocks in its pool now."""
        self.affinity.record(self._said(peer), chain.keys)

    def _said(self, peer: Peer) -> Worker:
        return Worker.of_load(peer.member_id, peer.start_id, self.members.load_of(peer))

    def _view(self, peer: Peer) -> Worker:
        worker, now_s = self._said(peer), self.clock.now_s()
        own = [call for call in self._calls if call.peer.start_id == peer.start_id]
        return replace(
            worker,
            running=max(worker.running, len(own) + self._expected[peer.start_id] - worker.waiting),
            waiting_tokens=max(worker.waiting_tokens, sum(call.missing_tokens for call in own)),
            unused_s=0.0 if own else now_s - self._used_s.setdefault(peer.start_id, now_s),
        )

    @contextmanager
    def expect(self, start_id: str) -> Iterator[Callable[[], None]]:
        """Count a choice that was just routed; yields what to call once it has become a call."""
        met = False

        def meet() -> None:
            nonlocal met
            if not met:
                met = True
                self._expected[start_id] -= 1
                if not self._expected[start_id]:
                    del self._expected[start_id]

        self._expected[start_id] += 1
        try:
            yield meet
        finally:
            meet()

    async def client(self, role: Role, start_id: str) -> tuple[Peer, Client]:
        """Connect to a worker; one that refuses is left out for a while. Raises Unavailable."""
        for peer in self.members.live(role):
            if peer.start_id == start_id:
                break
        else:
            raise errors.Unavailable(f"the {role} worker {start_id} has left")
        try:
            client = await self.dialer.client(peer.address)
        except errors.KvassError as error:
            self.members.refused(peer)
            raise errors.Unavailable(f"{peer.member_id}: {error}") from None
        if client.peer.start_id != start_id:
            await self.dialer.hang_up(peer.address)
            raise errors.Unavailable(f"another process has the address of {peer.member_id}")
        return peer, client

    @contextmanager
    def call(self, peer: Peer, client: Client, missing_tokens: int) -> Iterator[InFlight]:
        """Account for a call; raises Unavailable from it once the peer is gone or is given up."""
        with anyio.CancelScope() as scope:
            flight = InFlight(peer, missing_tokens, scope)
            self._calls.append(flight)
            try:
                yield flight
            except errors.Unavailable:
                if client.closed_because is not None:
                    self.members.refused(peer)
                raise
            finally:
                self._calls.remove(flight)
                self._used_s[peer.start_id] = self.clock.now_s()
        if flight.lost and scope.cancelled_caught:
            raise errors.Unavailable(f"{peer.member_id}: {flight.lost}")

    async def patrol(self) -> None:
        """Give up calls to peers that membership has lost; runs as long as the gateway."""
        while True:
            await anyio.sleep(PATROL_S)
            for flight in list(self._calls):
                if self._is_gone(flight.peer):
                    flight.lose("it stopped being heard of")
            known = {entry.peer.start_id for entry in self.members.table.entries()}
            for start_id in self._used_s.keys() - known:
                del self._used_s[start_id]

    def _is_gone(self, peer: Peer) -> bool:
        table, now_s = self.members.table, self.clock.now_s()
        for entry in table.entries(peer.role):
            if entry.peer.start_id == peer.start_id:
                # A demoted peer refused somebody's connection; that says nothing of this one.
                return entry.demoted_until_s <= now_s and not table.is_live(entry, now_s)
        return True

    def why_not_ready(self) -> Reason | None:
        """Return why no completion can be served now; None if one can."""
        return None if self.members.live("decode") else NO_DECODE
