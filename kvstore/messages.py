"""What clients and store nodes say to each other. Pure.

Blocks are named by spans: a segment's key, chain indices, and the full keys, since a segment key
and an index are ambiguous once two chains part inside a segment. One call is about one chain, so
answers name blocks by chain index, as half-open ranges.

    put             put_begin ─> granted places  [TCP: the client writes into the loan]
                    put_commit ─> stored
    get, same host  get_begin ─> lease, places  [the client reads, checks]  get_end ─> held?
    get, TCP        get_write ─> the node has written into the client's loan
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvass.common.errors import Invalid
from kvass.common.keys import KEY_BYTES, SEGMENT_BLOCKS, Chain, segments
from kvass.common.transport.route import Way
from kvass.common.transport.seam import EndpointCard, Loan
from kvass.common.wire import Done, Message, Range, Request, Seconds

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * SEGMENT_BLOCKS)]
Name = Annotated[str, Meta(max_length=256)]  # of an owner, tenant or writer
PutId = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Ranges = tuple[Range, ...]

# 4,096 spans are 131,072 blocks, 2 M tokens: sixteen of the longest prompts foreseen, 4 MiB of
# keys.
SPANS_MAX = 4_096
BLOCKS_MAX = 1_024  # moved by one call; of the default model 195 MB


class Span(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive blocks of one chain inside one segment; `keys` are concatenated, `parent` is the
    first one's."""

    segment_key: Key
    first: Count
    parent: Key
    keys: Keys

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    def named(self) -> Iterator[tuple[int, bytes]]:
        """Yield (chain index, key) in order; raises Invalid for a span that cannot be one."""
        count, rest = divmod(len(self.keys), KEY_BYTES)
        if rest or self.first % SEGMENT_BLOCKS + count > SEGMENT_BLOCKS:
            raise Invalid(
                f"span: {len(self.keys)} bytes of keys from block {self.first} on; expected whole "
                f"keys of {KEY_BYTES} bytes inside one segment of {SEGMENT_BLOCKS} blocks"
            )
        for i in range(count):
            yield self.first + i, self.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]


Spans = Annotated[tuple[Span, ...], Meta(max_length=SPANS_MAX)]


def spans_of(chain: Chain, ranges: Iterable[Range]) -> list[Span]:
    """Name ranges of a chain's blocks, cut at segment boundaries."""
    return [
        Span(chain.segment_key(low), low, chain.parent(low), b"".join(chain.keys[low:high]))
        for first, stop in ranges
        for low, high in segments(first, stop)
        if first < stop
    ]


def named(spans: Sequence[Span]) -> dict[int, bytes]:
    """Return the keys of spans by chain index; raises Invalid when an index comes twice."""
    keys = {index: key for span in spans for index, key in span.named()}
    if len(keys) != sum(len(span) for span in spans):
        raise Invalid("spans: a chain index comes twice")
    return keys


class LoanCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A landing buffer that the sender of this message lends to its receiver."""

    tag: bytes
    address: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    size: Count
    card: EndpointCard


def card_of(loan: Loan) -> LoanCard:
    """Return what a peer needs to write into a loan."""
    return LoanCard(tag=loan.tag, address=loan.address, size=loan.size, card=loan.card)


class Attached(Message, frozen=True, tag="attached"):
    """The node's card, and the way by which it takes this client's puts."""

    card: EndpointCard
    put_way: Way


class Attach(Request[Attached], frozen=True, tag="attach"):
    """Exchange cards; needed once a connection before blocks are moved."""

    card: EndpointCard


class Blocks(Message, frozen=True, tag="blocks"):
    """Ranges of the asked blocks: those that are readable (or, of `pin`, pinned)."""

    visible: Ranges


class Lookup(Request[Blocks], frozen=True, tag="lookup"):
    """Which of these blocks are readable? Protects nothing."""

    spans: Spans


class Claimed(Message, frozen=True, tag="claimed"):
    """`taken`: somebody else computes or writes these now."""

    granted: Ranges
    visible: Ranges
    taken: Ranges


class Claim(Request[Claimed], frozen=True, tag="claim"):
    """Say that `owner` computes these blocks; again, to renew."""

    owner: Name
    spans: Spans


class ReleaseClaims(Request[Done], frozen=True, tag="release_claims"):
    """End all claims of an owner."""

    owner: Name


Until = Literal["visible", "settled"]


class Waited(Message, frozen=True, tag="waited"):
    """`unclaimed`: nobody has, computes or writes these. Both empty: the deadline has passed."""

    visible: Ranges
    unclaimed: Ranges


class Wait(Request[Waited], frozen=True, tag="wait"):
    """Answer as soon as one of these blocks is visible, or (until settled) unclaimed."""

    spans: Spans
    until: Until
    deadline_s: Seconds


class PutPlaces(Message, frozen=True, tag="put_places"):
    """What became of each block; `loan` (TCP) has room for this writer's share of each granted
    block, in ascending order of index."""

    granted: Ranges
    visible: Ranges
    busy: Ranges
    full: Ranges
    loan: LoanCard | None = None


class PutBegin(Request[PutPlaces], frozen=True, tag="put_begin"):
    """Ask for places. `groups`: the half-open range of head groups that this writer brings.

    Asking again with the same `put_id` changes nothing. What is not committed within `deadline_s`
    of receipt is given up.
    """

    put_id: PutId
    spans: Spans
    namespace: Key
    tenant: Name
    writer: Name
    token_count: Annotated[int, Meta(ge=1, le=1 << 16)]
    block_size: Annotated[int, Meta(ge=1, le=1 << 32)]
    head_groups: Annotated[int, Meta(ge=1, le=1_024)]
    groups: Range
    deadline_s: Seconds
    hold_owner: Name = ""


class PutStored(Message, frozen=True, tag="put_stored"):
    """`stored`: in place and right. `corrupt`: other bytes arrived than were announced. The rest is
    gone: the put was over, or the transfer failed."""

    stored: Ranges
    corrupt: Ranges


class PutCommit(Request[PutStored], frozen=True, tag="put_commit"):
    """The blocks' bytes are at `addresses` (same host; where the writer's first group starts) or in
    the loan (TCP, where `addresses` is empty). `checksums`: xxh3-64, one a head group, block by
    block.
    """

    put_id: PutId
    keys: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=BLOCKS_MAX)]
    indices: tuple[Count, ...]
    addresses: tuple[int, ...]
    checksums: tuple[int, ...]
    deadline_s: Seconds


class PutAbort(Request[Done], frozen=True, tag="put_abort"):
    """Give a put up. `started`: bytes may be on their way into the loan."""

    put_id: PutId
    started: bool


class Places(Message, frozen=True, tag="places"):
    """Blocks that are here: chain indices, addresses of their slots in the node (same host), and
    checksums of the asked head groups, block by block. The lease lasts `lease_s` from now."""

    lease_id: str
    lease_s: float
    indices: tuple[int, ...]
    addresses: tuple[int, ...]
    checksums: tuple[int, ...]


class GetBegin(Request[Places], frozen=True, tag="get_begin"):
    """Lease these blocks, for head groups `groups`; blocks of another size are not here."""

    spans: Spans
    block_size: Count
    head_groups: Annotated[int, Meta(ge=1, le=1_024)]
    groups: Range


class GetWrite(Request[Places], frozen=True, tag="get_write"):
    """Write these blocks' head groups into the loan, those that are here, in the answer's order."""

    spans: Spans
    block_size: Count
    head_groups: Annotated[int, Meta(ge=1, le=1_024)]
    groups: Range
    loan: LoanCard
    deadline_s: Seconds


class Held(Message, frozen=True, tag="held"):
    """Whether a lease is (was, throughout) held. One from before the node's start is not."""

    held: bool


class GetEnd(Request[Held], frozen=True, tag="get_end"):
    """End a lease; `corrupt` names blocks whose bytes did not match, for the node to look at."""

    lease_id: str
    corrupt: Annotated[tuple[Key, ...], Meta(max_length=BLOCKS_MAX)] = ()


class GetRenew(Request[Held], frozen=True, tag="get_renew"):
    """Prolong a lease."""

    lease_id: str


class ReleaseHold(Request[Done], frozen=True, tag="release_hold"):
    """The job `owner` needs its blocks no longer."""

    owner: Name


class Pin(Request[Blocks], frozen=True, tag="pin"):
    """Keep blocks from eviction; answered by those that are pinned."""

    owner: Name
    spans: Spans
    duration_s: Seconds


class Unpin(Request[Done], frozen=True, tag="unpin"):
    """End an owner's pins."""

    owner: Name


class Dropped(Message, frozen=True, tag="dropped"):
    """How many blocks were erased."""

    blocks: int


class Drop(Request[Dropped], frozen=True, tag="drop"):
    """Erase the blocks that match every criterion that is given; at least one must be."""

    namespace: bytes | None = None
    tenant: str | None = None
    writer: str | None = None
    keys: tuple[Key, ...] | None = None


class StatsReply(Message, frozen=True, tag="stats_reply"):
    """Counts by name; see `Index.counts` and `Node.counts`."""

    counts: dict[str, int]


class Stats(Request[StatsReply], frozen=True, tag="stats"):
    """Ask for the node's counts."""


class Drain(Request[Done], frozen=True, tag="drain"):
    """Take no more puts and claims; go on answering reads."""


STORE_REPLIES: tuple[type[Message], ...] = (
    Attached,
    Blocks,
    Claimed,
    Waited,
    PutPlaces,
    PutStored,
    Places,
    Held,
    Dropped,
    StatsReply,
    Done,
)
