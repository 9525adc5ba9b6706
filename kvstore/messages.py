"""What clients and store nodes say to each other. Pure.

Blocks are named by spans (`spans.py`). One call is about one chain, so answers name blocks by chain
index, as half-open ranges.

    put, same host  put_read  ─> [the node reads, the client sums, put_sums]  ─> stored
    put, TCP        put_begin ─> granted places, a loan  [the client writes]  put_commit ─> stored
    get, same host  get_begin ─> lease, places  [the client reads, checks]  get_end ─> held?
    get, TCP        get_write ─> the node has written into the client's loan
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvass.common.transport.route import Way
from kvass.common.transport.seam import EndpointCard, Loan
from kvass.common.wire import KEYS_MAX as KEYS_MAX
from kvass.common.wire import Done, Key, Message, Name, Natural, Range, Request, Seconds
from kvass.common.wire import Ranges as Ranges
from kvass.kvstore.copying import BLOCKS_MAX as BLOCKS_MAX
from kvass.kvstore.copying import BlockSize, HeadGroups, TokenCount
from kvass.kvstore.copying import Describe as Describe
from kvass.kvstore.copying import Described as Described
from kvass.kvstore.copying import Fill as Fill
from kvass.kvstore.copying import Filling as Filling
from kvass.kvstore.copying import Shape as Shape
from kvass.kvstore.erasure import ErasureId
from kvass.kvstore.erasure import Exchange as Exchange
from kvass.kvstore.erasure import Exchanged as Exchanged
from kvass.kvstore.spans import SPANS_MAX as SPANS_MAX
from kvass.kvstore.spans import Index as Index
from kvass.kvstore.spans import Named as Named
from kvass.kvstore.spans import Piece as Piece
from kvass.kvstore.spans import Span as Span
from kvass.kvstore.spans import Spans as Spans
from kvass.kvstore.spans import named as named
from kvass.kvstore.spans import spans_of as spans_of
from kvass.kvstore.words import WORD_BYTES

PutId = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
LeaseId = Annotated[str, Meta(max_length=256)]
Hot = tuple[Key, Annotated[int, Meta(ge=2, le=1_024)]]  # segment key, copies

WHY_MAX = 512  # characters of a reason
TENANTS_SHOWN = 32  # by one node, in stats and metrics: the largest ones
CHECKSUMS_MAX = 1 << 16  # of one call: 64 groups of the most blocks

# Bytes are moved within this, or given up: a peer that hangs keeps slots no longer. Our own clients
# ask for less (`transfers.TRANSFER_S`).
MOVE_MAX_S = 60.0
MoveSeconds = Annotated[float, Meta(gt=0, le=MOVE_MAX_S)]

Indices = Annotated[tuple[Index, ...], Meta(max_length=BLOCKS_MAX)]
# Packed (`words.py`): hundreds a message, which are never looked at one by one.
Addresses = Annotated[bytes, Meta(max_length=WORD_BYTES * BLOCKS_MAX)]
Checksums = Annotated[bytes, Meta(max_length=WORD_BYTES * CHECKSUMS_MAX)]


class LoanCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A landing buffer that the sender of this message lends to its receiver."""

    tag: Annotated[bytes, Meta(max_length=256)]
    address: Natural
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
    """Ranges of the asked blocks: those that are readable (or, of `pin`, pinned). `on_flash`,
    `in_bucket`: of them, those that are only there, which a `stage` brings up.

    `hot` names segments that are read so much that their readers shall spread: over how many of
    the segment's nodes, in order.
    """

    visible: Ranges
    hot: Annotated[tuple[Hot, ...], Meta(max_length=SPANS_MAX)] = ()
    on_flash: Ranges = ()
    in_bucket: Ranges = ()


class Lookup(Request[Blocks], frozen=True, tag="lookup"):
    """Which of these blocks are readable? Protects nothing. `again`: for the same request they were
    looked up before, here or elsewhere, and count as neither hits nor misses."""

    spans: Spans
    again: bool = False


class Stage(Request[Done], frozen=True, tag="stage"):
    """Bring those of these blocks into memory that are only below it: they will be asked for within
    `deadline_s`. A hint: it is answered at once, and what exceeds a part of the memory is not
    brought."""

    spans: Spans
    deadline_s: Seconds


class Claimed(Message, frozen=True, tag="claimed"):
    """`taken`: somebody else computes or writes these now. Of a block in no list the node takes
    nothing new: ask the next one."""

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
    """What became of each block; `loan` has room for this writer's share of each granted block, in
    ascending order of index."""

    granted: Ranges
    visible: Ranges
    busy: Ranges
    full: Ranges
    loan: LoanCard | None = None


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks that a writer wants to put, in chain order. `groups`: the half-open range of head
    groups that it brings. What is not there and checked within `deadline_s` of receipt is given
    up."""

    put_id: PutId
    spans: Spans
    namespace: Key
    tenant: Name
    writer: Name
    token_count: TokenCount
    block_size: BlockSize
    head_groups: HeadGroups
    groups: Range
    deadline_s: MoveSeconds
    hold_owner: Name = ""


class PutDone(Message, frozen=True, tag="put_done"):
    """What became of each block. `stored`: in place and right. `corrupt`: other bytes arrived than
    were announced. `failed`: none arrived, or the put was over. In no list: this node takes nothing
    new."""

    stored: Ranges
    corrupt: Ranges
    failed: Ranges
    visible: Ranges
    busy: Ranges
    full: Ranges


class PutSums(Message, frozen=True, tag="put_sums"):
    """What the node must have found. `checksums`: xxh3-64, one a head group, block by block, of all
    that was offered."""

    checksums: Checksums


class PutRead(Request[PutDone], frozen=True, tag="put_read"):
    """Offer blocks that the node, on the same host, reads; the writer sums them meanwhile.
    `addresses`: where the writer's first group of each block starts in its memory, in the order of
    the offer's spans."""

    followed_by = PutSums

    offer: Offer
    addresses: Addresses


