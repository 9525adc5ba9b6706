"""Where every byte of a block is: layout, sizes, offsets and the header. Pure; needs no torch.

A block is the KV of `block_tokens` consecutive tokens, all layers and KV heads, as one contiguous
byte string, outermost first:

    [head_group][layer][K|V] record
    record = codes [head in group][token][head_dim] ‖ scales [head][part][token] ‖ padding

A row is one token's numbers of one head, and its codes are whole bytes: int4 has two numbers in a
byte, the first one in the low half. A row has one scale, in int4 two parts for each group of 32
numbers (of 16 where 32 does not divide head_dim): the groups' scales, then their least numbers.
A record is padded to 64 bytes, so records and head groups start on cache lines. One head group's
bytes are one contiguous range: every rank of a tensor-parallel degree that divides `head_groups`
moves one range a block, whatever degree wrote it.

No other code does arithmetic on layouts. Offsets are plain ints, hence 64-bit and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from kvass.common.errors import Invalid

KvDtype = Literal["fp8", "int8", "int4", "bf16"]
KV_DTYPES: tuple[KvDtype, ...] = ("fp8", "int8", "int4", "bf16")

LAYOUT_VERSION = 1
HEADER_MAGIC = b"KVASSBLK"
RECORD_ALIGN = 64  # a cache line, and the widest vector register
SLOT_ALIGN = 64
SCALE_BYTES = 2  # bf16
_CODE_BITS: dict[KvDtype, int] = {"fp8": 8, "int8": 8, "int4": 4, "bf16": 16}
_GROUPS = (32, 16)  # numbers that share an int4 scale; of fewer, scales would outweigh codes


def code_group(kv_dtype: KvDtype, head_dim: int) -> int:
    """Return how many numbers of a row share a scale; int4 has none for some values of head_dim."""
    if kv_dtype != "int4":
        return head_dim
    if head_dim % _GROUPS[-1]:
        raise Invalid(f"kv_dtype int4 needs a head_dim that {_GROUPS[-1]} divides, not {head_dim}")
    return next(size for size in _GROUPS if head_dim % size == 0)


def _round_up(size: int, align: int) -> int:
    return -(-size // align) * align


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Every offset, stride and size (in bytes) of a model's blocks in one numeric format.

    `kv_heads` counts the heads of the whole model; `head_groups` is the largest tensor-parallel
    degree that the cluster serves and must divide it.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    kv_dtype: KvDtype
    head_groups: int = 1

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise Invalid(f"kv_dtype is {self.kv_dtype!r}; expected one of {', '.join(KV_DTYPES)}")
        if min(self.layers, self.kv_heads, self.head_dim, self.head_groups, self.block_tokens) < 1:
            raise Invalid(f"every dimension of a block layout must be at least 1: {self}")
        if self.kv_heads % self.head_groups:
            raise Invalid(
                f"head_groups is {self.head_groups}, which does not divide the model's "
                f"{self.kv_heads} KV heads"
            )
        code_group(self.kv_dtype, self.head_dim)  # raises where there is none

    @property
    def group_heads(self) -> int:
        """KV heads in one head group."""
        return self.kv_heads // self.head_groups

    @property
    def row_size(self) -> int:
        """Bytes of the codes of one token and head."""
        return self.head_dim * _CODE_BITS[self.kv_dtype] // 8

    @property
    def scale_parts(self) -> int:
        """How many numbers in bf16 belong to the codes of one token and head."""
        if self.kv_dtype == "bf16":
            return 0
        per_group = 2 if self.kv_dtype == "int4" else 1
        return per_group * self.head_dim // code_group(self.kv_dtype, self.head_dim)

    @property
    def has_scales(self) -> bool:
        return self.scale_parts > 0

    @property
    def codes_size(self) -> int:
        """Bytes of the codes of one (layer, K|V) record."""
        return self.group_heads * self.block_tokens * self.row_size

    @property
    def scales_size(self) -> int:
        """Bytes of the scales of one record; they follow the codes."""
        return self.group_heads * self.block_tokens * self.scale_parts * SCALE_BYTES

    @property
    def record_size(self) -> int:
        """Bytes of one (layer, K|V) record with its padding."""
        return _round_up(self.codes_size + self.scales_size, RECORD_ALIGN)

    @property
    def layer_size(self) -> int:
        """Bytes of one layer in one head group: K's record, then V's."""
        return 2 * self.record_size

    @property
    def group_size(self) -> int:
        """Bytes of one head group: the unit of a transfer and of a checksum."""
        return self.layers * self.layer_size

    @property
    def block_size(self) -> int:
        """Bytes of a whole block."""
        return self.head_groups * self.group_size

    def group_offset(self, group: int) -> int:
        """Return where head group `group` starts in a block."""
        assert 0 <= group < self.head_groups, group
        return group * self.group_size

    def record_offset(self, group: int, layer: int, value: bool) -> int:
        """Return where the record of (group, layer, V if `value` else K) starts in a block."""
        assert 0 <= layer < self.layers, layer
        return self.group_offset(group) + layer * self.layer_size + value * self.record_size

    def code_offset(self, head: int, layer: int, value: bool, token: int) -> int:
        """Return where the first code of KV head `head` at `token` starts in a block."""
        group, inner = divmod(head, self.group_heads)
        row = inner * self.block_tokens + token
        return self.record_offset(group, layer, value) + row * self.row_size

    def scale_offset(self, head: int, layer: int, value: bool, token: int, part: int = 0) -> int:
        """Return where one part of the scales of (head, token) starts in a block."""
        assert 0 <= part < self.scale_parts, part
        group, inner = divmod(head, self.group_heads)
        place = (inner * self.scale_parts + part) * self.block_tokens + token
        return self.record_offset(group, layer, value) + self.codes_size + place * SCALE_BYTES

    def rank_groups(self, rank: int, degree: int) -> range:
        """Return the head groups that rank `rank` of a tensor-parallel `degree` reads and writes.

        A degree beyond the number of groups makes several ranks share one; the lowest writes it.
        """
        if degree <= self.head_groups:
            if self.head_groups % degree:
                raise Invalid(
                    f"tensor-parallel degree {degree} does not divide "
                    f"head_groups {self.head_groups}"
                )
            share = self.head_groups // degree
            return range(rank * share, (rank + 1) * share)
        if degree % self.head_groups:
            raise Invalid(
                f"tensor-parallel degree {degree} is no multiple of head_groups {self.head_groups}"
            )
        group = rank * self.head_groups // degree
        return range(group, group + 1)

    def identity(self) -> dict[str, int | str]:
        """Return what enters the namespace."""
        return {
            "layout_version": LAYOUT_VERSION,
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "block_tokens": self.block_tokens,
            "kv_dtype": self.kv_dtype,
            "head_groups": self.head_groups,
        }


class BlockHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a store node knows of a block besides its bytes.

    It lives in the node's index (and before the payload on flash), never in a slot. `index` is the
    block's place in its chain; `checksums` holds one xxh3-64 a head group.
    """

    key: bytes
    parent: bytes
    segment_key: bytes
    index: int
    namespace: bytes
    tenant: str
    writer: str
    token_count: int
    length: int
    checksums: tuple[int, ...]
    magic: bytes = HEADER_MAGIC
    layout_version: int = LAYOUT_VERSION

    def check(self) -> None:
        """Refuse a header that this version cannot have written; raises Invalid."""
        if self.magic != HEADER_MAGIC or self.layout_version != LAYOUT_VERSION:
            raise Invalid(
                f"block header: magic {self.magic!r}, layout version {self.layout_version}; "
                f"expected {HEADER_MAGIC!r}, {LAYOUT_VERSION}"
            )
        if not self.checksums or self.length % len(self.checksums):
            raise Invalid(
                f"block header: {self.length} bytes do not split into {len(self.checksums)} groups"
            )
