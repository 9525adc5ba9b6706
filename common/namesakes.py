"""Two processes under one member id: only one may serve.

    the first one lives        ─> who comes later is refused, in words
    the first one had stopped  ─> who comes later serves; the first one leaves when it wakes

A member is a host and a start, never an id alone. But others go by the id: of two workers or
gateways of one name, one is seen by nobody; and blocks are where a store node's id says, so that
half of what one of two has would not be found. Who is later is told by the starts' times and ids,
which both compare alike, so that never both leave.
"""

from __future__ import annotations

import anyio

from kvass.common.clock import Clock, RealClock
from kvass.common.errors import Invalid
from kvass.common.member import JOIN_CHECK_S, LOAD_INTERVAL_S, Member
from kvass.common.membership import LIVE_S, Entry, Peer

LOOK_S = LOAD_INTERVAL_S


async def refuse(member: Member) -> None:
    """Raise Invalid if another start of this member's id is there and lives; call it before the
    member says that it is ready. A presence that nobody stands behind any more refuses nobody."""
    with anyio.move_on_after(JOIN_CHECK_S):
        while others := await _others(member):
            for other in others:
                if other.load_heard_s is not None:
                    raise Invalid(
                        f"{_name(other.peer)} runs already: {_where(other.peer, member)}; give "
                        "this one another --id, or stop that one"
                    )
            await anyio.sleep(LOOK_S / 5)


async def watch(member: Member, clock: Clock | None = None) -> None:
    """Raise Invalid as soon as a later start of this member's id is ready, and lives."""
    clock = clock or RealClock()
    while True:
        me = [each.peer for each in _starts(member) if _is_own(each, member)]
        for other in await _others(member):
            heard_s = other.load_heard_s
            lives = heard_s is not None and clock.now_s() - heard_s <= LIVE_S
            if lives and me and _age(other.peer) > _age(me[0]):
                raise Invalid(
                    f"a later {_name(other.peer)} has taken this one's place: "
                    f"{_where(other.peer, member)}; this one leaves. If both are wanted, give one "
                    "another --id"
                )
        await anyio.sleep(LOOK_S)


def _starts(member: Member) -> list[Entry]:
    return member.table.starts(member.hello.role, member.hello.member_id)


def _is_own(entry: Entry, member: Member) -> bool:
    return entry.peer.start_id == member.hello.start_id


async def _others(member: Member) -> list[Entry]:
    """Return the other starts of this id that have come to serve, and listen to them."""
    others = [entry for entry in _starts(member) if not _is_own(entry, member)]
    serving = [entry for entry in others if entry.peer.state != "joining"]
    for entry in serving:
        await member.hear(entry.peer)
    return serving


def _age(peer: Peer) -> tuple[float, str]:
    return peer.started_s, peer.start_id


def _name(peer: Peer) -> str:
    return f"{peer.role} {peer.member_id}"


def _where(peer: Peer, member: Member) -> str:
    host = "this host" if peer.host_id == member.hello.host_id else "another host"
    return f"pid {peer.pid} on {host}, at {peer.address or 'no address yet'}"
