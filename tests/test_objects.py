"""The pure parts of the bucket tier: names, contents, the shelf, outages; against simple models."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import cast

import msgspec
import obstore
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flash_model import header_of, payload_of
from kvass.common.block import BlockHeader
from kvass.common.config import load
from kvass.common.errors import Invalid, Unavailable
from kvass.common.keys import Chain, Namespace
from kvass.kvstore.flash.disk import PAGE
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.node.node import Node
from kvass.kvstore.node.service import _open_bucket
from kvass.kvstore.objects import contents, names
from kvass.kvstore.objects.outage import FAULTS_MAX, FIRST_WAIT_S, LAST_WAIT_S, Outage
from kvass.kvstore.objects.s3 import S3Bucket
from kvass.kvstore.objects.shelf import Listed, Shelf

ROOT = names.root_of("local")


def chain_headers(count: int, *, seed: int = 0, **terms: str) -> list[BlockHeader]:
    """Return the headers of one chain's first blocks."""
    chain = Chain(Namespace(b"n" * 32), 4)
    chain.extend(random.Random(seed).choices(range(1000), k=4 * count))
    plain = msgspec.structs.replace(header_of(1), namespace=b"n" * 32, **terms)
    return [
        msgspec.structs.replace(
            plain,
            key=chain.keys[index],
            parent=chain.parent(index),
            segment_key=chain.segment_key(index),
            index=index,
        )
        for index in range(count)
    ]


def listed(headers: Sequence[BlockHeader], age_s: float = 0.0) -> Listed:
    size = contents.stride_of(headers) * len(headers)
    return Listed(names.name_of(headers).text(ROOT), size, age_s)


# --- names ---

blocks_of = st.integers(1, names.BLOCKS_MAX)
words = st.text(max_size=40)


@given(blocks_of, words, words, st.integers(0, 9))
def test_a_name_says_what_is_in_an_object(count: int, tenant: str, writer: str, seed: int) -> None:
    headers = chain_headers(count, seed=seed, tenant=tenant, writer=writer)
    name = names.name_of(headers)
    text = name.text(ROOT)
    assert names.read_name(text, ROOT) == name
    assert len(text) <= 610 and all(len(part) <= 255 for part in text.split("/"))
    assert names.read_name(text, names.root_of("other")) is None


@given(st.data())
def test_another_spelling_of_a_name_is_no_name(data: st.DataObject) -> None:
    text = names.name_of(chain_headers(data.draw(blocks_of))).text(ROOT)
    at = data.draw(st.integers(len(ROOT) + 1, len(text) - 1))
    changed = data.draw(
        st.sampled_from(
            [text[:at], text[:at] + "/" + text[at:], text + "=", text + "/", text + "A"]
        )
    )
    found = names.read_name(changed, ROOT)
    assert found is None or found.text(ROOT) == changed != text
    names.read_name(data.draw(st.text()), ROOT)


@given(
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([None, "v", "w"]),
    st.sampled_from([None, b"n" * 32, b"m" * 32]),
    st.sampled_from([None, 0, 1, 99]),
)
def test_what_a_drop_erases_is_under_its_prefix(
    tenant: str | None, writer: str | None, space: bytes | None, block: int | None
) -> None:
    headers = chain_headers(100, tenant="a", writer="v")
    keys = None if block is None else (headers[block].key,)
    order = DropOrder(space, tenant, writer, keys)
    name = names.name_of(headers[:2])
    text = name.text(ROOT)
    expected = tenant != "b" and writer != "w" and space != b"m" * 32 and block in (None, 0, 1)
    assert name.matches(order) == expected
    if expected:
        assert text.startswith(names.prefix_of(order, ROOT) + "/")
    by_origin = DropOrder(space, tenant, writer)
    assert names.is_under(text, names.parts_of(by_origin)) == name.matches(by_origin)


# --- contents ---


def test_each_block_is_read_by_one_range_and_is_the_one_that_was_packed() -> None:
    headers = [header_of(n) for n in (3, 7, 1, 2)]
    payloads = [payload_of(n) for n in (3, 7, 1, 2)]
    data = contents.packed("a name", headers, [memoryview(each) for each in payloads])
    stride = contents.stride_in(len(data), len(headers))
    assert stride == contents.stride_of(headers) and stride % PAGE == 0
    for number, (header, payload) in enumerate(zip(headers, payloads, strict=True)):
        at = number * stride
        found = contents.read("a name", data[at : at + stride], at)
        assert found is not None and (found.header, bytes(found.payload)) == (header, payload)
        assert found.is_right()


@pytest.mark.parametrize(
    ("name", "at", "end"),
    [("another name", 0, None), ("a name", PAGE, None), ("a name", 0, 100), ("a name", 0, 3000)],
)
def test_bytes_of_another_place_are_no_block(name: str, at: int, end: int | None) -> None:
    data = contents.packed("a name", [header_of(1)], [memoryview(payload_of(1))])
    assert contents.read(name, data[:end], at) is None


