"""Which slot of a worker's pool holds what, and who uses it. Pure.

A slot's life, with who may touch its bytes:

    free ──allocate──> private ──name──> shared ──last release──> cached ──evict──> free
           one owner writes │   immutable, read by many │   nobody; found by key
                            └──release (unnamed)──> free

Conservation, after every call: free + private + shared + cached == total. A slot that a transfer or
a step still uses is retained by it like by any request, so nothing is reused early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvass.common.keys import BlockKey
from kvass.common.pool.radix import Node, Radix


class BlockPool:
    """Slots and their users. Mutable fields: `_free`, `_private`, `_names`, `_radix`,
    `emptied_count`.

    `_private` counts the users of unnamed slots; `_names` maps a named slot to its node;
    `emptied_count` says how often all unused blocks were dropped at once.
    """

    def __init__(self, slots: int) -> None:
        assert slots > 0
        self.total = slots
        self._free = list(range(slots - 1, -1, -1))
        self._private: dict[int, int] = {}
        self._names: dict[int, Node] = {}
        self._radix = Radix()
        self.emptied_count = 0

    @property
    def available(self) -> int:
        """Slots that `allocate` could hand out now: free ones and cached ones."""
        return len(self._free) + self._radix.cached_count

    @property
    def used(self) -> int:
        """Slots that somebody uses now."""
        return self.total - self.available

    def counts(self) -> dict[str, int]:
        """Return slots by state; the four sum to `total`."""
        cached = self._radix.cached_count
        return {
            "free": len(self._free),
            "private": len(self._private),
            "shared": len(self._radix) - cached,
            "cached": cached,
        }

    def find(self, key: BlockKey) -> int | None:
        """Return the slot that holds block `key`, without touching it."""
        node = self._radix.get(key)
        return None if node is None else node.slot

    def retain_key(self, key: BlockKey) -> int | None:
        """Use the block `key` if it is here: return its slot, to be released once."""
        node = self._radix.get(key)
        if node is None:
            return None
        self._radix.retain(node)
        return node.slot

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` private slots (content undefined), evicting as needed; all or none."""
        if count > self.available:
            return None
        slots: list[int] = []
        for _ in range(count):
            slot = self._free.pop() if self._free else self._radix.evict()
            self._names.pop(slot, None)
            slots.append(slot)
        self._private.update(dict.fromkeys(slots, 1))
        return slots

    def name(self, slot: int, key: BlockKey, parent: bytes) -> bool:
        """Make a private slot findable: its bytes are complete and never change again.

        Returns False when another slot already holds the key; this one then stays private.
        """
        assert slot in self._private, "only a private slot can be named"
        if self._radix.get(key) is not None:
            return False
        self._names[slot] = self._radix.insert(key, parent, slot, refs=self._private.pop(slot))
        return True

    def retain(self, slot: int) -> None:
        """Count one more user of a slot that is in use."""
        node = self._names.get(slot)
        if node is not None:
            self._radix.retain(node)
        else:
            self._private[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        """Count one user less of each slot, last ones first, so that leaves age before parents."""
        for slot in reversed(list(slots)):
            node = self._names.get(slot)
            if node is not None:
                self._radix.release(node)
                continue
            self._private[slot] -= 1
            if not self._private[slot]:
                del self._private[slot]
                self._free.append(slot)

    def forget(self, keys: Sequence[BlockKey] = ()) -> int:
        """Drop unused blocks: those named, once or more, or all. Returns how many went."""
        self.emptied_count += not keys
        nodes = [self._radix.get(key) for key in dict.fromkeys(keys or self._radix.keys())]
        unused = [node for node in nodes if node is not None and node.refs == 0]
        for node in unused:
            del self._names[node.slot]
            self._free.append(self._radix.remove(node))
        return len(unused)
