"""Two real processes exchange bytes: right ones, dead and stopped peers, ports, cost of idling."""

from __future__ import annotations

import operator
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

import anyio
import msgspec
import numpy as np
import psutil
import pytest

from kvass.common import checksum
from kvass.common.checksum import Sums
from kvass.common.errors import DeadlineExceeded, Invalid, TransferFailed, Unavailable
from kvass.common.transport import loans
from kvass.common.transport.endpoints import Endpoints
from kvass.common.transport.seam import Copies, Transport
from transport_peer import BLOCK, Bytes, Pair, Peer, a_pair, address_of, listening, whole

pytestmark = [pytest.mark.anyio, pytest.mark.process]

MIB = 1 << 20
SIZE = 128 * MIB  # takes TCP 40 ms or more: long enough to interrupt


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with a_pair(SIZE) as both:
        yield both


def reader_of(endpoints: Endpoints) -> Transport:
    assert endpoints.reader is not None
    return endpoints.reader


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is awaited is memory, it wakes nobody
            await anyio.sleep(0.002)


def all_free(endpoints: Endpoints) -> bool:
    counts = endpoints.landing.counts()
    return counts["free"] == counts["total"]


def blocks(array: Bytes, peer: Peer, count: int) -> Copies:
    """Blocks of the peer into own slots, in reverse order."""
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(BLOCK)
    sizes = np.full(count, BLOCK, dtype=np.uint64)
    local, remote = np.uint64(address_of(array)), np.uint64(peer.address)
    return Copies(offsets + local, offsets[::-1] + remote, sizes)


