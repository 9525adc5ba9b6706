"""The counts of a client of the store as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from functools import partial

from kvass.common.metrics import BlockMetrics

# Why a pull did not bring a block: no node has it any more; its bytes were wrong; time was over
# before its turn; no landing memory was free; a call or transfer failed; no node could be asked.
MISSES = ("gone", "corrupt", "late", "landing_full", "failed", "unavailable")
# Why a push did not store one: the node is full; another writer is at it; then as above.
REFUSALS = ("full", "busy", "corrupt", "failed", "unavailable")
# The last: it answered what cannot be an answer.
_FAILED_CALLS = ("timeout", "unavailable", "unreachable", "wrong")


def show_counts(metrics: BlockMetrics, counts: Counter[str]) -> None:
    """Let the metrics read a client's counts whenever they are scraped."""
    for total, prefix, reasons in (
        (metrics.misses, "missed", MISSES),
        (metrics.refusals, "push", REFUSALS),
        (metrics.failed_calls, "node", _FAILED_CALLS),
    ):
        for reason in reasons:
            total.read(partial(counts.__getitem__, f"{prefix}_{reason}"), reason)
