"""Which store nodes there are, for a process that is no member of their cluster.

    by address   each is asked who it is, again and again: nothing else need run
    by broker    who is ready is listened to, as members do, and nothing is said

Both give the same nodes, in name and in weight, as members see them, so a chain's blocks are looked
for where others have put them. It refuses to know what nodes are asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from kvass.common import bus, seal, wire
from kvass.common.clock import Clock, RealClock
from kvass.common.config import DEFAULT_BROKER, ClusterConfig
from kvass.common.errors import Invalid, KvassError, Unauthorized
from kvass.common.membership import NodeTable, Peer
from kvass.common.rpc.credentials import Credentials
from kvass.common.rpc.hello import Hello
from kvass.common.secret import REMEDY
from kvass.kvstore import messages as m
from kvass.kvstore.links import CALL_S, Dialer
from kvass.kvstore.placement import StoreNode, nodes_of

_log = logging.getLogger(__name__)

LOOK_S = 2.0  # between two looks at who is there
KEPT_S = 10.0  # how long a node that does not answer is still one: a restart takes less
ADDRESSES_MAX = 1_024  # as many nodes as a cluster is foreseen to have

Apply = Callable[[list[StoreNode]], None]


class Roster(Protocol):
    """Knows the nodes while it runs."""

    async def run(self, apply: Apply) -> None:
        """Call `apply` with the nodes, now and after each change, for ever."""

    def complaint(self) -> str:
        """Say in words why there may be none."""


@dataclass(slots=True)
class Addresses:
    """Nodes by `host:port`. Mutable fields: `_nodes` by address, with the time when each answered
    last, and `reasons` why one does not; `refused`: it does, and lets this process not in."""

    addresses: Sequence[str]
    dialer: Dialer
    now_s: Callable[[], float]
    _nodes: dict[str, tuple[StoreNode, float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not 0 < len(self.addresses) <= ADDRESSES_MAX:
            raise Invalid(f"{len(self.addresses)} addresses of nodes; give 1 to {ADDRESSES_MAX}")
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            if not (host and port.isdecimal() and 0 < int(port) < 65_536):
                raise Invalid(f"a node's address is {address!r}; expected host:port")

    async def run(self, apply: Apply) -> None:
        applied: list[StoreNode] | None = None
        while True:
            nodes = await self.look()
            if nodes != applied:
                apply(nodes)
                applied = nodes
            await anyio.sleep(LOOK_S)

    async def look(self) -> list[StoreNode]:
        """Ask every address; return the nodes that answer, or did so lately, in order of id."""
        async with anyio.create_task_group() as tasks:
            for address in self.addresses:
                tasks.start_soon(self._look, address)
        late_s = self.now_s() - KEPT_S
        named = {n.member_id: n for n, heard_s in self._nodes.values() if heard_s >= late_s}
        return [named[member_id] for member_id in sorted(named)]

    def complaint(self) -> str:
        reasons = [f"{address}: {why}" for address, why in self.reasons.items()]
        return "; ".join(reasons) or f"no answer from {', '.join(self.addresses)}"

    async def _look(self, address: str) -> None:
        """Ask one address who is there."""
        self.refused.discard(address)
        try:
            with anyio.fail_after(CALL_S):
                client = await self.dialer.client(address)
                if client.peer.role != "store":
                    raise Invalid(f"a {client.peer.role} answers, which is no store node")
                counts = (await client.call(m.Stats(), deadline_s=CALL_S)).counts
        except TimeoutError:
            self.reasons[address] = f"no answer within {CALL_S:g} s"
        except KvassError as error:
            self.reasons[address] = str(error)
            if isinstance(error, Unauthorized):
                self.refused.add(address)
        else:
            node = _node_of(client.peer, address, counts)
            self._nodes[address] = (node, self.now_s())
            self.reasons.pop(address, None)


def _node_of(peer: Hello, address: str, counts: dict[str, int]) -> StoreNode:
    """Return a node as its announcement in a membership would have it."""
    return StoreNode(
        member_id=peer.member_id,
        address=address,
        capacity_bytes=counts.get("total_bytes", 0),
        host_id=peer.host_id,
        replicas=max(counts.get("replicas", 1), 1),
        draining=bool(counts.get("draining", 0)),
    )


class Broker:
    """Nodes as they announce themselves. asyncio only, as the bus is. Mutable fields: `_table`,
    `_refused` (messages that did not check) and `_complained` of one of them."""

    def __init__(
        self,
        cluster: ClusterConfig,
        credentials: Credentials,
        hello: Hello,
        clock: Clock | None = None,
    ) -> None:
        self._topics = bus.Topics(cluster.name)
        self._seal = seal.Seal(credentials.secret)
        self._source = credentials.secret.source
        self._clock: Clock = clock or RealClock()
        self._table = NodeTable(("store",))
        self._refused = 0
        self._bus = bus.Bus(
            cluster.broker or DEFAULT_BROKER,
            client_id=f"kvass-{hello.start_id}",
            own_topic=self._topics.presence("client", hello.member_id, hello.start_id),
            subscriptions=[self._topics.presences, self._topics.loads("store")],
            on_message=self._on_message,
            on_link_up=self._on_link_up,
            on_link_down=self._table.link_down,
        )

    async def run(self, apply: Apply) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._bus.run)
            applied: list[StoreNode] | None = None
            while True:
                now_s = self._clock.now_s()
                self._table.tick(now_s)
                self._table.forget_unconfirmed(now_s)
                nodes = nodes_of(self._table.live("store", now_s))
                if nodes != applied:
                    apply(nodes)
                    applied = nodes
                await anyio.sleep(LOOK_S / 4)

    def complaint(self) -> str:
        if not self._bus.is_up:
            return f"the broker {self._bus.broker} cannot be reached"
        if self._refused:
            return (
                f"who speaks at the broker {self._bus.broker} has another cluster secret than this "
                f"process, whose is from {self._source}: {REMEDY}"
            )
        return f"no store node is ready at the broker {self._bus.broker}"

    async def _on_link_up(self) -> None:
        self._table.link_up(self._clock.now_s())

    def _on_message(self, topic: str, payload: bytes) -> None:
        try:
            self._take(topic, payload)
        except Unauthorized as error:
            self._refused += 1
            if self._refused == 1:
                _log.warning("message on %s: %s; more such are not told", topic, error)
        except Invalid as error:
            _log.warning("message on %s: %s", topic, error)

    def _take(self, topic: str, payload: bytes) -> None:
        about = self._topics.parse(topic)
        if about is None or about.role != "store":
            return
        now_s = self._clock.now_s()
        if about.kind == "load":
            number, load = self._seal.open(topic, payload, wire.Facts)
            if self._seal.step(topic, number) > 0:
                self._table.saw_load(about.start_id, load, now_s)
        elif not payload:
            self._table.saw_gone(about.start_id)
        else:
            number, peer = self._seal.open(topic, payload, Peer)
            if self._seal.step(topic, number) >= 0 and (
                (peer.role, peer.member_id, peer.start_id) == about[1:]
            ):
                self._table.saw_presence(peer, now_s)
