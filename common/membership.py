"""Who is in the cluster, as one member sees it. Pure: the time is passed in.

A member is its id with the id of its start. Presence and 'gone' name both, so what is said of an
earlier start never touches a later one, in whatever order it arrives. Live means: present, and
heard of within LIVE_S, judged only while the own link to the broker is up, and while this process
runs: one that was stopped, or starved, has heard of nobody, and that says nothing of them.

    own link      ──up──┐       down       ┌──up─────────────────────────
    judged by     heard │ the last view    │ REJOIN_S of grace │ heard

    own ticks     ─┬─┬─┬─┐   none for ASLEEP_S    ┌─┬─┬─┬─┬─┬─┬─┬─┬─┬─
    judged by     heard  │ the last view          │ WAKING_S of grace │ heard

A member that was ready and is gone without having said that it leaves is lost: its name is
remembered for LOST_S, until it is back, or until somebody says that it may be forgotten.

It refuses to know how messages travel and what a load's numbers mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kvass.common import wire

Role = Literal["gateway", "prefill", "decode", "store"]
ROLES: tuple[Role, ...] = ("gateway", "prefill", "decode", "store")
State = Literal["joining", "ready", "draining"]
Load = Mapping[str, int | float | str]

LIVE_S = 3.0  # six loads at two a second: one lost message or one long pause demotes nobody
REJOIN_S = 5.0  # after a broker's return: its clients come back within the longest backoff, 1 s
ASLEEP_S = 1.0  # without a tick of one's own, twice as long as they are apart
WAKING_S = 1.0  # two loads of everybody, and what waited in the socket
DEMOTED_S = 2.0  # after a refused connection, before the peer is tried again
LOST_S = 900.0  # whoever was called out of bed has looked by then; a restart has made up for it
LOST_MAX = 256  # names: more is a network's fault, and the latest say as much


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a member says of itself: its retained presence.

    `cluster` is what all must agree on (empty: it serves any model). `details` is what others of a
    role need to know once, such as a store node's `capacity_bytes`.
    """

    role: Role
    member_id: wire.Id
    start_id: wire.Id
    host_id: wire.Id
    pid: wire.Natural
    state: State
    started_s: wire.Finite  # wall clock: only to tell which of two starts of one id is the later
    address: wire.Name = ""  # RPC or HTTP, host:port; empty while joining
    metrics_address: wire.Name = ""
    cluster: Annotated[dict[wire.Name, wire.Integer | wire.Text], Meta(max_length=64)] = {}
    details: wire.Facts = {}


@dataclass(slots=True)
class Entry:
    """One start of one member. All fields are mutable except `peer`'s identity."""

    peer: Peer
    heard_s: float
    confirmed: bool  # presence was heard since the own link last came up
    load: dict[str, int | float | str] = field(default_factory=dict)
    load_heard_s: float | None = None
    demoted_until_s: float = 0.0


class Lost(NamedTuple):
    """A member that went without a goodbye. `since_s`: when it was last heard of."""

    peer: Peer
    since_s: float
    forgotten_s: float


