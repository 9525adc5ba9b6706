"""Same-host reads by NIXL over cross-memory attach.

It only reads: the reader's own thread copies, so when a read has returned nothing is in flight, and
a stopped or dead peer can change nothing here. UCX addresses the peer by its PID alone, and a PID
may be given to a stranger. So each peer is held by a pidfd, checked before and after every slice;
at attach, the pidfd is matched with the start time in the card and with the start id that the peer
keeps in its own memory. It refuses to write.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvass.common.errors import Invalid, Overloaded, TransferFailed, Unavailable
from kvass.common.transport.copies import check, slices
from kvass.common.transport.identity import Identity, start_ticks
from kvass.common.transport.mover import Mover, Progress
from kvass.common.transport.nixl_agent import CMA, Agent
from kvass.common.transport.seam import (
    AttachRefused,
    Copies,
    EndpointCard,
    InPlace,
    Region,
    TransportKind,
)

_log = logging.getLogger(__name__)

# Half a millisecond: how often deadlines and peers are looked at. It is checked right after, and
# the cache has most of it then (measured: 3 to 6 MiB are best, 1 and 16 MiB take a tenth longer).
SLICE_BYTES = 4 << 20
PEERS_MAX = 1_024  # a pidfd each
SLICE_TIMEOUT_S = 1.0  # 5,000 times what it takes; longer means that UCX has lost the request


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The opaque part of a card."""

    start_ticks: int
    page: int  # where the peer keeps its start id
    nixl: bytes


@dataclass(slots=True)
class _Peer:
    """An attached peer. Mutable field: `name`, NIXL's; None until its metadata is loaded
    (again)."""

    card: EndpointCard
    metadata: _Metadata
    pidfd: int
    name: str | None = None

    def check(self) -> None:
        """Raise Unavailable when the process has exited."""
        if self.pidfd < 0 or select.select([self.pidfd], [], [], 0)[0]:
            raise Unavailable(f"{_who(self.card)} is gone")

    def identify(self) -> None:
        """Raise Unavailable unless the process has its memory: it loses it first when it dies."""
        _identify(self.card, self.metadata)
        self.check()


class CmaTransport:
    """The same-host transport. Create it on the mover's thread (0.4 s); it opens no
    socket.

    Mutable fields, all the mover thread's: `_agent`, `_generation`, `_peers`.
    """

    kind: TransportKind = "cma"

    def __init__(self, mover: Mover, identity: Identity, regions: Sequence[Region]) -> None:
        self._mover = mover
        self._identity = identity
        self._regions = list(regions)
        self._peers: dict[str, _Peer] = {}
        self._generation = 0
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._page.write(identity.start_id.encode())
        self._agent = self._create_agent()
        mover.on_close(self._close)

    def card(self) -> EndpointCard:
        """Return how peers read from this process."""
        metadata = _Metadata(
            start_ticks=start_ticks(os.getpid()) or 0,
            page=ctypes.addressof(ctypes.c_char.from_buffer(self._page)),
            nixl=self._nixl_metadata,
        )
        who = self._identity
        return EndpointCard(
            kind=self.kind,
            host_id=who.host_id,
            start_id=who.start_id,
            pid=who.pid,
            generation=self._generation,
            metadata=msgspec.msgpack.encode(metadata),
        )

    async def attach(self, card: EndpointCard) -> None:
        """Hold the peer's process and check that it is who its card says.

        Raises Unavailable when it is not, or when the kernel refuses cross-memory attach; Invalid
        for a card that is none.
        """
        known = self._peers.get(card.start_id)
        if known is not None and known.card == card:
            return
        await self._mover.call(lambda: self._attach(card))

    async def read(
        self,
        start_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        in_place: InPlace | None = None,
    ) -> None:
        """Copy from an attached peer into own registered memory."""
        check(copies, self._regions)
        read = _Read(self, start_id, copies, in_place)
        await self._mover.transfer(read, deadline_s=deadline_s)

    async def write(self, start_id: str, copies: Copies, *, tag: bytes, deadline_s: float) -> None:
        """Refuse: over cross-memory attach nothing but the writer's exit ends a write."""
        raise Invalid("cross-memory attach only reads; the owner of the memory starts the transfer")

    def detach(self, start_id: str) -> None:
        """Forget a peer and let go of its pidfd."""
        self._mover.post(lambda: self._forget(start_id))

    def step(self, start_id: str, piece: Copies) -> None:
        """Copy one slice; on the mover's thread. The peer is the same process before and after, so
        the bytes are its own."""
        peer = self._peers.get(start_id)
        if peer is None:
            raise Unavailable(f"peer {start_id} is not attached")
        peer.check()
        try:
            if peer.name is None:
                peer.name = self._agent.add(peer.metadata.nixl)
            self._copy(peer.name, piece)
        except (Unavailable, TransferFailed) as error:
            # UCX gives the endpoint up after any error, be it only a range that is not mapped.
            self._drop_name(peer)
            peer.identify()
            raise TransferFailed(f"a read from peer {start_id}: {error}") from None
        peer.check()

    def _copy(self, name: str, piece: Copies) -> None:
        handle, state = self._agent.post("READ", piece, name)
        try:
            give_up = time.monotonic() + SLICE_TIMEOUT_S
            while state == "PROC":
                state = self._agent.state(handle)
                if state == "PROC" and time.monotonic() > give_up:
                    self._rebuild()
                    raise TransferFailed(f"a slice did not end in {SLICE_TIMEOUT_S:g} s")
        finally:
            self._agent.release(handle)

    def _attach(self, card: EndpointCard) -> None:
        if card.kind != self.kind:
            raise Invalid(f"a card of kind {card.kind!r}; expected {self.kind!r}")
        if card.host_id != self._identity.host_id:
            raise AttachRefused(f"peer {card.start_id} is on another host")
        try:
            metadata = msgspec.msgpack.decode(card.metadata, type=_Metadata)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise Invalid(f"card of {card.start_id}: {error}") from None
        known = self._peers.get(card.start_id)
        if known is not None and known.card.generation > card.generation:
            return  # the card was long on its way
        if known is None and len(self._peers) >= PEERS_MAX:
            self._forget_dead()
            if len(self._peers) >= PEERS_MAX:
                raise Overloaded(f"{PEERS_MAX} peers are attached")
        pidfd = _hold(card, metadata)
        self._forget(card.start_id)
        self._peers[card.start_id] = _Peer(card, metadata, pidfd)

    def _forget(self, start_id: str) -> None:
        peer = self._peers.pop(start_id, None)
        if peer is not None:
            self._drop_name(peer)
            os.close(peer.pidfd)
            peer.pidfd = -1

    def _forget_dead(self) -> None:
        for start_id, peer in list(self._peers.items()):
            try:
                peer.check()
            except Unavailable:
                self._forget(start_id)

    def _drop_name(self, peer: _Peer) -> None:
        if peer.name is not None:
            self._agent.remove(peer.name)
            peer.name = None

    def _create_agent(self) -> Agent:
        agent = Agent(f"{self._identity.start_id}.cma.{self._generation}", CMA)
        agent.register(self._regions)
        self._nixl_metadata = agent.metadata()
        return agent

    def _rebuild(self) -> None:
        """Destroy the agent, which ends its reads for sure: they run in its own calls only."""
        _log.error("cma: UCX lost a request; the agent is rebuilt")
        self._agent.close()
        for peer in self._peers.values():
            peer.name = None
        self._generation += 1
        self._agent = self._create_agent()

    def _close(self) -> None:
        self._agent.close()
        for start_id in list(self._peers):
            self._peers[start_id].name = None
            self._forget(start_id)


