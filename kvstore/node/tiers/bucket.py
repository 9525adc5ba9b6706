"""The bucket as one store node knows it: what is there, what is to go, whether it answers.

    at the start, at times, when nodes come or go ─> list ─> the shelf (`objects/shelf.py`)
    wrong, too many, dropped ─> off the shelf, where nobody finds it ─> deleted

All nodes see all objects. What one of them has deleted the others notice when they read it, or at
their next listing. Of a drop that could not be carried out nothing is found any more, and it is
tried again; what was put anew meanwhile goes with it. It refuses to know what goes up and comes
down: `bucket_tier.py`, `uploads.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing

import anyio
import anyio.lowlevel
import numpy as np

from kvass.common.clock import Clock
from kvass.common.errors import Unavailable
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.flash.table import U64
from kvass.kvstore.objects.names import prefix_of, read_name
from kvass.kvstore.objects.outage import Outage
from kvass.kvstore.objects.shelf import Shelf
from kvass.kvstore.objects.store import DELETES_MAX, ObjectStore

_log = logging.getLogger(__name__)

TICK_S = 0.25
# What other nodes have put is known this late. A million objects take a thousand requests.
LIST_S = 1800.0
ANSWER_S = 5.0  # for one small page; reads of blocks wait as long
SETTLE_S = 5.0  # after nodes came or went, until their segments' new homes look
DOOMED_MAX = 4096  # names; what is forgotten here is found again at the next listing
ORDERS_MAX = 64  # drops that the bucket has not carried out; more are said, and not tried again
SLICE = 250  # objects taken off the shelf between two looks at the event loop
CLEAR_S = 30.0  # between two tries to delete what could not be
SPARE_SHARE = 1 / 128  # of the room, made at once: so that not each upload needs a deletion


class Bucket:
    """Mutable fields: `shelf`, `outage`, `reserved_bytes` (of uploads under way), `counts`,
    `_orders` (drops that are not done), `_failed` (those of them that are to be tried again),
    `_doomed` (names that are to be deleted), `_nodes`, `_list_s` and `_clear_s` (when to do so
    next)."""

    def __init__(
        self,
        objects: ObjectStore,
        root: str,
        total_bytes: int,
        clock: Clock,
        is_home: Callable[[bytes], bool],
    ) -> None:
        self.objects = objects
        self.root = root
        self.total_bytes = total_bytes
        self.is_home = is_home
        self.shelf = Shelf(root)
        self.outage = Outage()
        self.reserved_bytes = 0
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._orders: list[DropOrder] = []
        self._failed: list[DropOrder] = []
        self._clearing = anyio.Lock()
        self._flying: dict[str, bool] = {}  # uploads by name: whether a drop came meanwhile
        self._doomed: dict[str, None] = {}
        self._nodes: frozenset[str] = frozenset()
        self._list_s = self._clear_s = -1.0

    async def run(self) -> None:
        """Know what is there, and delete what is to go, until cancelled."""
        while True:
            now_s = self._clock.now_s()
            if self.outage.is_due(now_s) or (not self.outage.is_on and now_s >= self._list_s):
                await self.take_stock()
            elif not self.outage.is_on and now_s >= self._clear_s:
                await self._clear()
            await anyio.sleep(TICK_S)

    # --- whether it answers ---

    def worked(self) -> None:
        """It has answered."""
        lasted_s = self.outage.worked(self._clock.now_s())
        if lasted_s is not None:
            _log.info("bucket: it answers again, after %.0f s", lasted_s)

    def failed(self, error: Unavailable) -> None:
        """A call has failed; after some in a row nobody asks any more, until a listing works."""
        if self.outage.failed(self._clock.now_s()):
            self._say(error)

    async def answers(self, name: str) -> bool:
        """Ask for an object that could not be put, to see whether at least reading works; where it
        does not, an outage begins."""
        if self.outage.is_on:
            return False
        try:
            with anyio.fail_after(ANSWER_S):
                async with aclosing(self.objects.pages(name)) as pages:
                    await anext(pages, None)
        except TimeoutError:
            self._is_out(Unavailable(f"bucket: no answer within {ANSWER_S:.0f} s"))
        except Unavailable as error:
            self._is_out(error)
        else:
            self.worked()
        return not self.outage.is_on

    def _is_out(self, error: Unavailable) -> None:
        # What began it meanwhile says nothing new here, nor does it lengthen the wait.
        if not self.outage.is_on and self.outage.begin(self._clock.now_s()):
            self._say(error)

    def _say(self, error: Unavailable) -> None:
        _log.error("%s: the node goes on without the bucket, and tries again", error)

    # --- what is there ---

    def set_nodes(self, ids: frozenset[str]) -> None:
        """These are the cluster's nodes now. When some came or went, what they have put is this
        node's to find."""
        if self._nodes and ids != self._nodes:
            self._list_s = min(self._list_s, self._clock.now_s() + SETTLE_S)
        self._nodes = ids

    async def take_stock(self) -> None:
        """List all that is there."""
        begun_s = self._clock.now_s()
        self.shelf.begin_listing()
        try:
            async with aclosing(self.objects.pages(self.root)) as pages:
                async for page in pages:
                    self.worked()
                    kept = [each for each in page if not self.is_dropped(each.name)]
                    self._doom(self.shelf.add(kept, self._clock.now_s()))
        except Unavailable as error:
            self.counts["list_faults"] += 1
            if self.outage.begin(self._clock.now_s()):
                self._say(error)
            return
        self.worked()
        self.shelf.end_listing()
        if self._list_s < 0:
            _log.info("bucket: %d blocks in %d objects", self.shelf.blocks, len(self.shelf))
        self._list_s = begun_s + LIST_S
        await self.make_room(0)

    async def make_room(self, size_bytes: int) -> bool:
        """Delete what was not used for longest, of this node's segments, until so much fits;
        returns whether it does."""
        excess = self._excess(size_bytes)
        if excess > 0:
            spare = int(self.total_bytes * SPARE_SHARE)
            names = self.shelf.oldest(excess + spare, self.is_home)
            self.counts["evicted_objects"] += len(names)
            self.forget(names)
            await self._clear()
        return self._excess(size_bytes) <= 0

    def _excess(self, size_bytes: int) -> int:
        return self.shelf.used_bytes + self.reserved_bytes + size_bytes - self.total_bytes

    # --- deleting ---

    def forget(self, names: Iterable[str]) -> None:
        """Let nobody find these objects, and delete them soon."""
        for name in names:
            self.shelf.remove(name)
            self._doom([name])

    def _doom(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self._doomed) < DOOMED_MAX:
                self._doomed[name] = None

    def spare(self, name: str) -> None:
        """An object is made anew: what was wrong with it before is over."""
        self._doomed.pop(name, None)

    def takes_off(self, name: str) -> None:
        self._flying[name] = False

    def landed(self, name: str) -> bool:
        """Whether it may be found: no drop of it came meanwhile."""
        return not self._flying.pop(name, False)

    async def _clear(self) -> None:
        """Delete what is to go, and what drops could not erase; one at a time."""
        async with self._clearing:
            await self._clear_now()

    async def _clear_now(self) -> None:
        try:
            for order in list(self._failed):
                await self._erase(order)
                self._failed.remove(order)
                self._orders.remove(order)
            while self._doomed:
                await self._delete_doomed(list(self._doomed)[:DELETES_MAX])
        except Unavailable as error:
            self.counts["delete_faults"] += 1
            _log.error("%s: tried again in %.0f s", error, CLEAR_S)
            self._clear_s = self._clock.now_s() + CLEAR_S

    async def _delete_doomed(self, names: list[str]) -> None:
        for name in names:
            del self._doomed[name]
        try:
            await self.objects.delete(names)
        except Unavailable:
            self._doom(names)
            raise

    def is_dropped(self, text: str) -> bool:
        """Whether a drop that is not done yet erases an object."""
        name = read_name(text, self.root) if self._orders else None
        return name is not None and any(name.matches(order) for order in self._orders)

    @property
    def unerased(self) -> int:
        """How many drops have not been carried out."""
        return len(self._orders)

    async def drop(
        self,
        order: DropOrder,
        settled: Callable[[], Awaitable[None]],
        also: Sequence[str] = (),
        *,
        bars: bool = False,
    ) -> U64:
        """Take off the shelf what matches, and `also` these; when no upload that was begun before
        is under way any more, `settled`, delete it. Returns which blocks matched; raises
        Unavailable when not all could be deleted, which is then tried again while the node runs.

        An upload that lands later is forgotten if it matches; with `bars` each one is: it may have
        been computed upon what is wrong.
        """
        is_noted = True
        if len(self._orders) >= ORDERS_MAX:  # too many: then all goes
            order = DropOrder()
            is_noted = order not in self._orders
        if is_noted:
            self._orders.append(order)
        for name in self._flying:
            said = read_name(name, self.root)
            self._flying[name] |= bars or (said is not None and said.matches(order))
        try:
            await self._forget_slowly([*self.shelf.matching(order), *also])
            if self.outage.is_on:
                raise Unavailable("bucket: it has not answered for a while")
            await settled()
            erased = await self._erase(order)
            await self._delete(also)
        except BaseException:  # also when whoever asked is gone
            if is_noted:
                self._failed.append(order)
            self._doom(also)
            raise
        if is_noted:
            self._orders.remove(order)
        return erased

    async def bar(
        self, writer: str, wrong: Sequence[bytes], settled: Callable[[], Awaitable[None]]
    ) -> U64:
        """As `drop`, of all that a writer has put, of these blocks, and of what was computed upon
        either. Returns his blocks."""
        order = DropOrder(writer=writer)
        upon = self.shelf.upon(self.shelf.matching(order), wrong)
        return await self.drop(order, settled, upon, bars=True)

    async def _forget_slowly(self, names: list[str]) -> None:
        for at in range(0, len(names), SLICE):
            for name in names[at : at + SLICE]:
                self.shelf.remove(name)
            await anyio.lowlevel.checkpoint()

    async def _erase(self, order: DropOrder) -> U64:
        """Delete what matches of all that is there, whoever has put it."""
        erased: list[int] = []
        names: list[str] = []
        async with aclosing(self.objects.pages(prefix_of(order, self.root))) as pages:
            async for page in pages:
                for each in page:
                    name = read_name(each.name, self.root)
                    if name is not None and name.matches(order):
                        erased += name.blocks
                        names.append(each.name)
                        self.shelf.remove(each.name)
        await self._delete(names)
        return np.unique(np.array(erased, dtype=np.uint64))

    async def _delete(self, names: Sequence[str]) -> None:
        for at in range(0, len(names), DELETES_MAX):
            await self.objects.delete(names[at : at + DELETES_MAX])
        self.counts["dropped_objects"] += len(names)
