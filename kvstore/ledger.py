"""What every slot of the slab is used for. Pure.

    free ──open──> writing ──publish──> visible ──evict, drop──> free
      ^               │ removed           │ removed while leased
      │               v while bytes move  v
      └────────── quarantined          retired ──last lease ends──> free
        the move has ended

Conservation, after every call, in bytes: free + writing + visible + retired + quarantined == total.
Nothing that is leased or guarded is evicted, and within a node no parent before its children.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvass.common.block import BlockHeader
from kvass.kvstore.eviction import Eviction
from kvass.kvstore.extents import Extents, Slot

State = Literal["writing", "visible", "retired", "quarantined"]
STATES: tuple[State, ...] = ("writing", "visible", "retired", "quarantined")


@dataclass(slots=True)
class Group:
    """One head group of a block that is being written.

    `put_id` is empty once its put was aborted: then it only waits for its `moving` bytes to stop.
    """

    put_id: str
    moving: bool = False
    checksum: int | None = None


@dataclass(slots=True, eq=False)
class Entry:
    """A block's slot and what it is used for. All fields but `slot` are mutable.

    While writing, `header` has no checksums, `groups` holds the head groups that are in or
    promised, and at `ends_s` what is still not whole is given up. `moves` counts transfers into the
    slot.
    """

    header: BlockHeader
    slot: Slot
    head_groups: int
    ends_s: float
    state: State = "writing"
    groups: dict[int, Group] = field(default_factory=dict)
    moves: int = 0
    leases: int = 0

    @property
    def group_size(self) -> int:
        return self.header.length // self.head_groups


class Ledger:
    """Entries and their slots. Mutable fields: `entries` (writing or visible, by key), `gone`
    (retired or quarantined), `blocks` and `sizes` by state, `news`, `evictions`, `stored`,
    `_children`.

    `news` collects the keys that became visible or stopped being written since it was last emptied.
    """

    def __init__(
        self, extents: Extents, eviction: Eviction, guarded: Callable[[bytes], bool]
    ) -> None:
        self.extents = extents
        self.entries: dict[bytes, Entry] = {}
        self.gone: set[Entry] = set()
        self.blocks: dict[State, int] = dict.fromkeys(STATES, 0)
        self.sizes: dict[State, int] = dict.fromkeys(STATES, 0)
        self.news: list[bytes] = []
        self.evictions = 0
        self.stored = 0
        self._eviction = eviction
        self._guarded = guarded
        self._children: dict[bytes, int] = {}  # visible children by their parent's key

    def visible(self, key: bytes) -> Entry | None:
        """Return the readable block of this name."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.state == "visible" else None

    def open(self, header: BlockHeader, head_groups: int, ends_s: float) -> Entry | None:
        """Start a block that is being written, evicting as needed; None when the slab is full."""
        assert header.key not in self.entries
        slot = self.extents.take(header.length)
        while slot is None:
            victim = self._eviction.victim(self._evictable)
            if victim is None:
                return None
            self.evictions += 1
            self.remove(self.entries[victim])
            slot = self.extents.take(header.length)
        entry = Entry(header, slot, head_groups, ends_s)
        self.entries[header.key] = entry
        self._count(entry, 1)
        return entry

    def publish(self, entry: Entry, header: BlockHeader) -> None:
        """Make a block readable; every byte of it is in place and was checked."""
        assert entry.state == "writing" and not entry.moves
        self._move(entry, "visible")
        self.stored += 1
        entry.header = header
        entry.groups = {}
        self._children[header.parent] = self._children.get(header.parent, 0) + 1
        self._eviction.insert(header)
        self.news.append(header.key)
        self.offer(entry)

    def remove(self, entry: Entry) -> None:
        """Forget a block's name now; its slot comes back as soon as nobody uses it."""
        header = entry.header
        del self.entries[header.key]
        if entry.state == "visible":
            self._eviction.remove(header.key)
            self._uncount_child(header.parent)
            self._leave(entry, "retired")
        else:
            assert entry.state == "writing"
            self.news.append(header.key)
            self._leave(entry, "quarantined")

    def touch(self, keys: list[bytes]) -> None:
        """Note that these blocks of one chain were asked for."""
        self._eviction.touch(keys)

    def lease(self, entry: Entry) -> None:
        """Keep a visible block's bytes where they are."""
        assert entry.state == "visible"
        entry.leases += 1

    def unlease(self, entry: Entry) -> None:
        """End one lease of a block."""
        assert entry.leases > 0
        entry.leases -= 1
        self._settle(entry)

    def begin_move(self, entry: Entry) -> None:
        """Bytes start to move into the slot."""
        assert entry.state == "writing"
        entry.moves += 1

    def end_move(self, entry: Entry) -> None:
        """They have stopped, for sure."""
        assert entry.moves > 0
        entry.moves -= 1
        self._settle(entry)

    def offer(self, entry: Entry) -> None:
        """Let the policy evict the block, if nothing protects it."""
        if self._evictable(entry.header.key):
            self._eviction.offer(entry.header.key)

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
        end = 0
        for offset, size in sorted(used + free):
            assert offset == end, (
                f"bytes {min(offset, end)} to {max(offset, end)} have not one owner"
            )
            end = offset + size
        assert end == self.extents.total
        assert all(entry.leases for entry in self.gone if entry.state == "retired")
        assert all(entry.moves for entry in self.gone if entry.state == "quarantined")

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
            self.extents.give(entry.slot)
        elif entry.state == "visible":
            self.offer(entry)

    def _uncount_child(self, parent: bytes) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            self.offer_key(parent)

    def _move(self, entry: Entry, state: State) -> None:
        self._count(entry, -1)
        entry.state = state
        self._count(entry, 1)

    def _count(self, entry: Entry, step: int) -> None:
        self.blocks[entry.state] += step
        self.sizes[entry.state] += step * entry.slot.size
