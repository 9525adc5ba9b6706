"""BlockLayout, keys and chains: offsets never overlap, names depend on all that they must.

Published vectors are `vectors/block.json` and `vectors/keys.json`; `python
tests/vectors/generate.py` prints both anew (a difference is a new layout or a new numeric identity,
never a repair).
"""

from __future__ import annotations

import json
import struct
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.common import keys
from kvass.common.block import KV_DTYPES, BlockHeader, BlockLayout, code_group
from kvass.common.errors import Incompatible, Invalid
from vectors.generate import block_vectors, key_vectors

VECTORS = Path(__file__).parent / "vectors"


@st.composite
def layouts(draw: st.DrawFn) -> BlockLayout:
    groups, kv_dtype = draw(st.integers(1, 4)), draw(st.sampled_from(KV_DTYPES))
    depths = [16, 48, 64, 80] if kv_dtype == "int4" else [8, 20, 64, 80]
    return BlockLayout(
        layers=draw(st.integers(1, 3)),
        kv_heads=groups * draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from(depths)),
        block_tokens=draw(st.integers(1, 20)),
        kv_dtype=kv_dtype,
        head_groups=groups,
    )


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_every_row_and_scale_has_its_own_bytes(layout: BlockLayout) -> None:
    taken = bytearray(layout.block_size)
    parts = range(layout.scale_parts)
    for layer in range(layout.layers):
        for value in (False, True):
            for head in range(layout.kv_heads):
                for token in range(layout.block_tokens):
                    spans = [(layout.code_offset(head, layer, value, token), layout.row_size)]
                    at = [layout.scale_offset(head, layer, value, token, part) for part in parts]
                    spans += [(each, 2) for each in at]
                    for start, size in spans:
                        assert taken[start : start + size] == bytes(size)
                        taken[start : start + size] = b"\1" * size
                        group = head // layout.group_heads
                        first = layout.group_offset(group)
                        assert first <= start and start + size <= first + layout.group_size
    stored = layout.codes_size + layout.scales_size
    assert sum(taken) == 2 * layout.layers * layout.head_groups * stored


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_records_are_aligned_and_fill_the_block(layout: BlockLayout) -> None:
    assert layout.block_size == layout.head_groups * layout.group_size
    offsets = [
        layout.record_offset(group, layer, value)
        for group in range(layout.head_groups)
        for layer in range(layout.layers)
        for value in (False, True)
    ]
    assert offsets == list(range(0, layout.block_size, layout.record_size))
    assert all(offset % 64 == 0 for offset in offsets)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_the_ranks_of_a_degree_cover_every_group_alike(groups: int, degree: int) -> None:
    layout = BlockLayout(1, 8, 16, 4, "fp8", groups)
    covered = [group for rank in range(degree) for group in layout.rank_groups(rank, degree)]
    assert covered == sorted(covered)
    assert set(covered) == set(range(groups))
    assert len(covered) == max(groups, degree)


@pytest.mark.parametrize(("groups", "degree"), [(4, 3), (2, 3), (3, 4)])
def test_a_degree_that_splits_a_group_is_refused(groups: int, degree: int) -> None:
    with pytest.raises(Invalid, match=f"{degree}.*{groups}"):
        BlockLayout(1, 12, 16, 4, "fp8", groups).rank_groups(0, degree)


def test_impossible_layouts_are_refused_by_name() -> None:
    with pytest.raises(Invalid, match="head_groups is 2"):
        BlockLayout(1, 3, 64, 16, "fp8", 2)
    with pytest.raises(Invalid, match="at least 1"):
        BlockLayout(0, 3, 64, 16, "fp8")
    with pytest.raises(Invalid, match="int3"):
        BlockLayout(1, 3, 64, 16, "int3")  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="16 divides, not 72"):
        BlockLayout(1, 3, 72, 16, "int4")


