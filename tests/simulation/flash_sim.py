"""A second tier for simulated nodes: a disk in memory, which outlives the node that uses it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import anyio

from inline import InlineFutures
from kvass.kvstore.flash.disk import PAGE
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.flash.settings import LogSettings
from memory_disk import MemoryDisk
from store_sim import SimNode

T = TypeVar("T")
# Each block takes a page; a file holds some dozen of them.
SETTINGS = LogSettings(
    flash_bytes=12 * 16 * PAGE,
    segment_bytes=16 * PAGE,
    unsynced_bytes=8 * PAGE,
    buffer_bytes=2 * PAGE,
)


class _OfLife:
    """Runs a node's blocking work, of which a dead node does none any more."""

    def __init__(self, node: SimNode, time_s: float = 0.0) -> None:
        self._node = node
        self._time_s = time_s

    async def run(self, function: Callable[[], T]) -> T:
        await anyio.sleep(self._time_s)
        if not self._node.alive:
            await anyio.sleep_forever()
        return function()


def give_flash(node: SimNode, disk: MemoryDisk, seed: int, *, read_s: float = 0.0) -> FlashLog:
    """Let a node that has just been added use a disk, and what is on it; before it runs. Each read
    takes `read_s`."""
    log = FlashLog(disk, SETTINGS, InlineFutures(), random.Random(seed).randbytes)
    node.node.add_flash(log, _OfLife(node), _OfLife(node, read_s), _OfLife(node))
    return log


def lose_power(disk: MemoryDisk, rng: random.Random) -> None:
    """A part of each write that was not synced lasts; a whole page is written or it is not."""
    disk.crash(lambda size: rng.choice((0, size, rng.randrange(size // PAGE + 1) * PAGE)))
