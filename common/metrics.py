"""Every Prometheus name in one place, grouped by who counts it.

A process builds the groups that it needs on its member's registry, once; nothing is registered at
import. Names are public: dashboards and alerts depend on them. It refuses to know how a value comes
about: owners set gauges, or give a function that is read when somebody looks; and who looks, which
is `metrics_port.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

# A cached prompt's first token is a few ms away, a long cold one's a minute.
_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
_END_TO_END_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TRANSFER_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)


def new_registry() -> CollectorRegistry:
    """Return a registry with what the operating system knows of this process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def read(gauge: Gauge, value: Callable[[], float]) -> None:
    """Let a gauge call `value` whenever it is scraped (from the endpoint's thread)."""
    gauge.set_function(value)


class MemberMetrics:
    """Every role: its link to the control plane."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.bus_up = Gauge(
            "kvass_bus_up", "1 while the link to the broker is up", registry=registry
        )
        self.bus_links = Gauge(
            "kvass_bus_links", "Connections made to the broker so far", registry=registry
        )
        self.members = Gauge("kvass_members", "Live members seen", ["role"], registry=registry)
        self.messages_refused = Counter(
            "kvass_bus_messages_refused",
            "Control messages that did not parse or were too many",
            registry=registry,
        )


class Total(Collector):
    """A counter whose values are kept by somebody else, by one label or by none, and read whenever
    it is scraped (from the endpoint's thread). Mutable field: `_values`, by the label's value."""

    def __init__(
        self, name: str, documentation: str, label: str = "", *, registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = [label] if label else []
        self._values: dict[str, Callable[[], float]] = {}
        registry.register(self)

    def read(self, value: Callable[[], float], of: str = "") -> None:
        """Let `value` say the total, `of` one value of the label; it must never go down."""
        self._values[of] = value

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for of, value in self._values.items():
            family.add_metric([of] if self._labels else [], value())
        yield family


class WorkerMetrics:
    """Prefill and decode: the paged KV pool, the batch, and what had to be computed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.usage_percent = Gauge(
            "kvass_kv_cache_usage_percent",
            "Percent (0 to 100) of the pool's blocks that requests or jobs use",
            registry=registry,
        )
        self.total_blocks = Gauge(
            "kvass_kv_cache_total_blocks", "Blocks that the pool holds", registry=registry
        )
        self.used_blocks = Gauge(
            "kvass_kv_cache_used_blocks",
            "Blocks of the pool in use by requests or jobs",
            registry=registry,
        )
        self.prompt_tokens = Total(
            "kvass_worker_prompt_tokens",
            "Prompt tokens of the requests that this worker took in, or of its jobs' full blocks",
            registry=registry,
        )
        self.computed_tokens = Total(
            "kvass_worker_computed_tokens",
            "Prompt tokens that this worker computed; the rest was found in its pool or the store,"
            " or was not needed any more",
            registry=registry,
        )
        self.running = Gauge(
            "kvass_running", "Requests or jobs that have slots in the pool", registry=registry
        )
        self.waiting = Gauge(
            "kvass_waiting", "Requests or jobs that wait for slots", registry=registry
        )
        self.step_seconds = Histogram(
            "kvass_step_seconds",
            "Time of one step of the batch",
            buckets=_INTER_TOKEN_S,
            registry=registry,
        )


class BlockMetrics:
    """Whoever moves blocks: bytes, times, and what could not be had or stored, by reason."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.bytes = Counter(
            "kvass_transfer_bytes",
            "Bytes of blocks that came from store nodes (pull) or went to them (push)",
            ["direction"],
            registry=registry,
        )
        self.seconds = Histogram(
            "kvass_transfer_seconds",
            "Time of one pull or push that moved bytes, with all its nodes",
            ["direction"],
            buckets=_TRANSFER_S,
            registry=registry,
        )
        self.misses = Total(
            "kvass_block_misses",
            "Blocks that a pull did not bring, and that had to be computed",
            "reason",
            registry=registry,
        )
        self.refusals = Total(
            "kvass_block_refusals",
            "Blocks that were not stored when they were offered; each offer of a block counts",
            "reason",
            registry=registry,
        )
        self.failed_calls = Total(
            "kvass_store_failed_calls",
            "Calls to store nodes that were not answered",
            "reason",
            registry=registry,
        )


class AuditMetrics:
    """A prefill worker's audit of what others have stored."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.blocks = Total(
            "kvass_audit_blocks",
            "Blocks of other workers that were computed anew and compared, by outcome",
            "outcome",
            registry=registry,
        )
        self.barred = Total(
            "kvass_audit_barred", "Writers barred since they compute wrong", registry=registry
        )


