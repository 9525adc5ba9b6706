"""How blocks come into being: begin, move, check, and only then visible. Pure.

    begin ──> granted ──move──> moving ──checked──> in ──all head groups in──> visible
                 │ abort, deadline,    │ abort: the slot is quarantined until the bytes have stopped
                 v the writer left     v
               freed                 freed

Writers of different head groups share a block's slot; of two that offer the same group the second
is told `busy`, and once the block is visible every further one is told so: the first commit wins.
Nothing is readable before all of it was checked in its slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvass.common.block import BlockHeader
from kvass.common.errors import Invalid, Overloaded
from kvass.kvstore.index.deadlines import Deadlines
from kvass.kvstore.index.guards import Guards, Owner
from kvass.kvstore.index.ledger import Entry, Group, Groups, Ledger

PUTS_MAX = 16_384  # sixteen connections with their windows full of puts
# A put that is late comes within the seconds that its writer still tries: thousands of jobs ago at
# no rate that one node serves.
JOBS_OVER_MAX = 4096
# elsewhere: this node takes nothing new, and says so by giving no answer for the block. erased: a
# copy that was begun before its blocks were erased here.
Verdict = Literal["granted", "visible", "busy", "full", "elsewhere", "erased"]


@dataclass(frozen=True, slots=True)
class PutOrder:
    """What a writer asks for. `session` is its start id; `headers` come in chain order, have
    one length, and no checksums. What is not in at `ends_s` is given up; holds last until
    `hold_ends_s`. Of a copy, which another node or another tier of this one has, `as_of` says as of
    which erasure here (`Erasures.number`)."""

    put_id: str
    session: str
    headers: Sequence[BlockHeader]
    head_groups: int
    groups: range
    ends_s: float
    hold_owner: str = ""
    hold_ends_s: float = 0.0
    as_of: int | None = None
    spares: bool = False  # takes free room alone: nothing is evicted for it
    is_own: bool = False  # from another tier of this node: taken also while it drains


@dataclass(slots=True, eq=False)
class _Put:
    """Mutable field: `entries`. `promised` and `moving` are what its share of a block is."""

    session: str
    groups: range
    ends_s: float
    promised: Groups
    moving: Groups
    entries: dict[bytes, Entry] = field(default_factory=dict)


class Move(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Bytes on their way into a slot: end it exactly once, whatever happened. `offset`: where in
    the slab the put's head groups start."""

    entry: Entry
    put_id: str
    groups: range
    offset: int

    @property
    def size(self) -> int:
        return len(self.groups) * self.entry.group_size


