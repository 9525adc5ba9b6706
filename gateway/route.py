"""Which decode worker answers a prompt, and which prefill worker fills the store for it. Pure.

The choice is an estimate of the time to the first token: what waits before it, what must be
computed, what must be moved. It takes views (loads as heard by MQTT) and the ranges that a lookup
found; a wrong view costs time, never an answer. It refuses to know how anything is sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvass.common.errors import Overloaded, Unavailable
from kvass.common.keys import BlockKey
from kvass.common.wire import Range

# Before a worker has measured itself: a small model on a CPU, and a copy within one host. Equal for
# all, so that they decide nothing but whether moving pays, and it does.
PREFILL_TOKENS_S = 1000.0
PULL_BYTES_S = 1e9
RETRY_S = 60.0  # a worker k times as slow as the others is sent a prompt about every k minutes,
RETRY_MOST = 4  # up to so many times: a slower one keeps a prompt waiting for too long
STEP_S = 0.02  # one more request in a running batch: about a decode step of its own
HANDOVER_S = 0.005  # a prefill job's detour: two messages and the first pull
AFFINITY_KEYS = 1 << 17  # 2 million tokens; about 25 MB here
AFFINITY_POOLS = 1024  # whose blocks are counted: no cluster has more, and a restart is another
AFFINITY_WORKERS = 4  # that one key is remembered for: more copies than that are everywhere anyway


@dataclass(frozen=True, slots=True)
class Worker:
    """One live worker as its last load describes it."""

    member_id: str
    start_id: str
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens that are queued or unfinished
    waiting_max: int = 0  # how many may wait; 0: it did not say
    running_max: int = 0  # how many it serves at once; 0: it did not say
    total_blocks: int = 0  # of its pool; 0: it did not say
    emptied_count: int = 0  # how often its pool was emptied, as by `kvass drop`
    prefill_tokens_s: float = PREFILL_TOKENS_S
    has_measured: bool = False  # prefill_tokens_s is its own figure
    pull_bytes_s: float = PULL_BYTES_S
    unused_s: float = 0.0  # for so much longer than the others it was sent nothing

    @staticmethod
    def of_load(member_id: str, start_id: str, load: Mapping[str, int | float | str]) -> Worker:
        """Read a load message; what is missing or absurd in it falls back to the defaults."""

        def number(name: str, default: float) -> float:
            value = load.get(name)
            return value if isinstance(value, (int, float)) and value > 0 else default

        return Worker(
            member_id=member_id,
            start_id=start_id,
            running=int(number("running", 0)),
            waiting=int(number("waiting", 0)),
            waiting_tokens=int(number("waiting_tokens", 0)),
            waiting_max=int(number("waiting_max", 0)),
            running_max=int(number("running_max", 0)),
            total_blocks=int(number("total_blocks", 0)),
            emptied_count=int(number("emptied_count", 0)),
            prefill_tokens_s=number("prefill_tokens_s", PREFILL_TOKENS_S),
            has_measured=number("prefill_tokens_s", 0) > 0,
            pull_bytes_s=number("pull_bytes_s", PULL_BYTES_S),
        )

    @property
    def pool_id(self) -> str:
        """Name what is in its pool now: once that was emptied, it is another pool."""
        return f"{self.start_id} {self.emptied_count}"

    @property
    def hoped_tokens_s(self) -> float:
        """Its rate, and as much again for every minute in which others were used and it was not. A
        rate is measured at work alone: one of a bad moment, such as a start under load, would shut
        it out for good."""
        return self.prefill_tokens_s * min(1 + self.unused_s // RETRY_S, RETRY_MOST)

    @property
    def queue_s(self) -> float:
        """How long a request that comes now waits before its own work begins."""
        return self.waiting_tokens / self.prefill_tokens_s + self.running * STEP_S

    @property
    def is_full(self) -> bool:
        """Whether it would refuse one more."""
        return self.waiting_max > 0 and self.waiting >= self.waiting_max


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as routing sees it. `stored`: block ranges that the store can give."""

    tokens: int
    block_tokens: int
    block_bytes: int
    stored: Sequence[Range] = ()

    @property
    def blocks(self) -> int:
        """Its full blocks."""
        return self.tokens // self.block_tokens


@dataclass(frozen=True, slots=True)
class Route:
    """Where a prompt goes, and why. `prefill` is None where decode computes what is missing."""

    decode: Worker
    prefill: Worker | None
    missing_tokens: int
    estimate_s: float