@given(st.data())
def test_a_changed_byte_is_no_block_or_a_wrong_sum(data: st.DataObject) -> None:
    whole = contents.packed("a name", [header_of(2)], [memoryview(payload_of(2))])
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    found = contents.read("a name", whole, 0)
    if found is not None:
        assert found.header == header_of(2)
        assert not found.is_right() or found.payload == payload_of(2)


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1))
def test_runs_are_pieces_of_chains_and_hold_every_block_once(
    chosen: set[tuple[int, int]],
) -> None:
    chains = [chain_headers(41, seed=seed) for seed in range(4)]
    headers = [chains[seed][index] for seed, index in chosen]
    runs = contents.runs_of(headers)
    assert sorted(h.key for run in runs for h in run) == sorted(h.key for h in headers)
    for run in runs:
        assert len(run) <= names.BLOCKS_MAX
        assert all(b.parent == a.key for a, b in itertools.pairwise(run))


def test_large_blocks_make_smaller_objects() -> None:
    size = 3 << 20
    headers = [
        msgspec.structs.replace(header, length=size, checksums=(1,)) for header in chain_headers(20)
    ]
    assert {len(run) for run in contents.runs_of(headers)} == {5}
    huge = [msgspec.structs.replace(header, length=20 << 20) for header in headers]
    assert {len(run) for run in contents.runs_of(huge)} == {1}


# --- the shelf ---


