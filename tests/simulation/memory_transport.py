"""The simulation's transport: processes that are objects, real bytes, faults on demand.

A `Fabric` connects any number of endpoints inside one process and event loop; it needs anyio only,
so it runs on trio's virtual clock. What it promises and what it breaks is what the real transports
do: a read may end half-way; a write may arrive partly, wrongly, never, or after its loan was
abandoned, until the landing's agent is rebuilt. It refuses to know time but the event loop's, and
chance: which transfer meets which fault is the caller's function.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import anyio
import anyio.abc
import anyio.lowlevel
import numpy as np

from kvass.common.checksum import Sums, sum_ranges
from kvass.common.errors import DeadlineExceeded, Invalid, TransferFailed, Unavailable
from kvass.common.transport.copies import check, within
from kvass.common.transport.endpoints import Endpoints
from kvass.common.transport.identity import Identity
from kvass.common.transport.route import Setting
from kvass.common.transport.seam import (
    AttachRefused,
    Copies,
    EndpointCard,
    Region,
    TransportKind,
)
from memory_landing import MemoryLanding, memory_card

Verb = Literal["read", "write"]
# whole; failed: half the bytes, and an error; lost: half, and never an end; partial: half, and
# success; corrupt: one bit wrong, and success; late: an end at the deadline, the bytes after it.
Outcome = Literal["whole", "failed", "lost", "partial", "corrupt", "late"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one transfer. `late_s`: how long after its end a `late` write lands."""

    outcome: Outcome = "whole"
    delay_s: float = 0.0
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """A transfer as the fault function sees it: who started it, and the other side."""

    verb: Verb
    source: str
    target: str
    size: int


def no_fault(attempt: Attempt) -> Fault:
    """Let every transfer succeed at once."""
    return Fault()


class Fabric:
    """Connects endpoints. Give it the task group that late bytes may outlive a transfer in.

    Mutable fields: `fault`, `no_attach` (hosts whose kernel refuses), `_members`, `_hung`.
    """

    def __init__(
        self, tasks: anyio.abc.TaskGroup, fault: Callable[[Attempt], Fault] = no_fault
    ) -> None:
        self.fault = fault
        self.no_attach: set[str] = set()
        self._tasks = tasks
        self._members: dict[str, _Member] = {}
        self._hung: dict[str, anyio.Event] = {}

    def endpoints(
        self,
        identity: Identity,
        regions: Sequence[Region],
        *,
        setting: Setting = "auto",
        landing_bytes: int = 1 << 20,
    ) -> Endpoints:
        """Add a process that owns `regions`, and return what it moves bytes with."""
        assert identity.start_id not in self._members, "start ids are unique"
        landing = MemoryLanding(identity, landing_bytes)
        self._members[identity.start_id] = _Member(list(regions), landing)
        reader = None if setting == "tcp" else MemoryReader(self, identity, regions)
        writer = MemoryWriter(self, identity, regions)
        leave = functools.partial(self.kill, identity.start_id)
        return Endpoints(identity, setting, reader, writer, landing, leave)

    def kill(self, start_id: str) -> None:
        """End a process: its memory is gone, for good."""
        self._members.pop(start_id, None)
        self.resume(start_id)

    def hang(self, start_id: str) -> None:
        """Stop a process as SIGSTOP does: its memory can be read, but takes no writes."""
        self._hung.setdefault(start_id, anyio.Event())

    def resume(self, start_id: str) -> None:
        """Let a process go on; writes under way, and late bytes, then land."""
        event = self._hung.pop(start_id, None)
        if event is not None:
            event.set()

    def member(self, start_id: str) -> _Member:
        """Return a living process; raises Unavailable."""
        member = self._members.get(start_id)
        if member is None:
            raise Unavailable(f"peer {start_id} is gone")
        return member

    async def running(self, start_id: str) -> None:
        """Wait while a process hangs."""
        while start_id in self._hung:
            await self._hung[start_id].wait()

    def land_late(self, start_id: str, generation: int, move: _Move, late_s: float) -> None:
        """Let a write that has been given up land, unless its landing is rebuilt before."""

        async def land() -> None:
            await anyio.sleep(late_s)
            await self.running(start_id)
            member = self._members.get(start_id)
            if member is not None and member.landing.generation == generation:
                move.copy(move.size)

        self._tasks.start_soon(land)


@dataclass(frozen=True, slots=True)
class _Member:
    regions: list[Region]
    landing: MemoryLanding


@dataclass(frozen=True, slots=True)
class _Move:
    """Bytes on their way: where from, where to."""

    sources: Sequence[int]
    targets: Sequence[int]
    sizes: Sequence[int]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def copy(self, limit: int) -> None:
        """Copy the first `limit` bytes."""
        for source, target, size in zip(self.sources, self.targets, self.sizes, strict=True):
            ctypes.memmove(target, source, min(size, limit))
            limit -= min(size, limit)

    def flip(self) -> None:
        """Make one bit wrong at the target."""
        last = ctypes.c_uint8.from_address(self.targets[-1] + self.sizes[-1] - 1)
        last.value ^= 1

    async def run(self, fault: Fault) -> None:
        """Move as `fault` says; half at first, half after the delay."""
        half = self.size // 2
        self.copy(half)
        await anyio.sleep(fault.delay_s)
        if fault.outcome == "failed":
            raise TransferFailed("the simulated transfer failed")
        if fault.outcome in ("lost", "late"):
            await anyio.sleep_forever()
        if fault.outcome in ("whole", "corrupt"):
            self.copy(self.size)
        if fault.outcome == "corrupt":
            self.flip()


