"""An auditor's bench and knowledge in a simulated worker, whose slots are arrays."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from hash_model import BLOCK, HashModel
from kvass.common.membership import Peer
from kvass.common.pool.pool import BlockPool
from kvass.common.worker import DETERMINISTIC
from kvass.prefill.audit import Arithmetic, Auditor, Bench
from kvass.prefill.loop import PrefillLoop
from store_sim import SlotArray, Worker

PROBE = [index % 16 for index in range(4 * BLOCK)]
ROUNDING = 0.2  # share of a block's bytes that is taken for it


def peer_of(name: str, said: str) -> Peer:
    """Return what a worker says of itself and of its arithmetic."""
    return Peer(
        role="prefill", member_id=name, start_id=f"{name}@1", host_id="host-0", pid=1,
        state="ready", started_s=0.0, details={DETERMINISTIC: said} if said else {},
    )  # fmt: skip


def bench_of(
    memory: SlotArray,
    pool: BlockPool,
    model: HashModel,
    loop: PrefillLoop,
    *,
    deterministic: bool = True,
) -> Bench:
    array = memory.array
    return Bench(
        pool=pool,
        steps=model,
        executor=loop._executor,
        error=lambda one, other: float((array[one] != array[other]).mean()) / ROUNDING,
        deterministic=deterministic,
        digest=lambda slots: blake2b(array[list(slots)].tobytes()).digest(),
        probe=PROBE,
        block_tokens=BLOCK,
        chunk_tokens=4 * BLOCK,
        on_release=loop.wake,
    )


def auditor_of(
    worker: Worker,
    loop: PrefillLoop,
    bench: Bench,
    emptied: Iterable[BlockPool],
    deterministic: Iterable[str],
) -> Auditor:
    """Make the auditor of a loop's jobs. It knows these workers as deterministic."""

    async def empty_pools() -> None:
        for pool in emptied:
            pool.forget()

    name = worker.hello.member_id
    auditor = Auditor(name, worker.store, loop, bench, Arithmetic(), empty_pools, share=0.5)
    auditor.arithmetic.heard(peer_of(each, "yes") for each in deterministic)
    loop.on_served = auditor.served
    return auditor
