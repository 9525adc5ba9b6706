"""Tenants of one store node: quotas, shares by weight, and what each one is charged for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from kvass.common.block import BlockHeader
from kvass.common.config import load
from kvass.kvstore.eviction.policy import ChainLru
from kvass.kvstore.index.index import Index, Limits
from kvass.kvstore.index.puts import PutOrder, Verdict
from kvass.kvstore.index.shares import Allotments, Shares
from kvass.kvstore.node.service import idle_quotas
from store_model import SLAB, key_of, order_of, store
from test_store_machine import IndexMachine

SIZE = 128
TENANTS = ("", "a", "b")
ROOMY = 1 << 30


def used_bytes(index: Index) -> Counter[str]:
    """Count what each tenant has, slot by slot."""
    used: Counter[str] = Counter()
    for entry in [*index.ledger.entries.values(), *index.ledger.gone]:
        used[entry.header.tenant] += entry.slot.size
    return used


def test_a_quota_that_is_larger_than_the_memory_is_said() -> None:
    given = ["store.slab_bytes=1GiB", "store.tenant_quotas.a=2GiB", "store.tenant_quotas.b=1GiB"]
    (said,) = idle_quotas(load(None, given).store)
    assert "store.tenant_quotas.a is 2147483648, more than store.slab_bytes (1073741824)" in said
    (said,) = idle_quotas(load(None, ["store.tenant_quota=1TiB"]).store)
    assert "store.tenant_quota is" in said
    assert not idle_quotas(load(None, ["store.tenant_quotas.a=1MiB"]).store)


class TenantMachine(IndexMachine):
    """The same machine, its slab shared by tenants with quotas and weights."""

    @initialize(
        quota_bytes=st.sampled_from([0, 0, 3 * SIZE, 7 * SIZE]),
        quotas=st.dictionaries(
            st.sampled_from(TENANTS), st.sampled_from([SIZE, 5 * SIZE, ROOMY]), max_size=2
        ),
        weights=st.dictionaries(st.sampled_from(TENANTS), st.sampled_from([0.5, 3.0])),
    )
    def start(self, quota_bytes: int, quotas: dict[str, int], weights: dict[str, float]) -> None:
        self.limits = {"allotments": Allotments(quota_bytes, quotas, weights)}
        super().start()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        shares = self.index.ledger.shares
        monkey: Any = shares
        monkey.victim = self._judged(shares.victim)

    def _judged(self, victim: Callable[..., bytes | None]) -> Callable[..., bytes | None]:
        """Let every choice of a victim be judged by what slots say."""

        def judged(tenant: str, size: int, evictable: Callable[[bytes], bool]) -> bytes | None:
            key = victim(tenant, size, evictable)
            weight = self.index.limits.allotments.weight
            used = used_bytes(self.index)
            pressure = {each: used[each] / weight(each) for each in used}
            own = (used[tenant] + size) / weight(tenant)
            entries = self.index.ledger.entries
            may_go = {entries[k].header.tenant for k in entries if evictable(k)}
            heavier = {each for each in may_go if pressure[each] > own and each != tenant}
            if key is None:
                assert not heavier and tenant not in may_go, "somebody was over his share"
            else:
                whose = entries[key].header.tenant
                most = max((pressure[each] for each in heavier), default=0.0)
                assert whose == tenant if not heavier else pressure[whose] == most, whose
            return key

        return judged

    @invariant()
    def no_tenant_is_over_its_quota(self) -> None:
        for tenant, size in used_bytes(self.index).items():
            quota = self.index.limits.allotments.quota(tenant)
            assert not quota or size <= quota, f"{tenant!r} has {size} of {quota}"

    @invariant()
    def every_slot_is_charged_to_its_tenant(self) -> None:
        usage = self.index.usage()
        assert {name: each.size_bytes for name, each in usage.items()} == used_bytes(self.index)
        counts = self.index.counts()
        in_use = counts["total_bytes"] - counts["free_bytes"]
        assert sum(each.size_bytes for each in usage.values()) == in_use


TestTenants = TenantMachine.TestCase
TestTenants.settings = settings(max_examples=150, stateful_step_count=50)


# --- shares against a dictionary ---


@given(
    steps=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 9), st.booleans())),
    weights=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.25, 2.0])),
)
def test_the_heaviest_tenant_is_known_after_any_change(
    steps: list[tuple[str, int, bool]], weights: dict[str, float]
) -> None:
    shares = Shares(Allotments(weights=weights), ChainLru)
    held: dict[str, list[int]] = {}
    for tenant, size, comes in steps:
        if comes:
            held.setdefault(tenant, []).append(size)
            shares.charge(tenant, size)
        elif tenant in held:
            shares.discharge(tenant, held[tenant].pop())
            if not held[tenant]:
                del held[tenant]
        most = max((sum(held[t]) / weights.get(t, 1.0) for t in held), default=None)
        heaviest = shares._heaviest()
        if heaviest is None:
            assert most is None
        else:
            assert sum(held[heaviest]) / weights.get(heaviest, 1.0) == most
        assert len(shares._heap) <= 2 * len(held) + 65


# --- single promises ---


def an_index(**allotments: Any) -> Index:
    return Index(SLAB, Limits(epoch="e", allotments=Allotments(**allotments)))


def order_for(tenant: str, count: int, *, first: int = 0, hold: str = "") -> PutOrder:
    """Blocks of a tenant, each of a chain of its own: any of them may go."""
    plain = order_of(0, range(1)).headers[0]
    headers = [
        BlockHeader(
            **{
                **{name: getattr(plain, name) for name in plain.__struct_fields__},
                "key": f"{tenant}{index}".encode().ljust(32, b"."),
                "tenant": tenant,
            }
        )
        for index in range(first, first + count)
    ]
    return PutOrder(f"p{tenant}{first}", "s0", headers, 2, range(2), 5.0, hold, 30.0)


def put(index: Index, tenant: str, count: int, *, first: int = 0, hold: str = "") -> list[Verdict]:
    order = order_for(tenant, count, first=first, hold=hold)
    verdicts: list[Verdict] = []
    for header in order.headers:
        one = PutOrder(header.key.hex(), "s0", [header], 2, range(2), 5.0, hold, 30.0)
        verdicts += index.put_begin(one, 0.0)
        (move,) = index.begin_moves(one.put_id, "s0", [header.key], 0.0)
        if move is not None:
            assert index.end_move(move, (1, 2))
    return verdicts


def blocks(index: Index) -> dict[str, int]:
    return {tenant: usage.blocks for tenant, usage in index.usage().items()}


def test_a_tenant_over_its_quota_loses_its_own_blocks_first() -> None:
    index = an_index(quotas={"a": 3 * SIZE})
    put(index, "b", 5)
    assert put(index, "a", 6) == ["granted"] * 6
    assert blocks(index) == {"b": 5, "a": 3}
    assert index.counts()["evictions"] == 3
    keys = [header.key for header in order_for("a", 6).headers]
    assert index.lookup(keys, 0.0) == [False] * 3 + [True] * 3  # the least recently used went


def test_what_cannot_fit_into_the_quota_is_full_and_counted() -> None:
    index = an_index(quotas={"a": 3 * SIZE})
    put(index, "a", 3, hold="job")
    assert put(index, "a", 2, first=3) == ["full", "full"]  # all that it has is held
    assert index.counts()["over_quota"] == 2
    assert blocks(index) == {"a": 3}
    index.release_hold("job", 1.0)
    assert put(index, "a", 2, first=3) == ["granted", "granted"]
    tiny = an_index(quotas={"a": SIZE - 1})
    assert put(tiny, "a", 1) == ["full"]


def test_a_tenant_that_floods_leaves_the_others_their_share() -> None:
    index = an_index()
    put(index, "b", 4)
    put(index, "", 4)
    put(index, "a", 60)
    assert blocks(index) == {"b": 4, "": 4, "a": 4}


def test_what_nobody_else_uses_is_anybodys() -> None:
    index = an_index()
    put(index, "a", 60)
    assert blocks(index) == {"a": 12}
    put(index, "b", 60)
    assert blocks(index) == {"a": 6, "b": 6}


@pytest.mark.parametrize(("weight", "expected"), [(3.0, 9), (0.5, 4)])
def test_shares_follow_the_weights(weight: float, expected: int) -> None:
    index = an_index(weights={"a": weight})
    for turn in range(30):
        put(index, "a", 1, first=turn)
        put(index, "b", 1, first=turn)
    assert blocks(index) == {"a": expected, "b": 12 - expected}


def test_a_tenant_whose_blocks_are_all_held_takes_nothing_from_lighter_ones() -> None:
    index = an_index()
    put(index, "b", 4)
    put(index, "a", 6, hold="job")
    put(index, "a", 2, first=6)
    assert put(index, "a", 4, first=8) == ["granted"] * 4
    assert blocks(index) == {"b": 4, "a": 8}


def test_the_default_quota_is_for_tenants_without_an_own_one() -> None:
    index = an_index(quota_bytes=2 * SIZE, quotas={"b": 4 * SIZE})
    for tenant in ("a", "b", ""):
        put(index, tenant, 6)
    assert blocks(index) == {"a": 2, "b": 4, "": 2}


def test_public_blocks_are_charged_to_nobody_in_particular() -> None:
    index = an_index()
    store(index, 0, range(6))
    assert blocks(index) == {"": 2, "a": 4}
    index.drop(lambda header: header.tenant == "a", 1.0)
    assert index.lookup([key_of(0, i) for i in range(6)], 1.0) == [True] * 2 + [False] * 4