class _Attached:
    """The peers of a transport. Mutable field: `_cards`."""

    def __init__(self) -> None:
        self._cards: dict[str, EndpointCard] = {}

    def add(self, card: EndpointCard) -> None:
        known = self._cards.get(card.start_id)
        if known is not None and known.generation > card.generation:
            raise Unavailable(f"peer {card.start_id} has a newer card")
        self._cards[card.start_id] = card

    def get(self, start_id: str) -> EndpointCard:
        card = self._cards.get(start_id)
        if card is None:
            raise Unavailable(f"peer {start_id} is not attached")
        return card

    def drop(self, start_id: str) -> None:
        self._cards.pop(start_id, None)


class MemoryReader:
    """Stands for cross-memory attach."""

    kind: TransportKind = "memory"

    def __init__(self, fabric: Fabric, identity: Identity, regions: Sequence[Region]) -> None:
        self._fabric = fabric
        self._identity = identity
        self._regions = list(regions)
        self._peers = _Attached()

    def card(self) -> EndpointCard:
        """Return how peers read from this process."""
        return memory_card(self.kind, self._identity, 1)

    async def attach(self, card: EndpointCard) -> None:
        """Check that the peer lives and may be read."""
        await anyio.lowlevel.checkpoint()
        self._fabric.member(card.start_id)
        if card.host_id != self._identity.host_id or card.host_id in self._fabric.no_attach:
            raise AttachRefused(f"peer {card.start_id}: the kernel refuses cross-memory attach")
        self._peers.add(card)

    async def read(
        self,
        start_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        sums: Sums | None = None,
    ) -> None:
        """Copy from an attached peer into own memory."""
        check(copies, self._regions)
        self._peers.get(start_id)
        regions = self._fabric.member(start_id).regions
        if not within(copies.remote, copies.sizes, regions).all():
            raise Invalid(f"peer {start_id} has not registered that range")
        move = _Move(copies.remote.tolist(), copies.local.tolist(), copies.sizes.tolist())
        attempt = Attempt("read", start_id, self._identity.start_id, move.size)
        with anyio.move_on_after(deadline_s):
            await move.run(self._fabric.fault(attempt))
            self._fabric.member(start_id)
            if sums is not None and len(copies.sizes):
                sums.values[:] = sum_ranges(
                    copies.local.tolist(), int(copies.sizes[0]) // sums.groups, sums.groups
                )
                sums.whole[:] = True
            return
        raise DeadlineExceeded("the transfer did not end before its deadline")

    async def write(self, start_id: str, copies: Copies, *, tag: bytes, deadline_s: float) -> None:
        """Refuse, as cross-memory attach does."""
        raise Invalid("cross-memory attach only reads; the owner of the memory starts the transfer")

    def detach(self, start_id: str) -> None:
        """Forget a peer."""
        self._peers.drop(start_id)


class MemoryWriter:
    """Stands for TCP, the holder's side."""

    kind: TransportKind = "tcp"

    def __init__(self, fabric: Fabric, identity: Identity, regions: Sequence[Region]) -> None:
        self._fabric = fabric
        self._identity = identity
        self._regions = list(regions)
        self._peers = _Attached()

    def card(self) -> EndpointCard:
        """Return who writes."""
        return memory_card(self.kind, self._identity, 0)

    async def attach(self, card: EndpointCard) -> None:
        """Remember the card of a loan."""
        await anyio.lowlevel.checkpoint()
        self._peers.add(card)

    async def read(
        self,
        start_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        sums: Sums | None = None,
    ) -> None:
        """Refuse, as TCP does."""
        raise Invalid("TCP only writes; lend a landing buffer and ask the holder to write")

    async def write(self, start_id: str, copies: Copies, *, tag: bytes, deadline_s: float) -> None:
        """Write into the loan `tag` of an attached peer."""
        check(copies, self._regions)
        card = self._peers.get(start_id)
        landing = self._fabric.member(start_id).landing
        if not within(copies.remote, copies.sizes, [landing.region]).all():
            raise Invalid(f"peer {start_id} has not registered that range")
        move = _Move(copies.local.tolist(), copies.remote.tolist(), copies.sizes.tolist())
        fault = self._fabric.fault(Attempt("write", self._identity.start_id, start_id, move.size))
        hung = True
        try:
            with anyio.move_on_after(deadline_s):
                await self._fabric.running(start_id)
                self._check_generation(start_id, card)
                hung = False
                await move.run(fault)
                await self._fabric.running(start_id)
                self._check_generation(start_id, card).arrive(tag)
                hung = True
                return
            raise DeadlineExceeded("the transfer did not end before its deadline")
        except (DeadlineExceeded, anyio.get_cancelled_exc_class()):
            if fault.outcome == "late" or hung:
                self._fabric.land_late(start_id, card.generation, move, fault.late_s)
            raise

    def detach(self, start_id: str) -> None:
        """Forget a peer."""
        self._peers.drop(start_id)

    def _check_generation(self, start_id: str, card: EndpointCard) -> MemoryLanding:
        landing = self._fabric.member(start_id).landing
        if landing.generation != card.generation:
            raise TransferFailed(f"the landing of peer {start_id} was rebuilt")
        return landing


def region_of(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Region:
    """Return an array's memory as a region; the caller keeps the array."""
    return Region(int(array.ctypes.data), array.nbytes)