class _Read:
    """A read under way, one slice a step. Mutable fields: `_pieces`, what is left, last first;
    `_read_bytes`, what is in place."""

    def __init__(
        self, transport: CmaTransport, start_id: str, copies: Copies, in_place: InPlace | None
    ) -> None:
        self._transport = transport
        self._start_id = start_id
        self._in_place = in_place
        self._ends = np.cumsum(copies.sizes)
        self._read_bytes = 0
        self._pieces = list(slices(copies, SLICE_BYTES))[::-1]

    def step(self) -> Progress:
        if self._pieces:
            piece = self._pieces.pop()
            self._transport.step(self._start_id, piece)
            if self._in_place is not None:
                self._read_bytes += int(piece.sizes.sum())
                whole = np.searchsorted(self._ends, np.uint64(self._read_bytes), side="right")
                self._in_place(int(whole))
        return "moved" if self._pieces else "done"

    def stop(self) -> None:
        """Nothing is in flight between two steps."""


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_IoVector),
    ctypes.c_ulong,
    ctypes.POINTER(_IoVector),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def _peek(pid: int, address: int, size: int) -> bytes:
    """Read a few bytes of another process; raises OSError."""
    buffer = ctypes.create_string_buffer(size)
    own = _IoVector(ctypes.cast(buffer, ctypes.c_void_p), size)
    other = _IoVector(address, size)
    count = _libc.process_vm_readv(pid, ctypes.byref(own), 1, ctypes.byref(other), 1, 0)
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return buffer.raw[:count]


def _who(card: EndpointCard) -> str:
    return f"peer {card.start_id} (process {card.pid})"


def _identify(card: EndpointCard, metadata: _Metadata) -> None:
    """Check that the process with the card's PID keeps the card's start id in its memory."""
    expected = card.start_id.encode()
    try:
        found = _peek(card.pid, metadata.page, len(expected))
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            reason = f"{_who(card)}: the kernel refuses cross-memory attach ({error})"
            raise AttachRefused(reason) from None
        raise Unavailable(f"{_who(card)} is gone: {error}") from None
    if found != expected:
        raise Unavailable(f"{_who(card)} is gone: the process says that it is another one")


def _hold(card: EndpointCard, metadata: _Metadata) -> int:
    """Return a pidfd that is known to be the card's process; raises Unavailable, AttachRefused."""
    try:
        pidfd = os.pidfd_open(card.pid)
    except (ProcessLookupError, OverflowError) as error:
        raise Unavailable(f"{_who(card)} is gone: {error}") from None
    except OSError as error:
        raise AttachRefused(f"{_who(card)}: no pidfd ({error})") from None
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, pidfd)
        if start_ticks(card.pid) != metadata.start_ticks:
            raise Unavailable(f"{_who(card)} is gone; another process has its PID")
        _identify(card, metadata)
        if select.select([pidfd], [], [], 0)[0]:
            raise Unavailable(f"{_who(card)} is gone: it has just exited")
        undo.pop_all()
    return pidfd
