"""Same-host reads within one process: how threads share one, and how one ends.

A process may read itself like any other; what takes two is in
processes/test_transport_processes.py.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from kvass.common import checksum
from kvass.common.checksum import Sums
from kvass.common.errors import DeadlineExceeded, Invalid, TransferFailed, Unavailable
from kvass.common.transport import local
from kvass.common.transport.identity import own_identity
from kvass.common.transport.local import LocalTransport
from kvass.common.transport.peer_process import PeerProcess, Reading
from kvass.common.transport.seam import Copies, Region
from transport_peer import Bytes, address_of, memory

pytestmark = pytest.mark.anyio

PIECE = 100_000
COUNT = 120
SIZE = PIECE * COUNT  # six slices


@pytest.fixture
def source() -> Bytes:
    array = memory(SIZE, 0)
    array[:] = np.repeat(np.arange(COUNT, dtype=np.uint8), PIECE)
    return array


@pytest.fixture
def target() -> Bytes:
    return memory(SIZE, 99)


@pytest.fixture
def transport(source: Bytes, target: Bytes) -> Iterator[LocalTransport]:
    regions = [Region(address_of(source), SIZE), Region(address_of(target), SIZE)]
    opened = LocalTransport(own_identity(), regions)
    yield opened
    opened.close()


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LOOP_BYTES", 0)


def copies_of(source: Bytes, target: Bytes) -> Copies:
    """Pieces in reverse order."""
    offsets = np.arange(COUNT, dtype=np.uint64) * np.uint64(PIECE)
    sizes = np.full(COUNT, PIECE, dtype=np.uint64)
    return Copies(
        offsets + np.uint64(address_of(target)),
        offsets[::-1] + np.uint64(address_of(source)),
        sizes,
    )


async def attached(transport: LocalTransport) -> str:
    card = transport.card()
    await transport.attach(card)
    return card.start_id


Hook = Callable[[int, int], None]
Hooked = Callable[[Hook], Sums]


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Hooked:
    """Return what makes a read's sums and has its hook called, in whatever thread copies, after
    each slice."""
    read, hooks = PeerProcess.read, dict[int, Hook]()

    def read_and_call(self: PeerProcess, reading: Reading, first: int, stop: int) -> None:
        read(self, reading, first, stop)
        assert reading.sums.whole[first:stop].all()
        hooks[id(reading.sums)](first, stop)

    def made(hook: Hook) -> Sums:
        sums = Sums.of(COUNT, 2)
        hooks[id(sums)] = hook
        return sums

    monkeypatch.setattr(PeerProcess, "read", read_and_call)
    return made


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("in_loop", [False, True])
async def test_each_range_is_reported_once_when_it_is_there(
    transport: LocalTransport,
    source: Bytes,
    target: Bytes,
    in_loop: bool,
    hooked: Hooked,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small read is the event loop's, which a thread helps; a larger one is two threads'. Each
    waits a moment at its first slice, so that the other has its turn."""
    monkeypatch.setattr(local, "LOOP_BYTES", SIZE if in_loop else SIZE - 1)
    monkeypatch.setattr(threading.current_thread(), "name", "loop")
    seen: list[tuple[int, str]] = []

    def in_place(first: int, stop: int) -> None:
        for number in range(first, stop):
            piece = target[number * PIECE : (number + 1) * PIECE]
            assert (piece == COUNT - 1 - number).all()
            seen.append((number, threading.current_thread().name))
        time.sleep(0.02)

    sums = hooked(in_place)
    copies = copies_of(source, target)
    await transport.read(await attached(transport), copies, deadline_s=5, sums=sums)
    for number in range(COUNT):
        piece = target[number * PIECE : (number + 1) * PIECE]
        assert tuple(sums.values[number]) == checksum.sums(piece, 0, PIECE // 2, 2)
    assert sorted(number for number, _ in seen) == list(range(COUNT))
    names = {name for _, name in seen}
    assert len(names) == 2 and ("loop" in names) == in_loop


async def test_a_read_in_the_loop_leaves_others_their_turns_and_is_the_only_one(
    transport: LocalTransport, source: Bytes, target: Bytes, hooked: Hooked
) -> None:
    start_id = await attached(transport)
    seen: list[str] = []

    async def read(name: str) -> None:
        def in_place(first: int, stop: int) -> None:
            seen.append(f"{name} in {threading.current_thread().name}")
            time.sleep(0.01)

        copies = copies_of(source, target)
        await transport.read(start_id, copies, deadline_s=5, sums=hooked(in_place))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, "first")
        await anyio.lowlevel.checkpoint()
        assert seen, "a small read waits for nobody"
        begun = len(seen)
        tasks.start_soon(read, "second")
    firsts = [name for name in seen if name.startswith("first")]
    assert 1 <= begun < len(firsts), "the loop had no turn before the read was over"
    assert not all("kvass-read" in name for name in firsts)
    assert all("kvass-read" in name for name in seen if name.startswith("second"))