class PutBegin(Request[PutPlaces], frozen=True, tag="put_begin"):
    """Ask for places in a loan, over TCP. Asking again with the same `put_id` changes nothing."""

    offer: Offer


class PutStored(Message, frozen=True, tag="put_stored"):
    """`stored`, `corrupt`: as in `PutDone`. The rest is gone."""

    stored: Ranges
    corrupt: Ranges


class PutCommit(Request[PutStored], frozen=True, tag="put_commit"):
    """What the node finds in the loan. `checksums`: xxh3-64, one a head group, block by block."""

    put_id: PutId
    keys: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=BLOCKS_MAX)]
    checksums: Checksums
    deadline_s: MoveSeconds


class PutAbort(Request[Done], frozen=True, tag="put_abort"):
    """Give a put up. `started`: bytes may be on their way into the loan."""

    put_id: PutId
    started: bool


class Places(Message, frozen=True, tag="places"):
    """Blocks that are here: chain indices, addresses of their slots in the node (same host), and
    checksums of the asked head groups, block by block. The lease lasts `lease_s` from now."""

    lease_id: LeaseId
    lease_s: Annotated[float, Meta(ge=0, le=86_400)]
    indices: Indices
    addresses: Addresses
    checksums: Checksums


class GetBegin(Request[Places], frozen=True, tag="get_begin"):
    """Lease these blocks, for head groups `groups`; blocks of another size are not here."""

    spans: Spans
    block_size: Count
    head_groups: HeadGroups
    groups: Range


class GetWrite(Request[Places], frozen=True, tag="get_write"):
    """Write these blocks' head groups into the loan, those that are here, in the answer's order."""

    spans: Spans
    block_size: Count
    head_groups: HeadGroups
    groups: Range
    loan: LoanCard
    deadline_s: MoveSeconds


class Held(Message, frozen=True, tag="held"):
    """Whether a lease is (was, throughout) held. One from before the node's start is not."""

    held: bool


class GetEnd(Request[Held], frozen=True, tag="get_end"):
    """End a lease; `corrupt` names blocks whose bytes did not match, for the node to look at."""

    lease_id: LeaseId
    corrupt: Annotated[tuple[Key, ...], Meta(max_length=BLOCKS_MAX)] = ()


class GetRenew(Request[Held], frozen=True, tag="get_renew"):
    """Prolong a lease."""

    lease_id: LeaseId


class ReleaseHold(Request[Done], frozen=True, tag="release_hold"):
    """The job `owner` needs these of its blocks no longer; without spans none of them, for good."""

    owner: Name
    spans: Spans = ()


class Pin(Request[Blocks], frozen=True, tag="pin"):
    """Keep blocks from eviction; answered by those that are pinned."""

    owner: Name
    spans: Spans
    duration_s: Seconds


class Unpin(Request[Done], frozen=True, tag="unpin"):
    """End an owner's pins."""

    owner: Name


class Dropped(Message, frozen=True, tag="dropped"):
    """How many blocks were erased. `ends` (of `bar`): keys after which other nodes may have more
    that was computed upon them. `unerased`: why some may still be on a disk, if so."""

    blocks: Natural
    ends: Annotated[tuple[Key, ...], Meta(max_length=KEYS_MAX)] = ()
    unerased: Annotated[str, Meta(max_length=WHY_MAX)] = ""


class Drop(Request[Dropped], frozen=True, tag="drop"):
    """Erase the blocks that match every criterion that is given; at least one must be. All nodes
    are told the same `id`; without one a node makes one up."""

    namespace: Key | None = None
    tenant: Name | None = None
    writer: Name | None = None
    keys: Annotated[tuple[Key, ...], Meta(max_length=KEYS_MAX)] | None = None
    id: ErasureId | None = None


class Bar(Request[Dropped], frozen=True, tag="bar"):
    """The writer computes wrong: take nothing of his for a while, and erase what he wrote, with
    what was computed upon it or upon the blocks `after`."""

    writer: Name
    after: Annotated[tuple[Key, ...], Meta(max_length=KEYS_MAX)] = ()
    id: ErasureId | None = None


class TenantUse(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one tenant has of a node's slab; `quota_bytes` 0: as much as there is."""

    tenant: Name
    size_bytes: Natural
    blocks: Natural
    quota_bytes: Natural


class StatsReply(Message, frozen=True, tag="stats_reply"):
    """Counts by name; see `Index.counts` and `Node.counts`. `tenants`: those that have the most."""

    counts: Annotated[dict[Name, Natural], Meta(max_length=1_024)]
    tenants: Annotated[tuple[TenantUse, ...], Meta(max_length=TENANTS_SHOWN)] = ()


class Stats(Request[StatsReply], frozen=True, tag="stats"):
    """Ask for the node's counts."""


DrainHow = Literal["begin", "force", "cancel"]


class Drain(Request[Done], frozen=True, tag="drain"):
    """Take no more puts and claims, go on answering reads, and hand over what others lack; with
    `force`, leave with what they do not take. With `cancel`, go on as if nothing had been."""

    how: DrainHow = "begin"


STORE_REPLIES: tuple[type[Message], ...] = (
    Attached,
    Blocks,
    Claimed,
    Waited,
    PutPlaces,
    PutDone,
    PutStored,
    Places,
    Held,
    Dropped,
    StatsReply,
    Described,
    Filling,
    Exchanged,
    Done,
)
