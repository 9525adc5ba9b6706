"""What every slot of the slab is used for. Pure.

    free ──open──> writing ──publish──> visible ──evict, drop──> free
      ^               │ removed           │ removed while leased
      │               v while bytes move  v
      └────────── quarantined          retired ──last lease ends──> free
        the move has ended

Conservation, after every call, in bytes: free + writing + visible + retired + quarantined == total.
Nothing that is leased or guarded is evicted, and within a node no parent before its children.
Every slot in use is charged to its block's tenant (`shares.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from kvass.common.block import BlockHeader
from kvass.kvstore.index.extents import Extents, Slot, slot_size
from kvass.kvstore.index.shares import Shares

State = Literal["writing", "visible", "retired", "quarantined"]
STATES: tuple[State, ...] = ("writing", "visible", "retired", "quarantined")


class Group(msgspec.Struct, frozen=True):
    """One head group of a block that is being written.

    `put_id` is empty once its put was aborted: then it only waits for its `moving` bytes to stop.
    """

    put_id: str
    moving: bool = False
    checksum: int | None = None


Groups = Mapping[int, Group]
NO_GROUPS: Groups = {}


class Entry(msgspec.Struct, eq=False, gc=False):
    """A block's slot and what it is used for. All fields are mutable; `slot` changes only while
    nobody has a lease on the block and no bytes move.

    While writing, `header` has no checksums, `groups` holds the head groups that are in or
    promised (the blocks of one put share a map, so it is replaced and never changed), and at
    `ends_s` what is still not whole is given up. `moves` counts transfers into the slot.
    """

    header: BlockHeader
    slot: Slot
    head_groups: int
    ends_s: float
    state: State = "writing"
    groups: Groups = NO_GROUPS
    moves: int = 0
    leases: int = 0

    @property
    def group_size(self) -> int:
        return self.header.length // self.head_groups


class Ledger:
    """Entries and their slots. Mutable fields: `entries` (writing or visible, by key), `gone`
    (retired or quarantined), `blocks` and `sizes` by state, `news`, `evictions`,
    `quota_evictions`, `over_quota`, `stored`, `_at`,
    `_children`.

    `copy_bytes` (from, to, size), where it is given, lets blocks be moved together in the slab
    (`relocated` so far): it must have copied when it returns, whatever overlaps.
    `news` collects the keys that became visible or stopped being written since it was last emptied.
    """

    def __init__(self, extents: Extents, shares: Shares, guarded: Callable[[bytes], bool]) -> None:
        self.extents = extents
        self.entries: dict[bytes, Entry] = {}
        self.gone: set[Entry] = set()
        self.blocks: dict[State, int] = dict.fromkeys(STATES, 0)
        self.sizes: dict[State, int] = dict.fromkeys(STATES, 0)
        self.news: list[bytes] = []
        self.evictions = 0
        self.quota_evictions = 0  # of those: its own tenant was over its quota
        self.over_quota = 0  # blocks that found no room in their tenant's quota
        self.stored = 0
        self.shares = shares
        self.copy_bytes: Callable[[int, int, int], None] | None = None
        self.relocated = 0
        self._guarded = guarded
        self._at: dict[int, Entry] = {}  # by the offset of their slots
        self._children: dict[bytes, int] = {}  # visible children by their parent's key

    def visible(self, key: bytes) -> Entry | None:
        """Return the readable block of this name."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.state == "visible" else None

    def open_free(
        self, headers: Sequence[BlockHeader], head_groups: int, ends_s: float
    ) -> list[Entry]:
        """Start new blocks of one length as `open` does, the first ones of `headers`, as many as
        nothing must be evicted or moved for; none if they are of several tenants."""
        tenant, size = headers[0].tenant, slot_size(headers[0].length)
        tenants = [header.tenant for header in headers]
        if tenants.count(tenant) < len(tenants) or self.shares.is_over(tenant, size * len(tenants)):
            return []
        slots = self.extents.take_some(size, len(headers))
        return self._enter(headers[: len(slots)], slots, head_groups, ends_s) if slots else []

    def open(
        self, header: BlockHeader, head_groups: int, ends_s: float, *, evicts: bool = True
    ) -> Entry | None:
        """Start a block that is being written, evicting as needed, unless it shall not; None when
        the slab is full, or the tenant's quota is."""
        assert header.key not in self.entries
        tenant, size = header.tenant, slot_size(header.length)
        if self.shares.allotments.quota(tenant) and not self._fit_quota(tenant, size, evicts):
            self.over_quota += 1
            return None
        slot = self._take(size)
        while slot is None:
            if not evicts:
                return None
            victim = self.shares.victim(tenant, size, self._evictable)
            if victim is None:
                return None
            self._evict(victim)
            slot = self._take(size)
        return self._enter([header], [slot], head_groups, ends_s)[0]

    def _enter(
        self,
        headers: Sequence[BlockHeader],
        slots: Sequence[Slot],
        head_groups: int,
        ends_s: float,
    ) -> list[Entry]:
        entries = [
            Entry(header, slot, head_groups, ends_s)
            for header, slot in zip(headers, slots, strict=True)
        ]
        self.entries.update(zip([header.key for header in headers], entries, strict=True))
        self._at.update(zip([slot.offset for slot in slots], entries, strict=True))
        size = slots[0].size * len(slots)
        self.blocks["writing"] += len(slots)
        self.sizes["writing"] += size
        self.shares.charge(headers[0].tenant, size, len(slots))
        return entries

    def _take(self, size: int) -> Slot | None:
        """Take a slot, moving blocks together when the free bytes would do and none fits."""
        slot = self.extents.take(size)
        if slot is None and self.copy_bytes is not None:
            if self.extents.make_room(size, self._movable, self._relocate):
                slot = self.extents.take(size)
                assert slot is not None
        return slot

    def _movable(self, offset: int) -> bool:
        """Whether nobody reads or writes the block there: who does has a lease or a move."""
        entry = self._at[offset]
        return entry.state == "visible" and not entry.leases and not entry.moves

    def _relocate(self, offset: int, slot: Slot) -> None:
        assert self.copy_bytes is not None
        entry = self._at.pop(offset)
        self.copy_bytes(offset, slot.offset, entry.header.length)
        self._at[slot.offset] = entry
        entry.slot = slot
        self.relocated += 1

    def _fit_quota(self, tenant: str, size: int, evicts: bool) -> bool:
        """Evict a tenant's own blocks until `size` bytes more are within its quota."""
        if self.shares.never_fits(tenant, size):
            return False
        while self.shares.is_over(tenant, size):
            victim = self.shares.own_victim(tenant, self._evictable) if evicts else None
            if victim is None:
                return False
            self._evict(victim)
            self.quota_evictions += 1
        return True

    def _evict(self, key: bytes) -> None:
        self.evictions += 1
        self.remove(self.entries[key])

    def publish(self, entries: Sequence[Entry], headers: Sequence[BlockHeader]) -> None:
        """Make blocks readable; every byte of them is in place and was checked."""
        size, children = 0, self._children
        for entry, header in zip(entries, headers, strict=True):
            assert entry.state == "writing" and not entry.moves
            entry.state = "visible"
            entry.header = header
            entry.groups = NO_GROUPS
            size += entry.slot.size
            children[header.parent] = children.get(header.parent, 0) + 1
        self.blocks["writing"] -= len(entries)
        self.blocks["visible"] += len(entries)
        self.sizes["writing"] -= size
        self.sizes["visible"] += size
        self.stored += len(entries)
        self.news += [header.key for header in headers]
        self.shares.insert(headers)
        for header in headers:
            if header.key not in children and not self._guarded(header.key):
                self.shares.offer(header)

    def remove(self, entry: Entry) -> None:
        """Forget a block's name now; its slot comes back as soon as nobody uses it."""
        header = entry.header
        del self.entries[header.key]
        if entry.state == "visible":
            self.shares.remove(header)
            self._uncount_child(header.parent)
            self._leave(entry, "retired")
        else:
            assert entry.state == "writing"
            self.news.append(header.key)
            self._leave(entry, "quarantined")

    def touch(self, keys: list[bytes]) -> None:
        """Note that these blocks of one chain were asked for."""
        self.shares.touch(keys, self._tenant_of)

    def lease(self, entries: Iterable[Entry]) -> None:
        """Keep visible blocks' bytes where they are."""
        for entry in entries:
            assert entry.state == "visible"
            entry.leases += 1

    def unlease(self, entry: Entry) -> None:
        """End one lease of a block."""
        assert entry.leases > 0
        entry.leases -= 1
        self._settle(entry)

    def begin_moves(self, entries: Iterable[Entry]) -> None:
        """Bytes start to move into the slots."""
        for entry in entries:
            assert entry.state == "writing"
            entry.moves += 1

    def end_moves(self, entries: Iterable[Entry]) -> None:
        """They have stopped, for sure."""
        for entry in entries:
            assert entry.moves > 0
            entry.moves -= 1
            if entry.state != "writing":
                self._settle(entry)

    def offer(self, entry: Entry) -> None:
        """Let the policy evict the block, if nothing protects it."""
        if self._evictable(entry.header.key):
            self.shares.offer(entry.header)

    def offer_key(self, key: bytes) -> None:
        """As `offer`, by name."""
        if key in self.entries:
            self.offer(self.entries[key])

    def check(self) -> None:
        """Assert conservation by counting everything anew; for tests."""
        everything = [*self.entries.values(), *self.gone]
        for state in STATES:
            of_state = [entry for entry in everything if entry.state == state]
            assert self.blocks[state] == len(of_state), state
            assert self.sizes[state] == sum(entry.slot.size for entry in of_state), state
        used = [(entry.slot.offset, entry.slot.size) for entry in everything]
        free = list(self.extents.free_ranges())
        assert sum(size for _, size in free) == self.extents.free_bytes
        assert self._at == {entry.slot.offset: entry for entry in everything}
        end = 0
        for offset, size in sorted(used + free):
            assert offset == end, (
                f"bytes {min(offset, end)} to {max(offset, end)} have not one owner"
            )
            end = offset + size
        assert end == self.extents.total
        assert all(entry.leases for entry in self.gone if entry.state == "retired")
        assert all(entry.moves for entry in self.gone if entry.state == "quarantined")
        self._check_tenants(everything)

    def _check_tenants(self, everything: list[Entry]) -> None:
        charged: dict[str, list[int]] = {}
        for entry in everything:
            charged.setdefault(entry.header.tenant, []).append(entry.slot.size)
        assert charged.keys() == self.shares.used.keys()
        for tenant, usage in self.shares.used.items():
            sizes = charged[tenant]
            assert (usage.size_bytes, usage.blocks) == (sum(sizes), len(sizes)), tenant

    def _tenant_of(self, key: bytes) -> str | None:
        entry = self.entries.get(key)
        return None if entry is None else entry.header.tenant

    def _evictable(self, key: bytes) -> bool:
        entry = self.entries.get(key)
        return (
            entry is not None
            and entry.state == "visible"
            and entry.leases == 0
            and key not in self._children
            and not self._guarded(key)
        )

    def _leave(self, entry: Entry, state: State) -> None:
        self._move(entry, state)
        self.gone.add(entry)
        self._settle(entry)

    def _settle(self, entry: Entry) -> None:
        if entry.leases or entry.moves:
            return
        if entry in self.gone:
            self.gone.remove(entry)
            self._count(entry, -1)
            del self._at[entry.slot.offset]
            self.extents.give(entry.slot)
            self.shares.discharge(entry.header.tenant, entry.slot.size)
        elif entry.state == "visible":
            self.offer(entry)

    def _uncount_child(self, parent: bytes) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            self.offer_key(parent)

    def _move(self, entry: Entry, state: State) -> None:
        size, before = entry.slot.size, entry.state
        self.blocks[before] -= 1
        self.sizes[before] -= size
        self.blocks[state] += 1
        self.sizes[state] += size
        entry.state = state

    def _count(self, entry: Entry, step: int) -> None:
        self.blocks[entry.state] += step
        self.sizes[entry.state] += step * entry.slot.size
