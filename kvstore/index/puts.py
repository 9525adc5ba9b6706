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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvass.common.block import BlockHeader
from kvass.common.errors import Invalid, Overloaded
from kvass.kvstore.index.deadlines import Deadlines
from kvass.kvstore.index.guards import Guards, Owner
from kvass.kvstore.index.ledger import Entry, Group, Ledger

PUTS_MAX = 16_384  # sixteen connections with their windows full of puts
# A put that is late comes within the seconds that its writer still tries: thousands of jobs ago at
# no rate that one node serves.
JOBS_OVER_MAX = 4096
# elsewhere: this node takes nothing new, and says so by giving no answer for the block.
Verdict = Literal["granted", "visible", "busy", "full", "elsewhere"]


@dataclass(frozen=True, slots=True)
class PutOrder:
    """What a writer asks for. `session` is its start id; `headers` come in chain order, without
    checksums. What is not in at `ends_s` is given up; holds last until `hold_ends_s`."""

    put_id: str
    session: str
    headers: Sequence[BlockHeader]
    head_groups: int
    groups: range
    ends_s: float
    hold_owner: str = ""
    hold_ends_s: float = 0.0
    is_copy: bool = False  # of blocks that another node, or another tier of this one, has
    spares: bool = False  # takes free room alone: nothing is evicted for it
    is_own: bool = False  # from another tier of this node: taken also while it drains


@dataclass(slots=True, eq=False)
class _Put:
    session: str
    groups: range
    ends_s: float
    entries: dict[bytes, Entry] = field(default_factory=dict)


class Move(msgspec.Struct, frozen=True, eq=False):
    """Bytes on their way into a slot: end it exactly once, whatever happened."""

    entry: Entry
    put_id: str
    groups: range

    @property
    def offset(self) -> int:
        """Where in the slab the put's head groups start."""
        return self.entry.slot.offset + self.groups.start * self.entry.group_size

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
            put = _Put(order.session, order.groups, order.ends_s)
        elif (put.session, put.groups) != (order.session, order.groups):
            raise Invalid(f"put {order.put_id!r} was begun by another writer or for other groups")
        self._ledger.touch([key for header in order.headers for key in (header.parent, header.key)])
        try:
            return [self._begin_block(put, header, order) for header in order.headers]
        finally:
            if put.entries:
                self._puts[order.put_id] = put
                self._deadlines.add(order.put_id, put.ends_s)

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
        if self._ledger.sizes["quarantined"] > self.quarantine_cap_bytes:
            return "full"
        if header.length > self._ledger.extents.total:
            return "full"  # for ever
        if order.hold_owner and not self._hold(order, header):
            return "full"
        entry = self._ledger.open(header, order.head_groups, order.ends_s, evicts=not order.spares)
        if entry is None:
            self._guards.forget(header.key)
            return "full"
        self._join(put, entry, order)
        return "granted"

    def _join(self, put: _Put, entry: Entry, order: PutOrder) -> None:
        for index in order.groups:
            entry.groups.setdefault(index, Group(order.put_id))
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
        return [self._begin_move(put_id, put, put.entries.get(key)) for key in keys]

    def _begin_move(self, put_id: str, put: _Put, entry: Entry | None) -> Move | None:
        if entry is None:
            return None
        groups = [entry.groups[index] for index in put.groups]
        for group in groups:
            if group.moving:
                return None
        for group in groups:
            group.moving = True
        self._ledger.begin_move(entry)
        return Move(entry, put_id, put.groups)

    def end_move(self, move: Move, checksums: Sequence[int] | None) -> bool:
        """The bytes of a move have stopped; returns whether they are part of a block that lives.

        `checksums` holds one a head group of the move, of bytes that were checked in the slot; None
        when they are not there or not right.
        """
        entry = move.entry
        self._ledger.end_move(entry)
        if entry.state != "writing":
            return False
        if checksums is not None and len(move.groups) == entry.head_groups == 1:
            self._end_whole(move, entry.groups[0], tuple(checksums))
            return True
        stored = checksums is not None and all(entry.groups[g].put_id for g in move.groups)
        if checksums is not None and stored:
            for index, checksum in zip(move.groups, checksums, strict=True):
                entry.groups[index] = Group(move.put_id, checksum=checksum)
        else:
            for index in move.groups:
                del entry.groups[index]
        self._forget(move.put_id, entry.header.key)
        self._finish(entry)
        return stored

    def _end_whole(self, move: Move, group: Group, checksums: tuple[int, ...]) -> None:
        """As `end_move`, of a block that one move brings: nearly all are."""
        entry = move.entry
        self._forget(move.put_id, entry.header.key)
        assert group.put_id, "it was given up, and is written all the same"
        header = msgspec.structs.replace(entry.header, checksums=checksums)
        self._ledger.publish(entry, header)

    def _forget(self, put_id: str, key: bytes) -> None:
        """A put has nothing more to do with a block."""
        put = self._puts.get(put_id)
        if put is not None:
            put.entries.pop(key, None)
            if not put.entries:
                del self._puts[put_id]

    def _finish(self, entry: Entry) -> None:
        """Publish a block that is whole, or give up one that nobody fills any more."""
        sums = [group.checksum for group in entry.groups.values()]
        if len(sums) == entry.head_groups and None not in sums:
            ordered = tuple(entry.groups[g].checksum or 0 for g in range(entry.head_groups))
            header = msgspec.structs.replace(entry.header, checksums=ordered)
            self._ledger.publish(entry, header)
        elif not any(group.put_id for group in entry.groups.values()):
            self.give_up(entry)

    def give_up(self, entry: Entry) -> None:
        """End a block that is being written, with every put's share of it."""
        key = entry.header.key
        for put_id in {group.put_id for group in entry.groups.values() if group.put_id}:
            self._forget(put_id, key)
        self._guards.forget(key)
        self._ledger.remove(entry)

    def abort(self, put_id: str, session: str) -> None:
        """Give up what a put has not brought; unknown puts are none."""
        put = self._puts.get(put_id)
        if put is None or put.session != session:
            return
        del self._puts[put_id]
        for entry in put.entries.values():
            for index in put.groups:
                if entry.groups[index].moving:
                    entry.groups[index].put_id = ""
                else:
                    del entry.groups[index]
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
