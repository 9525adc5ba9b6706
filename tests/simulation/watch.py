"""Indexes that are looked at whenever their node has done something, and what all of them did.

    WatchedIndex  one node's: every slot has one state, what is leased or moved into stays, what is
                  visible was checked
    History       all nodes': what was erased, by whom blocks were brought, so that a block that was
                  erased and comes back from another node is seen at once

It refuses to know members and requests: `verdict.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvass.common.block import BlockHeader
from kvass.common.checksum import sums
from kvass.kvstore.index.index import Index, Limits
from kvass.kvstore.index.ledger import Entry, Ledger
from kvass.kvstore.index.puts import Move
from kvass.kvstore.node.copies import fills
from kvass.kvstore.node.slab import Slab

Matches = Callable[[BlockHeader], bool]
OWN_PUTS = (f"{fills.OWN_SESSION}-", "flash-", "bucket-")  # of what nodes bring by themselves
WHOLE_LOOK = 16  # every so many looks a ledger is counted anew, which takes a while


@dataclass(slots=True, eq=False)
class Erasure:
    """One erasure as nodes did it. Mutable field: `handled` (when, by start id)."""

    begun: int
    matches: Matches
    handled: dict[str, int] = field(default_factory=dict)

    def since(self, epoch: str) -> int:
        """Return when a node had erased what it had; one that came later had nothing."""
        return self.handled.get(epoch, self.begun)


@dataclass(slots=True, eq=False)
class History:
    """Mutable fields: all. `step` counts what happened; `written` says when and where writers
    brought a block, by key: (step, start id); `had` every key that a node ever had, by start id;
    `under_way` and `done` are erasures."""

    step: int = 0
    written: dict[bytes, list[tuple[int, str]]] = field(default_factory=dict)
    had: dict[str, set[bytes]] = field(default_factory=dict)
    under_way: Erasure | None = None
    done: list[Erasure] = field(default_factory=list)

    def next(self) -> int:
        """Return the number of what happens now."""
        self.step += 1
        return self.step

    def begin_erasure(self, matches: Matches) -> None:
        """From now on an operator erases; one after the other."""
        assert self.under_way is None
        self.under_way = Erasure(self.next(), matches)

    def end_erasure(self, indexes: Sequence[Index], *, whole: bool) -> None:
        """It is over; `whole`: every node was told, and says so. Then nothing of it is left."""
        erasure, self.under_way = self.under_way, None
        assert erasure is not None
        if whole:
            self.done.append(erasure)
            for index in indexes:
                for key, entry in index.ledger.entries.items():
                    if entry.state == "visible":
                        self.check(key, entry.header)

    def check(self, key: bytes, header: BlockHeader) -> None:
        """Assert that a visible block was not erased, or was brought by a writer after that."""
        for erasure in self.done:
            if erasure.matches(header):
                brought = self.written.get(key, ())
                fresh = any(step > erasure.since(epoch) for step, epoch in brought)
                assert fresh, "an erased block came back"


class WatchedIndex(Index):
    """See the module. Mutable fields: `looks`, `moves` (bytes on their way), the history that it
    shares, and `slab`, once there is one."""

    def __init__(self, slab_bytes: int, limits: Limits, history: History) -> None:
        super().__init__(slab_bytes, limits)
        self.looks = 0
        self.moves: set[Move] = set()
        self.slab: Slab | None = None
        self.history = history
        self.had = history.had.setdefault(limits.epoch, set())

    def take_news(self) -> list[bytes]:
        """Return the news, and look at everything that must hold."""
        self.looks += 1
        check_leases(self)
        check_moves(self.ledger, self.moves)
        if self.looks % WHOLE_LOOK == 0:
            self.ledger.check()
        return super().take_news()

    def begin_moves(
        self, put_id: str, session: str, keys: Sequence[bytes], now_s: float
    ) -> list[Move | None]:
        """Begin moves; their slots are watched until they end."""
        begun = super().begin_moves(put_id, session, keys, now_s)
        self.moves.update(move for move in begun if move is not None)
        return begun

    def end_moves(
        self, moves: Sequence[Move], checksums: Sequence[Sequence[int] | None]
    ) -> list[bool]:
        """End moves; what is readable by them is written down."""
        self.moves.difference_update(moves)
        stored = super().end_moves(moves, checksums)
        for move, is_in in zip(moves, stored, strict=True):
            if is_in and move.entry.state == "visible":
                self._note_visible(move)
        return stored

    def _note_visible(self, move: Move) -> None:
        header = move.entry.header
        self.had.add(header.key)
        self._check_bytes(move.entry)
        if move.put_id.startswith(OWN_PUTS):
            self.history.check(header.key, header)
        else:
            brought = self.history.written.setdefault(header.key, [])
            brought.append((self.history.next(), self.limits.epoch))

    def _check_bytes(self, entry: Entry) -> None:
        if self.slab is not None:
            size, count = entry.group_size, entry.head_groups
            found = sums(self.slab.view, entry.slot.offset, size, count)
            assert found == entry.header.checksums, "a block is visible that was not checked"

    def drop(self, matches: Matches, now_s: float, *, bars: bool = False) -> int:
        """Erase; what comes from now on is new. Others tell of earlier erasures, too."""
        erasure = self.history.under_way
        if erasure is not None and matches == erasure.matches:
            erasure.handled.setdefault(self.limits.epoch, self.history.next())
        return super().drop(matches, now_s, bars=bars)


def check_moves(ledger: Ledger, moves: Iterable[Move]) -> None:
    """Where bytes move into, nobody else's are."""
    for move in moves:
        entry = move.entry
        there = entry in ledger.gone or ledger.entries.get(entry.header.key) is entry
        assert there, "a slot was given back while bytes moved into it"


def check_leases(index: Index) -> None:
    """What is leased is there: its slot has not been given to anybody else."""
    ledger = index.ledger
    sizes = sum(ledger.sizes.values()) + ledger.extents.free_bytes
    assert sizes == ledger.extents.total, "the slab's states do not add up"
    for lease in index.leases._leases.values():
        for entry in lease.entries:
            there = entry in ledger.gone or ledger.entries.get(entry.header.key) is entry
            assert there, "a leased slot was given back"
            assert entry.leases > 0
