"""Who is at each end of a connection, said first by both.

Members that disagree on the cluster are refused with the field named.
"""

from __future__ import annotations

import anyio
import msgspec

from kvass.common import config, errors, wire
from kvass.common.rpc.frames import HELLO, Frames

HELLO_TIMEOUT_S = 5.0


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is at one end of a connection. `cluster` is empty for members that serve any model."""

    role: str
    member_id: str
    host_id: str
    start_id: str
    pid: int
    cluster: dict[str, str | int]
    protocol: int = wire.PROTOCOL_VERSION


async def shake_hands(frames: Frames, ours: Hello, *, answer_first: bool) -> Hello:
    """Exchange Hellos; raises Incompatible naming the first field that differs."""
    with anyio.fail_after(HELLO_TIMEOUT_S):
        if answer_first:
            await frames.send(HELLO, 0, ours)
        kind, _, body = await frames.receive()
        if not answer_first:
            await frames.send(HELLO, 0, ours)
    if kind != HELLO:
        raise errors.Invalid(f"the first frame must be a hello; got kind {kind}")
    try:
        theirs = msgspec.convert(body, Hello)
    except msgspec.ValidationError as error:
        raise errors.Invalid(f"hello: {error}") from None
    who = f"{theirs.role} {theirs.member_id}"
    if theirs.protocol != ours.protocol:
        raise errors.Incompatible("protocol", ours.protocol, theirs.protocol, who=who)
    if ours.cluster and theirs.cluster:
        name = config.difference(ours.cluster, theirs.cluster)
        if name is not None:
            raise errors.Incompatible(
                name, ours.cluster.get(name), theirs.cluster.get(name), who=who
            )
    return theirs
