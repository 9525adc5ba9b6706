"""A bucket in memory that fails, hangs, loses and changes what it holds when it is told to; and
nodes that use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import anyio

from flash_sim import give_flash
from inline import InlineExecutor
from kvass.common.errors import Unavailable
from kvass.common.transport.route import Setting
from kvass.kvstore.node.tiers.bucket_tier import BucketTier
from kvass.kvstore.objects.shelf import Listed
from memory_disk import MemoryDisk
from store_sim import Cluster, SimNode, Worker, chain_of, push

PAGE_OBJECTS = 3
BLOCKS = 12
CHAINS = 4
SMALL = 24  # blocks of memory: two chains
ALL = set(range(BLOCKS))
BLOCK_BYTES = 4096  # of each in an object


@dataclass(slots=True)
class _Stored:
    data: bytes
    put_s: float


@dataclass
class MemoryObjects:
    """Mutable fields: `stored` by name, `calls` by kind, `refuses` (says why a call on a name
    fails, or None), `waits_s` (how long each call takes), `slow` (and those of one kind, more)."""

    stored: dict[str, _Stored] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    refuses: Callable[[str, str], str | None] = lambda what, name: None
    waits_s: float = 0.0
    slow: dict[str, float] = field(default_factory=dict)

    async def put(self, name: str, data: memoryview) -> None:
        await self._attempt("put", name)
        self.stored[name] = _Stored(bytes(data), anyio.current_time())

    async def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        await self._attempt("read", name)
        found = self.stored.get(name)
        if found is None:
            return None
        return [memoryview(found.data)[start:end] for start, end in ranges]

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            await self._attempt("delete", name)
            self.stored.pop(name, None)

    async def pages(self, under: str) -> AsyncGenerator[list[Listed], None]:
        at = ""
        while True:
            await self._attempt("list", under)
            names = sorted(n for n in self.stored if n > at and n.startswith(f"{under}/"))
            page = names[:PAGE_OBJECTS]
            if not page:
                return
            at, now_s = page[-1], anyio.current_time()
            kept = self.stored
            yield [Listed(n, len(kept[n].data), now_s - kept[n].put_s) for n in page]

    async def _attempt(self, what: str, name: str) -> None:
        self.calls[what] += 1
        await anyio.sleep(self.waits_s + self.slow.get(what, 0.0))
        why = self.refuses(what, name)
        if why is not None:
            raise Unavailable(f"bucket: cannot {what}: {why}")

    # --- what a test does to it ---

    def is_down(self, down: bool) -> None:
        """Let every call fail, or none."""
        self.refuses = lambda what, name: "connection refused" if down else None

    def change(self, how: Callable[[bytes], bytes]) -> None:
        """Change the bytes of everything that is there."""
        for each in self.stored.values():
            each.data = how(each.data)


def start(
    sim: Cluster,
    objects: MemoryObjects,
    name: str = "store-0",
    *,
    blocks: int = SMALL,
    total_bytes: int = 1 << 30,
    setting: Setting = "auto",
    host: str = "host-0",
    disk: MemoryDisk | None = None,
) -> SimNode:
    node = sim.add_node(name, setting=setting, blocks=blocks, host=host)
    if disk is not None:
        give_flash(node, disk, seed=len(disk.files))
    node.node.add_bucket(objects, "sim", total_bytes, InlineExecutor())
    sim.share_view()
    return node


def tier(node: SimNode) -> BucketTier:
    found = node.node._bucket
    assert found is not None
    return found


async def fill(worker: Worker, chains: int = CHAINS, **terms: object) -> None:
    """Put chains and ask for each, so that all of them go to the bucket."""
    for seed in range(chains):
        chain = chain_of(BLOCKS, seed=seed)
        await push(worker, chain, range(BLOCKS), **terms)
        await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
        await anyio.sleep(4)


async def again(
    sim: Cluster, objects: MemoryObjects, name: str = "store-0", **terms: object
) -> SimNode:
    """Start a node anew, with nothing in memory, and let it look at the bucket."""
    sim.kill_node(name)
    await anyio.sleep(2)
    node = start(sim, objects, name, **terms)  # type: ignore[arg-type]
    await anyio.sleep(1)
    return node


async def until(true: Callable[[], bool], within_s: float = 120.0) -> None:
    for _ in range(int(within_s / 0.1)):
        if true():
            return
        await anyio.sleep(0.1)
    raise AssertionError("it did not happen")
