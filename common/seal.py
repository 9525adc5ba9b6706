"""What members say on the bus, signed with the cluster's secret, and what they hear, checked.

    payload   msgpack of [schema version, MAC, msgpack of [number, body]]

The MAC covers the topic, which names the sender and its start (a command's: who shall obey), so a
message holds for one topic only. The number grows with each message of a start: what is said again
by somebody who recorded it is known. Commands, which come from anybody on one topic, carry what
tells one from its copy; see `Orders`. It hides nothing, and it refuses to know the broker.
"""

from __future__ import annotations

import uuid
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from kvass.common import wire
from kvass.common.errors import Invalid, Unauthorized
from kvass.common.secret import Secret

SCHEMA_VERSION = 2
PAYLOAD_BYTES_MAX = 64 << 10  # a presence is under 2 KB, a load under 1 KB
TOPICS_MAX = 16_384  # whose last numbers are kept: presence and load of a thousand members, 8 times
COMMAND_S = 60.0  # what clocks may differ by, and a broker take
COMMANDS_MAX = 1_024  # within twice that; operators send a handful

_PURPOSE = b"kvass bus 2"
T = TypeVar("T")


class Opened(NamedTuple, Generic[T]):
    """A message that a member of this cluster has signed."""

    number: int
    body: T


class Seal:
    """Signs and checks one member's messages. Mutable fields: `_number` (of the last one signed)
    and `_heard` (the last number of each topic, the latest heard last)."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._number = 0
        self._heard: dict[str, int] = {}

    def close(self, topic: str, body: object) -> bytes:
        """Return the payload of a message on a topic; raises Invalid for one that is too large."""
        self._number += 1
        packed = wire.pack([self._number, body])
        mac = self._secret.mac(_PURPOSE, topic.encode(), packed)
        payload = wire.pack([SCHEMA_VERSION, mac, packed])
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise Invalid(f"a payload of {len(payload)} bytes is over {PAYLOAD_BYTES_MAX}")
        return payload

    def open(self, topic: str, payload: bytes, kind: type[T]) -> Opened[T]:
        """Return what a payload says. Raises Invalid for another form, version, type or size, and
        Unauthorized for what no member of this cluster has said on this topic."""
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise Invalid(f"a payload of {len(payload)} bytes is over {PAYLOAD_BYTES_MAX}")
        version, mac, packed = _parts(wire.unpack(payload))
        if version != SCHEMA_VERSION:
            raise Invalid(f"schema version {version!r}; this process speaks {SCHEMA_VERSION}")
        if not isinstance(mac, bytes) or not isinstance(packed, bytes):
            raise Invalid("a payload must be [schema version, MAC, message]")
        if not self._secret.signed(mac, _PURPOSE, topic.encode(), packed):
            raise Unauthorized("it is not signed with this cluster's secret")
        said = wire.unpack(packed)
        if not (isinstance(said, list) and len(said) == 2 and type(said[0]) is int):
            raise Invalid("a message must be [number, body]")
        try:
            return Opened(said[0], msgspec.convert(said[1], kind, builtin_types=(bytes,)))
        except msgspec.ValidationError as error:
            raise Invalid(f"{getattr(kind, '__name__', kind)}: {error}") from None

    def step(self, topic: str, number: int) -> int:
        """Return how much later a message is than the last one on its topic: 0 for that one again,
        less for one from before it."""
        last = self._heard.pop(topic, 0)
        self._heard[topic] = max(last, number)
        if len(self._heard) > TOPICS_MAX:
            del self._heard[next(iter(self._heard))]
        return number - last


def _parts(envelope: Any) -> tuple[object, object, object]:
    if not (isinstance(envelope, list) and len(envelope) in (2, 3)):
        raise Invalid("a payload must be [schema version, MAC, message]")
    return envelope[0], envelope[1], envelope[-1]


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a member is told to do: `forget`, `drain`. `to` is the start that shall obey; `issued_s`
    is the teller's wall clock."""

    verb: wire.Id
    to: wire.Id
    command_id: wire.Id
    issued_s: wire.Finite
    arguments: wire.Facts = {}


def new_command(verb: str, to: str, now_s: float, arguments: dict[str, Any]) -> Command:
    """Return a command to one start of a member, which that obeys once, and soon or never."""
    return Command(verb, to, uuid.uuid4().hex, now_s, arguments)


class Orders:
    """Which commands were obeyed lately, so that none is twice. Mutable field: `_obeyed`, ids in
    order, with the time when they may be forgotten."""

    def __init__(self, own_start_id: str) -> None:
        self._own_start_id = own_start_id
        self._obeyed: dict[str, float] = {}

    def check(self, command: Command, now_s: float) -> None:
        """Note a command that shall be obeyed; raises Invalid for any other."""
        if command.to != self._own_start_id:
            raise Invalid(f"command {command.verb!r} is for another start of this member")
        if abs(now_s - command.issued_s) > COMMAND_S:
            raise Invalid(
                f"command {command.verb!r} was given {now_s - command.issued_s:.0f} s ago by the "
                f"clock here; over {COMMAND_S:g} s it is old, or the hosts' clocks differ"
            )
        while self._obeyed and next(iter(self._obeyed.values())) < now_s:
            del self._obeyed[next(iter(self._obeyed))]
        if command.command_id in self._obeyed:
            raise Invalid(f"command {command.verb!r} was obeyed already")
        if len(self._obeyed) >= COMMANDS_MAX:
            raise Invalid(f"{COMMANDS_MAX} commands came within {2 * COMMAND_S:g} s")
        self._obeyed[command.command_id] = now_s + 2 * COMMAND_S
