"""A store node's side of an erasure: memory at once, then what is below it, then a note of it.

    drop, bar ─────────────┐
    told by another node ──┼─> heard before? ──no──> memory ─> below ─> written down, answered
    may have missed one ───┘        └─yes─> what is still owed below

An erasure is heard once, whoever tells it; see `index/heard.py`. What cannot be erased below is not
served from there: that tier is closed until it can. It is closed, too, until the other nodes have
told what this one may have missed (`exchange.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import anyio
import msgspec
import numpy as np

from kvass.common.errors import Invalid, Unavailable
from kvass.common.rpc.server import Call, Handler
from kvass.common.wire import Message
from kvass.kvstore import messages as m
from kvass.kvstore.erasure import Criteria, Erasure, joined, new_id, split
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.flash.table import hashes_of
from kvass.kvstore.index.heard import Heard, Kept, Saved
from kvass.kvstore.node.state import NodeState, request_of
from kvass.kvstore.node.tiers.bucket_tier import BucketTier
from kvass.kvstore.node.tiers.flash_tier import FlashTier

_log = logging.getLogger(__name__)

# Each is looked for in every file of the log; more at once is a disk that has been failing for
# long, and then everything on it goes.
OWED_MAX = 1_024
# How old the note may be of when this node last knew what others know: see `heard.SLACK_S`.
NOTE_S = 300.0
# In which many erasures are written down once, by whoever deletes block after block; of a single
# one it lasts before it is answered.
BURST_S = 1.0


@dataclass(slots=True, eq=False)
class _Owed:
    """What an erasure has still to do below memory. `gone`: keys that memory lost by it; `wrong`
    (of a bar): all keys that are known to be wrong; `in_bucket`: why not all left the bucket, which
    is then the bucket's to do, None before it was asked."""

    kept: Kept
    gone: set[bytes]
    wrong: set[bytes] = field(default_factory=set)
    in_bucket: str | None = None

    @property
    def order(self) -> DropOrder:
        of = self.kept.erasure
        keys = None if of.keys is None else tuple(split(of.keys))
        return DropOrder(of.namespace, of.tenant, of.writer, keys)


