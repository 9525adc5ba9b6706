"""A reader that sees the cluster as it is, and whose wires are always well: what copies promise.

A block that is at all of its homes, two at least, is read after the crash of any one of them,
unless it was erased or evicted meanwhile. What a node that leaves had, another one has been given.
"""

from __future__ import annotations

from typing import cast

import anyio
import anyio.abc

from kvass.common.keys import Chain
from kvass.kvstore import messages as m
from kvass.kvstore.index.ledger import Entry
from kvass.kvstore.node.copies.handover import spans_of_entries
from kvass.kvstore.placement import Placement, StoreNode
from record import Record
from store_sim import Cluster, SimNode
from watch import History

NAME = "probe-0"
READ_S = 5.0
SLOTS = 64  # blocks that are looked at after one crash


class Prober:
    """Mutable fields: `seen` (the bytes that were read, by key), the record."""

    def __init__(
        self, sim: Cluster, history: History, record: Record, tasks: anyio.abc.TaskGroup
    ) -> None:
        self._sim = sim
        self._history = history
        self._record = record
        self.worker = sim.add_worker(NAME, tasks=tasks, slots=SLOTS, host="host-probe")
        self.seen: list[tuple[bytes, bytes]] = []

    def copied(self, victim: SimNode) -> list[Entry]:
        """Return blocks of a node that each of their homes has, two at least."""
        view = self._sim.view(alive_only=True)
        place = Placement(node for node in view if not node.draining)
        chosen: list[Entry] = []
        for entry in victim.index.ledger.entries.values():
            homes = place.homes(entry.header.segment_key, place.copies)
            nodes = [self._sim.nodes[home.member_id] for home in homes]
            everywhere = all(node.index.ledger.visible(entry.header.key) for node in nodes)
            if len(nodes) >= 2 and everywhere and entry.state == "visible":
                chosen.append(entry)
        return chosen[:SLOTS]

    async def read(self, copied: list[Entry], known: list[StoreNode]) -> None:
        """Assert that blocks are read, now that one of the nodes that had them is dead: by who has
        not heard of that, and by who has."""
        kept = {entry.header.key: self._holders(entry) for entry in copied}
        for view in (known, self._sim.view(alive_only=True)):
            self.worker.store.set_nodes(view)
            for span in spans_of_entries(copied):
                await self._read(span, kept)

    def _holders(self, entry: Entry) -> list[tuple[SimNode, Entry]]:
        """Return where else a block is now, at nodes that answer."""
        found: list[tuple[SimNode, Entry]] = []
        for node in self._sim.nodes.values():
            here = node.index.ledger.visible(entry.header.key)
            if here is not None and self._answers(node):
                found.append((node, here))
        return found

    async def _read(self, span: m.Span, kept: dict[bytes, list[tuple[SimNode, Entry]]]) -> None:
        store, memory = self.worker.store, self.worker.memory
        piece = m.Piece(span)
        indices = [index for index, _ in span.named()]
        slots = list(range(len(indices)))
        there = await store.pull(cast(Chain, piece), indices, slots, deadline_s=READ_S)
        for slot, index in zip(slots, indices, strict=True):
            key = piece.key(index)
            if index in there:
                self.seen.append((key, memory.array[slot].tobytes()))
                self._record.count("survived")
                continue
            left = [node for node, entry in kept[key] if self._still(node, entry)]
            assert not left, f"{left[0].member_id} has a block that nobody finds after a crash"

    def _still(self, node: SimNode, entry: Entry) -> bool:
        visible = node.index.ledger.visible(entry.header.key)
        return visible is entry and self._answers(node)

    def _answers(self, node: SimNode) -> bool:
        return node.alive and node.identity.start_id not in self._sim.fabric._hung

    def check_handover(self, leaver: SimNode) -> None:
        """A node says that others have all it has: so they must have been given it."""
        others = [
            keys for epoch, keys in self._history.had.items() if epoch != leaver.identity.start_id
        ]
        for key, entry in leaver.index.ledger.entries.items():
            if entry.state == "visible":
                given = any(key in keys for keys in others)
                assert given, f"{leaver.member_id} may leave, and a block goes with it"
                self._record.count("handed over")
