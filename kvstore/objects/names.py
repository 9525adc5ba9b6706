"""What an object is called. Pure.

    kvass1-<cluster>/<tenant>/<namespace>/<writer>/<segment>/<blocks>[/<blocks>]

Base64 (the URL's alphabet) of: 16 bytes of a hash of the tenant, the namespace, 16 of the writer's
hash, the key of the segment, and 8 bytes of the key of the first block's parent and of each block's
own, in order. What is erased together is under one prefix as far as that goes; tenants come first,
for they go most often. It takes at most 610 bytes: S3 allows 1,024, and file systems that servers
keep objects in 255 for each part.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import takewhile

import numpy as np

from kvass.common.block import BlockHeader
from kvass.common.keys import KEY_BYTES, SEGMENT_BLOCKS
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.flash.table import hashes_of

FORMAT = "kvass1"
TAG_BYTES = 16
BLOCKS_MAX = SEGMENT_BLOCKS
PART_IDS = 17  # in one part of the name: 182 characters


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What a name says. `tenant` and `writer` are tags (`tag_of`); `parent` and `blocks` are as in
    the shelf's table: each block is computed upon the one before it."""

    tenant: bytes
    namespace: bytes
    writer: bytes
    segment_key: bytes
    parent: int
    blocks: tuple[int, ...]

    def text(self, root: str) -> str:
        """Return the whole name."""
        ids = np.array([self.parent, *self.blocks], dtype="<u8").tobytes()
        step = 8 * PART_IDS
        parts = [self.tenant, self.namespace, self.writer, self.segment_key]
        parts += [ids[at : at + step] for at in range(0, len(ids), step)]
        return "/".join([root, *map(_text, parts)])

    def matches(self, order: DropOrder) -> bool:
        """Whether a drop erases it: of a drop by keys, whether it holds one of them."""
        return (
            order.namespace in (None, self.namespace)
            and (order.tenant is None or tag_of(order.tenant) == self.tenant)
            and (order.writer is None or tag_of(order.writer) == self.writer)
            and (order.keys is None or not _ids_of(order.keys).isdisjoint(self.blocks))
        )


def root_of(cluster: str) -> str:
    """Return what all names of a cluster begin with."""
    return f"{FORMAT}-{cluster}"


def name_of(headers: Sequence[BlockHeader]) -> ObjectName:
    """Name an object of these blocks, a piece of a chain."""
    assert 0 < len(headers) <= BLOCKS_MAX
    first = headers[0]
    parent, *blocks = hashes_of([first.parent, *(header.key for header in headers)]).tolist()
    origin = tag_of(first.tenant), first.namespace, tag_of(first.writer)
    return ObjectName(*origin, first.segment_key, parent, tuple(blocks))


def read_name(text: str, root: str) -> ObjectName | None:
    """Return what a name says; None when it is none of ours."""
    if not text.startswith(root + "/"):
        return None
    try:
        parts = [_bytes(part) for part in text[len(root) + 1 :].split("/")]
    except (binascii.Error, ValueError):
        return None
    if not 5 <= len(parts) <= 4 + -(-(1 + BLOCKS_MAX) // PART_IDS):
        return None
    tenant, namespace, writer, segment_key, *ids = parts
    joined = b"".join(ids)
    sizes = (len(tenant), len(namespace), len(writer), len(segment_key))
    if sizes != (TAG_BYTES, KEY_BYTES, TAG_BYTES, KEY_BYTES) or len(joined) % 8 or len(joined) < 16:
        return None
    parent, *blocks = np.frombuffer(joined, dtype="<u8").tolist()
    found = ObjectName(tenant, namespace, writer, segment_key, parent, tuple(blocks))
    # One content has one name: another spelling of it is nobody's.
    is_ours = len(blocks) <= BLOCKS_MAX and min(blocks) > 1 and found.text(root) == text
    return found if is_ours else None


def parts_of(order: DropOrder) -> tuple[str | None, str | None, str | None]:
    """Return what of a name a drop asks for: the tenant, the namespace, the writer."""
    return (
        None if order.tenant is None else _text(tag_of(order.tenant)),
        None if order.namespace is None else _text(order.namespace),
        None if order.writer is None else _text(tag_of(order.writer)),
    )


def is_under(text: str, wanted: tuple[str | None, str | None, str | None]) -> bool:
    """Whether a name has these parts: as `matches` without keys, and faster."""
    parts = text.split("/", 4)[1:4]
    return all(asked in (None, part) for asked, part in zip(wanted, parts, strict=True))


def prefix_of(order: DropOrder, root: str) -> str:
    """Return what the names of all that a drop may erase begin with."""
    parts = takewhile(lambda part: part is not None, parts_of(order))
    return "/".join([root, *(part for part in parts if part is not None)])


@lru_cache(1024)
def tag_of(name: str) -> bytes:
    """Return what stands for a tenant or a writer in a name: of fixed size, whatever is in it."""
    return blake2b(name.encode(), digest_size=TAG_BYTES, person=b"kvass-tag").digest()


@lru_cache(8)
def _ids_of(keys: tuple[bytes, ...]) -> frozenset[int]:
    return frozenset(hashes_of(keys).tolist())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
