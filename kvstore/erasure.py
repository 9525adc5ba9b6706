"""An erasure as an order with a name: how store nodes keep it, and tell it to each other. Pure.

A node erases by an order once, when it first hears of it, everything that it has then; whoever
tells it. So nobody compares clocks of two hosts, and what is written at a node that has heard is
new, and stays. `age_s` counts from when somebody first heard the order, on the clock of who speaks.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from kvass.common.block import BlockHeader
from kvass.common.keys import KEY_BYTES
from kvass.common.wire import KEYS_MAX, Key, Message, Name, Request

ID_BYTES = 16
# Of an operator these are years of work, of a program that deletes tensors perhaps minutes. Kept
# whole they take some megabytes of memory, and the same on a disk.
KEPT_MAX = 1_024
KEPT_KEYS_MAX = KEYS_MAX  # that all kept ones together name: one drop of the largest fits
# Of more than that it is known that they were, so that who missed one can be told so.
PAST_MAX = 16_384

ErasureId = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
ErasureIds = Annotated[tuple[ErasureId, ...], Meta(max_length=KEPT_MAX)]
Age = Annotated[float, Meta(ge=0, le=1e12)]
JoinedIds = Annotated[bytes, Meta(max_length=ID_BYTES * PAST_MAX)]
Joined = Annotated[bytes, Meta(max_length=KEY_BYTES * KEPT_KEYS_MAX)]  # keys, one after the other


@dataclass(frozen=True, slots=True)
class Criteria:
    """Which blocks: those that match all that is given; with nothing given, all."""

    namespace: bytes | None = None
    tenant: str | None = None
    writer: str | None = None
    keys: frozenset[bytes] | None = None

    def __call__(self, header: BlockHeader) -> bool:
        return (
            self.namespace in (None, header.namespace)
            and self.tenant in (None, header.tenant)
            and self.writer in (None, header.writer)
            and (self.keys is None or header.key in self.keys)
        )


class Erasure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`bars`: `writer` may write nothing for a while, and what was computed upon his blocks, or
    upon the blocks `after`, goes too."""

    id: ErasureId
    age_s: Age
    namespace: Key | None = None
    tenant: Name | None = None
    writer: Name | None = None
    keys: Joined | None = None
    bars: bool = False
    after: Joined = b""

    def __post_init__(self) -> None:
        """Refuse what could not be carried out; on the wire that is an Invalid."""
        if self.bars and self.writer is None:
            raise ValueError("a bar names a writer")
        if len(self.keys or b"") % KEY_BYTES or len(self.after) % KEY_BYTES:
            raise ValueError("a half key")

    @property
    def criteria(self) -> Criteria:
        keys = None if self.keys is None else frozenset(split(self.keys))
        return Criteria(self.namespace, self.tenant, self.writer, keys)

    @property
    def key_count(self) -> int:
        """How many keys it names."""
        return (len(self.keys or b"") + len(self.after)) // KEY_BYTES


def split_ids(ids: bytes) -> list[bytes]:
    """Return the ids that were written one after the other."""
    return [ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES)]


def new_id() -> bytes:
    """Return an id that no other erasure has."""
    return secrets.token_bytes(ID_BYTES)


def joined(keys: Sequence[bytes]) -> bytes:
    """Write keys one after the other."""
    return b"".join(keys)


def split(keys: bytes) -> list[bytes]:
    """Return the keys that were written one after the other."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


class Exchanged(Message, frozen=True, tag="exchanged"):
    """`erasures`: those that the caller lacks; `wanted`: those that this node lacks, of which it
    asks to be told. The rest: see `Exchange`."""

    erasures: Annotated[tuple[Erasure, ...], Meta(max_length=KEPT_MAX)] = ()
    wanted: ErasureIds = ()
    past: JoinedIds = b""
    forgotten_s: Age | None = None

    def __post_init__(self) -> None:
        _check_ids(self.past)


class Exchange(Request[Exchanged], frozen=True, tag="exchange"):
    """One store node to another: the erasures `ids` I keep, and these I tell you now; you have
    erased by them when you answer. When nodes meet for the first time (`is_first`) they say which
    they keep no more (`past`), and how young those are of which they don't know even the ids."""

    ids: ErasureIds
    erasures: Annotated[tuple[Erasure, ...], Meta(max_length=KEPT_MAX)] = ()
    is_first: bool = False
    past: JoinedIds = b""
    forgotten_s: Age | None = None

    def __post_init__(self) -> None:
        _check_ids(self.past)


def _check_ids(ids: bytes) -> None:
    if len(ids) % ID_BYTES:
        raise ValueError("a half id")