@pytest.mark.parametrize(
    ("depth", "group", "parts"), [(64, 32, 4), (80, 16, 10), (96, 32, 6), (128, 32, 8), (16, 16, 2)]
)
def test_int4_scales_groups_of_32_and_of_16_where_32_does_not_divide(
    depth: int, group: int, parts: int
) -> None:
    layout = BlockLayout(1, 1, depth, 16, "int4")
    assert code_group("int4", depth) == group
    assert (layout.row_size, layout.scale_parts) == (depth // 2, parts)


def test_published_block_vectors() -> None:
    published = json.loads((VECTORS / "block.json").read_text())
    assert published == block_vectors()
    default = published["layouts"][0]
    assert (default["record_size"], default["block_size"]) == (3200, 192_000)
    assert default["codes_size"] + default["scales_size"] == 3168


def test_a_header_of_another_version_is_refused() -> None:
    name = bytes(32)
    header = BlockHeader(name, name, name, 0, name, "", "p0", 16, 192_000, (1,))
    header.check()
    for wrong in (
        BlockHeader(name, name, name, 0, name, "", "p0", 16, 192_000, (1,), magic=b"NOTABLCK"),
        BlockHeader(name, name, name, 0, name, "", "p0", 16, 192_000, (1,), layout_version=2),
        BlockHeader(name, name, name, 0, name, "", "p0", 16, 192_000, ()),
        BlockHeader(name, name, name, 0, name, "", "p0", 16, 100, (1, 2, 3)),
    ):
        with pytest.raises(Invalid, match="block header"):
            wrong.check()


tokens = st.lists(st.integers(0, keys.TOKEN_ID_MAX), max_size=40)
NAMESPACE = keys.namespace_of({"model": "test"})


@given(tokens, st.integers(1, 5), st.data())
def test_a_chain_does_not_depend_on_how_it_grew(
    sequence: list[int], size: int, data: st.DataObject
) -> None:
    whole = keys.Chain(NAMESPACE, size)
    whole.extend(sequence)
    pieces = keys.Chain(NAMESPACE, size)
    position = 0
    while position < len(sequence):
        step = data.draw(st.integers(1, 7))
        pieces.extend(sequence[position : position + step])
        position += step
    assert pieces.keys == whole.keys
    assert len(whole.keys) == len(sequence) // size
    for index in range(len(whole.keys)):
        block = sequence[index * size : (index + 1) * size]
        assert whole.keys[index] == keys.block_key(whole.parent(index), block)


@given(st.lists(st.integers(0, 99), min_size=8, max_size=8), st.integers(0, 7), st.integers(0, 4))
def test_a_key_depends_on_every_token_before_it_and_on_the_salt(
    sequence: list[int], changed: int, public_blocks: int
) -> None:
    salt = keys.salt_of(b"secret", "tenant")
    chain = keys.Chain(NAMESPACE, 2, salt=salt, public_blocks=public_blocks)
    plain = keys.Chain(NAMESPACE, 2)
    other = keys.Chain(NAMESPACE, 2, salt=salt, public_blocks=public_blocks)
    chain.extend(sequence)
    plain.extend(sequence)
    other.extend([token + (place == changed) for place, token in enumerate(sequence)])
    assert chain.keys[:public_blocks] == plain.keys[:public_blocks]
    assert not set(chain.keys[public_blocks:]) & set(plain.keys)
    first = changed // 2
    assert chain.keys[:first] == other.keys[:first]
    assert not set(chain.keys[first:]) & set(other.keys)


def test_salts_separate_tenants_and_their_own_salts() -> None:
    salts = {
        keys.salt_of(secret, tenant, own)
        for secret in (b"", b"s")
        for tenant in ("", "a", "b")
        for own in ("", "a", "b")
    }
    assert len(salts) == 18
    assert keys.salt_of(b"", "") == keys.PUBLIC


def test_a_namespace_is_canonical_and_refuses_floats() -> None:
    one = keys.namespace_of({"a": 1, "b": {"c": "x", "d": [1, 2]}})
    assert one == keys.namespace_of({"b": {"d": (1, 2), "c": "x"}, "a": 1})
    assert one != keys.namespace_of({"a": 2, "b": {"c": "x", "d": [1, 2]}})
    with pytest.raises(Invalid, match="no floats"):
        keys.namespace_of({"a": 1.0})  # type: ignore[dict-item]


@given(st.integers(0, 200), st.integers(0, 200))
def test_segments_cut_at_fixed_places(first: int, length: int) -> None:
    parts = keys.segments(first, first + length)
    assert [index for low, high in parts for index in range(low, high)] == list(
        range(first, first + length)
    )
    assert all(
        low // keys.SEGMENT_BLOCKS == (high - 1) // keys.SEGMENT_BLOCKS for low, high in parts
    )


@given(st.sets(st.integers(0, 60)))
def test_ranges_are_maximal(indices: set[int]) -> None:
    ranges = keys.ranges_of(sorted(indices))
    assert [index for low, high in ranges for index in range(low, high)] == sorted(indices)
    assert all(high < low for (_, high), (low, _) in pairwise(ranges))


def test_published_key_vectors() -> None:
    published = json.loads((VECTORS / "keys.json").read_text())
    assert published == key_vectors()
    namespace, salt = map(bytes.fromhex, (published["namespace"], published["salt"]["value"]))
    packed = struct.pack("<4I", *published["tokens"][:4])
    chains = published["chains"]
    public = blake2b(namespace + packed, digest_size=32)
    assert chains["public"][0] == public.hexdigest()
    private = blake2b(namespace + packed, digest_size=32, key=salt)
    assert chains["private"][0] == private.hexdigest()


def test_self_check_passes_here_and_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    keys.self_check()
    monkeypatch.setattr(keys, "block_key", lambda parent, tokens, *, salt=b"", extra=b"": bytes(32))
    with pytest.raises(Incompatible, match="key of"):
        keys.self_check()
