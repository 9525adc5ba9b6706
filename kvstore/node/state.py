"""What a store node's calls share, and what they do alike."""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from kvass.common.clock import Clock
from kvass.common.errors import Invalid
from kvass.common.keys import ranges_of
from kvass.common.rpc.server import Call
from kvass.common.transport.endpoints import Endpoints
from kvass.common.wire import Message
from kvass.kvstore.index.index import Index
from kvass.kvstore.index.puts import Verdict
from kvass.kvstore.messages import Ranges
from kvass.kvstore.node.deliveries import Deliveries
from kvass.kvstore.node.keeping import Keeping
from kvass.kvstore.node.waiters import Waiters

M = TypeVar("M", bound=Message)
# What was done (put, get or fill), bytes, seconds.
Moved = Callable[[str, int, float], None]


# bugs: of what the node does by itself (`chores.py`).
FAULTS = ("put_failed", "put_corrupt", "get_failed", "get_suspect", "bugs")


@dataclass(slots=True)
class NodeState:
    """Mutable fields: `faults`, counts by name; `on_stored`, told of the blocks that a writer has
    stored; `on_moved`, of the bytes that went; `rise`, which brings blocks into memory from the
    tiers below, if there are any, and keeps them there. Call `notify` after each call of the
    index."""

    index: Index
    deliveries: Deliveries
    endpoints: Endpoints
    clock: Clock
    waiters: Waiters = field(default_factory=Waiters)
    on_stored: Callable[[Sequence[bytes]], None] = lambda keys: None
    on_moved: Moved = lambda what, size_bytes, time_s: None
    on_asked: Callable[[Sequence[bytes]], None] = lambda keys: None
    rise: Callable[[Sequence[bytes], Keeping], Awaitable[None]] | None = None
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))

    def now_s(self) -> float:
        return self.clock.now_s()

    def may_rise(self, keys: Collection[bytes]) -> bool:
        """Whether some of these blocks may be below memory, and nowhere in it."""
        return self.rise is not None and not self.index.ledger.entries.keys() >= set(keys)

    def keeping(self, keys: Iterable[bytes]) -> Keeping:
        """Keep in memory those of `keys` that are there, and what is added."""
        keep = Keeping(self.index.ledger, self.notify)
        entries = map(self.index.ledger.visible, keys)
        keep.add(entry for entry in entries if entry is not None)
        return keep

    @asynccontextmanager
    async def risen(self, keys: Collection[bytes]) -> AsyncIterator[None]:
        """Bring up what is below memory: of `keys` all that can be had in time is in memory until
        the block ends."""
        if self.rise is None or not self.may_rise(keys):
            yield
            return
        with self.keeping(keys) as keep:
            await self.rise(list(keys), keep)
            yield

    def notify(self) -> None:
        """Wake those who wait for what has just happened."""
        self.waiters.wake(self.index.take_news())


def request_of(call: Call, cls: type[M]) -> M:
    """Return a call's request, which the server found by its class."""
    assert isinstance(call.request, cls)
    return call.request


def check_own(call: Call, start_id: str, what: str) -> None:
    """Refuse cards of memory that is not the caller's."""
    if start_id != call.peer.start_id:
        raise Invalid(f"{what} of {start_id!r}, sent by {call.peer.start_id!r}")


def ranges(indices: Iterable[int]) -> Ranges:
    """Join chain indices into ranges."""
    return tuple(ranges_of(sorted(indices)))


def chosen(verdicts: Mapping[int, Verdict], verdict: Verdict) -> Ranges:
    """Return the ranges of blocks that got `verdict`."""
    return ranges(index for index, given in verdicts.items() if given == verdict)