class EraseCalls:
    """Mutable fields: `heard`, `_tiers` and `_bucket`, `_flash_lost` (why there is no flash where
    there should be), `_owed` by id, `_owes_all` (everything below is to go) and `_all_asked` (how
    often that was asked for), `_is_told` (others
    have told what they know), `_noted_s`, `_is_news` (since the last note), and the counts `told`
    (erasures, by other nodes) and `discarded` (blocks)."""

    def __init__(self, state: NodeState, wall_s: Callable[[], float] = time.time) -> None:
        self._state = state
        self._wall_s = wall_s
        self.heard = Heard()
        self._tiers: FlashTier | None = None
        self._bucket: BucketTier | None = None
        self._flash_lost = ""
        self._owed: dict[bytes, _Owed] = {}
        self._owes_all = False
        self._all_asked = 0
        self._is_told = False
        self._noted_s, self._is_news = -NOTE_S, False
        self._erasing = anyio.Lock()
        self.told = 0
        self.discarded = 0

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Return what an RPC server answers."""
        return {m.Drop: self._drop, m.Bar: self._bar}

    def counts(self) -> dict[str, int]:
        return {
            "erasures_kept": len(self.heard),
            "erasures_told": self.told,
            "erasures_discarded": self.discarded,
            "erasures_owed": len(self._owed) + self._owes_all,
        }

    def use(self, tiers: FlashTier) -> None:
        """There is a tier below: take in what an earlier life has written down beside it."""
        self._tiers = tiers
        text = tiers.noted()
        if text is not None:
            try:
                saved = msgspec.msgpack.decode(text, type=Saved)
            except msgspec.DecodeError as error:
                _log.error("flash: the note of erasures says nothing to this program: %s", error)
            else:
                self.heard.load(saved, self._state.now_s(), self._wall_s())
                self._owes_all = saved.owes_all
        for kept in self.heard:
            if kept.erasure.bars:
                self._keep_out(kept.erasure)
            if not kept.is_done:
                self._owed[kept.erasure.id] = _Owed(kept, set(), set(split(kept.erasure.after)))
        self._open_or_close()

    def use_bucket(self, bucket: BucketTier) -> None:
        """There is a bucket, too."""
        self._bucket = bucket
        self._open_or_close()

    def lose_flash(self, why: str) -> None:
        """There should be a tier below, and there is none that could be erased."""
        self._flash_lost = why

    def all_told(self) -> None:
        """The other nodes have told what they know: what is below may be served."""
        self._is_told = True
        self._open_or_close()

    def _open_or_close(self) -> None:
        if not self._owed and not self._owes_all:
            self._state.index.erasures.settle()
        if self._tiers is not None:
            self._tiers.closed = not self._is_told or self._owes_all or bool(self._owed)
        if self._bucket is not None:  # of what it was told to erase it serves nothing by itself
            untold = any(owed.in_bucket is None for owed in self._owed.values())
            self._bucket.closed = not self._is_told or untold

    # --- calls ---

    async def _drop(self, call: Call) -> m.Dropped:
        request = request_of(call, m.Drop)
        by_field = (request.namespace, request.tenant, request.writer)
        if request.keys is None and by_field == (None, None, None):
            raise Invalid("drop: give a namespace, a tenant, a writer or keys")
        keys = None if request.keys is None else joined(request.keys)
        erasure = Erasure(request.id or new_id(), 0.0, *by_field, keys)
        unerased = "its caller left before that was known"
        try:
            reply = await self._erase(erasure)
            unerased = reply.unerased
            return reply
        finally:
            if keys is None:  # of keys, whoever erases block after block would fill the log
                self._say(erasure, call.peer.member_id, unerased)

    async def _bar(self, call: Call) -> m.Dropped:
        request = request_of(call, m.Bar)
        writer, after = request.writer, joined(request.after)
        erasure = Erasure(request.id or new_id(), 0.0, writer=writer, bars=True, after=after)
        reply = await self._erase(erasure)
        by = call.peer.member_id
        _log.error("writer %r is barred, said %s: %d blocks erased", writer, by, reply.blocks)
        return reply

    def _say(self, erasure: Erasure, by: str, unerased: str) -> None:
        kept = self.heard.get(erasure.id)
        if kept is None or kept.erasure.criteria != erasure.criteria:
            return  # it was refused
        level = logging.WARNING if kept.blocks or unerased else logging.INFO
        left = f"; not all, perhaps: {unerased}" if unerased else ""
        said = "drop of %s, said %s: %d blocks erased%s"
        _log.log(level, said, _named(erasure), by, kept.blocks, left)

    async def _erase(self, erasure: Erasure) -> m.Dropped:
        kept = self._take(erasure)
        owed = self._owed.get(erasure.id)
        below = await self.settle()
        why = [below] if below and not kept.is_done else []
        if owed is not None and owed.in_bucket:
            why.append(owed.in_bucket)
        return m.Dropped(
            blocks=kept.blocks,
            ends=kept.ends[: m.KEYS_MAX],
            unerased="; ".join(why)[: m.WHY_MAX],
        )

    async def hear(self, erasures: Iterable[Erasure], by: str) -> None:
        """Erase by what another node tells, all that was not heard before; memory is erased when
        this first waits, the rest when it returns, or is owed."""
        fresh = [self._take(each) for each in erasures if each.id not in self.heard]
        if not fresh:
            return
        self.told += len(fresh)
        await self.settle()
        blocks = sum(kept.blocks for kept in fresh)
        level = logging.WARNING if blocks else logging.INFO
        told = "%s told of %d erasures (%s): %d blocks erased"
        _log.log(level, told, by, len(fresh), _named(fresh[-1].erasure), blocks)
        for kept in fresh:  # others may have more that was computed upon these
            if kept.erasure.bars and set(kept.ends) - set(split(kept.erasure.after)):
                more = msgspec.structs.replace(
                    kept.erasure, id=new_id(), after=joined(kept.ends[: m.KEYS_MAX])
                )
                self._take(more)
        await self.settle()

    async def discard(self, by: str) -> None:
        """This node may have missed an erasure that nobody can tell it any more."""
        blocks = self._state.index.drop(Criteria(), self._state.now_s())
        self._state.notify()
        below = 0 if self._tiers is None else self._tiers.blocks
        self._owes_all = self._tiers is not None
        self._all_asked += 1
        self.discarded += blocks + below
        if blocks + below:
            _log.warning(
                "this node was away for longer than %s remembers erasures: all its blocks (%d) are "
                "discarded, since some may have been erased meanwhile",
                by,
                blocks + below,
            )
        await self.settle()

    # --- memory ---

    def _take(self, erasure: Erasure) -> Kept:
        """Erase in memory, unless it was done; what is below is owed from now on."""
        if erasure.id in self._owed or erasure.id in self.heard:
            known = self._owed.get(erasure.id)
            kept = self.heard.get(erasure.id) if known is None else known.kept
            if kept is not None and kept.erasure.criteria != erasure.criteria:
                raise Invalid("drop: this id is another erasure's; give each one its own")
            return kept or Kept(erasure, self._state.now_s(), is_done=True)
        index, now_s = self._state.index, self._state.now_s()
        is_last = self._tiers is None and self._bucket is None
        before = set() if is_last else set(index.ledger.entries)
        owed = _Owed(self.heard.add(erasure, now_s), set())
        if erasure.bars:
            assert erasure.writer is not None
            self._keep_out(erasure)
            self._bar_in_memory(owed, split(erasure.after))
        else:
            owed.kept.blocks = index.drop(erasure.criteria, now_s)
        owed.gone = before - index.ledger.entries.keys()
        self._state.notify()
        self._owed[erasure.id] = owed
        self._is_news = True  # also what cannot be carried out now lasts over a restart
        if len(self._owed) > OWED_MAX:
            self._owed.clear()
            self._owes_all = True
            self._all_asked += 1
        return owed.kept

    def _keep_out(self, erasure: Erasure) -> None:
        assert erasure.writer is not None
        self._state.index.erasures.bar(erasure.writer, self._state.now_s(), erasure.age_s)

    def _bar_in_memory(self, owed: _Owed, after: Iterable[bytes]) -> bool:
        """Erase what is known to be wrong; returns whether there is more of that now."""
        writer = owed.kept.erasure.writer
        assert writer is not None
        barred = self._state.index.bar(writer, after, self._state.now_s())
        owed.kept.blocks += barred.blocks
        owed.kept.ends = tuple(dict.fromkeys((*owed.kept.ends, *barred.ends)))
        before = len(owed.wrong)
        owed.wrong |= barred.wrong
        return len(owed.wrong) > before

    # --- below ---

    async def settle(self) -> str:
        """Erase below what is owed there, and write down what is done; returns why not all is."""
        async with self._erasing:
            owed = len(self._owed) + self._owes_all
            why = await self._settle()
            self._is_news |= owed != len(self._owed) + self._owes_all
            if self._is_news and self._state.now_s() - self._noted_s >= BURST_S:
                await self._note()
            self._open_or_close()
        return why

    async def _settle(self) -> str:
        batch = list(self._owed.values())  # what comes meanwhile has its own turn
        fresh = [owed for owed in batch if owed.in_bucket is None]
        for owed in fresh:
            if not owed.kept.erasure.bars:
                await self._erase_in_bucket(owed)
        why = await self._settle_flash(batch)
        for owed in fresh:
            if owed.kept.erasure.bars:  # by now it is known what else is wrong
                await self._erase_in_bucket(owed)
        return why

    async def _erase_in_bucket(self, owed: _Owed) -> None:
        owed.in_bucket = ""
        if self._bucket is None:
            return
        order = owed.order
        try:
            if owed.kept.erasure.bars:
                await self._bucket.bar(order.writer or "", list(owed.wrong))
                return
            erased = await self._bucket.drop(order)
        except Unavailable as error:
            owed.in_bucket = str(error)
            owed.kept.bucket_owes = True
            return
        # Those that are nowhere else here.
        elsewhere = np.isin(erased, hashes_of(list(owed.gone)))
        if self._tiers is not None:
            elsewhere |= self._tiers.holds(erased)
        owed.kept.blocks += int((~elsewhere).sum())

    async def _settle_flash(self, batch: Iterable[_Owed]) -> str:
        if self._tiers is None:
            for owed in batch:
                self._end(owed, is_done=not self._flash_lost)
            return self._flash_lost
        try:
            if self._owes_all:
                await self._erase_all_below(self._tiers)
            for owed in batch:
                await self._erase_below(self._tiers, owed)
                self._end(owed, is_done=True)
        except Unavailable as error:
            return str(error)
        return ""

    def _end(self, owed: _Owed, *, is_done: bool) -> None:
        owed.kept.is_done = is_done
        self._owed.pop(owed.kept.erasure.id, None)

    async def _erase_all_below(self, tiers: FlashTier) -> None:
        asked = self._all_asked
        await tiers.drop(DropOrder())
        self._owes_all = self._all_asked > asked  # of what came meanwhile

    async def _erase_below(self, tiers: FlashTier, owed: _Owed) -> None:
        erasure = owed.kept.erasure
        if not erasure.bars:
            owed.kept.blocks += await tiers.drop(owed.order, list(owed.gone))
            return
        assert erasure.writer is not None
        before = set(self._state.index.ledger.entries)
        below: set[bytes] = set()
        while True:  # what is above follows from what is below, and the other way round
            found = await tiers.computed_upon(erasure.writer, owed.wrong)
            owed.kept.ends = tuple(dict.fromkeys((*owed.kept.ends, *found.ends)))
            more = not found.keys <= owed.wrong
            below |= found.keys
            if not (self._bar_in_memory(owed, owed.wrong | found.keys) or more):
                break
        self._state.notify()
        gone = list(owed.gone | (before - self._state.index.ledger.entries.keys()))
        if below:
            owed.kept.blocks += await tiers.drop(DropOrder(keys=tuple(below)), gone)
        owed.kept.blocks += await tiers.drop(DropOrder(writer=erasure.writer), gone)

    # --- what lasts ---

    async def note(self) -> None:
        """Write down what has not been, and now and then that this node knows what others know."""
        if self._bucket is not None and not self._bucket.bucket.unerased:
            for kept in self.heard:
                self._is_news |= kept.bucket_owes
                kept.bucket_owes = False
        now_s = self._state.now_s()
        is_due = now_s - self._noted_s >= (BURST_S if self._is_news else NOTE_S)
        is_due &= self._is_news or self.heard.touched_at_s is not None
        if self._tiers is not None and is_due:
            async with self._erasing:
                await self._note()

    async def _note(self) -> None:
        if self._tiers is None:
            return
        self._noted_s, self._is_news = self._state.now_s(), False
        # What is owed and kept no more cannot be said one by one.
        owes_all = self._owes_all or any(self.heard.get(each) is None for each in self._owed)
        saved = self.heard.saved(self._noted_s, self._wall_s(), owes_all=owes_all)
        try:
            await self._tiers.note(msgspec.msgpack.encode(saved))
        except Unavailable as error:
            _log.error("%s: after a restart this node must be told again what was erased", error)


def _named(erasure: Erasure) -> str:
    """Return what an erasure is of, for the log."""
    if erasure.keys is not None:
        return f"{len(list(split(erasure.keys)))} keys"
    namespace = None if erasure.namespace is None else erasure.namespace.hex()[:16]
    given = {"namespace": namespace, "tenant": erasure.tenant, "writer": erasure.writer}
    return ", ".join(f"{name} {value!r}" for name, value in given.items() if value is not None)