async def test_read_on_the_same_host_brings_the_right_bytes(pair: Pair) -> None:
    peer, own, array = pair
    assert await own.way_to(peer.card) == "read"
    await peer.ask("fill_blocks", BLOCK)
    found, right = array[: 64 * BLOCK].reshape(64, BLOCK), np.arange(64, dtype=np.uint8)[::-1]
    sums = Sums.of(64, 3)
    await reader_of(own).read(peer.card.start_id, blocks(array, peer, 64), deadline_s=5, sums=sums)
    assert (found == right[:, None]).all()
    assert sums.whole.all()
    for place in range(64):
        assert tuple(sums.values[place]) == checksum.sums(found[place], 0, BLOCK // 3, 3)
    assert (array[64 * BLOCK :] == 5).all()


async def test_write_over_tcp_brings_the_right_bytes(pair: Pair) -> None:
    peer, own, array = pair
    card, tag, address = await peer.ask("lend", 64 * BLOCK)
    array[: 64 * BLOCK] = np.repeat(np.arange(64, dtype=np.uint8), BLOCK)
    peer.tell("take", 5.0)
    await own.writer.attach(card)
    copies = whole(address_of(array), address, 64 * BLOCK, BLOCK)
    await own.writer.write(card.start_id, copies, tag=tag, deadline_s=5)
    assert await peer.answered() == "done"
    assert await peer.ask("block_values", BLOCK, 64) == [[i] for i in range(64)]
    counts = await peer.ask("counts")
    assert counts["free"] == counts["total"]


@pytest.mark.fault(number=3)
async def test_killed_peer_is_noticed_in_mid_read(pair: Pair) -> None:
    peer, own, array = pair
    reader = reader_of(own)
    await reader.attach(peer.card)
    killed_at: list[float] = []

    async def kill_soon() -> None:
        await anyio.sleep(0.05)
        killed_at.append(time.monotonic())
        os.kill(peer.pid, 9)

    copies = whole(address_of(array), peer.address, SIZE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon)
        with pytest.raises((Unavailable, TransferFailed)):
            for _ in range(1000):
                await reader.read(peer.card.start_id, copies, deadline_s=5)
    assert time.monotonic() - killed_at[0] < 1.0
    with pytest.raises(Unavailable):
        await reader.read(peer.card.start_id, copies, deadline_s=5)
    with pytest.raises(Unavailable):
        await reader.attach(msgspec.structs.replace(peer.card, generation=1))


async def test_killed_peer_is_noticed_in_mid_write(pair: Pair) -> None:
    peer, own, array = pair
    await write_to(peer, own, array, MIB)
    card, tag, address = await peer.ask("lend", SIZE)
    await own.writer.attach(card)
    killed_at: list[float] = []

    async def kill_soon() -> None:
        await anyio.sleep(0.03)
        killed_at.append(time.monotonic())
        os.kill(peer.pid, 9)

    copies = whole(address_of(array), address, SIZE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon)
        with pytest.raises((Unavailable, TransferFailed)):
            for _ in range(1000):
                await own.writer.write(card.start_id, copies, tag=tag, deadline_s=5)
    assert time.monotonic() - killed_at[0] < 1.0


@pytest.mark.fault(number=2)
@pytest.mark.fault(number=3)
async def test_stopped_writer_lands_no_late_byte(pair: Pair) -> None:
    peer, own, _ = pair
    loan = await own.landing.lend(SIZE)
    assert loan is not None
    peer.tell("write", loan.card, loan.tag, loan.address, SIZE, 20.0)
    landed = np.frombuffer(loan.view(), dtype=np.uint8)
    await until(lambda: landed[MIB] == 7, 5)
    peer.stop()
    with pytest.raises(DeadlineExceeded):
        await loan.arrived(deadline_s=0.3)
    assert landed[-1] != 7, "the transfer was over before it could be interrupted"
    abandoned_at = time.monotonic()
    loan.abandon()
    await until(lambda: all_free(own), 1.0)  # nothing else is out: at once
    assert time.monotonic() - abandoned_at < 1.0

    again = await own.landing.lend(SIZE)
    assert again is not None and again.card.generation == loan.card.generation + 1
    reused = np.frombuffer(again.view(), dtype=np.uint8)
    reused[:] = 9
    peer.go_on()
    assert await peer.answered() in ("Unavailable", "TransferFailed")
    await anyio.sleep(0.3)
    assert (reused == 9).all(), "late bytes landed in memory that was lent again"

    peer.tell("write", again.card, again.tag, again.address, SIZE, 20.0)
    await again.arrived(deadline_s=10)
    assert (reused == 7).all()
    assert await peer.answered() == "done"
    loan.settle()  # of a loan that ended long ago: a no-op
    assert own.landing.counts()["lent"] == SIZE
    again.settle()
    assert all_free(own)


async def write_to(peer: Peer, own: Endpoints, array: Bytes, size: int) -> None:
    """Do one whole write; the connection is there afterwards."""
    card, tag, address = await peer.ask("lend", size)
    await own.writer.attach(card)
    copies = whole(address_of(array), address, size)
    await own.writer.write(card.start_id, copies, tag=tag, deadline_s=10)
    assert await peer.ask("take", 10.0) == "done"


@pytest.mark.fault(number=2)
@pytest.mark.fault(number=3)
async def test_stopped_landing_gets_no_late_byte(pair: Pair) -> None:
    peer, own, array = pair
    await write_to(peer, own, array, MIB)
    await peer.ask("fill", 7)
    card, tag, address = await peer.ask("lend", SIZE)
    await own.writer.attach(card)
    copies = whole(address_of(array), address, SIZE)
    peer.tell("take", 1.0)
    async with anyio.create_task_group() as tasks:
        began = time.monotonic()

        async def write() -> None:
            with pytest.raises(DeadlineExceeded):
                await own.writer.write(card.start_id, copies, tag=tag, deadline_s=1.2)

        tasks.start_soon(write)
        await anyio.sleep(0.02)
        peer.stop()
    assert time.monotonic() - began < 2.0, "a stopped peer held its writer beyond the deadline"
    array[:] = 3  # the holder's slots are reused
    peer.go_on()
    assert await peer.answered() == "DeadlineExceeded"
    assert await peer.ask("values") == [7], "bytes of an abandoned loan came into a slot"
    counts = await peer.ask("counts")
    give_up = time.monotonic() + loans.BOUND_S
    while counts["free"] != counts["total"] and time.monotonic() < give_up:
        counts = await peer.ask("counts")
    assert counts["free"] == counts["total"]

    card, tag, address = await peer.ask("lend", SIZE)
    await peer.ask("fill_loan", 9)
    await anyio.sleep(0.3)
    assert await peer.ask("loan_values") == [9]
    await own.writer.attach(card)
    peer.tell("take", 10.0)
    copies = whole(address_of(array), address, SIZE)
    await own.writer.write(card.start_id, copies, tag=tag, deadline_s=10)
    assert await peer.answered() == "done"
    assert await peer.ask("values") == [3]


async def test_stopped_reader_gets_no_late_byte(pair: Pair) -> None:
    peer, own, array = pair
    peer.tell("read", own.card(), address_of(array), SIZE, 0.2)
    await anyio.sleep(0.01)
    peer.stop()
    await anyio.sleep(0.4)
    array[:] = 3
    peer.go_on()
    assert await peer.answered() in ("DeadlineExceeded", "done")
    await peer.ask("fill", 9)
    await anyio.sleep(0.3)
    assert await peer.ask("values") == [9]


async def test_stopped_holder_can_be_read(pair: Pair) -> None:
    peer, own, array = pair
    reader = reader_of(own)
    await reader.attach(peer.card)
    peer.stop()
    copies = whole(address_of(array), peer.address, SIZE)
    await reader.read(peer.card.start_id, copies, deadline_s=5)
    assert (array == 7).all()
    peer.go_on()


async def test_cancelled_read_writes_nothing_more(pair: Pair) -> None:
    peer, own, array = pair
    reader = reader_of(own)
    await reader.attach(peer.card)
    copies = whole(address_of(array), peer.address, SIZE)
    with anyio.move_on_after(0.004) as scope:
        await reader.read(peer.card.start_id, copies, deadline_s=5)
    assert scope.cancelled_caught
    array[:] = 9
    await anyio.sleep(0.1)
    assert (array == 9).all()


async def test_cancelled_write_reads_its_source_no_more(pair: Pair) -> None:
    peer, own, array = pair
    await write_to(peer, own, array, MIB)
    card, tag, address = await peer.ask("lend", SIZE)
    await own.writer.attach(card)
    peer.stop()
    copies = whole(address_of(array), address, SIZE)
    began = time.monotonic()
    with anyio.move_on_after(0.3):
        await own.writer.write(card.start_id, copies, tag=tag, deadline_s=20)
    assert time.monotonic() - began < 1.0
    array[:] = 3  # the source has another owner now
    array[:MIB] = 4
    peer.go_on()
    copies = whole(address_of(array), address, MIB)  # drives whatever is left of the first write
    await own.writer.write(card.start_id, copies, tag=b"of no loan", deadline_s=5)
    assert 3 not in await peer.ask("loan_values")
    assert await peer.ask("take", 0.3) == "DeadlineExceeded"


async def test_ranges_outside_registered_memory_are_refused(pair: Pair) -> None:
    peer, own, array = pair
    reader, start_id = reader_of(own), peer.card.start_id
    await reader.attach(peer.card)
    base = address_of(array)
    with pytest.raises(Invalid, match=r"copies\.local"):
        await reader.read(start_id, whole(base + SIZE - 100, peer.address, 200), deadline_s=1)
    with pytest.raises(Invalid):
        await reader.read(start_id, whole(base, peer.address + SIZE - 100, 200), deadline_s=1)
    card, tag, address = await peer.ask("lend", MIB)
    await own.writer.attach(card)
    for wrong in (address + SIZE, peer.address):
        with pytest.raises(Invalid):
            await own.writer.write(start_id, whole(base, wrong, 200), tag=tag, deadline_s=2)
    await own.writer.write(start_id, whole(base, address, MIB), tag=tag, deadline_s=5)
    assert await peer.ask("take", 5.0) == "done"


async def test_data_ports_are_lazy_and_on_loopback(pair: Pair) -> None:
    peer, own, array = pair
    before = listening(os.getpid())
    await reader_of(own).attach(peer.card)
    copies = whole(address_of(array), peer.address, MIB)
    await reader_of(own).read(peer.card.start_id, copies, deadline_s=5)
    assert listening(peer.pid) == set(), "same-host transfers need no socket"
    assert listening(os.getpid()) == before
    await write_to(peer, own, array, MIB)
    for ports in (listening(peer.pid), listening(os.getpid()) - before):
        assert ports and {address for address, _ in ports} == {"127.0.0.1"}


async def test_a_peer_that_is_detached_leaves_no_port(pair: Pair) -> None:
    peer, own, array = pair
    before = listening(os.getpid())
    await write_to(peer, own, array, MIB)
    assert len(listening(os.getpid()) - before) == 1
    own.writer.detach(peer.card.start_id)
    await until(lambda: listening(os.getpid()) == before, 5)


async def test_strangers_at_an_idle_agent_s_port_are_forgotten(pair: Pair) -> None:
    """UCX accepts them by itself; they stayed in CLOSE_WAIT until bytes moved."""
    peer, own, array = pair
    before = listening(os.getpid())
    await write_to(peer, own, array, MIB)
    ports = listening(peer.pid) | (listening(os.getpid()) - before)
    used = open_fds(peer)
    for address in ports:  # of the landing there, and of the agent here
        for _ in range(50):
            socket.create_connection(address, timeout=2).close()
    await anyio.sleep(0.2)  # by now UCX has accepted them
    await until(lambda: all(map(operator.le, open_fds(peer), used)), 15)
    await write_to(peer, own, array, MIB)


def open_fds(peer: Peer) -> list[int]:
    return [psutil.Process(pid).num_fds() for pid in (os.getpid(), peer.pid)]


async def test_an_idle_process_uses_no_cpu(pair: Pair) -> None:
    peer, own, array = pair
    await write_to(peer, own, array, MIB)
    await own.way_to(peer.card)

    def seconds() -> float:
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in (os.getpid(), peer.pid))

    before = seconds()
    await anyio.sleep(1.0)
    assert seconds() - before <= 0.03


def test_a_process_that_forgets_to_close_exits_cleanly(tmp_path: object) -> None:
    program = (
        "import asyncio\n"
        "from transport_peer import memory, open_over\n"
        "from kvass.common.config import TransportConfig\n"
        "array = memory(1 << 20, 1)\n"
        "async def main():\n"
        "    global endpoints, loan\n"
        "    endpoints = await open_over(array, TransportConfig(landing_bytes=1 << 20))\n"
        "    loan = await endpoints.landing.lend(4096)\n"
        "    await endpoints.writer.attach(loan.card)\n"
        "asyncio.run(main())\n"
        "print('end')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=30
    )
    assert (ended.returncode, ended.stdout) == (0, b"end\n"), ended.stderr.decode()
