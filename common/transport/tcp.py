"""Writes over TCP by NIXL, into landing buffers that peers lend.

The holder of bytes writes them. It has one agent for each peer: when a write must end (its deadline
passed, its caller left) only destroying its agent ends it for sure, and an agent of its own takes
no other peer's transfers with it. A peer whose landing was rebuilt (a card of another generation)
gets a new agent too. Agents, and with them listening sockets, exist only once something was
written. It refuses to read: over TCP a read is emulated by its target, which then must not hang.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvass.common.checksum import Sums
from kvass.common.descriptors import require_free
from kvass.common.errors import Invalid, KvassError, Overloaded, TransferFailed, Unavailable
from kvass.common.transport.copies import check, joined, slices
from kvass.common.transport.identity import Identity
from kvass.common.transport.mover import Mover, Progress
from kvass.common.transport.nixl_agent import Agent, tcp_environment
from kvass.common.transport.seam import Copies, EndpointCard, Region, TransportKind

_log = logging.getLogger(__name__)

PEERS_MAX = 1_024
AGENTS_MAX = 64  # 1 MB, four descriptors and one listening socket each; idle ones make room


@dataclass(slots=True)
class _Peer:
    """An attached peer. Mutable fields: all but `card`. `used` orders peers by their last write."""

    card: EndpointCard
    agent: Agent | None = None
    name: str = ""
    writes: int = 0
    used: int = 0


class TcpTransport:
    """The holder's side of TCP.

    Mutable fields, all the mover thread's: `_peers`, `_opened` (agents ever created: makes names).
    """

    kind: TransportKind = "tcp"

    def __init__(
        self, mover: Mover, identity: Identity, regions: Sequence[Region], *, interface: str
    ) -> None:
        self._mover = mover
        self._identity = identity
        self._regions = list(regions)
        self._environment = tcp_environment(interface)
        self._peers: dict[str, _Peer] = {}
        self._opened = 0
        mover.post(lambda: mover.tend(self))
        mover.on_close(self._close)

    def card(self) -> EndpointCard:
        """Return who writes; nothing can be reached by this card."""
        who = self._identity
        return EndpointCard(
            kind=self.kind,
            host_id=who.host_id,
            start_id=who.start_id,
            pid=who.pid,
            generation=0,
            metadata=b"",
        )

    async def attach(self, card: EndpointCard) -> None:
        """Remember the card of a loan; the connection is made by the first write."""
        known = self._peers.get(card.start_id)
        if known is None or known.card != card:
            await self._mover.call(lambda: self._attach(card))

    async def read(
        self,
        start_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        sums: Sums | None = None,
    ) -> None:
        """Refuse: an emulated read hangs with its target and lands bytes after it was given up."""
        raise Invalid("TCP only writes; lend a landing buffer and ask the holder to write")

    async def write(self, start_id: str, copies: Copies, *, tag: bytes, deadline_s: float) -> None:
        """Write into the loan `tag` of an attached peer."""
        check(copies, self._regions)
        if not len(copies.sizes) or not tag:
            raise Invalid("a write needs at least one range, and its loan's tag")
        peer = self._peers.get(start_id)
        if peer is None:
            raise Unavailable(f"peer {start_id} is not attached")
        ranges = joined(copies, self._regions)  # each is one write of UCX, with a header of its own
        await self._mover.transfer(_Write(self, peer, ranges, tag), deadline_s=deadline_s)

    def detach(self, start_id: str) -> None:
        """Forget a peer; writes in flight to it fail."""
        try:
            self._mover.post(lambda: self._forget(start_id))
        except (Overloaded, Unavailable) as error:
            # Closed: no agent is left. Too busy: the idle peer makes room when another one comes.
            _log.debug("tcp: peer %s is not forgotten yet: %s", start_id, error)

    def has_agents(self) -> bool:
        """Return whether there is an agent; on the mover's thread."""
        return any(peer.agent is not None for peer in self._peers.values())

    def tend(self) -> None:
        """Let each agent make progress. Nobody has a loan of it, so no tag that it is told is
        waited for."""
        for peer in list(self._peers.values()):
            if peer.agent is None:
                continue
            try:
                peer.agent.notifications()
            except KvassError as error:
                _log.debug("tcp: the agent for peer %s: %s", peer.card.start_id, error)
                if not peer.writes:  # else they find out
                    self.tear_down(peer)

    def open_agent(self, peer: _Peer) -> Agent:
        """Return the peer's agent, connected; on the mover's thread."""
        if self._peers.get(peer.card.start_id) is not peer:
            raise Unavailable(f"peer {peer.card.start_id} was detached or has a newer card")
        self._opened += 1
        peer.used = self._opened
        if peer.agent is None:
            self._make_room()
            require_free("an agent that writes over TCP")
            agent = Agent(f"{self._identity.start_id}.out.{self._opened}", self._environment)
            try:
                agent.register(self._regions)
                peer.name = agent.add(peer.card.metadata)
            except KvassError:
                agent.close()
                raise
            peer.agent = agent
        return peer.agent

    def tear_down(self, peer: _Peer) -> None:
        """Destroy the peer's agent: all that is in flight to that peer ends. On the mover's
        thread."""
        if peer.agent is not None:
            agent, peer.agent = peer.agent, None
            agent.close()

    def _attach(self, card: EndpointCard) -> None:
        if card.kind != self.kind or not card.metadata:
            raise Invalid(f"a card of kind {card.kind!r}; expected that of a TCP landing")
        known = self._peers.get(card.start_id)
        if known is not None and known.card == card:
            return  # another writer of this card came first, and may be writing
        if known is not None and known.card.generation > card.generation:
            raise Unavailable(f"the landing of peer {card.start_id} was rebuilt since that card")
        if known is None and len(self._peers) >= PEERS_MAX:
            idle = min(self._peers.values(), key=lambda peer: (peer.writes > 0, peer.used))
            if idle.writes:
                raise Overloaded(f"{PEERS_MAX} peers are being written to")
            self._forget(idle.card.start_id)
        self._forget(card.start_id)
        self._peers[card.start_id] = _Peer(card)

    def _make_room(self) -> None:
        open_peers = [peer for peer in self._peers.values() if peer.agent is not None]
        if len(open_peers) < AGENTS_MAX:
            return
        idle = min(open_peers, key=lambda peer: (peer.writes > 0, peer.used))
        if idle.writes:
            raise Overloaded(f"{AGENTS_MAX} peers are being written to")
        self.tear_down(idle)

    def _forget(self, start_id: str) -> None:
        peer = self._peers.pop(start_id, None)
        if peer is not None:
            self.tear_down(peer)

    def _close(self) -> None:
        for start_id in list(self._peers):
            self._forget(start_id)


