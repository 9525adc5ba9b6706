"""Same-host reads: out of memory that a peer shares, else by the kernel's cross-memory attach.

It only reads: this process copies, so when a read has returned nothing is in flight,
and a stopped or dead peer can change nothing here. It refuses to write.

NIXL's UCX has the same two ways on one host. They are gone directly here: there is no agent to
create, to lose a request or to rebuild, and bytes are summed as they are copied: out of shared
memory at the speed of a memcpy that sums nothing. `benchmarks/transfer.py` measures it beside one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import anyio
import msgspec

from kvass.common.checksum import Sums
from kvass.common.errors import DeadlineExceeded, Invalid, Overloaded, Unavailable
from kvass.common.transport.copies import Bounds, check
from kvass.common.transport.identity import Identity
from kvass.common.transport.peer_process import Own, PeerProcess
from kvass.common.transport.seam import (
    AttachRefused,
    Copies,
    EndpointCard,
    Region,
    TransportKind,
)

PEERS_MAX = 1_024  # a pidfd each
# Two cores attach, copy and sum 1.5 times as fast as one where both are idle; one does where not.
# One core copies out of shared memory as fast as the memory goes.
THREADS = 2
# So much is read in the event loop itself, a millisecond or two with others' turns in between, and
# a thread beside it where two help: waking threads and being woken would take a tenth as long
# again. One read at a time; the rest goes to threads.
LOOP_BYTES = 32 << 20
# A tenth to four tenths of a millisecond: how often deadlines and peers are looked at, and how long
# one thread waits for the other in the end. Out of shared memory a slice has one thread, and takes
# up to a millisecond: each turn of the loop in between costs a thirtieth of one.
SLICE_BYTES = 2 << 20
MAPPED_SLICE_BYTES = 16 << 20


class LocalTransport:
    """The same-host transport; it opens no socket. All methods run in the event loop.

    Mutable fields: `_peers`, `_readings` (under way), `_is_closed`, `_loop` (which tells that a
    peer is gone).
    """

    kind: TransportKind = "local"

    def __init__(self, identity: Identity, regions: Sequence[Region]) -> None:
        self._identity = identity
        self._regions = list(regions)
        self._own = Own(identity, self._regions)
        self._peers: dict[str, PeerProcess] = {}
        self._pool = _started(THREADS)
        self._readings: set[_Slices] = set()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def card(self) -> EndpointCard:
        """Return how peers read from this process."""
        who = self._identity
        return EndpointCard(
            kind=self.kind,
            host_id=who.host_id,
            start_id=who.start_id,
            pid=who.pid,
            generation=0,
            metadata=msgspec.msgpack.encode(self._own.metadata),
        )

    async def attach(self, card: EndpointCard) -> None:
        """Hold the peer's process and check that it is who its card says.

        Raises Unavailable when it is not, or when the kernel lets its memory not be read; Invalid
        for a card that is none.
        """
        if self._is_closed:
            raise Unavailable("the transport of this process was closed")
        known = self._peers.get(card.start_id)
        if known is not None and known.card == card:
            return
        if card.kind != self.kind:
            raise Invalid(f"a card of kind {card.kind!r}; expected {self.kind!r}")
        if card.host_id != self._identity.host_id:
            raise AttachRefused(f"peer {card.start_id} is on another host")
        if known is None and len(self._peers) >= PEERS_MAX:
            raise Overloaded(f"{PEERS_MAX} peers are attached")
        peer = PeerProcess(card)
        self.detach(card.start_id)
        self._peers[card.start_id] = peer
        # Its shared memory is the machine's again when nobody maps it any more.
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(peer.pidfd, self.detach, card.start_id)

    async def read(
        self,
        start_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        sums: Sums | None = None,
    ) -> None:
        """Copy from an attached peer into own registered memory."""
        bounds = check(copies, self._regions)
        if self._is_closed:
            raise Unavailable("the transport of this process was closed")
        peer = self._peers.get(start_id)
        if peer is None:
            raise Unavailable(f"peer {start_id} is not attached")
        if sums is None:
            sums = Sums.of(len(copies.sizes), 1)
        reading = _Slices(peer, copies, bounds, sums, time.monotonic() + deadline_s)
        in_loop = not self._readings and reading.size_bytes <= LOOP_BYTES
        peer.users += 1
        self._readings.add(reading)
        try:
            await (self._run_here(reading) if in_loop else self._run(reading))
        finally:
            self._readings.remove(reading)
            peer.users -= 1
            if self._peers.get(start_id) is not peer:
                _close_unused(peer)

    async def _run_here(self, reading: _Slices) -> None:
        """Read in the event loop, which has its turn after each slice, and in a thread."""
        beside = self._pool.submit(reading.work) if reading.is_shared else None
        failure: BaseException | None = None
        try:
            for is_left in reading.each():
                if is_left:  # after the last one the caller goes on
                    await asyncio.sleep(0)
        finally:
            reading.end()
            # Its last slice: not longer than one of this thread's own.
            if beside is not None and not beside.cancel():
                failure = beside.exception()
        if failure is not None:
            raise failure

    async def _run(self, reading: _Slices) -> None:
        """Read in threads; returns or raises when they have ended."""
        loop = asyncio.get_running_loop()
        count = THREADS if reading.is_shared else 1
        work = [loop.run_in_executor(self._pool, reading.work) for _ in range(count)]
        together = asyncio.gather(*work, return_exceptions=True)
        try:
            failures = await asyncio.shield(together)
        except asyncio.CancelledError:
            reading.end()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([together])  # the cancellation is what the caller is told
            raise
        for failure in failures:
            if failure is not None:
                raise failure

    async def write(self, start_id: str, copies: Copies, *, tag: bytes, deadline_s: float) -> None:
        """Refuse: on one host nothing but the writer's exit ends a write."""
        raise Invalid("on one host peers only read; the owner of the memory starts the transfer")

    def detach(self, start_id: str) -> None:
        """Forget a peer; reads under way go on, and let go of its process at their end."""
        peer = self._peers.pop(start_id, None)
        if peer is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(peer.pidfd)
            _close_unused(peer)

    def close(self) -> None:
        """Let reads under way fail after their slice; returns when no thread reads."""
        self._is_closed = True
        for reading in self._readings:
            reading.stopped = True
        self._pool.shutdown(wait=True)
        for start_id in list(self._peers):
            self.detach(start_id)
        self._own.close()


