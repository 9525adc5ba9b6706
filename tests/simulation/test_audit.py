"""The audit: who computes wrong is found and barred, who is right never; its cost is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import anyio
import pytest
import torch
import trio.testing

from hash_model import BLOCK, HashModel
from kvass.common.model.runner import Rows
from kvass.prefill.audit import Auditor, Bench, OwnFault
from store_sim import Cluster, SlotArray, cluster
from worker_sim import Prefiller, add_prefiller

pytestmark = pytest.mark.anyio
PROBE = [index % 16 for index in range(4 * BLOCK)]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class BadMemory(HashModel):
    """Flips one bit of one token's KV, from its `after`-th row on. Mutable field: `after`."""

    def __init__(self, memory: SlotArray, after: int) -> None:
        super().__init__(memory)
        self.after = after
        self._array = memory.array

    def run(self, pieces: Sequence[Rows]) -> torch.Tensor | None:
        logits = super().run(pieces)
        if self.rows > self.after:
            piece = pieces[0]
            last = (piece.start + len(piece.tokens) - 1) // BLOCK
            self._array[piece.slots[last], 5] ^= 1
        return logits


def an_auditor(prefiller: Prefiller, share: float = 0.5) -> Auditor:
    memory = prefiller.worker.memory
    bench = Bench(
        pool=prefiller.pool,
        steps=prefiller.model,
        executor=prefiller.loop._executor,
        error=lambda one, other: float((memory.array[one] != memory.array[other]).any()),
        error_max=0.2,
        digest=lambda slots: blake2b(memory.array[list(slots)].tobytes()).digest(),
        probe=PROBE,
        block_tokens=BLOCK,
        chunk_tokens=4 * BLOCK,
    )
    name = prefiller.worker.hello.member_id
    auditor = Auditor(name, prefiller.worker.store, prefiller.loop, bench, share)
    prefiller.loop.on_served = auditor.served
    return auditor


def two(sim: Cluster, *, after: int = 1 << 30) -> tuple[Prefiller, Prefiller, Auditor]:
    """Return one that writes (wrong, `after` some rows), one that checks, and its auditor."""
    sim.add_node("store-0", blocks=400)
    sim.add_node("store-1", blocks=400)
    writer, checker = add_prefiller(sim, "prefill-0"), add_prefiller(sim, "prefill-1")
    writer.model = writer.loop._steps = BadMemory(writer.worker.memory, after)
    return writer, checker, an_auditor(checker)


def prompt(seed: int, blocks: int = 12) -> list[int]:
    return [(seed * 7 + index * index) % 16 for index in range(blocks * BLOCK)]


async def test_a_worker_that_computes_wrong_is_found_and_all_that_rests_on_it_goes() -> None:
    async with cluster() as sim:
        writer, checker, auditor = two(sim, after=0)
        sim.tasks.start_soon(auditor.run)
        for turn in range(12):
            await writer.prefill(prompt(turn), f"w{turn}")
            await checker.prefill([*prompt(turn), *prompt(99, 2)], f"c{turn}")
            await anyio.sleep(10)
            if auditor.barred:
                break
        assert auditor.barred == 1
        for node in sim.nodes.values():
            assert node.index.counts()["barred_writers"] == 1
            writers = {entry.header.writer for entry in node.index.ledger.entries.values()}
            assert "prefill-0" not in writers
        await writer.prefill(prompt(50), "again")
        assert "full" in writer.not_stored


async def test_a_worker_that_goes_bad_in_mid_chain_is_proved_by_its_own_block_before() -> None:
    async with cluster() as sim:
        writer, checker, auditor = two(sim, after=4 * BLOCK)
        await writer.prefill(prompt(1), "w")
        await checker.prefill([*prompt(1), *prompt(99, 2)], "c")
        auditor._known = await auditor.bench.probed()
        for _ in range(20):
            await auditor.audit(auditor._jobs[-1])
            if auditor.barred:
                break
        assert auditor.barred == 1


async def test_a_right_worker_is_never_accused() -> None:
    async with cluster() as sim:
        writer, checker, auditor = two(sim)
        sim.tasks.start_soon(auditor.run)
        for turn in range(20):
            await writer.prefill(prompt(turn), f"w{turn}")
            await checker.prefill([*prompt(turn), *prompt(99, 2)], f"c{turn}")
            await anyio.sleep(5)
        assert auditor.right > 20
        assert auditor.wrong == auditor.barred == 0
        assert checker.pool.used == 0


async def test_who_computed_upon_a_wrong_block_is_not_barred_for_it() -> None:
    async with cluster() as sim:
        liar, checker, auditor = two(sim, after=0)
        honest = add_prefiller(sim, "prefill-2")
        await liar.prefill(prompt(1, 4), "w")
        await honest.prefill(prompt(1), "h")  # pulls what is wrong, and goes on from there
        await checker.prefill([*prompt(1), *prompt(99, 2)], "c")
        auditor._known = await auditor.bench.probed()
        await checker.worker.store.drop(writer="prefill-0")  # by name only: what rests on it stays
        for _ in range(20):
            await auditor.audit(auditor._jobs[-1])
        assert auditor.wrong and not auditor.barred
        for node in sim.nodes.values():
            assert node.index.counts()["barred_writers"] == 0


async def test_an_auditor_that_computes_wrong_itself_accuses_nobody() -> None:
    async with cluster() as sim:
        writer, checker, auditor = two(sim)
        await writer.prefill(prompt(1), "w")
        await checker.prefill([*prompt(1), *prompt(99, 2)], "c")
        auditor._known = await auditor.bench.probed()
        bad = BadMemory(checker.worker.memory, 0)
        object.__setattr__(auditor.bench, "steps", bad)
        with pytest.raises(OwnFault):
            for _ in range(20):
                await auditor.audit(auditor._jobs[-1])
        assert auditor.wrong == auditor.barred == 0
        assert checker.pool.used == 0


async def test_audits_take_no_more_than_their_share_of_time_and_none_while_jobs_wait() -> None:
    async with cluster() as sim:
        writer, checker, auditor = two(sim)
        auditor.share = 0.01
        for turn in range(8):
            await writer.prefill(prompt(turn), f"w{turn}")
            await checker.prefill([*prompt(turn), *prompt(99, 2)], f"c{turn}")
        rows = checker.model.rows
        sim.tasks.start_soon(auditor.run)
        begun_s = anyio.current_time()
        await anyio.sleep(10)
        steps = (checker.model.rows - rows) / (4 * BLOCK)  # of 0.01 s each
        assert 0 < steps * 0.01 <= 0.01 * (anyio.current_time() - begun_s) + 0.05


def test_no_share_is_no_audit() -> None:
    async def main() -> None:
        async with cluster() as sim:
            _, _, auditor = two(sim)
            auditor.share = 0.0
            await auditor.run()

    anyio.run(main, backend="trio")