class _Write:
    """A write under way, slice after slice; the last one carries the tag.

    Mutable fields: `_agent` (what it began on), `_handle` (of the slice in flight), `_pieces`.
    """

    def __init__(self, transport: TcpTransport, peer: _Peer, copies: Copies, tag: bytes) -> None:
        self._transport = transport
        self._peer = peer
        self._tag = tag
        self._pieces = list(slices(copies))[::-1]
        self._agent: Agent | None = None
        self._handle: int | None = None

    def step(self) -> Progress:
        try:
            return self._advance()
        except Invalid:
            self._end()  # refused before a byte of this slice moved
            raise
        except KvassError:
            self.stop()
            raise

    def stop(self) -> None:
        """Destroy the peer's agent, if this write has begun on it and it is still there."""
        if self._agent is not None and self._peer.agent is self._agent:
            _log.warning("tcp: the connection to peer %s is torn down", self._peer.card.start_id)
            self._transport.tear_down(self._peer)
        self._end()

    def _advance(self) -> Progress:
        if self._agent is None:
            self._agent = self._transport.open_agent(self._peer)
            self._peer.writes += 1
        elif self._agent is not self._peer.agent:
            raise TransferFailed(f"the connection to peer {self._peer.card.start_id} was torn down")
        if self._handle is None:
            piece = self._pieces.pop()
            tag = b"" if self._pieces else self._tag
            self._handle, state = self._agent.write(piece, self._peer.name, tag)
        else:
            state = self._agent.state(self._handle)
        if state == "PROC":
            return "idle"
        self._agent.release(self._handle)
        self._handle = None
        if self._pieces:
            return "moved"
        self._end()
        return "done"

    def _end(self) -> None:
        if self._agent is not None:
            self._agent = None
            self._peer.writes -= 1
