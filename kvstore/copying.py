"""What store nodes, and who repairs them, say to each other of copies. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvass.common.wire import Key, Message, Name, Ranges, Request
from kvass.kvstore.spans import Index, Spans

BLOCKS_MAX = 1_024  # moved by one call; of the default model 195 MB
GROUPS_MAX = 1_024  # head groups of a block

TokenCount = Annotated[int, Meta(ge=1, le=1 << 16)]  # of a block
BlockSize = Annotated[int, Meta(ge=1, le=1 << 32)]  # bytes
HeadGroups = Annotated[int, Meta(ge=1, le=GROUPS_MAX)]


class Shape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a node must know of a block, besides its name and bytes, to keep a copy of it."""

    index: Index
    namespace: Key
    tenant: Name
    writer: Name
    token_count: TokenCount
    block_size: BlockSize
    head_groups: HeadGroups


class Described(Message, frozen=True, tag="described"):
    """Those of the asked blocks that are here."""

    shapes: Annotated[tuple[Shape, ...], Meta(max_length=BLOCKS_MAX)]


class Describe(Request[Described], frozen=True, tag="describe"):
    """What are these blocks? A node asks before it takes a copy."""

    spans: Spans


class Filling(Message, frozen=True, tag="filling"):
    """Which of the blocks, by their places in the request, are not here yet; and of those, which
    shall spare what is here, and find no room."""

    missing: Ranges = ()
    full: Ranges = ()


class Fill(Request[Filling], frozen=True, tag="fill"):
    """Take copies of these blocks, of any chains, from the store node `source`, if you have them
    not; to `spare` what you have, into free room alone; `lasting`: on flash, too. A hint: it is
    answered at once, and what exceeds a bounded queue is dropped."""

    source: Name
    spans: Spans
    spare: bool = False
    lasting: bool = False
