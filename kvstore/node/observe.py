"""A node's counts as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter

from kvass.common.metrics import StoreMetrics, StoreTotals
from kvass.kvstore.index.ledger import STATES
from kvass.kvstore.messages import TenantUse

_EVENTS = (
    "stored", "evictions", "over_quota", "dropped", "corrupt", "put_failed", "put_corrupt",
    "get_failed", "get_suspect", "filled", "fill_failed", "fill_dropped",
)  # fmt: skip
# Names of the counts, by label; those of a lower tier are there when the node has it.
_COPIES = {"waiting": "copies_waiting", "queued": "fill_queued_blocks", "left": "handover_left"}
_FLASH_WRITTEN = {"appended": "flash_appended_bytes", "copied": "flash_copied_bytes"}
_FLASH_FAULTS = {
    "read": "flash_read_faults", "write": "flash_write_faults", "corrupt": "flash_corrupt",
}  # fmt: skip
_BUCKET_MOVED = {"written": "bucket_written_bytes", "read": "bucket_read_bytes"}
_BUCKET_FAULTS = {
    "read": "bucket_read_faults", "write": "bucket_write_faults", "list": "bucket_list_faults",
    "delete": "bucket_delete_faults", "corrupt": "bucket_corrupt",
}  # fmt: skip


class Observer:
    """Mutable fields: `_seen`, the totals at the last `update`, by metric and label; `_tenants`,
    who is shown."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = StoreMetrics(registry)
        self._totals = StoreTotals(registry)
        self._seen: dict[tuple[Counter, str], int] = {}
        self._tenants: set[str] = set()

    def moved(self, what: str, size_bytes: int, time_s: float) -> None:
        """One put, get or fill is over."""
        if size_bytes:
            self._totals.moved_bytes.labels(what).inc(size_bytes)
            self._totals.moved_seconds.labels(what).observe(time_s)

    def show_tenants(self, tenants: Sequence[TenantUse]) -> None:
        """Show what these tenants have, and no others: there may be any number of them."""
        shown = {each.tenant: each.size_bytes for each in tenants}
        for tenant in self._tenants - shown.keys():
            self._metrics.tenant_bytes.remove(tenant)
        for tenant, size_bytes in shown.items():
            self._metrics.tenant_bytes.labels(tenant).set(size_bytes)
        self._tenants = set(shown)

    def update(self, counts: Mapping[str, int]) -> None:
        """Show these counts from now on."""
        self._show_gauges(counts)
        totals = self._totals
        for event in _EVENTS:
            self._count(totals.blocks, event, counts[event])
        for answer in ("hits", "misses"):
            self._count(totals.lookups, answer, counts[answer])
        below = {tier: counts.get(f"{tier}_hits", 0) for tier in ("flash", "bucket")}
        self._count(totals.hits, "dram", counts["hits"] - sum(below.values()))
        for tier, hits in below.items():
            self._count(totals.hits, tier, hits)
        quota = counts["quota_evictions"]
        self._count(totals.evictions, "quota", quota)
        self._count(totals.evictions, "room", counts["evictions"] - quota)
        self._count(totals.leases_lost, "", counts["leases_lost"])
        self._count(totals.scrubbed_bytes, "", counts["scrubbed_bytes"])
        self._count(totals.scrub_findings, "", counts["scrub_found"])
        for why, name in _FLASH_WRITTEN.items():
            self._count(totals.flash_written_bytes, why, counts.get(name, 0))
        for what, name in _FLASH_FAULTS.items():
            self._count(totals.flash_faults, what, counts.get(name, 0))
        for way, name in _BUCKET_MOVED.items():
            self._count(totals.bucket_moved_bytes, way, counts.get(name, 0))
        for what, name in _BUCKET_FAULTS.items():
            self._count(totals.bucket_faults, what, counts.get(name, 0))

    def _show_gauges(self, counts: Mapping[str, int]) -> None:
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
        for state, name in _COPIES.items():
            metrics.copies.labels(state).set(counts[name])
        metrics.hot_segments.set(counts["hot_segments"])
        metrics.draining.set(counts["draining"])
        total = counts["total_bytes"]
        self._show_tier("dram", counts["visible_blocks"], total - counts["free_bytes"], total)
        for tier in ("flash", "bucket"):
            if f"{tier}_total_bytes" in counts:
                blocks, used = counts[f"{tier}_blocks"], counts[f"{tier}_used_bytes"]
                self._show_tier(tier, blocks, used, counts[f"{tier}_total_bytes"])

    def _show_tier(self, tier: str, blocks: int, used_bytes: int, total_bytes: int) -> None:
        self._metrics.tier_blocks.labels(tier).set(blocks)
        self._metrics.tier_bytes.labels(tier, "used").set(used_bytes)
        self._metrics.tier_bytes.labels(tier, "total").set(total_bytes)

    def _count(self, counter: Counter, label: str, total: int) -> None:
        """Raise a counter (the one of `label`, if it has any) to a total."""
        shown = counter.labels(label) if label else counter
        shown.inc(max(total - self._seen.get((counter, label), 0), 0))
        self._seen[counter, label] = total
