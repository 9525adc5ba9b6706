"""Waiting until a store node is at rest, as its own counts say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from kvass.kvstore.client.store import StoreClient

SETTLE_S = 15.0  # the put's deadline, the landing's bound, and a busy machine
REST = ("writing_bytes", "retired_bytes", "quarantined_bytes", "leases", "puts")
LANDING = ("landing_lent_bytes", "landing_quarantined_bytes")


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for another process's state; raises TimeoutError."""
    with anyio.fail_after(SETTLE_S):
        while not await condition():  # noqa: ASYNC110 (another process's state)
            await anyio.sleep(0.05)


async def counts_of(store: StoreClient) -> dict[str, str | int]:
    """Return the one node's counts, as soon as it answers."""
    found: list[dict[str, str | int]] = []

    async def answered() -> bool:
        found[:] = await store.stats()
        return bool(found)

    await until(answered)
    return found[0]


async def at_rest(store: StoreClient) -> dict[str, str | int]:
    """Wait until nothing is left over; return the counts."""

    async def rested() -> bool:
        counts = await counts_of(store)
        return not any(counts[name] for name in (*REST, *LANDING))

    await until(rested)
    return await counts_of(store)