class StoreMetrics:
    """A store node now: its tiers, by state, and what its users have out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.bytes = Gauge(
            "kvass_store_bytes", "Bytes of the slab, by state", ["state"], registry=registry
        )
        self.slots = Gauge(
            "kvass_store_slots", "Slots in use, by state", ["state"], registry=registry
        )
        self.tier_bytes = Gauge(
            "kvass_store_tier_bytes",
            "Bytes of each tier: in use, and in all",
            ["tier", "what"],
            registry=registry,
        )
        self.tier_blocks = Gauge(
            "kvass_store_tier_blocks", "Blocks in each tier", ["tier"], registry=registry
        )
        self.tenant_bytes = Gauge(
            "kvass_store_tenant_bytes",
            "Bytes of the slab by tenant, of those that have the most",
            ["tenant"],
            registry=registry,
        )
        self.protected_bytes = Gauge(
            "kvass_store_protected_bytes", "Bytes kept from eviction", ["by"], registry=registry
        )
        self.open = Gauge(
            "kvass_store_open", "Leases, claims and puts that are open", ["what"], registry=registry
        )
        self.landing_bytes = Gauge(
            "kvass_store_landing_bytes", "Landing memory, by state", ["state"], registry=registry
        )
        self.copies = Gauge(
            "kvass_store_copies",
            "Blocks of which copies are to be taken: told to others (waiting), taken here (queued),"
            " and (left) what a node that drains has still to see elsewhere",
            ["state"],
            registry=registry,
        )
        self.hot_segments = Gauge(
            "kvass_store_hot_segments",
            "Segments read so much that their readers are spread over several nodes",
            registry=registry,
        )
        self.draining = Gauge(
            "kvass_store_draining",
            "1 while the node hands over and takes nothing new",
            registry=registry,
        )


class StoreTotals:
    """A store node: what it has done and met since its start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.blocks = Counter(
            "kvass_store_blocks", "Blocks, by what became of them", ["event"], registry=registry
        )
        self.evictions = Counter(
            "kvass_store_evictions",
            "Blocks evicted: for room, or since their tenant was over its quota",
            ["cause"],
            registry=registry,
        )
        self.lookups = Counter(
            "kvass_store_lookups",
            "Blocks looked up, by answer: each block of a prompt once, at the first node asked",
            ["answer"],
            registry=registry,
        )
        self.hits = Counter(
            "kvass_store_hits",
            "Blocks looked up and found, by the tier they were in",
            ["tier"],
            registry=registry,
        )
        self.leases_lost = Counter(
            "kvass_store_leases_lost",
            "Leases that ended before their reader did",
            registry=registry,
        )
        self.scrubbed_bytes = Counter(
            "kvass_store_scrubbed_bytes", "Bytes that the scrub has read", registry=registry
        )
        self.scrub_findings = Counter(
            "kvass_store_scrub_findings", "Blocks that the scrub found corrupt", registry=registry
        )
        self.flash_written_bytes = Counter(
            "kvass_store_flash_written_bytes",
            "Bytes written to flash: appended, or copied forward; their sum is its wear",
            ["why"],
            registry=registry,
        )
        self.flash_faults = Counter(
            "kvass_store_flash_faults", "Faults of the flash tier", ["what"], registry=registry
        )
        self.bucket_moved_bytes = Counter(
            "kvass_store_bucket_moved_bytes",
            "Bytes that this node has written to the bucket, and read from it",
            ["way"],
            registry=registry,
        )
        self.bucket_faults = Counter(
            "kvass_store_bucket_faults",
            "Requests of this node that the bucket refused or did not answer in time; blocks of it"
            " that were corrupt",
            ["what"],
            registry=registry,
        )
        self.moved_bytes = Counter(
            "kvass_store_moved_bytes",
            "Bytes of blocks that writers stored (put), readers had (get), this node copied (fill)",
            ["what"],
            registry=registry,
        )
        self.moved_seconds = Histogram(
            "kvass_store_moved_seconds",
            "Time of one put, get or fill that moved bytes, as the node sees it; a get on the same"
            " host is its lease",
            ["what"],
            buckets=_TRANSFER_S,
            registry=registry,
        )


class RequestMetrics:
    """The gateway: requests as clients see them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvass_requests", "Requests, by outcome", ["outcome"], registry=registry
        )
        self.prompt_tokens = Counter(
            "kvass_request_prompt_tokens",
            "Prompt tokens of requests that were answered whole",
            registry=registry,
        )
        self.cached_tokens = Counter(
            "kvass_request_cached_tokens",
            "Of those, tokens that no worker computed for the request",
            registry=registry,
        )
        self.generated_tokens = Counter(
            "kvass_request_generated_tokens",
            "Tokens of answers to requests that were answered whole",
            registry=registry,
        )
        self.hit_rate = Gauge(
            "kvass_prefix_cache_hit_rate",
            "Share (0 to 1) of answered requests' prompt tokens that no worker computed for them;"
            " older requests weigh less, by 1/e in two minutes",
            registry=registry,
        )
        self.running = Gauge(
            "kvass_requests_running",
            "Answers in flight: a request has n of them",
            registry=registry,
        )
        self.resumed = Counter(
            "kvass_requests_resumed",
            "Streams that had begun, lost their worker and were given to one again",
            registry=registry,
        )
        self.blocks_not_stored = Counter(
            "kvass_prefill_blocks_not_stored",
            "Blocks that prefill jobs could not put into the store: decode workers compute them",
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "kvass_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.inter_token_seconds = Histogram(
            "kvass_inter_token_latency_seconds",
            "Between a stream's tokens",
            buckets=_INTER_TOKEN_S,
            registry=registry,
        )
        self.end_to_end_seconds = Histogram(
            "kvass_e2e_request_latency_seconds",
            "From the request's arrival to its end",
            buckets=_END_TO_END_S,
            registry=registry,
        )
