"""How copies are made up for that were lost with a node, of blocks that only flash has here.

    a node has gone ─> HOLD_OFF_S ─> files, one after the other: blocks of which it had a copy
                                     ─> brought up, a part of the memory at a time (`tiers.py`)
                                     ─> told to who should have them, until they are taken

Of what is in memory `handover.py` tells at once. The next batch comes when the last one was taken,
or nobody takes more of it for a while: so neither side is stormed. Who takes such a copy puts it on
its own flash, since nobody may ask for it before memory needs the room.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import numpy as np
from numpy.typing import NDArray

from kvass.kvstore.flash.table import U64
from kvass.kvstore.node.copies.handover import HOLD_OFF_S, Handover
from kvass.kvstore.node.tiers.flash_tier import FlashTier
from kvass.kvstore.placement import Placement, StoreNode

_log = logging.getLogger(__name__)

LOOK_S = 0.2  # between two looks at what those who were told have taken
IDLE_S = 5.0  # without one more block over there, the batch's rest is given up


@dataclass(slots=True, eq=False)
class Repair:
    """Mutable fields: `tiers` (once there are any), `_place` (the nodes now), `_before` (as they
    were), `_lost` (ids), `_due_s`, and the counts of blocks `told` and `untaken`."""

    handover: Handover
    tiers: FlashTier | None = None
    told: int = 0
    untaken: int = 0
    _place: Placement = field(default_factory=lambda: Placement([]))
    _before: Placement = field(default_factory=lambda: Placement([]))
    _lost: set[str] = field(default_factory=set)
    _due_s: float | None = None

    def set_nodes(self, nodes: Sequence[StoreNode]) -> None:
        """Take in the cluster's nodes: who has gone, and is not back in time, is made up for."""
        now = {each.member_id for each in nodes}
        gone = {each.member_id for each in self._place.nodes} - now
        if gone and self._place.copies > 1:
            if not self._lost:
                self._before = self._place
            self._lost |= gone
            self._due_s = self.handover.state.now_s() + HOLD_OFF_S
        self._lost -= now
        self._place = Placement(nodes)

    def counts(self) -> dict[str, int]:
        return {"repair_told": self.told, "repair_untaken": self.untaken}

    async def run(self) -> None:
        """Make up for what is lost, when it is due, until cancelled."""
        while True:
            await anyio.sleep(1.0)
            if self._due_s is None or self.handover.state.now_s() < self._due_s:
                continue
            lost, before = self._lost, self._before
            self._due_s, self._lost = None, set()
            if lost and self.tiers is not None and not self.handover.state.index.draining:
                await self._repair(self.tiers, before, lost)

    async def _repair(self, tiers: FlashTier, before: Placement, lost: set[str]) -> None:
        begun = self.told
        async for keys, _ in tiers.brought_up(lambda segments: _of(segments, before, lost)):
            await self._offer(keys)
        if self.told > begun:
            names = ", ".join(sorted(lost))
            _log.info("%s gone: others were told of %d blocks on flash", names, self.told - begun)

    async def _offer(self, keys: Sequence[bytes]) -> None:
        """Tell of blocks until they are taken, or no more of them are for a while."""
        state = self.handover.state
        best, best_s = len(keys), state.now_s()
        while batches := self.handover.batches(keys):
            missing: set[bytes] = set()
            for member_id, entries in batches:
                missing |= (await self.handover.tell(member_id, entries, lasting=True))[0]
            if len(missing) < best:
                best, best_s = len(missing), state.now_s()
            if not missing or state.now_s() - best_s > IDLE_S:
                self.told += len(keys) - len(missing)
                self.untaken += len(missing)
                return
            await anyio.sleep(LOOK_S)


def _of(segments: U64, before: Placement, lost: set[str]) -> NDArray[np.bool_]:
    """Say of which segments a copy was at one of the lost nodes."""
    names, places = np.unique(segments, return_inverse=True)
    chosen = [_had(int(name), before, lost) for name in names]
    found: NDArray[np.bool_] = np.array(chosen, dtype=bool)[places]
    return found


def _had(segment: int, before: Placement, lost: set[str]) -> bool:
    key = segment.to_bytes(8, "little").ljust(32, b"\0")  # placement looks at no more of it
    return any(node.member_id in lost for node in before.homes(key, before.copies))
