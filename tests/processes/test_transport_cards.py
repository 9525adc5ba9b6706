"""A peer's card, between two real processes: who is attached by it, who is not, and by which."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import anyio
import msgspec
import pytest

from kvass.common.errors import DeadlineExceeded, Invalid, TransferFailed, Unavailable
from kvass.common.transport.identity import own_identity
from kvass.common.transport.seam import EndpointCard
from kvass.common.transport.tcp import TcpTransport
from transport_peer import BLOCK, Pair, Peer, a_pair, address_of, whole

pytestmark = [pytest.mark.anyio, pytest.mark.process]

MIB = 1 << 20
SIZE = 8 * MIB


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with a_pair(SIZE) as both:
        yield both


async def test_strangers_with_the_same_pid_are_refused(pair: Pair) -> None:
    peer, own, _ = pair
    reader = own.reader
    assert reader is not None
    other = Peer(4 * MIB, fill=1)
    try:
        recycled = msgspec.structs.replace(peer.card, pid=other.pid)
        with pytest.raises(Unavailable, match="another process has its PID"):
            await reader.attach(recycled)
        other_start = msgspec.structs.replace(peer.card, start_id=own_identity().start_id)
        with pytest.raises(Unavailable, match="says that it is another one"):
            await reader.attach(other_start)
        other_host = msgspec.structs.replace(peer.card, host_id="elsewhere")
        with pytest.raises(Unavailable, match="another host"):
            await reader.attach(other_host)
        with pytest.raises(Unavailable):
            await own.way_to(recycled)
        with pytest.raises(Invalid):
            await reader.attach(msgspec.structs.replace(peer.card, metadata=b"\x00garbage"))
    finally:
        other.kill()


async def test_a_card_of_an_older_generation_reaches_nothing(pair: Pair) -> None:
    peer, own, array = pair
    old, tag, address = await peer.ask("lend", MIB)
    assert await peer.ask("take", 0.01) == "DeadlineExceeded"
    new, new_tag, new_address = await peer.ask("lend", MIB)
    assert new.generation == old.generation + 1
    await own.writer.attach(old)
    copies = whole(address_of(array), address, MIB)
    with pytest.raises((Unavailable, TransferFailed, DeadlineExceeded)):
        await own.writer.write(old.start_id, copies, tag=tag, deadline_s=1)
    await own.writer.attach(new)
    with pytest.raises(Unavailable):
        await own.writer.attach(old)
    copies = whole(address_of(array), new_address, MIB)
    await own.writer.write(new.start_id, copies, tag=new_tag, deadline_s=5)
    assert await peer.ask("take", 5.0) == "done"


async def test_the_first_writes_of_a_card_begin_together(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds the card unknown; whoever comes second must not end the first one's write."""
    peer, own, array = pair
    attach = TcpTransport._attach

    def late_attach(self: TcpTransport, card: EndpointCard) -> None:
        time.sleep(0.02)  # in the mover's thread: the first writer goes on meanwhile
        attach(self, card)

    monkeypatch.setattr(TcpTransport, "_attach", late_attach)
    card, tag, address = await peer.ask("lend", 3 * BLOCK)

    async def write(number: int) -> None:
        await own.writer.attach(card)
        copies = whole(address_of(array), address + number * BLOCK, BLOCK)
        await own.writer.write(card.start_id, copies, tag=tag, deadline_s=5)

    peer.tell("take", 5.0)
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(write, number)
    assert await peer.answered() == "done"
