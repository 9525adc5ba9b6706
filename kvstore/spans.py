"""Names of blocks on the wire: spans. Pure.

A span is a segment's key, the chain indices, and the full keys, since a segment key and an index
are ambiguous once two chains part inside a segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from kvass.common.errors import Invalid
from kvass.common.keys import KEY_BYTES, SEGMENT_BLOCKS, segments
from kvass.common.wire import ITEMS_MAX, Key, Range

Keys = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * SEGMENT_BLOCKS)]
Index = Annotated[int, Meta(ge=0, le=ITEMS_MAX)]  # in a chain; of its tokens 16 times as many
# 4,096 spans are 131,072 blocks, 2 M tokens: sixteen of the longest prompts foreseen, 4 MiB of
# keys.
SPANS_MAX = 4_096


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive blocks of one chain inside one segment; `keys` are concatenated, `parent` is the
    first one's."""

    segment_key: Key
    first: Index
    parent: Key
    keys: Keys

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def named(self) -> Iterable[tuple[int, bytes]]:
        """Return (chain index, key) in order; raises Invalid for a span that cannot be one."""
        keys, first, size = self.keys, self.first, len(self.keys)
        count, rest = divmod(size, KEY_BYTES)
        if rest or first % SEGMENT_BLOCKS + count > SEGMENT_BLOCKS:
            raise Invalid(
                f"span: {size} bytes of keys from block {first} on; expected whole "
                f"keys of {KEY_BYTES} bytes inside one segment of {SEGMENT_BLOCKS} blocks"
            )
        each = [keys[at : at + KEY_BYTES] for at in range(0, size, KEY_BYTES)]
        return zip(range(first, first + count), each, strict=True)


Spans = Annotated[tuple[Span, ...], Meta(max_length=SPANS_MAX)]


class Named(Protocol):
    """Blocks of one chain by index: a whole `common.keys.Chain`, or a piece of one."""

    def segment_key(self, index: int) -> bytes: ...

    def parent(self, index: int) -> bytes: ...

    def keys_of(self, first: int, stop: int) -> bytes:
        """Return the keys of blocks [first, stop), one after the other."""

    def key(self, index: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """The blocks of one span, for a node that knows no more of their chain."""

    span: Span

    def segment_key(self, index: int) -> bytes:
        return self.span.segment_key

    def parent(self, index: int) -> bytes:
        return self.key(index - 1) if index > self.span.first else self.span.parent

    def keys_of(self, first: int, stop: int) -> bytes:
        begin = self.span.first
        return self.span.keys[(first - begin) * KEY_BYTES : (stop - begin) * KEY_BYTES]

    def key(self, index: int) -> bytes:
        return self.keys_of(index, index + 1)


def spans_of(chain: Named, ranges: Iterable[Range]) -> list[Span]:
    """Name ranges of a chain's blocks, cut at segment boundaries."""
    return [
        Span(
            chain.segment_key(low),
            low,
            chain.parent(low),
            chain.keys_of(low, high),
        )
        for first, stop in ranges
        for low, high in segments(first, stop)
        if first < stop
    ]


def named(spans: Sequence[Span]) -> dict[int, bytes]:
    """Return the keys of spans by chain index; raises Invalid when an index comes twice."""
    keys: dict[int, bytes] = {}
    for span in spans:
        keys.update(span.named())
    if len(keys) != sum(len(span) for span in spans):
        raise Invalid("spans: a chain index comes twice")
    return keys
