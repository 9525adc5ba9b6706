"""What a holder gives UCX to write over TCP: as few ranges as may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.transport.identity import own_identity
from kvass.common.transport.mover import Mover
from kvass.common.transport.seam import Copies, EndpointCard, Region
from kvass.common.transport.tcp import TcpTransport, _Write

pytestmark = pytest.mark.anyio
T = TypeVar("T")
SIZE = 4096


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return BACKEND, dict(BACKEND_OPTIONS)


class IdleMover(Mover):
    """Notes what it should move. Mutable field: `written`."""

    def __init__(self) -> None:
        self.written: list[Copies] = []

    def on_close(self, closer: Callable[[], None]) -> None:
        pass

    def post(self, command: Callable[[], None]) -> None:
        pass

    async def call(self, function: Callable[[], T]) -> T:
        return function()

    async def transfer(self, transfer: object, *, deadline_s: float) -> None:
        assert isinstance(transfer, _Write)
        self.written += transfer._pieces


async def test_blocks_side_by_side_on_both_sides_are_one_range() -> None:
    mover = IdleMover()
    regions = [Region(1 << 20, 8 * SIZE), Region((1 << 20) + 8 * SIZE, 8 * SIZE)]
    transport = TcpTransport(mover, own_identity(), regions, interface="lo")
    await transport.attach(EndpointCard("tcp", "host", "start", 1, 1, b"metadata"))
    blocks = np.array([0, 1, 2, 7, 8, 9, 4], dtype=np.uint64)  # 7 and 8 are in two regions
    copies = Copies(
        local=np.uint64(1 << 20) + blocks * np.uint64(SIZE),
        remote=np.uint64(1 << 30) + np.arange(len(blocks), dtype=np.uint64) * np.uint64(SIZE),
        sizes=np.full(len(blocks), SIZE, dtype=np.uint64),
    )
    await transport.write("start", copies, tag=b"tag", deadline_s=1)
    (piece,) = mover.written
    assert piece.local.tolist() == [(1 << 20) + at * SIZE for at in (0, 7, 8, 4)]
    assert piece.remote.tolist() == [(1 << 30) + at * SIZE for at in (0, 3, 4, 6)]
    assert piece.sizes.tolist() == [3 * SIZE, SIZE, 2 * SIZE, SIZE]