class NodeTable:
    """The members that this one knows of.

    Mutable fields: `_entries` by start id, `_lost` by role and id, the latest last, `_link_up`,
    `_judged_from_s`, `_ticked_s`, `version` (counts changes of who is present; not of loads).
    `followed` names the roles whose loads are received: only those can be missed; of others,
    presence is all that is known.
    """

    def __init__(self, followed: Collection[str] = ROLES) -> None:
        self._followed = frozenset(followed)
        self._entries: dict[str, Entry] = {}
        self._lost: dict[tuple[str, str], Lost] = {}
        self._link_up = False
        self._judged_from_s = 0.0
        self._ticked_s: float | None = None
        self.version = 0

    @property
    def is_linked(self) -> bool:
        """Whether the own link to the broker is up."""
        return self._link_up

    def link_up(self, now_s: float) -> None:
        """The own connection to the broker is up: all that are there will be heard of again."""
        self._link_up = True
        self._judged_from_s = now_s + REJOIN_S
        for entry in self._entries.values():
            entry.confirmed = False

    def link_down(self) -> None:
        """The own connection is lost: keep the last view."""
        self._link_up = False

    def tick(self, now_s: float) -> None:
        """This process runs; called twice a second, or nobody is judged."""
        if self._was_asleep(now_s):
            self._judged_from_s = max(self._judged_from_s, now_s + WAKING_S)
        self._ticked_s = now_s

    def saw_presence(self, peer: Peer, now_s: float) -> None:
        """Take in a presence message, retained or fresh."""
        if peer.state == "ready":
            self._lost.pop((peer.role, peer.member_id), None)
        entry = self._entries.get(peer.start_id)
        if entry is None:
            self._entries[peer.start_id] = Entry(peer, heard_s=now_s, confirmed=True)
        else:
            unchanged = entry.peer == peer and entry.demoted_until_s <= now_s
            entry.peer, entry.heard_s, entry.confirmed = peer, now_s, True
            entry.demoted_until_s = 0.0
            if unchanged:
                return
        self.version += 1

    def saw_gone(self, start_id: str) -> None:
        """Take in a last will or a goodbye: it ends that start, and no other. Who says goodbye has
        said before that it leaves: the state is `draining`."""
        entry = self._entries.pop(start_id, None)
        if entry is None:
            return
        self.version += 1
        if entry.peer.state == "ready":
            self._lose(entry)

    def _lose(self, entry: Entry) -> None:
        """Remember who is lost, unless another start of it is ready."""
        peer = entry.peer
        if any(
            (other.peer.role, other.peer.member_id) == (peer.role, peer.member_id)
            and other.peer.state == "ready"
            for other in self._entries.values()
        ):
            return
        seen_s = max(entry.heard_s, self._ticked_s or entry.heard_s)
        self._lost.pop((peer.role, peer.member_id), None)
        self._lost[peer.role, peer.member_id] = Lost(peer, entry.heard_s, seen_s + LOST_S)
        if len(self._lost) > LOST_MAX:
            del self._lost[next(iter(self._lost))]

    def lost(self, now_s: float) -> list[Lost]:
        """Return who went without a goodbye and was not forgotten, in order of role and id."""
        for name, lost in list(self._lost.items()):
            if lost.forgotten_s <= now_s:
                del self._lost[name]
        return sorted(self._lost.values(), key=lambda each: _place(each.peer))

    def forget_lost(self, member_id: str) -> bool:
        """Speak no more of a lost member; returns whether there was one."""
        names = [name for name in self._lost if name[1] == member_id]
        for name in names:
            del self._lost[name]
        return bool(names)

    def saw_load(self, start_id: str, load: Load, now_s: float) -> None:
        """Take in a load message; one of a member whose presence was not heard is dropped."""
        entry = self._entries.get(start_id)
        if entry is not None:
            entry.load = dict(load)
            entry.heard_s = entry.load_heard_s = now_s

    def refused(self, start_id: str, now_s: float) -> None:
        """A connection to this member was refused or lost: leave it out for DEMOTED_S."""
        entry = self._entries.get(start_id)
        if entry is not None:
            entry.demoted_until_s = now_s + DEMOTED_S
            self.version += 1

    def forget_unconfirmed(self, now_s: float) -> None:
        """Drop members that went while the link was down: not heard of in the grace after it."""
        if not self._link_up or now_s < self._judged_from_s:
            return
        for start_id, entry in list(self._entries.items()):
            if not entry.confirmed and not self._is_heard(entry, now_s):
                self.saw_gone(start_id)

    def live(self, role: str, now_s: float) -> list[Peer]:
        """Return a role's members that are live and ready, in order of id; one start of each id."""
        return [
            entry.peer
            for entry in self._latest(role)
            if entry.peer.state == "ready" and self.is_live(entry, now_s)
        ]

    def __contains__(self, start_id: object) -> bool:
        return start_id in self._entries

    def load(self, start_id: str) -> Load:
        """Return a member's last load; empty when none was heard."""
        entry = self._entries.get(start_id)
        return entry.load if entry is not None else {}

    def entries(self, role: str | None = None) -> list[Entry]:
        """Return the latest start of each member, of one role or of all, whatever its state."""
        roles = ROLES if role is None else (role,)
        return [entry for each in roles for entry in self._latest(each)]

    def starts(self, role: str, member_id: str) -> list[Entry]:
        """Return every start of one member, whatever its state."""
        named = self._entries.values()
        return [e for e in named if (e.peer.role, e.peer.member_id) == (role, member_id)]

    def is_live(self, entry: Entry, now_s: float) -> bool:
        """Judge one member: heard of lately, and not demoted."""
        if entry.demoted_until_s > now_s:
            return False
        if not self._link_up or now_s < self._judged_from_s or self._was_asleep(now_s):
            return True
        if entry.peer.role not in self._followed:
            return entry.confirmed
        return self._is_heard(entry, now_s)

    def _was_asleep(self, now_s: float) -> bool:
        return self._ticked_s is not None and now_s - self._ticked_s > ASLEEP_S

    def _is_heard(self, entry: Entry, now_s: float) -> bool:
        return now_s - entry.heard_s <= LIVE_S

    def _latest(self, role: str) -> list[Entry]:
        latest: dict[str, Entry] = {}
        for entry in self._entries.values():
            peer = entry.peer
            if peer.role != role:
                continue
            other = latest.get(peer.member_id)
            if other is None or _age(other.peer) < _age(peer):
                latest[peer.member_id] = entry
        return [latest[member_id] for member_id in sorted(latest)]


def _place(peer: Peer) -> tuple[int, str]:
    return ROLES.index(peer.role), peer.member_id


def _age(peer: Peer) -> tuple[float, str]:
    return peer.started_s, peer.start_id
