"""Which copies of its blocks a store node wants others to take, and when it may leave.

    committed here ───────────┐
    a node has gone (repair) ─┼─> a bounded queue ─> fill ─> the segment's other homes
    drain: all that is here ──┘  (on flash too: brought up batch after batch)

It only tells: whoever is told takes the copy by itself, when it has time (`fills.py`), or has it
already. So copies cost a writer nothing, and a cluster that has just lost a node is not stormed.
What a drain offers goes into free room alone: nobody evicts for it, and who is full refuses it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import anyio

from kvass.common.errors import KvassError
from kvass.kvstore import messages as m
from kvass.kvstore.index.ledger import Entry
from kvass.kvstore.links import CALL_S
from kvass.kvstore.node.state import NodeState
from kvass.kvstore.placement import Placement, StoreNode
from kvass.kvstore.router import Router

_log = logging.getLogger(__name__)

QUEUED_MAX = 1 << 20  # keys that wait to be told of: 32 MB of memory at most
BATCH_BLOCKS = 512  # told of at once
# Repair waits so long after a node has gone: a restart takes less, and brings an empty memory back
# to the same place.
HOLD_OFF_S = 10.0
DRAIN_LOOK_S = 0.2  # between two looks at what those who were told have taken
DRAIN_IDLE_S = 10.0  # without one more block over there, the rest is given up


@dataclass(frozen=True, slots=True)
class Tally:
    """What a drain has come to, in blocks: each is one of the last four. `refused`: nowhere else,
    since those that it was offered to have no room. `untaken`: nowhere else, for other reasons."""

    elsewhere: int = 0
    handed: int = 0
    refused: int = 0
    untaken: int = 0

    @property
    def lost(self) -> int:
        """How many blocks go with this node."""
        return self.refused + self.untaken

    @property
    def blocks(self) -> int:
        return self.elsewhere + self.handed + self.lost

    def plus(self, other: Tally) -> Tally:
        return Tally(
            self.elsewhere + other.elsewhere,
            self.handed + other.handed,
            self.refused + other.refused,
            self.untaken + other.untaken,
        )


@dataclass(slots=True)
class Handover:
    """One node's view of the others. Mutable fields: `_place`, `_queue` (an ordered set of keys),
    `_news`, `_lost_s` (when repair is due), the counts `told` and `untold` (no answer), and of a
    drain `tally` and `left` (copies that are still to be taken; at its end, what is nowhere else).
    `below` brings up what only another tier has, batch after batch, each with how many could not be
    had."""

    member_id: str
    state: NodeState
    router: Router
    told: int = 0
    untold: int = 0
    left: int = 0
    tally: Tally = Tally()
    below: Callable[[], AsyncIterator[tuple[list[bytes], int]]] = lambda: _nothing()
    _place: Placement = field(default_factory=lambda: Placement([]))
    _queue: dict[bytes, None] = field(default_factory=dict)
    _news: anyio.Event = field(default_factory=anyio.Event)
    _lost_s: float | None = None

    def set_nodes(self, nodes: Sequence[StoreNode]) -> bool:
        """Take in the cluster's nodes, this one among them. When one has gone, its copies are
        replaced, after a while. Returns whether one has come."""
        before, now = ({each.member_id for each in part} for part in (self._place.nodes, nodes))
        gone = before - now
        self._place = Placement(nodes)
        self.router.set_nodes([node for node in nodes if node.member_id != self.member_id])
        if gone and self._place.copies > 1:
            self._lost_s = self.state.now_s()
        return bool(now - before)

    def counts(self) -> dict[str, int]:
        return {
            "copies_waiting": len(self._queue),
            "copies_told": self.told,
            "copies_untold": self.untold,
            "handover_left": self.left,
            "handover_handed": self.tally.handed,
            "handover_elsewhere": self.tally.elsewhere,
            "handover_refused": self.tally.refused,
            "replicas": self._place.copies,
            "takers": len(self._takers().nodes),
        }

    def forget_tally(self) -> None:
        """The drain is cancelled: nothing is left to do."""
        self.tally, self.left = Tally(), 0

    @property
    def nodes(self) -> int:
        """How many store nodes the cluster has, this one among them."""
        return len(self._place.nodes)

    def is_home(self, segment_key: bytes) -> bool:
        """Whether this node is the first one of a segment."""
        first = self._place.homes(segment_key, 1)
        return not first or first[0].member_id == self.member_id

    def committed(self, keys: Iterable[bytes]) -> None:
        """Blocks were stored here by a writer: let the segment's other homes have them too."""
        if self._place.copies > 1:
            self._offer(keys)

    async def run(self) -> None:
        """Tell what is queued, and repair when it is due, until cancelled."""
        while True:
            with anyio.move_on_after(1.0):
                await self._news.wait()
                self._news = anyio.Event()
            if self._lost_s is not None and self.state.now_s() - self._lost_s >= HOLD_OFF_S:
                self._lost_s = None
                self._offer(self._visible())
            while self._queue:
                batch = list(self._queue)[:BATCH_BLOCKS]
                for key in batch:
                    del self._queue[key]
                for member_id, entries in self.batches(batch):
                    await self.tell(member_id, entries)

    async def leave(self) -> Tally:
        """Hand over what is here, and what puts that were begun before still bring, to the nodes
        that are next in order; return what that came to. Call it once the node takes nothing new.
        """
        seen: set[bytes] = set()
        elsewhere, idle_s = 0, DRAIN_IDLE_S
        while True:
            fresh = [key for key in self._visible() if key not in seen]
            seen.update(fresh)
            first = await self._hand_over(fresh, idle_s)
            elsewhere += first.elsewhere
            if first.untaken:  # it was waited for already
                idle_s = DRAIN_LOOK_S
            if not fresh and not self.state.index.ledger.blocks["writing"]:
                break
            await anyio.sleep(DRAIN_LOOK_S)
        # Others may have evicted what they took, or had: what counts is who has it now.
        last = await self._hand_over(self._visible(), idle_s)
        handed = max(last.elsewhere + last.handed - elsewhere, 0)
        there = last.elsewhere + last.handed - handed
        tally = Tally(there, handed, last.refused, last.untaken)
        async for keys, unread in self.below():
            tally = tally.plus(await self._hand_over(keys, DRAIN_IDLE_S))
            tally = tally.plus(Tally(untaken=unread))
        self.tally, self.left = tally, tally.lost
        return tally

    async def _hand_over(self, keys: Iterable[bytes], idle_s: float) -> Tally:
        """Tell others of blocks until they have them, or take no more for so long."""
        here = [key for key in keys if self.state.index.ledger.visible(key) is not None]
        batches = self.batches(here) if self._takers().nodes else []
        there, before, full = set[bytes](), None, set[bytes]()
        best, best_s = sum(len(entries) for _, entries in batches), self.state.now_s()
        while batches:
            waiting = []
            for member_id, entries in batches:
                missing, refused = await self.tell(member_id, entries, spare=True)
                there.update({entry.header.key for entry in entries} - missing)
                full |= refused
                if rest := [e for e in entries if e.header.key in missing - refused]:
                    waiting.append((member_id, rest))
            before = len(there) if before is None else before
            batches = waiting
            self.left = sum(len(entries) for _, entries in batches)
            if self.left < best:
                best, best_s = self.left, self.state.now_s()
            if not batches or self.state.now_s() - best_s > idle_s:
                break
            await anyio.sleep(DRAIN_LOOK_S)
        before, lost = before or 0, set(here) - there
        refused_count = len(lost & full)
        return Tally(before, len(there) - before, refused_count, len(lost) - refused_count)

    def batches(self, keys: Iterable[bytes]) -> list[tuple[str, list[Entry]]]:
        """Say who should have what, cut into what one call tells of."""
        return [
            (member_id, entries[first : first + BATCH_BLOCKS])
            for member_id, entries in self._wanted(keys).items()
            for first in range(0, len(entries), BATCH_BLOCKS)
        ]

    def _visible(self) -> list[bytes]:
        entries = self.state.index.ledger.entries.values()
        return [entry.header.key for entry in entries if entry.state == "visible"]

    def _offer(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if len(self._queue) >= QUEUED_MAX:
                return
            self._queue[key] = None
        self._news.set()

    def _takers(self) -> Placement:
        """Return the nodes that take what is new; this one too, unless it is leaving, of which
        others hear a moment later."""
        leaving = self.state.index.draining
        return Placement(
            node
            for node in self._place.nodes
            if not node.draining and not (leaving and node.member_id == self.member_id)
        )

    def _wanted(self, keys: Iterable[bytes]) -> dict[str, list[Entry]]:
        """Return the blocks that each other node should have, by its id."""
        wanted: dict[str, list[Entry]] = {}
        takers = self._takers()
        chosen: dict[bytes, list[StoreNode]] = {}
        for key in keys:
            entry = self.state.index.ledger.visible(key)
            if entry is None:
                continue
            segment = entry.header.segment_key
            if segment not in chosen:
                chosen[segment] = takers.homes(segment, takers.copies)
            for node in chosen[segment]:
                if node.member_id != self.member_id:
                    wanted.setdefault(node.member_id, []).append(entry)
        return wanted

    async def tell(
        self,
        member_id: str,
        entries: Sequence[Entry],
        *,
        spare: bool = False,
        lasting: bool = False,
    ) -> tuple[set[bytes], set[bytes]]:
        """Tell one node of blocks that it should have: to `spare` what it has already, or to put
        them on its flash (`lasting`). Returns which of them it still lacks, and for which of these
        it has no room."""
        spans = tuple(spans_of_entries(entries))
        request = m.Fill(source=self.member_id, spans=spans, spare=spare, lasting=lasting)
        keys = [key for span in spans for _, key in span.named()]
        try:
            reply = await self.router.link(member_id).call(request, deadline_s=CALL_S)
        except KvassError as error:
            self.untold += len(entries)
            _log.debug("copies to %s: %s", member_id, error)
            return set(keys), set()
        self.told += len(entries)
        return _chosen(keys, reply.missing), _chosen(keys, reply.full)


def _chosen(keys: Sequence[bytes], ranges: m.Ranges) -> set[bytes]:
    return {key for first, stop in ranges for key in keys[first:stop]}


async def _nothing() -> AsyncIterator[tuple[list[bytes], int]]:
    """There is one tier."""
    for never in list[tuple[list[bytes], int]]():
        yield never


def spans_of_entries(entries: Iterable[Entry]) -> list[m.Span]:
    """Name blocks of any chains: runs of children of each other, cut where chains part."""
    runs: dict[bytes, list[Entry]] = {}  # by the key of their last block
    for entry in sorted(entries, key=lambda entry: entry.header.index):
        header = entry.header
        run = runs.pop(header.parent, None)
        if run is not None and run[0].header.segment_key != header.segment_key:
            runs[header.parent] = run
            run = None
        runs[header.key] = [*(run or []), entry]
    return [
        m.Span(
            run[0].header.segment_key,
            run[0].header.index,
            run[0].header.parent,
            b"".join(entry.header.key for entry in run),
        )
        for run in runs.values()
    ]
