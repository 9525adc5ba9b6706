"""Names of blocks: namespaces, keys, chains and segments. Pure; needs no torch.

A block's key is a hash of everything that determined its content, so two processes that derive the
same key hold the same bytes:

    namespace ──> key of block 0 ──> key of block 1 ──> …
                    │ tokens 0…15      │ tokens 16…31
                    └ salt, when block 0 is private

It refuses to know where blocks live and what is in them. Published test vectors are in
`tests/vectors/keys.json`; a process checks some of them before it joins a cluster (`self_check`).
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import NewType

import msgpack

from kvass.common.errors import Incompatible, Invalid

BlockKey = NewType("BlockKey", bytes)
Namespace = NewType("Namespace", bytes)
Salt = NewType("Salt", bytes)

KEY_BYTES = 32
SEGMENT_BLOCKS = 32  # 512 tokens of the default block: the unit of placement on nodes
TOKEN_ID_MAX = 2**32 - 1
PUBLIC = Salt(b"")

Canonical = None | bool | int | str | bytes | Sequence["Canonical"] | Mapping[str, "Canonical"]


def _canonical(value: Canonical) -> object:
    """Order every map by key, so that equal values give equal bytes on every machine."""
    if isinstance(value, Mapping):
        return {key: _canonical(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, float):
        raise Invalid(f"a namespace holds no floats (got {value!r}): write them as strings")
    return value


def namespace_of(identity: Mapping[str, Canonical]) -> Namespace:
    """Fingerprint a model and its numeric format: the root of every hash chain.

    `identity` holds everything that changes a block's bytes (`model/identity.py`). Floats are
    refused, since their text differs between writers; pass `repr(value)`.
    """
    packed: bytes = msgpack.packb(_canonical(identity), use_bin_type=True)
    return Namespace(blake2b(packed, digest_size=KEY_BYTES, person=b"kvass-ns").digest())


def salt_of(secret: bytes, tenant: str, cache_salt: str = "") -> Salt:
    """Derive the salt of a tenant's private blocks (32 bytes); a client's own salt separates more.

    Without a secret, a tenant and a `cache_salt` there is nothing to separate: the salt is empty.
    """
    if not secret and not tenant and not cache_salt:
        return PUBLIC
    packed: bytes = msgpack.packb([tenant, cache_salt])
    return Salt(hmac.new(secret, packed, "sha256").digest())


def block_key(
    parent: bytes, tokens: Sequence[int], *, salt: bytes = b"", extra: bytes = b""
) -> BlockKey:
    """Name one block: BLAKE2b-256 of its parent's key, its token ids (u32 LE) and `extra`.

    `parent` is the namespace for block 0. `salt` is given for the first private block only; every
    later key inherits it through the chain.
    """
    assert len(parent) == KEY_BYTES, len(parent)
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    digest = blake2b(parent, digest_size=KEY_BYTES, key=salt)
    digest.update(packed)
    digest.update(extra)
    return BlockKey(digest.digest())


class Chain:
    """The keys of a growing token sequence, in order: one key for each full block.

    Mutable fields: `keys` and `_rest` (tokens that fill no block yet). Blocks before
    `public_blocks` are shared by all tenants; the block at `public_blocks` is the first one that
    takes `salt`.
    """

    __slots__ = ("_rest", "block_tokens", "keys", "namespace", "public_blocks", "salt")

    def __init__(
        self,
        namespace: Namespace,
        block_tokens: int,
        *,
        salt: Salt = PUBLIC,
        public_blocks: int = 0,
    ) -> None:
        assert block_tokens > 0 and public_blocks >= 0
        self.namespace = namespace
        self.block_tokens = block_tokens
        self.salt = salt
        self.public_blocks = public_blocks
        self.keys: list[BlockKey] = []
        self._rest: list[int] = []

    def extend(self, tokens: Iterable[int]) -> list[BlockKey]:
        """Append tokens; return the keys of the blocks that they completed."""
        self._rest.extend(tokens)
        size = self.block_tokens
        full = len(self._rest) // size
        first = len(self.keys)
        for start in range(0, full * size, size):
            index = len(self.keys)
            salt = self.salt if index == self.public_blocks else b""
            parent = self.keys[-1] if self.keys else self.namespace
            self.keys.append(block_key(parent, self._rest[start : start + size], salt=salt))
        del self._rest[: full * size]
        return self.keys[first:]

    def key(self, index: int) -> BlockKey:
        """Return the key of block `index`."""
        return self.keys[index]

    def keys_of(self, first: int, stop: int) -> bytes:
        """Return the keys of blocks [first, stop), one after the other."""
        assert 0 <= first <= stop <= len(self.keys), (first, stop, len(self.keys))
        return b"".join(self.keys[first:stop])

    def parent(self, index: int) -> bytes:
        """Return the key that block `index` was derived from (the namespace for block 0)."""
        return self.keys[index - 1] if index else self.namespace

    def segment_key(self, index: int) -> BlockKey:
        """Return the key that places block `index`: its segment's first block's."""
        return self.keys[index - index % SEGMENT_BLOCKS]


def segments(first: int, stop: int) -> list[tuple[int, int]]:
    """Cut block indices [first, stop) at segment boundaries, in order."""
    edges = [
        first,
        *range((first // SEGMENT_BLOCKS + 1) * SEGMENT_BLOCKS, stop, SEGMENT_BLOCKS),
        stop,
    ]
    return [(low, high) for low, high in pairwise(edges) if low < high]


def indices_of(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the indices of half-open ranges, in the ranges' order."""
    return [index for low, high in ranges for index in range(low, high)]