@dataclass(slots=True)
class Affinity:
    """Which workers had which blocks lately: a guess that decides ties and saves moves.

    It also decides whether prefill is asked, so it must not be believed for long without cause. It
    names pools, not workers: of one that was emptied nothing is believed that was noted before. And
    pools forget what was used longest ago: what was noted before as many new blocks as one holds is
    gone.

    Mutable fields: `_holders`, by key, least recently used first, at most `keys_max`; of each key
    the pools that last had it, latest last, with their counts of then. `_counts`, by pool, of
    blocks that it was not thought to have when they were noted; latest last, at most
    `AFFINITY_POOLS`.
    """

    keys_max: int = AFFINITY_KEYS
    _holders: OrderedDict[BlockKey, tuple[tuple[str, int], ...]] = field(
        default_factory=OrderedDict
    )
    _counts: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def record(self, worker: Worker, keys: Sequence[BlockKey]) -> None:
        """Note that a worker has these blocks in its pool now."""
        pool_id, known = worker.pool_id, self.blocks(worker, keys)
        count = self._counts.pop(pool_id, 0) + len(keys) - len(known)
        self._counts[pool_id] = count
        noted = (pool_id, count)
        for key in keys:
            others = (each for each in self._holders.pop(key, ()) if each[0] != pool_id)
            self._holders[key] = (*others, noted)[-AFFINITY_WORKERS:]
        while len(self._holders) > self.keys_max:
            self._holders.popitem(last=False)
        while len(self._counts) > AFFINITY_POOLS:
            self._counts.popitem(last=False)

    def blocks(self, worker: Worker, keys: Sequence[BlockKey]) -> set[int]:
        """Return the indices of the keys that a worker is thought to have."""
        pool_id, since = worker.pool_id, -1
        if worker.total_blocks:
            since = self._counts.get(pool_id, 0) - worker.total_blocks
        return {
            index
            for index, key in enumerate(keys)
            for holder, count in self._holders.get(key, ())
            if holder == pool_id and count > since
        }

    def __len__(self) -> int:
        return len(self._holders)


def _cost(prompt: Prompt, worker: Worker, local: Collection[int]) -> tuple[int, int]:
    """Return (missing tokens, blocks to pull): at least the prompt's last token is computed."""
    have = {index for index in local if index < prompt.blocks}
    pulled = {
        index
        for first, stop in prompt.stored
        for index in range(first, min(stop, prompt.blocks))
        if index not in have
    }
    missing = prompt.tokens - (len(have) + len(pulled)) * prompt.block_tokens
    return max(1, missing), len(pulled)


def pick_prefill(
    missing_tokens: int, workers: Iterable[Worker], *, excluded: Collection[str] = ()
) -> tuple[Worker, float] | None:
    """Return the prefill worker that would be done first, and when; None where there is none."""
    ends = [
        (worker.queue_s + missing_tokens / worker.hoped_tokens_s, worker.member_id, worker)
        for worker in workers
        if worker.start_id not in excluded and not worker.is_full
    ]
    if not ends:
        return None
    end_s, _, worker = min(ends, key=lambda end: end[:2])
    return worker, end_s


def plan(
    prompt: Prompt,
    decodes: Sequence[Worker],
    prefills: Sequence[Worker],
    *,
    local: Mapping[str, Collection[int]],
    prefill_tokens_min: int,
) -> Route:
    """Choose the route with the earliest first token.

    `local` gives, by start id, the block indices that a decode worker is thought to have. A prefill
    worker is used where at least `prefill_tokens_min` tokens are missing: also where decode would
    be done sooner, since its other streams would wait. Raises Unavailable without a decode worker,
    Overloaded where every one is full, with the shortest queue as the time to come back.
    """
    if not decodes:
        raise Unavailable("no decode worker is ready")
    routes = [
        _route(prompt, worker, prefills, local.get(worker.start_id, ()), prefill_tokens_min)
        for worker in decodes
        if not worker.is_full
    ]
    if not routes:
        soonest_s = min(worker.queue_s for worker in decodes)
        raise Overloaded("every decode worker's queue is full", retry_after_s=max(1.0, soonest_s))
    return min(routes, key=lambda route: (route.estimate_s, route.decode.member_id))


def _route(
    prompt: Prompt,
    worker: Worker,
    prefills: Sequence[Worker],
    local: Collection[int],
    prefill_tokens_min: int,
) -> Route:
    missing, pulled = _cost(prompt, worker, local)
    prefill, compute_s, moved = None, missing / worker.hoped_tokens_s, pulled
    if missing >= prefill_tokens_min:
        picked = pick_prefill(missing, prefills)
        if picked is not None:
            prefill, end_s = picked
            moved += missing // prompt.block_tokens
            compute_s = end_s + HANDOVER_S
    move_s = moved * prompt.block_bytes / worker.pull_bytes_s
    return Route(worker, prefill, missing, worker.queue_s + compute_s + move_s)


def largest_pool_tokens(block_tokens: int, decodes: Iterable[Worker]) -> int | None:
    """Return the most tokens that any decode worker's pool holds; None if one did not say."""
    sizes = [worker.total_blocks for worker in decodes]
    return max(sizes) * block_tokens if sizes and 0 not in sizes else None


def missing_ranges(tokens: int, block_tokens: int, stored: Iterable[Range]) -> list[Range]:
    """Return the token ranges of a prompt that no stored block covers."""
    gaps, position = [], 0
    for first, stop in sorted(stored):
        start = min(first * block_tokens, tokens)
        if start > position:
            gaps.append((position, start))
        position = max(position, min(stop * block_tokens, tokens))
    if position < tokens:
        gaps.append((position, tokens))
    return gaps


def union(ranges: Iterable[Range]) -> list[Range]:
    """Merge half-open ranges into ascending disjoint ones."""
    merged: list[Range] = []
    for first, stop in sorted(ranges):
        if stop <= first:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((first, stop))
    return merged


def cached_tokens(prompt_tokens: int, computed: Iterable[Range]) -> int:
    """Return how many of a prompt's tokens were not computed for it; at most all but one."""
    inside = [(max(0, first), min(stop, prompt_tokens)) for first, stop in computed]
    fresh = sum(stop - first for first, stop in union(inside))
    return max(0, min(prompt_tokens - fresh, prompt_tokens - 1))
