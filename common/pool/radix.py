"""The tree of named blocks in a worker's pool, and which of them to evict next. Pure.

A block's key names its whole prefix, so the tree is a map from key to node with a link to the
parent's key: matching a prefix is one look-up a block, and a hole (a block whose parent is not
here) costs nothing. Leaves of the unused blocks are evicted, least recently used first: no parent
before its unused children. (One that a request holds without its parent, which it once lacked,
keeps no parent back: else an unused block could be one that cannot be had.)

It refuses to know about memory: a slot is a number here.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from kvass.common.keys import BlockKey


@dataclass(slots=True)
class Node:
    """One named block. Mutable fields: `refs` (requests that use it), `used_at` (a logical
    time)."""

    key: BlockKey
    parent: bytes
    slot: int
    refs: int
    used_at: int


class Radix:
    """Named blocks by key. Mutable fields: `_nodes`, `_unused_children` (counts by parent),
    `_leaves`, `_ticks`, `cached_count`.

    `_leaves` is a heap of eviction candidates that may be out of date: an entry counts only if its
    node still is unused, with that `used_at` and without unused children.
    """

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, Node] = {}
        self._unused_children: Counter[bytes] = Counter()
        self._leaves: list[tuple[int, BlockKey]] = []
        self._ticks = 0
        self.cached_count = 0  # nodes that nobody uses

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, key: BlockKey) -> Node | None:
        """Find a block by key, without touching it."""
        return self._nodes.get(key)

    def keys(self) -> list[BlockKey]:
        return list(self._nodes)

    def insert(self, key: BlockKey, parent: bytes, slot: int, *, refs: int) -> Node:
        """Name the block in `slot`, which `refs` requests use; the key must be new."""
        assert key not in self._nodes, "a key names one slot"
        self._ticks += 1
        node = Node(key, parent, slot, refs, self._ticks)
        self._nodes[key] = node
        if refs == 0:
            self._become_unused(node)
        return node

    def retain(self, node: Node) -> None:
        """Count one more user."""
        if node.refs == 0:
            self._leave_unused(node)
        node.refs += 1

    def release(self, node: Node) -> None:
        """Count one user less; with none left the block stays, until it is evicted."""
        assert node.refs > 0, "released more often than retained"
        node.refs -= 1
        self._ticks += 1
        node.used_at = self._ticks
        if node.refs == 0:
            self._become_unused(node)

    def evict(self) -> int:
        """Drop the least recently used leaf of the unused blocks, of which there must be one;
        return its slot."""
        while True:
            used_at, key = heapq.heappop(self._leaves)
            node = self._nodes.get(key)
            if node is not None and node.used_at == used_at and self._is_evictable(node):
                return self.remove(node)

    def remove(self, node: Node) -> int:
        """Take an unused block's name away and return its slot."""
        assert node.refs == 0, "a block in use keeps its name"
        del self._nodes[node.key]
        self._leave_unused(node)
        return node.slot

    def _become_unused(self, node: Node) -> None:
        self.cached_count += 1
        self._unused_children[node.parent] += 1
        self._offer(node)

    def _leave_unused(self, node: Node) -> None:
        self.cached_count -= 1
        self._unused_children[node.parent] -= 1
        if not self._unused_children[node.parent]:
            del self._unused_children[node.parent]
            parent = self._nodes.get(BlockKey(node.parent))
            if parent is not None:
                self._offer(parent)

    def _is_evictable(self, node: Node) -> bool:
        return node.refs == 0 and not self._unused_children.get(node.key)

    def _offer(self, node: Node) -> None:
        if self._is_evictable(node):
            heapq.heappush(self._leaves, (node.used_at, node.key))
            if len(self._leaves) > 4 * len(self._nodes) + 64:
                self._rebuild()

    def _rebuild(self) -> None:
        """Drop out-of-date candidates, so that the heap stays proportional to the pool."""
        live = (node for node in self._nodes.values() if self._is_evictable(node))
        self._leaves = [(node.used_at, node.key) for node in live]
        heapq.heapify(self._leaves)