async def test_a_read_in_the_loop_ends_between_two_slices(
    transport: LocalTransport, source: Bytes, target: Bytes, hooked: Hooked
) -> None:
    """When it is cancelled, when its time is over and when the transport is closed."""
    start_id, reports = await attached(transport), []
    loop_thread = threading.get_ident()

    async def read(then: Callable[[], None], deadline_s: float = 5.0) -> None:
        def in_place(first: int, stop: int) -> None:
            if threading.get_ident() == loop_thread:
                reports.append(first)
                then()
            else:
                time.sleep(0.005)  # so that the loop has its slices

        copies = copies_of(source, target)
        await transport.read(start_id, copies, deadline_s=deadline_s, sums=hooked(in_place))

    with anyio.CancelScope() as scope:
        await read(scope.cancel)
    with pytest.raises(DeadlineExceeded):
        await read(lambda: time.sleep(0.02), deadline_s=0.01)
    with pytest.raises(Unavailable, match="was closed"):
        await read(transport.close)
    assert len(reports) == 3


async def test_nothing_to_read_and_one_range_longer_than_a_slice(
    transport: LocalTransport, source: Bytes, target: Bytes
) -> None:
    start_id = await attached(transport)
    nothing = Copies(*(np.zeros(0, dtype=np.uint64) for _ in range(3)))
    await transport.read(start_id, nothing, deadline_s=5)
    whole = (address_of(target), address_of(source), SIZE)
    await transport.read(
        start_id, Copies(*(np.array([n], dtype=np.uint64) for n in whole)), deadline_s=5
    )
    assert SIZE > local.SLICE_BYTES and np.array_equal(source, target)


async def test_memory_that_the_peer_does_not_have(target: Bytes) -> None:
    """What is not registered is refused; what is, and is not mapped, fails, a part read or not."""
    page = mmap.mmap(-1, 2 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = address_of(np.frombuffer(page, dtype=np.uint8))
    hole = 1 << 40  # nobody maps the beginning of the address space
    regions = [Region(address, mmap.PAGESIZE), Region(address_of(target), SIZE), Region(hole, SIZE)]
    transport = LocalTransport(own_identity(), regions)
    start_id = await attached(transport)

    async def read(remote: int) -> None:
        values = (address_of(target), remote, 16)
        copies = Copies(*(np.array([n], dtype=np.uint64) for n in values))
        await transport.read(start_id, copies, deadline_s=5)

    try:
        await read(address)
        with pytest.raises(Invalid, match="not registered"):
            await read(address + mmap.PAGESIZE)
        with pytest.raises(TransferFailed):
            await read(hole)
        await read(address)
    finally:
        transport.close()
    with pytest.raises(Unavailable, match="was closed"):
        await read(address)


class Gate:
    """Holds reading threads in their first report. Mutable: the events."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.reports = 0

    def in_place(self, first: int, stop: int) -> None:
        self.reports += 1
        self.reached.set()
        assert self.opened.wait(10)

    async def until_reached(self) -> None:
        with anyio.fail_after(10):
            while not self.reached.is_set():  # noqa: ASYNC110 (a thread tells no loop)
                await anyio.sleep(0.001)


@pytest.mark.usefixtures("in_threads")
async def test_a_peer_that_is_forgotten_in_mid_read_is_held_until_its_end(
    transport: LocalTransport, source: Bytes, target: Bytes, hooked: Hooked
) -> None:
    gate, before = Gate(), open_descriptors()
    start_id = await attached(transport)
    assert open_descriptors() == before + 1
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            copies = copies_of(source, target)
            await transport.read(start_id, copies, deadline_s=10, sums=hooked(gate.in_place))

        tasks.start_soon(read)
        await gate.until_reached()
        transport.detach(start_id)
        assert open_descriptors() == before + 1
        gate.opened.set()
    assert open_descriptors() == before
    assert (target[:PIECE] == COUNT - 1).all() and (target[-PIECE:] == 0).all()


@pytest.mark.usefixtures("in_threads")
async def test_a_cancelled_read_returns_when_no_thread_reads(
    transport: LocalTransport, source: Bytes, target: Bytes, hooked: Hooked
) -> None:
    gate = Gate()
    start_id = await attached(transport)
    async with anyio.create_task_group() as tasks:

        async def open_late() -> None:
            await gate.until_reached()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
                gate.opened.set()

        tasks.start_soon(open_late)
        try:
            await transport.read(
                start_id, copies_of(source, target), deadline_s=10, sums=hooked(gate.in_place)
            )
        finally:
            assert gate.opened.is_set()
            target[:] = 99
    await anyio.sleep(0.02)
    assert 1 <= gate.reports <= local.THREADS and (target == 99).all()


@pytest.mark.usefixtures("in_threads")
async def test_a_read_ends_at_its_deadline(
    transport: LocalTransport, source: Bytes, target: Bytes, hooked: Hooked
) -> None:
    gate = Gate()
    threading.Timer(0.1, gate.opened.set).start()
    with pytest.raises(DeadlineExceeded):
        await transport.read(
            await attached(transport),
            copies_of(source, target),
            deadline_s=0.05,
            sums=hooked(gate.in_place),
        )


@pytest.mark.usefixtures("in_threads")
async def test_closing_fails_what_is_under_way(
    transport: LocalTransport, source: Bytes, target: Bytes, hooked: Hooked
) -> None:
    gate, failures = Gate(), list[str]()
    start_id = await attached(transport)
    async with anyio.create_task_group() as tasks:

        async def read() -> None:
            try:
                copies = copies_of(source, target)
                await transport.read(start_id, copies, deadline_s=10, sums=hooked(gate.in_place))
            except Unavailable as error:
                failures.append(str(error))

        tasks.start_soon(read)
        await gate.until_reached()
        threading.Timer(0.05, gate.opened.set).start()
        transport.close()
    assert failures == ["the transport of this process was closed"]
    assert 1 <= gate.reports <= local.THREADS
