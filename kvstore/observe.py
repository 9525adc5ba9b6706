"""Counts as Prometheus metrics: a node's, and those of a client of the store."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter

from kvass.common.metrics import BlockMetrics, StoreMetrics
from kvass.kvstore.ledger import STATES

_EVENTS = ("stored", "evictions", "dropped", "corrupt", "put_failed", "put_corrupt", "get_failed")


# Why a pull did not bring a block: no node has it any more; its bytes were wrong; time was over
# before its turn; no landing memory was free; a call or transfer failed; no node could be asked.
MISSES = ("gone", "corrupt", "late", "landing_full", "failed", "unavailable")
# Why a push did not store one: the node is full; another writer is at it; then as above.
REFUSALS = ("full", "busy", "corrupt", "failed", "unavailable")
_FAILED_CALLS = ("timeout", "unavailable", "unreachable")


def show_counts(metrics: BlockMetrics, counts: Counts[str]) -> None:
    """Let the metrics read a client's counts whenever they are scraped."""
    for total, prefix, reasons in (
        (metrics.misses, "missed", MISSES),
        (metrics.refusals, "push", REFUSALS),
        (metrics.failed_calls, "node", _FAILED_CALLS),
    ):
        for reason in reasons:
            total.read(partial(counts.__getitem__, f"{prefix}_{reason}"), reason)


class Observer:
    """Mutable field: `_seen`, the totals at the last `update`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = StoreMetrics(registry)
        self._seen: dict[str, int] = {}

    def update(self, counts: Mapping[str, int]) -> None:
        """Show these counts from now on."""
        metrics = self._metrics
        for state in ("free", *STATES):
            metrics.bytes.labels(state).set(counts[f"{state}_bytes"])
        for state in STATES:
            metrics.slots.labels(state).set(counts[f"{state}_blocks"])
        for by in ("held", "pinned"):
            metrics.protected_bytes.labels(by).set(counts[f"{by}_bytes"])
        for what in ("leases", "claims", "puts"):
            metrics.open.labels(what).set(counts[what])
        for state in ("free", "lent", "quarantined"):
            metrics.landing_bytes.labels(state).set(counts[f"landing_{state}_bytes"])
        for event in _EVENTS:
            self._count(metrics.blocks, "event", event, counts)
        for answer in ("hits", "misses"):
            self._count(metrics.lookups, "answer", answer, counts)

    def _count(self, counter: Counter, label: str, name: str, counts: Mapping[str, int]) -> None:
        total = counts[name]
        counter.labels(**{label: name}).inc(total - self._seen.get(name, 0))
        self._seen[name] = total
