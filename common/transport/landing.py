"""Landing memory for TCP: lent to peers, which write into it with a notification by tag.

Its agent is its own and owns nothing else, because destroying it is the only thing that surely
stops bytes on their way (MEASURED): that is how abandoned loans become free again. The agent, its
socket and the memory exist only once something was lent; after a rebuild the next loan creates the
next generation. What is due when is `loans.py`'s. It refuses to know what the bytes are.

While bytes are awaited the mover polls this agent: over TCP the target's own calls place them, and
tell the writer so.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import secrets
import threading
import time

import anyio

from kvass.common.descriptors import require_free
from kvass.common.errors import DeadlineExceeded, Invalid, KvassError, TransferFailed
from kvass.common.transport.identity import Identity
from kvass.common.transport.loans import LoanBook
from kvass.common.transport.mover import Mover, Progress
from kvass.common.transport.nixl_agent import Agent, tcp_environment
from kvass.common.transport.seam import EndpointCard, Region

_log = logging.getLogger(__name__)

TAG_BYTES = 16  # random: whoever was not lent a buffer cannot announce bytes in it
WORK_S = 10e-6  # an empty poll takes 1 µs; a longer one has placed bytes


class TcpLoan:
    """A landing buffer, lent. Mutable field: `_failure`."""

    def __init__(
        self, landing: TcpLanding, tag: bytes, address: int, view: memoryview, card: EndpointCard
    ) -> None:
        self._landing = landing
        self._view = view
        self._ended = anyio.Event()
        self._failure: KvassError | None = None
        self.tag = tag
        self.address = address
        self.size = len(view)
        self.card = card

    async def arrived(self, *, deadline_s: float) -> None:
        """Wait until the peer's write is whole. The mover polls no more for a loan whose write has
        ended on both sides: whoever copies it needs the interpreter lock."""
        with anyio.move_on_after(deadline_s):
            await self._ended.wait()
        if not self._ended.is_set():
            raise DeadlineExceeded(f"no write arrived within {deadline_s:.3g} s")
        if self._failure is not None:
            raise self._failure
        self._landing.landed(self.tag)

    def view(self) -> memoryview:
        """Return the buffer's bytes."""
        return self._view

    def settle(self) -> None:
        """Give the buffer back."""
        self._landing.settle(self.tag)

    def abandon(self) -> None:
        """Put the buffer into quarantine."""
        self._landing.abandon(self.tag)

    def end(self, failure: KvassError | None) -> None:
        """Wake who waits. In the event loop; only the first end counts."""
        if not self._ended.is_set():
            self._failure = failure
            self._ended.set()


