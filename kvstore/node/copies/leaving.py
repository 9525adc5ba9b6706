"""How a store node leaves: it takes nothing new, hands over, and is drained, or held where that
would lose blocks.

    serving ──begin──> draining ──all is elsewhere, or forced──> drained
       ^                │   ^ begin again, a node has come            │
       │                v   │                                         │
       │               held: blocks are nowhere else ──force──────────┤
       └────────────────cancel────────────────────────────────────────┘

Reads are answered in every phase; once it is drained others ask it no more. It refuses to know how
blocks get to others: `handover.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

import anyio
import anyio.abc

from kvass.kvstore.node.chores import lasting
from kvass.kvstore.node.copies.handover import Handover, Tally
from kvass.kvstore.node.state import NodeState

_log = logging.getLogger(__name__)

Phase = Literal["serving", "draining", "held", "drained"]


@dataclass(slots=True)
class Leaving:
    """Mutable fields: `phase`, `_forced`, and what wakes those who wait for a change of either."""

    state: NodeState
    handover: Handover
    tasks: anyio.abc.TaskGroup
    phase: Phase = "serving"
    _forced: bool = False
    _again: anyio.Event = field(default_factory=anyio.Event)
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def begin(self) -> None:
        """Take no more puts and claims, and hand over what others lack; where that found no room,
        try again."""
        if self.phase == "serving":
            self.state.index.draining = True
            self._forced, self._again = False, anyio.Event()
            self._scope = anyio.CancelScope()
            self._go("draining")
            self.tasks.start_soon(self._run, self._scope)
        elif self.phase == "held":
            self._again.set()

    def force(self) -> None:
        """Hand over what others take, and leave with the rest."""
        self.begin()
        self._forced = True

    def cancel(self) -> None:
        """Go on as if nothing had been; what others took they keep."""
        if self.phase != "serving":
            self._scope.cancel()
            self.state.index.draining = False
            self.handover.forget_tally()
            self._go("serving")
            _log.info("the drain is cancelled: this node takes blocks again")

    async def after(self, phase: Phase) -> Phase:
        """Wait until the phase is another one than this; return it."""
        while self.phase == phase:
            await self._changed.wait()
        return self.phase

    async def over(self) -> int:
        """Wait until a drain has handed over what it could; return how many blocks are nowhere
        else."""
        while self.phase not in ("held", "drained"):
            await self._changed.wait()
        return self.handover.left

    async def _run(self, scope: anyio.CancelScope) -> None:
        with scope:
            await lasting("the drain", self._drain, self.state.faults)

    async def _drain(self) -> None:
        while True:
            tally = await self.handover.leave()
            if not tally.lost or self._forced:
                break
            _log.warning("the drain is held up: %s", said_of(tally))
            self._go("held")
            await self._again.wait()
            self._again = anyio.Event()
            self._go("draining")
        _log.info("drained: %s; this node may be stopped", said_of(tally))
        self._go("drained")

    def _go(self, phase: Phase) -> None:
        self.phase = phase
        self._changed.set()
        self._changed = anyio.Event()


def said_of(tally: Tally) -> str:
    """Return what a drain has come to, in words."""
    return (
        f"of {tally.blocks} blocks {tally.elsewhere} were elsewhere already, {tally.handed} were "
        f"handed over, {tally.lost} are nowhere else ({tally.refused} found no room)"
    )
