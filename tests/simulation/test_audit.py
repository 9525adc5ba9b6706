"""The audit: who computes wrong is found and barred, who is right never; its cost is bounded."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
import torch
import trio.testing

from audit_sim import auditor_of, bench_of, peer_of
from hash_model import BLOCK, HashModel
from kvass.common.model.runner import Rows
from kvass.prefill.audit import WORKERS_KNOWN_MAX, Arithmetic, Auditor, OwnFault
from store_sim import Cluster, SlotArray, cluster
from worker_sim import Prefiller, add_prefiller

pytestmark = pytest.mark.anyio


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


def an_auditor(
    prefiller: Prefiller, *, deterministic: bool = True, emptied: Sequence[Prefiller] = ()
) -> Auditor:
    bench = bench_of(
        prefiller.worker.memory,
        prefiller.pool,
        prefiller.model,
        prefiller.loop,
        deterministic=deterministic,
    )
    pools = [each.pool for each in emptied]
    names = [f"prefill-{number}" for number in range(3)]
    return auditor_of(prefiller.worker, prefiller.loop, bench, pools, names)


def two(sim: Cluster, *, after: int = 1 << 30) -> tuple[Prefiller, Prefiller, Auditor]:
    """Return one that writes (wrong, `after` some rows), one that checks, and its auditor."""
    sim.add_node("store-0", blocks=400)
    sim.add_node("store-1", blocks=400)
    writer, checker = add_prefiller(sim, "prefill-0"), add_prefiller(sim, "prefill-1")
    writer.model = writer.loop._steps = BadMemory(writer.worker.memory, after)
    return writer, checker, an_auditor(checker, emptied=[writer, checker])


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
        for each in (writer, checker):
            assert not each.pool.counts()["cached"], "what was pulled of it is used again"
        await writer.prefill(prompt(50), "again")
        assert "full" in writer.not_stored


@pytest.mark.parametrize(
    ("own", "writers", "found"),
    [("yes", "yes", 1), ("no", "yes", 0), ("yes", "no", 0), ("yes", "", 0)],
)
async def test_one_bit_is_enough_where_all_are_deterministic_and_known(
    own: str, writers: str, found: int
) -> None:
    async with cluster() as sim:
        writer, checker, _ = two(sim, after=0)
        auditor = an_auditor(checker, deterministic=own == "yes")
        auditor.arithmetic.heard([peer_of("prefill-0", writers)])
        await writer.prefill(prompt(1, 4), "w")  # one step, of whose blocks the last is wrong
        await checker.prefill([*prompt(1, 4), *prompt(99, 2)], "c")
        await checker.worker.store.drop(writer="prefill-1")
        auditor._known = await auditor.bench.probed()
        for _ in range(20):
            await auditor.audit(auditor._jobs[-1])
        assert min(auditor.wrong, 1) == found
        assert auditor.barred == found and (found or auditor.right)


def test_rounding_is_allowed_above_a_block_of_a_worker_that_rounds_otherwise() -> None:
    async def main() -> None:
        async with cluster() as sim:
            _, _, auditor = two(sim)
            auditor.arithmetic.heard([peer_of("loose", "no"), peer_of("silent", "")])
            for other, exactly in (("prefill-0", True), ("loose", False), ("silent", False)):
                assert auditor._is_exact(5, {0: other, 5: "prefill-2"}) == exactly
                assert auditor._is_exact(5, {5: "prefill-2", 6: other})

    anyio.run(main, backend="trio")


def test_what_a_worker_once_said_of_its_rounding_stays() -> None:
    """Blocks bear its id, not its start."""
    heard = Arithmetic()
    heard.heard([peer_of("a", "yes"), peer_of("b", "no")])
    assert heard.is_exact(["a"]) and not heard.is_exact(["a", "b"]) and not heard.is_exact(["c"])
    heard.heard([peer_of("b", "yes")])  # started anew, with other settings
    assert heard.is_exact(["a"]) and not heard.is_exact(["b"])
    heard.heard(peer_of(f"w{number}", "yes") for number in range(WORKERS_KNOWN_MAX))
    assert heard.is_exact(["w0"]) and not heard.is_exact(["a"])


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


async def test_a_job_that_has_no_room_beside_an_audit_goes_on_when_that_is_over() -> None:
    """Seed 1764603189: nobody told the loop that the auditor's slots had come back, and the job
    waited for the next one, or its deadline, on a worker that did nothing."""
    async with cluster() as sim:
        writer, checker, auditor = two(sim)
        await writer.prefill(prompt(1, 40), "w")
        await checker.prefill([*prompt(1, 40), *prompt(99, 2)], "c")
        auditor._known = await auditor.bench.probed()
        sim.tasks.start_soon(auditor.audit, auditor._jobs[-1])
        await anyio.sleep(0.02)
        assert checker.pool.counts()["private"] > 2, "the audit is at work"
        begun_s = anyio.current_time()
        with anyio.move_on_after(60):
            await checker.prefill(prompt(5, 62), "j")
        assert auditor.right and anyio.current_time() - begun_s < 5


def test_no_share_is_no_audit() -> None:
    async def main() -> None:
        async with cluster() as sim:
            _, _, auditor = two(sim)
            auditor.share = 0.0
            await auditor.run()

    anyio.run(main, backend="trio")
