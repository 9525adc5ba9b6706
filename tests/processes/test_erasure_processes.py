"""A store node that is killed, and away while a tenant is erased, as real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from crew import Seat, crew
from kvass.kvstore.placement import StoreNode
from store_peer import LAYOUT, pull, push, worker
from store_rest import until
from store_sim import chain_of

pytestmark = [pytest.mark.anyio, pytest.mark.process]
BLOCKS = 16
CHAINS = 12  # of two slabs of 109 blocks: more than half of them, so that they go down


def node_of(seat: Seat) -> StoreNode:
    return StoreNode(seat.member_id, f"127.0.0.1:{seat.port}", 20 << 20)


async def test_what_was_erased_while_a_node_was_dead_does_not_come_back(tmp_path: Path) -> None:
    sizes = ("--set", "store.flash_bytes=268435456", "--set", "store.flash_segment_bytes=8388608")
    with crew("--slab-bytes", "20MiB", *sizes) as members:
        seats = [
            members.add(f"store-{number}", "--set", f'store.flash_dir="{tmp_path / str(number)}"')
            for number in range(2)
        ]
        for seat in seats:
            seat.until_ready()
        first, second = seats
        async with worker("local", f"127.0.0.1:{first.port}", BLOCKS, "other") as (store, memory):
            store.set_nodes([node_of(seat) for seat in seats])
            chains = [chain_of(BLOCKS, seed=seed, layout=LAYOUT) for seed in range(CHAINS)]

            async def counts(seat: Seat, name: str) -> int:
                found = {each["id"]: each for each in await store.stats()}
                return int(found.get(seat.member_id, {}).get(name, -1))

            for seed, chain in enumerate(chains):
                assert await push(store, memory, seed, BLOCKS) == set(range(BLOCKS))
                await store.lookup(chain, [(0, BLOCKS)], deadline_s=3)

            async def below() -> bool:
                return await counts(first, "flash_blocks") >= BLOCKS

            await until(below)
            first.kill()
            store.set_nodes([node_of(second)])
            assert await store.drop(tenant="") > 0
            fresh = chain_of(BLOCKS, seed=99, layout=LAYOUT)
            assert await push(store, memory, 99, BLOCKS) == set(range(BLOCKS))
            first.start()
            first.until_ready()
            store.set_nodes([node_of(seat) for seat in seats])
            for seed, chain in enumerate(chains):
                assert await store.lookup(chain, [(0, BLOCKS)], deadline_s=3) == []
                assert await pull(store, memory, seed, BLOCKS) == set()
            assert await counts(first, "erasures_told") == 1
            assert await counts(first, "flash_blocks") == 0
            assert await counts(first, "flash_closed") == 0
            assert await store.lookup(fresh, [(0, BLOCKS)], deadline_s=3) == [(0, BLOCKS)]
        assert any(f"uses {tmp_path / '0' / 'node-0'}, its own" in line for line in first.lines), (
            "right after a kill -9"
        )
        assert any("store-1 told of 1 erasures" in line for line in first.lines)
