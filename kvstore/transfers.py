"""What blocks are moved with: a reader's or writer's slots, its share of each block, transports,
threads, landing memory lent to the other side.

How blocks come is in `client/pulls.py`, how they go in `client/pushes.py`. It refuses to know
about nodes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import anyio.abc
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from kvass.common.checksum import Words, sum_ranges
from kvass.common.errors import KvassError
from kvass.common.executor import Executor
from kvass.common.transport.endpoints import Endpoints
from kvass.common.transport.seam import Loan, Region
from kvass.kvstore import messages as m

HASH_BYTES = 64 << 20  # hashed in the event loop, two milliseconds with turns in between
TURN_BYTES = 8 << 20
# One call's bytes over TCP: some milliseconds, and a landing memory of the default size holds four.
TCP_BATCH_BYTES = 16 << 20
LANDING_SHARE = 4  # no batch takes more than this part of the landing memory
# Batches of one transfer under way at once, where one's bytes move while another's are checked.
# Over TCP 3 are 1.3 to 1.9 times as fast as 1 (blocks of 512 KiB and 2 MiB, two cores). A get on
# the same host is one call's work on one core: a second only takes turns with it.
TCP_LANES = 3
# Between two parts of a long read leases are renewed, and what has come becomes visible.
PART_BYTES = 32 << 20
LEND_PAUSE_S = 0.002  # between two looks for free landing memory; doubled up to the next
LEND_PAUSE_MAX_S = 0.05
TRANSFER_S = 10.0  # of one batch: bounds what a hanging peer can hold up


class Slots(Protocol):
    """Bytes by slot."""

    def __getitem__(self, slot: int, /) -> NDArray[np.uint8]: ...


class BlockMemory(Protocol):
    """What `common.pool.memory.SlotMemory` is, without torch."""

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def array(self) -> Slots: ...

    def addresses(self, slots: Sequence[int], /) -> Words: ...


class OwnMemory(BlockMemory, Protocol):
    """Memory to be registered with transports."""

    @property
    def region(self) -> Region: ...


class BlockShape(Protocol):
    """What moving a block needs to know of its layout: `common.block.BlockLayout` knows more."""

    @property
    def block_size(self) -> int: ...

    @property
    def head_groups(self) -> int: ...

    @property
    def group_size(self) -> int: ...

    def group_offset(self, group: int) -> int: ...


@dataclass(frozen=True, slots=True)
class PlainShape:
    """A block of so many equal head groups, one after the other; of what is in them nothing."""

    block_size: int
    head_groups: int = 1

    @property
    def group_size(self) -> int:
        return self.block_size // self.head_groups

    def group_offset(self, group: int) -> int:
        return group * self.group_size


class Transfers:
    """Mutable fields: `counts` (what went wrong, by kind), `_puts` (numbers puts), `_later` and
    `_is_more` (what is to be done in the background, once there is a task that does it).

    `groups`: the head groups that this process reads and writes; `share` is their bytes in a block,
    from `start` on. What need not be waited for runs in `tasks`, the owner's task group.
    """

    def __init__(
        self,
        memory: BlockMemory,
        layout: BlockShape,
        groups: range,
        endpoints: Endpoints,
        executor: Executor,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self.memory = memory
        self.groups = groups
        self.endpoints = endpoints
        self.executor = executor
        self.tasks = tasks
        self.counts: Counter[str] = Counter()
        self.block_size = layout.block_size
        self.head_groups = layout.head_groups
        self.group_size = layout.group_size
        self.start = layout.group_offset(groups.start)
        self.share = len(groups) * layout.group_size
        self._puts = itertools.count()
        self._later: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._is_more: anyio.Event | None = None

    def later(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something in the background. Its task begins when the caller waits for something: to
        make one takes a fiftieth of a small get."""
        self._later.append(work)
        if self._is_more is None:
            self._is_more = anyio.Event()
            self.tasks.start_soon(self._do_later)
        self._is_more.set()

    async def _do_later(self) -> None:
        while True:
            assert self._is_more is not None
            await self._is_more.wait()
            self._is_more = anyio.Event()
            works, self._later = self._later, []
            for work in works:
                self.tasks.start_soon(work)

    def next_put(self) -> str:
        """Return an id that no other put of any process has."""
        return f"{self.endpoints.identity.start_id}-{next(self._puts)}"

    def places(self, slots: Sequence[int]) -> Words:
        """Return the addresses where the share of a block starts in each slot."""
        addresses = self.memory.addresses(slots)
        return addresses + np.uint64(self.start) if self.start else addresses

    def _sums(self, places: Words) -> Words:
        return sum_ranges(places, self.group_size, len(self.groups))

    async def hashed(self, places: Words) -> Words:
        """Return the checksums, uint64 [places, groups], of each place's share: few bytes are
        hashed in the event loop, which has its turn in between, since waking a thread would take as
        long."""
        if len(places) * self.share > HASH_BYTES:
            return await self.executor.run(lambda: self._sums(places))
        found, count = [], max(1, TURN_BYTES // self.share)
        for first in range(0, len(places), count):
            await anyio.lowlevel.checkpoint()
            found.append(self._sums(places[first : first + count]))
        return np.concatenate(found)

    async def in_lanes(
        self,
        indices: Sequence[int],
        move: Callable[[Sequence[int]], Awaitable[None]],
        *,
        landed: bool,
    ) -> None:
        """Move blocks batch by batch, over TCP several at once; raises the first KvassError, when
        none of them is under way any more."""
        batches = self.batches(indices, landed=landed)
        failures: list[KvassError] = []

        async def lane() -> None:
            for batch in batches:
                try:
                    await move(batch)
                except KvassError as error:
                    failures.append(error)
                if failures:
                    return

        if not landed or len(indices) <= 1:
            await lane()
        else:
            async with anyio.create_task_group() as tasks:
                for _ in range(TCP_LANES):
                    tasks.start_soon(lane)
        if failures:
            raise failures[0]

    def batches(self, indices: Sequence[int], *, landed: bool) -> Iterator[Sequence[int]]:
        """Cut blocks into what one call moves, by way of a landing memory or not."""
        most = min(m.BLOCKS_MAX, m.CHECKSUMS_MAX // len(self.groups))
        if landed:
            room = self.endpoints.landing.counts()["total"] // LANDING_SHARE
            most = min(most, max(1, min(room, TCP_BATCH_BYTES) // self.share))
        for first in range(0, len(indices), most):
            yield indices[first : first + most]


async def borrow(endpoints: Endpoints, size: int, *, deadline_s: float) -> Loan | None:
    """Lend landing memory to a peer, waiting for it up to `deadline_s`; None when none came
    free."""
    pause_s = LEND_PAUSE_S
    with anyio.move_on_after(deadline_s):
        while True:
            loan = await endpoints.landing.lend(size)
            if loan is not None:
                return loan
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, LEND_PAUSE_MAX_S)
    return None


def parts(items: int, size: int) -> list[slice]:
    """Cut so many items of `size` bytes each into parts of about PART_BYTES."""
    count = max(1, PART_BYTES // size)
    return [slice(first, first + count) for first in range(0, items, count)]
