"""Whose blocks go when room is short: quotas and weighted shares of tenants. Pure.

    put of tenant A ──> A would be over its quota ──> A's own least valuable block goes, or `full`
                    └─> the slab is full ──> a block goes of the tenant with the most bytes for its
                                             weight, the new block counted: so a tenant that floods
                                             pays with its own blocks, and others keep their share

Each tenant has an eviction policy of its own, which orders its blocks among themselves and knows
nothing of tenants. A policy hears what happened, in order, before it is asked for a victim, and
not before callers are answered: that would be a third of a put. A block is charged to its header's
tenant, whoever else reads it, from the moment its slot is taken until it is given back. It refuses
to know slots, states and what protects a block.

Invariant: `used` sums to the bytes of all slots that are in use.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvass.common.block import BlockHeader
from kvass.kvstore.eviction.policy import Eviction

OWED_MAX = 4_096  # things that policies have not heard yet: a node tells them after each answer
HEADROOM = 1.125  # a tenant that grows is listed with this much more than it has


@dataclass(frozen=True, slots=True)
class Allotments:
    """What tenants may have of one node. `quota_bytes` is for tenants without an own one, 0: no
    quota; a weight that is not given is 1."""

    quota_bytes: int = 0
    quotas: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    def quota(self, tenant: str) -> int:
        """Return how many bytes a tenant may have; 0: as many as there are."""
        return self.quotas.get(tenant, self.quota_bytes)

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)


@dataclass(slots=True)
class Usage:
    """What a tenant has now. Mutable fields: both."""

    size_bytes: int = 0
    blocks: int = 0


class Shares:
    """Mutable fields: `used` by tenant, `_policies` by tenant, `_owed` (what policies have not
    heard yet, in order) and `_owed_count`, `_heap` and `_listed`.

    The heap holds tenants by pressure (bytes for their weight), the greatest first. An entry may
    say more than is true, and is put right when it comes up; `_listed` says which of a tenant's
    entries counts. So a block that goes costs nothing, and one that comes seldom a push.
    """

    def __init__(self, allotments: Allotments, policy: Callable[[], Eviction]) -> None:
        self.allotments = allotments
        self.used: dict[str, Usage] = {}
        self._new_policy = policy
        self._policies: dict[str, Eviction] = {}
        self._owed: list[tuple[Callable[[Any], None], Sequence[Any]]] = []
        self._owed_count = 0
        self._heap: list[tuple[float, str]] = []
        self._listed: dict[str, float] = {}

    # --- what tenants have ---

    def charge(self, tenant: str, size_bytes: int, blocks: int = 1) -> None:
        """Slots of `size_bytes` together were taken for a tenant's blocks."""
        usage = self.used.get(tenant)
        if usage is None:
            usage = self.used[tenant] = Usage()
        usage.size_bytes += size_bytes
        usage.blocks += blocks
        pressure = usage.size_bytes / self.allotments.weight(tenant)
        if pressure > self._listed.get(tenant, -1.0):
            self._list(tenant, pressure * HEADROOM)

    def discharge(self, tenant: str, size_bytes: int) -> None:
        """The slot is free again."""
        usage = self.used[tenant]
        usage.size_bytes -= size_bytes
        usage.blocks -= 1
        assert usage.size_bytes >= 0 and usage.blocks >= 0
        if not usage.blocks:  # a tenant that has nothing costs nothing
            assert not usage.size_bytes
            del self.used[tenant], self._listed[tenant]
            self._policies.pop(tenant, None)

    def is_over(self, tenant: str, size_bytes: int) -> bool:
        """Whether so many bytes more would be over the tenant's quota."""
        quota = self.allotments.quota(tenant)
        return bool(quota) and self._size(tenant) + size_bytes > quota

    def never_fits(self, tenant: str, size_bytes: int) -> bool:
        """Whether a block of this size is over the tenant's quota by itself."""
        return bool(quota := self.allotments.quota(tenant)) and size_bytes > quota

    # --- what goes first ---

    def catch_up(self) -> None:
        """Tell the policies what happened."""
        owed, self._owed, self._owed_count = self._owed, [], 0
        for tell, things in owed:
            for what in things:
                tell(what)

    def _owe(self, tell: Callable[[Any], None], *things: object) -> None:
        self._owed.append((tell, things))
        self._owed_count += len(things)
        if self._owed_count >= OWED_MAX:
            self.catch_up()

    def insert(self, headers: Sequence[BlockHeader]) -> None:
        """Blocks became visible, in this order."""
        tenants = dict.fromkeys([header.tenant for header in headers])
        for tenant in tenants:
            policy = self._policies.get(tenant)
            if policy is None:
                policy = self._policies[tenant] = self._new_policy()
            own = headers if len(tenants) == 1 else [h for h in headers if h.tenant == tenant]
            self._owe(policy.insert, *own)

    def touch(self, keys: Sequence[bytes], tenant_of: Callable[[bytes], str | None]) -> None:
        """These blocks of one chain were asked for together; one of which nobody knows the tenant
        counts for that of the block before it."""
        if len(self._policies) == 1:
            self._owe(next(iter(self._policies.values())).touch, keys)
            return
        chains: dict[str, list[bytes]] = {}
        tenant: str | None = None
        for key in keys:
            known = tenant_of(key)
            tenant = tenant if known is None else known
            if tenant is not None:
                chains.setdefault(tenant, []).append(key)
        for tenant, own in chains.items():
            if tenant in self._policies:
                self._owe(self._policies[tenant].touch, own)

    def remove(self, header: BlockHeader) -> None:
        """A visible block is gone."""
        self._owe(self._policies[header.tenant].remove, header.key)

    def offer(self, header: BlockHeader) -> None:
        """A visible block may be evicted from now on."""
        self._owe(self._policies[header.tenant].offer, header.key)

    def own_victim(self, tenant: str, evictable: Callable[[bytes], bool]) -> bytes | None:
        """Return the block that a tenant over its quota gives up next, or None."""
        self.catch_up()
        policy = self._policies.get(tenant)
        return None if policy is None else policy.victim(evictable)

    def victim(
        self, tenant: str, size_bytes: int, evictable: Callable[[bytes], bool]
    ) -> bytes | None:
        """Return the block that goes for `size_bytes` of `tenant`, or None when none may go: what
        tenants under less pressure than this one have is safe from it."""
        self.catch_up()
        own = (self._size(tenant) + size_bytes) / self.allotments.weight(tenant)
        passed: list[tuple[float, str]] = []
        chosen: bytes | None = None
        while chosen is None:
            heaviest = self._heaviest()
            if heaviest is None or self._listed[heaviest] <= own:
                chosen = self.own_victim(tenant, evictable)
                break
            chosen = self.own_victim(heaviest, evictable)
            passed.append(heapq.heappop(self._heap))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return chosen

    # --- pressure ---

    def _size(self, tenant: str) -> int:
        usage = self.used.get(tenant)
        return 0 if usage is None else usage.size_bytes

    def _pressure(self, tenant: str) -> float:
        return self._size(tenant) / self.allotments.weight(tenant)

    def _heaviest(self) -> str | None:
        """Return the tenant under the most pressure of those in the heap, its entry put right."""
        while self._heap:
            negative, tenant = self._heap[0]
            if self._listed.get(tenant) != -negative:
                heapq.heappop(self._heap)
                continue
            pressure = self._pressure(tenant)
            if pressure == -negative:
                return tenant
            self._listed[tenant] = pressure
            heapq.heapreplace(self._heap, (-pressure, tenant))
        return None

    def _list(self, tenant: str, pressure: float) -> None:
        self._listed[tenant] = pressure
        heapq.heappush(self._heap, (-pressure, tenant))
        if len(self._heap) > 2 * len(self._listed) + 64:
            self._heap = [(-pressure, tenant) for tenant, pressure in self._listed.items()]
            heapq.heapify(self._heap)
