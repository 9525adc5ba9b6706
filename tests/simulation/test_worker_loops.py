"""Both workers' loops over a simulated store: the same tokens whatever was cached, lost,
cancelled or killed, each token computed where it should be, and nothing left in use at rest."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import anyio
import pytest
import torch
import trio.testing

from hash_model import BLOCK, reference
from kvass.common.costs import Costs
from kvass.common.errors import KvassError, Unavailable
from kvass.common.model.runner import Rows
from store_sim import LAYOUT, Cluster, chain_from, cluster
from worker_sim import (
    Decoder,
    Prefiller,
    add_decoder,
    add_prefiller,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Iterator[tuple[str, dict[str, object]]]:
    yield "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed} {i}").randrange(16) for i in range(length)]


async def disaggregated(
    prefiller: Prefiller, decoder: Decoder, prompt: list[int], count: int, name: str
) -> tuple[list[int], int]:
    """Serve one request as the gateway does; return its tokens and how many prompt tokens were
    computed anywhere."""
    ticket = decoder.ticket(prompt, count, name=name, prefill_pending=len(prompt) >= BLOCK)
    computed: set[int] = set()
    answers: list[list[int]] = []

    async def prefill() -> None:
        try:
            if len(prompt) >= BLOCK:
                progress = await prefiller.prefill(prompt, name)
                computed.update(i for low, high in progress.computed for i in range(low, high))
        except KvassError:
            pass  # what the gateway does: decode computes it
        finally:
            ticket.prefill_over.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prefill)
        tokens, ranges = await decoder.answer(ticket)
        answers.append(tokens)
    computed.update(i for low, high in ranges for i in range(low, high))
    return answers[0], len(computed)


async def at_rest(sim: Cluster, *workers: Prefiller | Decoder) -> None:
    """Nothing is in use a while after the last request."""
    await anyio.sleep(120)
    for worker in workers:
        assert worker.pool.used == 0, worker.pool.counts()
    for node in sim.nodes.values():
        if node.alive:
            counts = node.node.counts()
            busy = ("leases", "claims", "held_bytes", "writing_blocks", "retired_blocks")
            assert not any(counts[name] for name in busy), counts


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 8 * BLOCK, 70 * BLOCK + 3])
async def test_the_same_tokens_cold_from_the_pool_and_from_the_store(length: int) -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=256)
        prefiller, decoder = add_prefiller(sim, slots=96), add_decoder(sim, slots=96)
        prompt = prompt_of(length)
        expected = reference(prompt, 6)
        full = length // BLOCK * BLOCK
        assert await disaggregated(prefiller, decoder, prompt, 6, "cold") == (expected, length)
        tail = min(length - full, length)
        assert await disaggregated(prefiller, decoder, prompt, 6, "pool") == (expected, tail)
        decoder.pool.forget()
        assert await disaggregated(prefiller, decoder, prompt, 6, "store") == (expected, tail)
        other = add_decoder(sim, "decode-1", slots=96)
        assert await disaggregated(prefiller, other, prompt, 6, "other") == (expected, tail)
        await at_rest(sim, prefiller, decoder, other)


async def test_a_prompt_longer_than_all_that_may_be_held_gets_through() -> None:
    """Each block is held until decode has it, and no longer."""
    async with cluster() as sim:
        node = sim.add_node("store-0", blocks=32)
        prefiller, decoder = add_prefiller(sim, slots=96), add_decoder(sim, slots=96)
        prompt = prompt_of(64 * BLOCK + 1)
        assert node.index.guards.cap_bytes < 17 * LAYOUT.block_size
        begun_s = anyio.current_time()
        got = await disaggregated(prefiller, decoder, prompt, 6, "long")
        assert got == (reference(prompt, 6), len(prompt))
        assert prefiller.not_stored == ""
        assert decoder.model.rows == 6, "decode computed what could not be stored"
        assert anyio.current_time() - begun_s < 2.0
        await at_rest(sim, prefiller, decoder)


async def test_what_decode_would_rather_compute_is_not_held_for_it() -> None:
    """Seed 1764603033: its blocks kept half of a small node until their job gave up the others."""
    async with cluster() as sim:
        sim.add_node("store-0", blocks=32)
        prefiller, decoder = add_prefiller(sim, slots=96), add_decoder(sim, slots=96)
        decoder.loop._fetcher._costs = Costs(tokens_per_s=1e9)
        prompt = prompt_of(64 * BLOCK + 1)
        begun_s = anyio.current_time()
        await disaggregated(prefiller, decoder, prompt, 6, "long")
        assert prefiller.not_stored == ""
        assert anyio.current_time() - begun_s < 2.0
        await at_rest(sim, prefiller, decoder)


async def test_a_gap_in_the_middle_is_the_only_thing_computed() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=256)
        prefiller, decoder = add_prefiller(sim, slots=96), add_decoder(sim, slots=96)
        prompt = prompt_of(64 * BLOCK + 1)
        expected = reference(prompt, 4)
        await disaggregated(prefiller, decoder, prompt, 4, "cold")
        keys = chain_from(prompt, b"").keys[20:40]
        for worker in (prefiller, decoder):
            worker.pool.forget(keys)
        await decoder.worker.store.drop(keys=keys)
        rows = prefiller.model.rows
        got = await disaggregated(prefiller, decoder, prompt, 4, "gap")
        assert got == (expected, 20 * BLOCK + 1)
        assert prefiller.model.rows - rows == 20 * BLOCK
        await at_rest(sim, prefiller, decoder)


async def test_two_jobs_for_one_prompt_compute_it_once() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=256)
        one, two = add_prefiller(sim, "prefill-0"), add_prefiller(sim, "prefill-1")
        prompt = prompt_of(48 * BLOCK)
        done = []

        async def job(prefiller: Prefiller, name: str) -> None:
            done.append(await prefiller.prefill(prompt, name))

        async with anyio.create_task_group() as tasks:
            for index, prefiller in enumerate((one, two, one, two)):
                tasks.start_soon(job, prefiller, f"job-{index}")
        assert all(p.done and not p.missing for p in done)
        assert one.model.rows + two.model.rows == 48 * BLOCK
        for index in range(4):
            await one.worker.store.release_hold(f"job-{index}")
        await at_rest(sim, one, two)


async def test_a_killed_claimant_is_followed_by_one_waiter() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=256)
        dead = add_prefiller(sim, "prefill-0", step_s=1.0)
        alive = [add_prefiller(sim, f"prefill-{n}") for n in (1, 2)]
        prompt = prompt_of(16 * BLOCK)
        with anyio.move_on_after(0.5):
            await dead.prefill(prompt, "dead")
        sim.kill_worker(dead.worker)
        begun_s = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for prefiller in alive:
                tasks.start_soon(prefiller.prefill, prompt, prefiller.worker.hello.member_id)
        assert anyio.current_time() - begun_s < 10
        assert sum(prefiller.model.rows for prefiller in alive) == 16 * BLOCK


async def test_prefill_ends_when_no_store_answers() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        prefiller, decoder = add_prefiller(sim), add_decoder(sim)
        sim.kill_node("store-0")
        prompt = prompt_of(8 * BLOCK + 2)
        got = await disaggregated(prefiller, decoder, prompt, 5, "r")
        assert got == (reference(prompt, 5), len(prompt))
        assert prefiller.model.rows == 0
        await at_rest(sim, prefiller, decoder)


async def test_decode_goes_on_when_prefill_fails_half_way() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=256)
        prefiller, decoder = add_prefiller(sim, step_s=1.0), add_decoder(sim)
        prompt = prompt_of(16 * BLOCK)
        ticket = decoder.ticket(prompt, 5, name="r", prefill_pending=True)
        with anyio.move_on_after(2.5):
            await prefiller.prefill(prompt, "r")
        ticket.prefill_over.set()
        tokens, computed = await decoder.answer(ticket)
        assert tokens == reference(prompt, 5)
        assert computed == ((8 * BLOCK, 16 * BLOCK),)
        await at_rest(sim, prefiller, decoder)


async def test_a_row_that_goes_wrong_costs_nobody_elses_stream() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=256)
        decoder = add_decoder(sim)
        prompts = [prompt_of(2 * BLOCK + 1, seed=seed) for seed in range(2)]
        good, bad = (decoder.ticket(each, 8, name=str(each[0])) for each in prompts)
        run = decoder.model.run

        def spoil(pieces: Sequence[Rows]) -> torch.Tensor | None:
            logits = run(pieces)
            wanted = [piece.slots[0] for piece in pieces if piece.logits]
            if logits is not None and len(wanted) == 2:
                logits[wanted.index(bad.table.slots[0])] = torch.inf
            return logits

        async def fail() -> None:
            with pytest.raises(Unavailable, match="not finite"):
                await decoder.answer(bad)

        decoder.model.run = spoil  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            tokens, _ = await decoder.answer(good)
        assert tokens == reference(prompts[0], 8)
        await at_rest(sim, decoder)


async def test_the_next_turn_finds_what_decode_wrote() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=256)
        first, second = add_decoder(sim, "decode-0"), add_decoder(sim, "decode-1")
        prompt = prompt_of(10)
        tokens, _ = await first.answer(first.ticket(prompt, 30, name="one"))
        await anyio.sleep(1)
        turn = prompt + tokens + prompt_of(3, seed=1)
        answer, computed = await second.answer(second.ticket(turn, 5, name="two"))
        assert answer == reference(turn, 5)
        # The last token was sampled and never computed: its block was not full.
        assert computed == ((len(prompt + tokens[:-1]) // BLOCK * BLOCK, len(turn)),)
        await at_rest(sim, first, second)


async def test_a_wrong_salt_finds_nothing() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=256)
        decoder, other = add_decoder(sim), add_decoder(sim, "decode-1")
        prompt = prompt_of(4 * BLOCK)
        await decoder.answer(decoder.ticket(prompt, 3, name="one", salt=b"a" * 32))
        await anyio.sleep(1)
        for worker, salt in ((decoder, b"b" * 32), (other, b"c" * 32)):
            _, computed = await worker.answer(worker.ticket(prompt, 3, name="two", salt=salt))
            assert computed == ((0, len(prompt)),)


async def test_suspended_requests_give_the_same_tokens() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=256)
        decoder = add_decoder(sim, slots=12)
        prompts = [prompt_of(BLOCK * 2 + n, seed=n) for n in range(4)]
        answers: dict[int, list[int]] = {}

        async def one(index: int) -> None:
            ticket = decoder.ticket(prompts[index], 20, name=str(index))
            answers[index], _ = await decoder.answer(ticket)

        async with anyio.create_task_group() as tasks:
            for index in range(4):
                tasks.start_soon(one, index)
        assert answers == {n: reference(prompts[n], 20) for n in range(4)}
        assert decoder.loop.totals.suspended > 0
        await at_rest(sim, decoder)


@pytest.mark.parametrize("seed", range(12))
async def test_anything_in_any_order(seed: int) -> None:
    """Shared prefixes, cancellations at any moment, a node lost and started anew."""
    rng = random.Random(seed)
    async with cluster() as sim:
        for n in range(2):
            sim.add_node(f"store-{n}", blocks=rng.choice([8, 24, 64]))
        prefillers = [add_prefiller(sim, f"prefill-{n}", slots=24) for n in range(2)]
        decoders = [add_decoder(sim, f"decode-{n}", slots=rng.choice([20, 40])) for n in range(2)]
        ended: list[str] = []

        async def client(name: str) -> None:
            await anyio.sleep(rng.random())
            prompt = prompt_of(rng.randrange(1, 18 * BLOCK), seed=rng.randrange(2))
            count = rng.randrange(1, 8)
            patience_s = rng.choice([0.02, 0.1, 300.0, 300.0, 300.0])
            with anyio.move_on_after(patience_s) as scope:
                workers = rng.choice(prefillers), rng.choice(decoders)
                tokens, _ = await disaggregated(*workers, prompt, count, name)
                assert tokens == reference(prompt, count)
            assert not scope.cancelled_caught or patience_s < 300
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            for n in range(24):
                tasks.start_soon(client, f"r{n}")
            await anyio.sleep(rng.random())
            sim.kill_node("store-0")
            await anyio.sleep(rng.random() * 3)
            sim.add_node("store-0", blocks=16)
        assert len(set(ended)) == 24
        await at_rest(sim, *prefillers, *decoders)


def test_the_simulated_model_notices_a_wrong_token() -> None:
    assert reference([1, 2, 3], 8) != reference([1, 3, 3], 8)