def ranges_of(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Join ascending indices into maximal half-open ranges."""
    known = list(indices)
    whole = range(known[0], known[0] + len(known)) if known else range(0)
    if known and known == list(whole):  # as a rule
        return [(whole.start, whole.stop)]
    joined: list[tuple[int, int]] = []
    for index in known:
        if joined and joined[-1][1] == index:
            joined[-1] = (joined[-1][0], index + 1)
        else:
            assert not joined or joined[-1][1] < index, "indices must ascend"
            joined.append((index, index + 1))
    return joined


# From the published vectors: the namespace, and each chain's last key, which depends on all others.
_CHECK_IDENTITY: Mapping[str, Canonical] = {"model": "vector", "kv_dtype": "fp8", "block_tokens": 4}
_CHECK_TOKENS = (0, 1, 2, 3, 49_151, 65_536, 4_294_967_295, 7, 8, 9, 10, 11, 12)
_CHECK_NAMESPACE = "0d462c8593b5dbe39775c3a6a1912bc755a9d71727604c44dab86b8a1ec69e5a"
_CHECK_KEYS = {
    "a public chain": "c9a8b6459dde78e39703f4bc6818901d0aade768b23048c501dd62f70ac7a0f5",
    "a private chain": "84ebf7126f7142e05665d8dd4566b15715aa9406a8da82c59a20269c75c82d3b",
    "a chain private after one block": (
        "4d45cc01dadfcd7f892ca33d4dbdbdd64f482dd3deb24e5fa4d06ca6ec4237ce"
    ),
}


def self_check() -> None:
    """Derive published names; raise Incompatible when this process hashes otherwise.

    A process whose names differ would fill the store with blocks that nobody finds, or find
    others'.
    """
    namespace = namespace_of(_CHECK_IDENTITY)
    salt = salt_of(b"vector secret", "tenant-a", "own salt")
    chains = (
        Chain(namespace, 4),
        Chain(namespace, 4, salt=salt),
        Chain(namespace, 4, salt=salt, public_blocks=1),
    )
    ours = {"the namespace": namespace.hex()}
    for name, chain in zip(_CHECK_KEYS, chains, strict=True):
        chain.extend(_CHECK_TOKENS)
        ours[f"the last key of {name}"] = chain.keys[-1].hex()
    published = [_CHECK_NAMESPACE, *_CHECK_KEYS.values()]
    for (name, value), expected in zip(ours.items(), published, strict=True):
        if value != expected:
            raise Incompatible(name, value, expected, who="tests/vectors/keys.json")