class ShelfMachine(RuleBasedStateMachine):
    """A shelf against a dict of names; every object is a piece of one of a few chains."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(ROOT)
        self.model: dict[str, tuple[list[BlockHeader], int, float]] = {}
        self.seen: set[str] | None = None
        self.now_s = 100.0

    def put(self, seed: int, first: int, count: int, age_s: float) -> None:
        tenant = "ab"[seed % 2]
        headers = chain_headers(64, seed=seed, tenant=tenant)[first : first + count]
        each = listed(headers, age_s)
        assert not self.shelf.add([each], self.now_s)
        self.model.setdefault(each.name, (headers, each.size_bytes, self.now_s - age_s))
        if self.seen is not None:
            self.seen.add(each.name)

    # Pieces of one chain do not overlap: which of two has a block is nobody's promise.
    @rule(seed=st.integers(0, 3), piece=st.integers(0, 7), age_s=st.integers(0, 50))
    def put_one(self, seed: int, piece: int, age_s: int) -> None:
        self.now_s += 1
        self.put(seed, piece * 8, 8, age_s)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.shelf.remove(name)
        del self.model[name]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        self.now_s += 1
        name = data.draw(st.sampled_from(sorted(self.model)))
        headers, size, _ = self.model[name]
        self.shelf.use(self.shelf.find([headers[3].key]), self.now_s)
        self.model[name] = (headers, size, self.now_s)

    @rule(tenant=st.sampled_from("ab"), seed=st.integers(0, 3), by_key=st.booleans())
    def drop(self, tenant: str, seed: int, by_key: bool) -> None:
        keys = (chain_headers(64, seed=seed)[9].key,) if by_key else None
        order = DropOrder(tenant=tenant, keys=keys)
        found = self.shelf.matching(order)
        expected = {
            name for name, (hs, _, _) in self.model.items() if names.name_of(hs).matches(order)
        }
        assert set(found) == expected and len(found) == len(expected)
        for name in found:
            self.shelf.remove(name)
            del self.model[name]

    @rule(share=st.floats(0, 1.2), parity=st.sampled_from([None, 0, 1]))
    def make_room(self, share: float, parity: int | None) -> None:
        def mine(segment: bytes) -> bool:
            return parity is None or segment[0] % 2 == parity

        wanted = int(share * self.shelf.used_bytes)
        chosen = self.shelf.oldest(wanted, mine)
        own = [n for n, (hs, _, _) in self.model.items() if mine(hs[0].segment_key)]
        used = {name: self.model[name][2] for name in own}
        assert set(chosen) <= set(own)
        freed = sum(self.model[name][1] for name in chosen)
        assert freed >= wanted or len(chosen) == len(own)
        left = [used[name] for name in own if name not in chosen]
        if chosen and left:
            assert max(used[name] for name in chosen) <= min(left)
        for name in chosen:
            self.shelf.remove(name)
            del self.model[name]

    @precondition(lambda self: self.seen is None)
    @rule()
    def begin_listing(self) -> None:
        self.shelf.begin_listing()
        self.seen = set()

    @precondition(lambda self: self.seen is not None and self.model)
    @rule(data=st.data())
    def list_some(self, data: st.DataObject) -> None:
        assert self.seen is not None
        for name in data.draw(st.sets(st.sampled_from(sorted(self.model)))):
            self.shelf.add([Listed(name, self.model[name][1], 0.0)], self.now_s)
            self.seen.add(name)

    @precondition(lambda self: self.seen is not None)
    @rule()
    def end_listing(self) -> None:
        assert self.seen is not None
        self.shelf.end_listing()
        self.model = {n: each for n, each in self.model.items() if n in self.seen}
        self.seen = None

    @invariant()
    def is_as_the_model(self) -> None:
        assert len(self.shelf) == len(self.model)
        assert self.shelf.used_bytes == sum(size for _, size, _ in self.model.values())
        assert self.shelf.blocks == sum(len(headers) for headers, _, _ in self.model.values())
        for name, (headers, size, _) in self.model.items():
            places = self.shelf.find([header.key for header in headers])
            stride = size // len(headers)
            assert [self.shelf.where(place) for place in places] == [
                (name, at * stride, (at + 1) * stride) for at in range(len(headers))
            ]
        absent = [header.key for header in chain_headers(3, seed=77)]
        assert self.shelf.find(absent) == [0, 0, 0]


TestShelf = ShelfMachine.TestCase


def test_an_object_of_another_size_than_it_can_have_is_wrong_and_a_strange_one_is_let_be() -> None:
    each = listed(chain_headers(3))
    shelf = Shelf(ROOT)
    cut = Listed(each.name, each.size_bytes - 1, 0.0)
    strange = Listed("photos/cat.jpg", 3, 0.0)
    assert shelf.add([cut, strange, Listed(each.name + "x", 3, 0.0)], 0.0) == [each.name]
    assert len(shelf) == 0


def test_what_was_computed_upon_wrong_blocks_is_found_down_the_chains() -> None:
    bad = chain_headers(96, seed=1, writer="bad")
    good = chain_headers(96, seed=2)
    shelf = Shelf(ROOT)
    upon = [msgspec.structs.replace(header, writer="w-ann") for header in bad]
    pieces = [bad[:8], upon[8:32], upon[32:64], upon[64:96], good[:32], good[32:64]]
    shelf.add([listed(piece) for piece in pieces], 0.0)
    by_writer = shelf.matching(DropOrder(writer="bad"))
    assert by_writer == [listed(pieces[0]).name]
    expected = {listed(piece).name for piece in pieces[1:4]}
    assert set(shelf.upon(by_writer, [])) == expected
    assert shelf.upon([], [good[63].key]) == [listed(pieces[5]).name]


# --- outages ---


@given(st.lists(st.sampled_from(["failed", "worked", "wait", "listing fails"]), max_size=60))
def test_an_outage_begins_once_and_asks_ever_less_often(events: list[str]) -> None:
    outage, now_s, in_a_row, waits = Outage(), 0.0, 0, FIRST_WAIT_S
    is_on = False
    for event in events:
        if event == "wait":
            now_s += LAST_WAIT_S
            assert outage.is_due(now_s) == is_on
        elif event == "worked":
            lasted_s = outage.worked(now_s)
            assert (lasted_s is not None) == is_on
            is_on, in_a_row = False, 0
        else:
            begins = outage.failed(now_s) if event == "failed" else outage.begin(now_s)
            in_a_row += event == "failed"
            starts = event == "listing fails" or (in_a_row >= FAULTS_MAX and not is_on)
            assert begins == (starts and not is_on)
            if starts:
                waits = min(2 * waits, LAST_WAIT_S) if is_on else FIRST_WAIT_S
                is_on = True
                assert not outage.is_due(now_s + waits - 0.01) and outage.is_due(now_s + waits)
        assert outage.is_on == is_on


# --- the package that it takes ---


def test_without_its_package_a_bucket_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "kvass.kvstore.objects.s3", raising=False)
    config = load(None, ["store.bucket=s3://bucket"])
    with pytest.raises(Invalid, match=r"-e '.\[objects\]'"):
        _open_bucket(config, cast(Node, None), ExitStack())
    _open_bucket(load(), cast(Node, None), ExitStack())


@pytest.mark.parametrize("address", ["nonsense", "ftp://host", "http://", "http://key:secret@host"])
def test_an_address_that_can_never_work_is_refused_at_the_start(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(Invalid, match=r"^AWS_ENDPOINT_URL: expected http://") as refused:
        S3Bucket("s3://bucket")
    assert "secret@" not in str(refused.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:9")
    S3Bucket("s3://bucket/prefix")


class RustPanic(Exception):
    """As pyo3 calls it."""


@pytest.mark.anyio
async def test_a_panic_of_the_library_costs_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def panics(*_: object, **__: object) -> None:
        raise RustPanic("rust future panicked")

    monkeypatch.setattr(obstore, "put_async", panics)
    with pytest.raises(Unavailable, match="cannot put: obstore met a bug: rust future panicked"):
        await S3Bucket("s3://bucket").put("name", memoryview(b""))
