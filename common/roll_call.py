"""Who came, left or was lost, as lines for a log: one a member a change. Pure.

It compares the node table with what it saw at its last look. Of who was there at the first look it
makes one line, however many they are. It refuses to know where lines go, and which process looks
except that it is not one of the others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from kvass.common.membership import LIVE_S, Entry, NodeTable, Peer, Role

Condition = Literal["joining", "ready", "draining", "lost"]

_NOUNS: Mapping[Role, str] = {
    "gateway": "gateway",
    "prefill": "prefill worker",
    "decode": "decode worker",
    "store": "store node",
}


class Line(NamedTuple):
    """One line for a log, with its level."""

    level: int
    text: str


class Seen(NamedTuple):
    """One start of a member at a look."""

    peer: Peer
    condition: Condition


class RollCall:
    """Looks at one table, for the roles that its owner follows.

    Mutable field: `_seen`, what the last look saw, by start id; None before the first.
    """

    def __init__(self, table: NodeTable, roles: Collection[str], own_start_id: str) -> None:
        self._table = table
        self._roles = frozenset(roles)
        self._own_start_id = own_start_id
        self._seen: dict[str, Seen] | None = None

    def look(self, now_s: float) -> list[Line]:
        """Return a line for each member that changed since the last look."""
        before, self._seen = self._seen, self._others(self._seen or {}, now_s)
        if before is None:
            return [_first(self._seen.values())]
        lost = {each.peer.start_id for each in self._table.lost(now_s)}
        gone = [
            _gone(was, was.peer.start_id in lost)
            for start_id, was in before.items()
            if start_id not in self._seen and was.condition != "lost"
        ]
        return gone + [
            line
            for start_id, seen in self._seen.items()
            if (line := _change(before.get(start_id), seen)) is not None
        ]

    def _others(self, before: Mapping[str, Seen], now_s: float) -> dict[str, Seen]:
        return {
            entry.peer.start_id: self._see(entry, before.get(entry.peer.start_id), now_s)
            for entry in self._table.entries()
            if entry.peer.role in self._roles and entry.peer.start_id != self._own_start_id
        }

    def _see(self, entry: Entry, was: Seen | None, now_s: float) -> Seen:
        if was is not None and entry.demoted_until_s > now_s:
            return was  # left out for a refused connection: whoever was refused tells of it
        is_live = self._table.is_live(entry, now_s)
        return Seen(entry.peer, entry.peer.state if is_live else "lost")


def _first(others: Collection[Seen]) -> Line:
    roles = Counter(other.peer.role for other in others if other.condition == "ready")
    counts = ", ".join(
        f"{count} {_NOUNS[role]}{'s' * (count > 1)}" for role, count in sorted(roles.items())
    )
    return Line(logging.INFO, f"joined the cluster{'; ready: ' if counts else ''}{counts}")


def _gone(was: Seen, is_lost: bool) -> Line:
    if not is_lost:
        return Line(logging.INFO, f"{_name(was.peer)} left")
    return Line(logging.WARNING, f"{_name(was.peer)} is lost: it went without a goodbye")


def _change(was: Seen | None, seen: Seen) -> Line | None:
    name, condition = _name(seen.peer), seen.condition
    if condition == (was.condition if was is not None else "joining"):
        return None
    match condition:
        case "joining":
            return None
        case "ready":
            if was is not None and was.condition == "lost":
                return Line(logging.INFO, f"{name} is back")
            return Line(logging.INFO, f"{name} joined: {seen.peer.address}, pid {seen.peer.pid}")
        case "draining":
            return Line(logging.INFO, f"{name} is leaving")
        case "lost":
            return Line(logging.WARNING, f"{name} is lost: nothing heard of it for {LIVE_S:g} s")


def _name(peer: Peer) -> str:
    return f"{peer.role} {peer.member_id}"
