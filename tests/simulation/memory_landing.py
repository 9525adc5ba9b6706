"""The simulation's landing memory: the real book of loans, and an agent that is only a number.

What the mover does between two polls happens here whenever somebody looks. It refuses to know the
fabric: whoever writes asks `generation` first.
"""

from __future__ import annotations

import ctypes
import mmap

import anyio
import anyio.lowlevel

from kvass.common.errors import DeadlineExceeded, Invalid, KvassError, TransferFailed
from kvass.common.transport.identity import Identity
from kvass.common.transport.loans import LoanBook
from kvass.common.transport.seam import EndpointCard, Region


class MemoryLoan:
    """A landing buffer, lent. Mutable field: `failure`."""

    def __init__(
        self, landing: MemoryLanding, tag: bytes, address: int, view: memoryview, card: EndpointCard
    ) -> None:
        self._landing = landing
        self._view = view
        self.tag = tag
        self.address = address
        self.size = len(view)
        self.card = card
        self.ended = anyio.Event()
        self.failure: KvassError | None = None

    async def arrived(self, *, deadline_s: float) -> None:
        """Wait until the peer's write is whole."""
        give_up_s = anyio.current_time() + deadline_s
        while not self.ended.is_set():
            now_s = anyio.current_time()
            if now_s >= give_up_s:
                raise DeadlineExceeded(f"no write arrived within {deadline_s:.3g} s")
            wake_s = min(give_up_s, self._landing.rebuild_due_s() or give_up_s)
            with anyio.move_on_after(max(wake_s - now_s, 0.0)):
                await self.ended.wait()
            self._landing.rebuild_if_due()
        if self.failure is not None:
            raise self.failure

    def view(self) -> memoryview:
        """Return the buffer's bytes."""
        return self._view

    def settle(self) -> None:
        """Give the buffer back."""
        self._landing.settle(self.tag)

    def abandon(self) -> None:
        """Put the buffer into quarantine."""
        self._landing.abandon(self.tag)


class MemoryLanding:
    """Stands for TCP, the owner's side: the real book, and an agent that is a number.

    Mutable fields: `generation`, `_book`, `_loans`, `_lent` (makes tags).
    """

    def __init__(self, identity: Identity, size: int) -> None:
        self._identity = identity
        self._book = LoanBook(size)
        self._memory = mmap.mmap(-1, self._book.size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.region = Region(address, self._book.size)
        self._loans: dict[bytes, MemoryLoan] = {}
        self._lent = 0
        self.generation = 1

    async def lend(self, size: int) -> MemoryLoan | None:
        """Lend `size` contiguous bytes, or return None when none are free now."""
        await anyio.lowlevel.checkpoint()
        if not 0 < size <= self._book.size:
            raise Invalid(f"a loan of {size} bytes; this landing has {self._book.size}")
        self.rebuild_if_due()
        self._lent += 1
        tag = f"{self._identity.start_id}/{self._lent}".encode()
        offset = self._book.lend(tag, size, anyio.current_time())
        if offset is None:
            return None
        view = memoryview(self._memory)[offset : offset + size]
        card = memory_card("tcp", self._identity, self.generation)
        self._loans[tag] = loan = MemoryLoan(self, tag, self.region.address + offset, view, card)
        return loan

    def counts(self) -> dict[str, int]:
        """Return bytes by state."""
        self.rebuild_if_due()
        return self._book.counts()

    def arrive(self, tag: bytes) -> None:
        """Note that a write is whole; a no-op for a loan that has ended."""
        if self._book.is_lent(tag):
            self._loans[tag].ended.set()

    def settle(self, tag: bytes) -> None:
        """End a loan whose transfer has ended for sure."""
        self._book.settle(tag)
        self._loans.pop(tag, None)
        self.rebuild_if_due()

    def abandon(self, tag: bytes) -> None:
        """End a loan into which bytes may still land."""
        self._book.abandon(tag, anyio.current_time())
        self._loans.pop(tag, None)
        self.rebuild_if_due()

    def rebuild_due_s(self) -> float | None:
        """Return when a rebuild is due, None when none is."""
        return self._book.rebuild_due_s()

    def rebuild_if_due(self) -> None:
        """Do what the mover does between two polls."""
        due_s = self._book.rebuild_due_s()
        if due_s is None or anyio.current_time() < due_s:
            return
        self.generation += 1
        for tag in self._book.rebuilt():
            loan = self._loans[tag]
            loan.failure = TransferFailed("the landing was rebuilt under the transfer")
            loan.ended.set()


def memory_card(kind: str, identity: Identity, generation: int) -> EndpointCard:
    return EndpointCard(
        kind=kind,
        host_id=identity.host_id,
        start_id=identity.start_id,
        pid=identity.pid,
        generation=generation,
        metadata=b"simulated",
    )
