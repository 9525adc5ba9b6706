"""Whose turn is next when more is asked than served: tenants share by their weights. Pure.

Start-time fair queueing (Goyal, Vin and Cheng 1996): what a tenant is served costs it time, the
less the greater its weight, and whose own clock is furthest behind comes next. So a tenant with a
thousand that wait delays another's first by the one turn that it is given, and a tenant that was
away has saved nothing up. Within a tenant, first come is first served.

It refuses to know what is served, for how long, and who waits for what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Waiting:
    """One that waits for its turn. `number` grows with each that comes."""

    tenant: str
    cost: int
    number: int


@dataclass(slots=True)
class FairQueue:
    """Mutable fields: `_waiting` by tenant (none is empty), `_next_s` (when a tenant's next turn
    would start, on the queue's own clock; only of those that are ahead of it), `_now_s` (that
    clock), `_number`, and `cost` of all that wait."""

    weights: Mapping[str, float] = field(default_factory=dict)
    cost: int = 0
    _waiting: dict[str, dict[int, Waiting]] = field(default_factory=dict)
    _next_s: dict[str, float] = field(default_factory=dict)
    _now_s: float = 0.0
    _number: int = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, tenant: str, cost: int) -> Waiting:
        """Let one more of a tenant wait, behind its others."""
        self._number += 1
        one = Waiting(tenant, cost, self._number)
        self._waiting.setdefault(tenant, {})[one.number] = one
        self.cost += cost
        return one

    def first(self) -> Waiting | None:
        """Return whose turn is next."""
        heads = [next(iter(each.values())) for each in self._waiting.values()]
        return min(heads, key=lambda one: (self._start_s(one.tenant), one.number), default=None)

    def serve(self, one: Waiting) -> None:
        """It has its turn."""
        self._now_s = self._start_s(one.tenant)
        self.remove(one)
        self._next_s[one.tenant] = self._now_s + one.cost / self.weights.get(one.tenant, 1.0)
        self._next_s = {t: s for t, s in self._next_s.items() if s > self._now_s}

    def rest(self) -> None:
        """Nothing is served, and nobody waits: whoever comes next, nobody is behind anybody."""
        assert not self._waiting
        self._next_s.clear()

    def remove(self, one: Waiting) -> None:
        """It waits no more."""
        own = self._waiting[one.tenant]
        del own[one.number]
        self.cost -= one.cost
        if not own:
            del self._waiting[one.tenant]

    def crowded_out(self, tenant: str, cost: int = 1) -> Waiting | None:
        """Return who makes room for one more of `tenant` where no more may wait: the latest of
        whoever has most waiting for its weight, if that is more than this tenant would have."""
        loads = {
            name: sum(one.cost for one in each.values()) / self.weights.get(name, 1.0)
            for name, each in self._waiting.items()
        }
        heaviest = max(loads, key=lambda name: (loads[name], name), default=tenant)
        own = loads.get(tenant, 0.0) + cost / self.weights.get(tenant, 1.0)
        if heaviest == tenant or loads[heaviest] <= own:
            return None
        return next(reversed(self._waiting[heaviest].values()))

    def _start_s(self, tenant: str) -> float:
        return max(self._now_s, self._next_s.get(tenant, 0.0))