class TcpLanding:
    """The owner's side of TCP.

    Mutable fields, under `_lock`: `_book`, `_waiting` (who waits, by tag), `_card` (None: there
    is no agent). The mover's thread's own: `_memory`, `_agent`, `_generation`.
    """

    def __init__(self, mover: Mover, identity: Identity, size: int, *, interface: str) -> None:
        self._mover = mover
        self._identity = identity
        self._environment = tcp_environment(interface)
        self._book = LoanBook(size)
        self._lock = threading.Lock()
        self._waiting: dict[bytes, tuple[asyncio.AbstractEventLoop, TcpLoan]] = {}
        self._memory: mmap.mmap | None = None
        self._agent: Agent | None = None
        self._card: EndpointCard | None = None
        self._generation = 0
        mover.post(lambda: mover.watch(self))
        mover.post(lambda: mover.tend(self))
        mover.on_close(self._close)

    async def lend(self, size: int) -> TcpLoan | None:
        """Lend `size` contiguous bytes, or return None when none are free now."""
        if not 0 < size <= self._book.size:
            raise Invalid(f"a loan of {size} bytes; this landing has {self._book.size}")
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._card is not None and self._book.rebuild_due_s() is None:
                self._mover.post(lambda: None)  # it slept, and polls from now on
                return self._lend_now(self._card, size, loop)
        return await self._mover.call(lambda: self._lend(size, loop))

    def counts(self) -> dict[str, int]:
        """Return bytes by state."""
        with self._lock:
            return self._book.counts()

    def landed(self, tag: bytes) -> None:
        """Await nothing more for a loan."""
        with self._lock:
            self._book.landed(tag)

    def settle(self, tag: bytes) -> None:
        """End a loan whose transfer has ended for sure."""
        with self._lock:
            self._book.settle(tag)
            self._waiting.pop(tag, None)

    def abandon(self, tag: bytes) -> None:
        """End a loan into which bytes may still land."""
        with self._lock:
            self._book.abandon(tag, time.monotonic())
            self._waiting.pop(tag, None)

    def active(self) -> bool:
        """Return whether bytes may arrive, or their writer waits for our answer."""
        with self._lock:
            return not self._book.is_empty()

    def has_agents(self) -> bool:
        """Return whether there is an agent; on the mover's thread."""
        return self._agent is not None

    def tend(self) -> None:
        """Poll once; what arrives then is late, or somebody's who waits."""
        if self._agent is not None:
            self.poll()

    def poll(self) -> Progress:
        """Place arriving bytes, report whole writes, rebuild when it is due. The mover calls it."""
        began = time.perf_counter()
        tags: list[bytes] = []
        failed: KvassError | None = None
        if self._agent is not None:
            try:
                tags = self._agent.notifications()
            except KvassError as error:
                failed = error
        worked = time.perf_counter() - began > WORK_S
        for tag in tags:
            self._arrive(tag)
        if failed is not None:
            self._rebuild(str(failed))
        rebuilt = self._rebuild_if_due()
        return "moved" if tags or worked or rebuilt or failed else "idle"

    def _lend(self, size: int, loop: asyncio.AbstractEventLoop) -> TcpLoan | None:
        self._rebuild_if_due()  # at once, not between this loan and the next
        card = self._open()
        with self._lock:
            return self._lend_now(card, size, loop)

    def _lend_now(
        self, card: EndpointCard, size: int, loop: asyncio.AbstractEventLoop
    ) -> TcpLoan | None:
        """Lend memory of an agent that is there; under the lock."""
        tag = secrets.token_bytes(TAG_BYTES)
        offset = self._book.lend(tag, size, time.monotonic())
        if offset is None:
            return None
        assert self._memory is not None
        view = memoryview(self._memory)[offset : offset + size]
        loan = TcpLoan(self, tag, _address(self._memory) + offset, view, card)
        self._waiting[tag] = (loop, loan)
        return loan

    def _open(self) -> EndpointCard:
        """Return the agent's card; creates what is not there yet."""
        if self._memory is None:
            self._memory = mmap.mmap(-1, self._book.size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        if self._agent is None or self._card is None:
            require_free("landing memory for TCP")
            self._generation += 1
            name = f"{self._identity.start_id}.landing.{self._generation}"
            agent = Agent(name, self._environment)
            agent.register([Region(_address(self._memory), self._book.size)])
            who = self._identity
            card = EndpointCard(
                kind="tcp",
                host_id=who.host_id,
                start_id=who.start_id,
                pid=who.pid,
                generation=self._generation,
                metadata=agent.metadata(),
            )
            self._agent = agent
            with self._lock:
                self._card = card
        return self._card

    def _arrive(self, tag: bytes) -> None:
        with self._lock:
            waiting = self._waiting.get(tag) if self._book.is_lent(tag) else None
        if waiting is not None:  # else it is late: the loan has ended
            _end_in_loop(*waiting, None)

    def _rebuild_if_due(self) -> bool:
        with self._lock:
            due_s = self._book.rebuild_due_s()
        if due_s is None or time.monotonic() < due_s:
            return False
        self._rebuild("bytes may still be on their way")
        return True

    def _rebuild(self, reason: str) -> None:
        """Destroy the agent: nothing lands any more. The next loan creates the next generation."""
        if self._agent is not None:
            self._agent.close()
        self._agent = None
        with self._lock:
            self._card = None
            orphans = [self._waiting.pop(tag, None) for tag in self._book.rebuilt()]
        _log.warning(
            "landing: generation %d destroyed (%s), and %d loans with it",
            self._generation,
            reason,
            len(orphans),
        )
        for waiting in orphans:
            if waiting is not None:
                _end_in_loop(*waiting, TransferFailed("the landing was rebuilt under the transfer"))

    def _close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _end_in_loop(
    loop: asyncio.AbstractEventLoop, loan: TcpLoan, failure: KvassError | None
) -> None:
    try:
        loop.call_soon_threadsafe(loan.end, failure)
    except RuntimeError:
        _log.debug("landing: the event loop has closed; nobody waits for this loan")