def _started(threads: int) -> ThreadPoolExecutor:
    """Start all threads now, or raise Unavailable. Where one cannot be started later, its work is
    queued all the same, and bytes would land when nobody waits for them any more."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="kvass-read")
    together = threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(together.wait)
    except RuntimeError as error:
        together.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise Unavailable(f"no thread can be started to read with: {error}") from None
    together.wait()
    return pool


def _close_unused(peer: PeerProcess) -> None:
    if not peer.users:
        peer.close()


class _Slices:
    """One read, slice after slice, by any number of threads: each takes the next that is left.

    Mutable fields: `stopped` (set by the event loop), `_left` (slices that nobody has taken).
    """

    def __init__(
        self, peer: PeerProcess, copies: Copies, bounds: Bounds, sums: Sums, deadline: float
    ) -> None:
        self._peer = peer
        self._deadline = deadline
        self._reading = peer.reading(copies, bounds, sums)
        size = MAPPED_SLICE_BYTES if self._reading.is_mapped else SLICE_BYTES
        self._left = deque(self._reading.slices(size))
        self.stopped = False

    @property
    def size_bytes(self) -> int:
        """Return how much there is to copy, done or not."""
        return self._reading.size_bytes

    @property
    def is_shared(self) -> bool:
        """Whether there is something to do for two threads."""
        return not self._reading.is_mapped and len(self._left) > 1

    def end(self) -> None:
        """Let no thread begin another slice."""
        self._left.clear()

    def work(self) -> None:
        """Copy slices until none is left; blocking. Raises as `each`."""
        for _ in self.each():
            pass

    def each(self) -> Iterator[bool]:
        """Copy slice after slice, and yield after each whether another one is left. Raises
        Unavailable when it was stopped; one thread's failure ends the others' work."""
        try:
            while (piece := self._next()) is not None:
                if self.stopped:
                    raise Unavailable("the transport of this process was closed")
                if time.monotonic() >= self._deadline:
                    raise DeadlineExceeded("the read did not end before its deadline")
                self._peer.read(self._reading, *piece)
                yield bool(self._left)
        except BaseException:
            self.end()
            raise

    def _next(self) -> tuple[int, int] | None:
        try:
            return self._left.popleft()
        except IndexError:
            return None
