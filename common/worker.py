"""What the shells of prefill and decode workers share: the store's nodes, load and pool metrics."""

from __future__ import annotations

from typing import Protocol

from kvass.common.costs import Costs
from kvass.common.metrics import PoolMetrics, read
from kvass.common.model.engine import Engine
from kvass.common.pool.pool import BlockPool


class Totals(Protocol):
    """What a worker's loop counts for the hit rate."""

    prompt_tokens: int
    computed_tokens: int


def pool_load(engine: Engine, costs: Costs) -> dict[str, int | float | str]:
    """Return the part of a load report that both workers make."""
    pool = engine.pool
    return {
        "total_blocks": pool.total,
        "used_blocks": pool.used,
        "cached_blocks": pool.counts()["cached"],
        "prefill_tokens_s": round(costs.tokens_per_s, 1),
        "pull_bytes_s": round(costs.bytes_per_s),
        "deterministic": "yes" if engine.deterministic else "no",
    }


def watch_pool(metrics: PoolMetrics, pool: BlockPool, totals: Totals) -> None:
    """Let the pool's gauges read it whenever they are scraped."""
    read(metrics.total_blocks, lambda: pool.total)
    read(metrics.used_blocks, lambda: pool.used)
    read(metrics.usage_percent, lambda: 100 * pool.used / pool.total)
    read(metrics.hit_rate, lambda: 1 - totals.computed_tokens / max(1, totals.prompt_tokens))