class Puts:
    """Mutable fields: `_puts` by id, `_deadlines` of puts, `_entry_deadlines` of unfinished
    blocks, `_over` (jobs that released their hold, in order; the oldest are forgotten)."""

    def __init__(self, ledger: Ledger, guards: Guards, quarantine_bytes: int) -> None:
        self._ledger = ledger
        self._guards = guards
        self.quarantine_cap_bytes = quarantine_bytes
        self._puts: dict[str, _Put] = {}
        self._deadlines: Deadlines[str] = Deadlines(self._ends_s)
        self._entry_deadlines: Deadlines[Entry] = Deadlines(self._entry_ends_s)
        self._over: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._puts)

    def _ends_s(self, put_id: str) -> float | None:
        put = self._puts.get(put_id)
        return None if put is None else put.ends_s

    def _entry_ends_s(self, entry: Entry) -> float | None:
        return entry.ends_s if entry.state == "writing" else None

    def begin(self, order: PutOrder) -> list[Verdict]:
        """Answer for each header. The same put asked again gets the same answer."""
        put = self._puts.get(order.put_id)
        if put is None:
            if len(self._puts) >= PUTS_MAX:
                raise Overloaded(f"{PUTS_MAX} puts are open on this node")
            promised = dict.fromkeys(order.groups, Group(order.put_id))
            moving = dict.fromkeys(order.groups, Group(order.put_id, moving=True))
            put = _Put(order.session, order.groups, order.ends_s, promised, moving)
        elif (put.session, put.groups) != (order.session, order.groups):
            raise Invalid(f"put {order.put_id!r} was begun by another writer or for other groups")
        keys = [header.key for header in order.headers]
        self._ledger.touch(_asked_for(order.headers, keys))
        try:
            verdicts = self._begin_new(put, keys, order)
            for header in order.headers[len(verdicts) :]:
                verdicts.append(self._begin_block(put, header, order))
            return verdicts
        finally:
            if put.entries:
                self._puts[order.put_id] = put
                self._deadlines.add(order.put_id, put.ends_s)

    def _begin_new(self, put: _Put, keys: Sequence[bytes], order: PutOrder) -> list[Verdict]:
        """As `_begin_block`, of the first blocks at once, where all are new and nothing must be
        held or evicted for them: mostly all."""
        is_new = self._ledger.entries.keys().isdisjoint(keys) and len(set(keys)) == len(keys)
        if not keys or not is_new or self._is_full(order):
            return []
        holds = order.hold_owner and order.hold_owner not in self._over
        if holds and self._guards.room_bytes < order.headers[0].length * len(keys):
            return []
        entries = self._ledger.open_free(order.headers, order.head_groups, order.ends_s)
        for entry in entries:
            entry.groups = put.promised
            if holds:
                self._hold(order, entry.header)
        put.entries.update(zip(keys, entries, strict=False))
        if len(order.groups) < order.head_groups:
            for entry in entries:
                self._entry_deadlines.add(entry, entry.ends_s)
        return ["granted"] * len(entries)

    def _begin_block(self, put: _Put, header: BlockHeader, order: PutOrder) -> Verdict:
        entry = self._ledger.entries.get(header.key)
        if entry is None:
            return self._open(put, header, order)
        if (entry.header.length, entry.head_groups) != (header.length, order.head_groups):
            raise Invalid(
                f"block {header.key.hex()[:16]} has {entry.header.length} bytes in "
                f"{entry.head_groups} head groups here; got {header.length} in {order.head_groups}"
            )
        if entry.state == "visible":
            self._hold(order, header)  # without room for a hold it is visible all the same
            return "visible"
        taken = [entry.groups[g] for g in order.groups if g in entry.groups]
        if len(taken) == len(order.groups) and all(g.checksum is not None for g in taken):
            return "visible"  # this writer's share is in; the rest is others' to bring
        if any(group.put_id != order.put_id for group in taken):
            return "busy"
        if not self._hold(order, header):
            return "full"
        self._join(put, entry, order)
        return "granted"

    def _open(self, put: _Put, header: BlockHeader, order: PutOrder) -> Verdict:
        if self._is_full(order):
            return "full"
        if order.hold_owner and not self._hold(order, header):
            return "full"
        entry = self._ledger.open(header, order.head_groups, order.ends_s, evicts=not order.spares)
        if entry is None:
            self._guards.forget(header.key)
            return "full"
        self._join(put, entry, order)
        return "granted"

    def _is_full(self, order: PutOrder) -> bool:
        """Whether no new block may come in now, or none of this size ever."""
        ledger = self._ledger
        quarantined = ledger.sizes["quarantined"] > self.quarantine_cap_bytes
        return quarantined or order.headers[0].length > ledger.extents.total

    def _join(self, put: _Put, entry: Entry, order: PutOrder) -> None:
        entry.groups = {**put.promised, **entry.groups} if entry.groups else put.promised
        entry.ends_s = max(entry.ends_s, order.ends_s)
        put.entries[entry.header.key] = entry
        if len(order.groups) < entry.head_groups:  # else the put's own deadline ends it
            self._entry_deadlines.add(entry, entry.ends_s)

    def _hold(self, order: PutOrder, header: BlockHeader) -> bool:
        """Hold a block for the job that asks for it, if one does; False when there is no room."""
        if not order.hold_owner or order.hold_owner in self._over:
            return True
        owner: Owner = ("hold", order.hold_owner)
        return self._guards.add(owner, header.key, header.length, order.hold_ends_s)

    def end_job(self, owner: str) -> None:
        """A job has released its hold: puts for it that come later hold nothing."""
        self._over.pop(owner, None)
        self._over[owner] = None
        if len(self._over) > JOBS_OVER_MAX:
            del self._over[next(iter(self._over))]

    def begin_moves(self, put_id: str, session: str, keys: Sequence[bytes]) -> list[Move | None]:
        """Start moving a put's shares of blocks; None where the put has no claim to one (any
        more)."""
        put = self._puts.get(put_id)
        if put is None or put.session != session:
            return [None] * len(keys)
        moves: list[Move | None] = []
        for entry in map(put.entries.get, keys):
            if entry is None or not self._is_to_move(put, entry):
                moves.append(None)
                continue
            offset = entry.slot.offset
            if put.groups.start:
                offset += put.groups.start * entry.group_size
            moves.append(Move(entry, put_id, put.groups, offset))
        self._ledger.begin_moves([move.entry for move in moves if move is not None])
        return moves

    def _is_to_move(self, put: _Put, entry: Entry) -> bool:
        """Whether a put's share of a block did not move, and does so from now on."""
        if entry.groups is put.promised:  # nobody else has a share of it
            entry.groups = put.moving
            return True
        if any([entry.groups[index].moving for index in put.groups]):
            return False
        entry.groups = {**entry.groups, **put.moving}
        return True

    def end_moves(
        self, moves: Sequence[Move], checksums: Sequence[Sequence[int] | None]
    ) -> list[bool]:
        """The bytes of a put's moves have stopped; returns of which they are part of a block that
        lives.

        `checksums` holds for each move one a head group, of bytes that were checked in the slot;
        None when they are not there or not right.
        """
        self._ledger.end_moves([move.entry for move in moves])
        stored: list[bool] = []
        entries: list[Entry] = []
        headers: list[BlockHeader] = []
        for move, sums in zip(moves, checksums, strict=True):
            entry = move.entry
            if entry.state != "writing":
                stored.append(False)
            elif sums is not None and len(sums) == len(move.groups) == entry.head_groups:
                entries.append(entry)
                headers.append(msgspec.structs.replace(entry.header, checksums=tuple(sums)))
                stored.append(True)
            else:
                stored.append(self._end_share(move, sums))
        if entries:
            self._forget(moves[0].put_id, [header.key for header in headers])
            self._ledger.publish(entries, headers)
        return stored

    def _end_share(self, move: Move, checksums: Sequence[int] | None) -> bool:
        """As `end_moves`, of a block that others bring the rest of, or that is not right."""
        entry = move.entry
        stored = checksums is not None and all(entry.groups[g].put_id for g in move.groups)
        if checksums is not None and stored:
            sums = zip(move.groups, checksums, strict=True)
            mine = {index: Group(move.put_id, checksum=checksum) for index, checksum in sums}
            entry.groups = {**entry.groups, **mine}
        else:
            entry.groups = {i: g for i, g in entry.groups.items() if i not in move.groups}
        self._forget(move.put_id, [entry.header.key])
        self._finish(entry)
        return stored

    def _forget(self, put_id: str, keys: Iterable[bytes]) -> None:
        """A put has nothing more to do with blocks."""
        put = self._puts.get(put_id)
        if put is not None:
            for key in keys:
                put.entries.pop(key, None)
            if not put.entries:
                del self._puts[put_id]

    def _finish(self, entry: Entry) -> None:
        """Publish a block that is whole, or give up one that nobody fills any more."""
        sums = [group.checksum for group in entry.groups.values()]
        if len(sums) == entry.head_groups and None not in sums:
            ordered = tuple(entry.groups[g].checksum or 0 for g in range(entry.head_groups))
            header = msgspec.structs.replace(entry.header, checksums=ordered)
            self._ledger.publish([entry], [header])
        elif not any(group.put_id for group in entry.groups.values()):
            self.give_up(entry)

    def give_up(self, entry: Entry) -> None:
        """End a block that is being written, with every put's share of it."""
        key = entry.header.key
        for put_id in {group.put_id for group in entry.groups.values() if group.put_id}:
            self._forget(put_id, [key])
        self._guards.forget(key)
        self._ledger.remove(entry)

    def abort(self, put_id: str, session: str) -> None:
        """Give up what a put has not brought; unknown puts are none."""
        put = self._puts.get(put_id)
        if put is None or put.session != session:
            return
        del self._puts[put_id]
        for entry in put.entries.values():
            stopping = {i: Group("", moving=True) for i in put.groups if entry.groups[i].moving}
            others = {i: g for i, g in entry.groups.items() if i not in put.groups}
            entry.groups = {**others, **stopping}
            self._finish(entry)

    def leave(self, session: str) -> None:
        """A writer is gone: abort all of its puts."""
        for put_id in [put_id for put_id, put in self._puts.items() if put.session == session]:
            self.abort(put_id, session)

    def expire(self, now_s: float) -> None:
        """Give up what is over its time."""
        for put_id in self._deadlines.due(now_s):
            self.abort(put_id, self._puts[put_id].session)
        for entry in self._entry_deadlines.due(now_s):
            if entry.state == "writing":
                self.give_up(entry)


def _asked_for(headers: Sequence[BlockHeader], keys: list[bytes]) -> list[bytes]:
    """Return the keys of a put's blocks, in chain order and each once, before each span's the block
    that it goes on from."""
    if not headers or headers[-1].index - headers[0].index < len(headers):
        return [header.parent for header in headers[:1]] + keys
    asked, last = list[bytes](), b""
    for header in headers:
        if header.parent != last:
            asked.append(header.parent)
        asked.append(header.key)
        last = header.key
    return asked
