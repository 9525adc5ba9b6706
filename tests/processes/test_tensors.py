"""The client library as a stranger uses it: other processes, nodes that run by themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvass.common.errors import Invalid, Unavailable
from kvass.kvstore.client.tensors import TensorStore, open_store
from ports import free_port
from store_alone import KVASS, NodeProcess, node
from store_rest import until

pytestmark = [pytest.mark.anyio, pytest.mark.process]

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "store_tensors.py"
SECRET = "no other process has this one"
LIKE = np.empty((3, 50), dtype=np.float32)
BLOCKS = 7


@pytest.fixture(scope="module")
def alone() -> Iterator[NodeProcess]:
    with node(
        "--standalone", "--slab-bytes", "8MiB", "--id", "alone", KVASS_CLUSTER_SECRET=SECRET
    ) as found:
        yield found


def block(index: int) -> NDArray[np.float32]:
    return np.full((3, 50), index + 0.5, dtype=np.float32)


def every() -> dict[int, NDArray[np.float32]]:
    return {index: block(index) for index in range(BLOCKS)}


@contextmanager
def run_broker(address: str) -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("broker_process.py")), address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            running.kill()


def example(verb: str, address: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), verb, address],
        capture_output=True, text=True, timeout=60,
        env=os.environ | {"KVASS_CLUSTER_SECRET": SECRET},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_stores_in_one_process_and_loads_in_another(alone: NodeProcess) -> None:
    assert example("get", alone.address) == "found []\n"
    assert example("put", alone.address) == "stored [0, 1, 2, 3] refused {}\n"
    assert example("get", alone.address) == "found [0, 1, 2, 3]\n"
    code = EXAMPLE.read_text().split("import open_store\n")[1].strip().splitlines()
    assert len([line for line in code if line.strip()]) <= 20


def test_a_node_by_itself_is_looked_at_by_its_address(alone: NodeProcess) -> None:
    asked = [*KVASS, "status", "--store", "--node", alone.address]
    own = os.environ | {"KVASS_CLUSTER_SECRET": SECRET, "COLUMNS": "80"}
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, env=own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ alone +8 MiB .* well *$", done.stdout, re.MULTILINE), done.stdout
    assert "1 store node, 1 well" in done.stdout
    silent = [*asked, "--node", "127.0.0.1:1", "--json"]
    done = subprocess.run(silent, capture_output=True, text=True, timeout=60, env=own)
    assert done.returncode == 1, done.stderr
    found = {each["id"]: each for each in json.loads(done.stdout)}
    assert found["alone"]["is"] == "well" and found["alone"]["total_bytes"] == 8 << 20
    assert "cannot connect to 127.0.0.1:1" in found["127.0.0.1:1"]["findings"][0]


def test_its_metrics_are_there_without_a_broker(alone: NodeProcess) -> None:
    url = alone.until(r"metrics at (http://\S+)")
    text = httpx.get(url, trust_env=False).text
    for name in ("kvass_store_tier_bytes", "kvass_store_evictions_total", "kvass_store_scrubbed"):
        assert name in text


async def test_chains_by_tokens_salt_name_and_form(alone: NodeProcess) -> None:
    tokens = range(100, 100 + 4 * BLOCKS)
    async with open_store(
        [alone.address], like=LIKE, name="t1", block_tokens=4, slots=2, secret=SECRET
    ) as store:
        chain = store.chain(tokens)
        result = await store.put(chain, every())  # by way of two slots
        assert (result.stored, result.refused) == (set(range(BLOCKS)), {})
        found = await store.get(chain, [(1, 3), (5, 7)])
        assert sorted(found) == [1, 2, 5, 6]
        assert all((found[index] == block(index)).all() for index in found)
        found[1][:] = 0  # the caller's own
        assert (await store.get(chain, [(1, 2)]))[1][0, 0] == 1.5
        assert await store.lookup(chain) == [(0, BLOCKS)]
        # The same tokens under a salt, and others, are other blocks.
        assert await store.get(store.chain(tokens, salt="mine")) == {}
        assert await store.get(store.chain(range(4 * BLOCKS))) == {}
        # A prefix is shared, and what comes after it is not.
        shared = store.chain([*list(tokens)[:8], *range(8)])
        assert sorted(await store.get(shared)) == [0, 1]
    # Tensors of the same form are the same blocks; other numbers, shapes and names are others.
    like = torch.empty(3, 50)
    async with open_store(
        [alone.address], like=like, name="t1", block_tokens=4, secret=SECRET
    ) as other:
        tensors = await other.get(other.chain(tokens))
        assert len(tensors) == BLOCKS and torch.equal(tensors[2], torch.full((3, 50), 2.5))
    for else_like, name in ((like.view(50, 3), "t1"), (like.int(), "t1"), (like, "t2")):
        async with open_store(
            [alone.address], like=else_like, name=name, block_tokens=4, secret=SECRET
        ) as other:
            assert await other.lookup(other.chain(tokens)) == []


async def test_pins_and_erasure(alone: NodeProcess) -> None:
    async with open_store(
        [alone.address], like=LIKE, name="t3", block_tokens=1, tenant="a", secret=SECRET
    ) as store:
        chain, other = store.chain(range(BLOCKS)), store.chain(range(50, 50 + BLOCKS))
        await store.put(chain, every())
        await store.put(other, every())
        assert await store.pin(chain, [(0, 3)], owner="me", duration_s=60) == [(0, 3)]
        [counts] = await store.client.stats()
        assert counts["pinned_bytes"] == 3 * LIKE.nbytes
        await store.unpin("me")
        assert await store.drop(chain, [(2, 4)]) == 2
        assert await store.lookup(chain) == [(0, 2), (4, BLOCKS)]
        assert await store.drop_all() == 2 * BLOCKS - 2
        assert await store.lookup(other) == []


async def test_a_callers_mistakes_are_said_and_nothing_else_is_raised(alone: NodeProcess) -> None:
    async with open_store([alone.address], like=LIKE, name="t4", secret=SECRET) as store:
        chain = store.chain(range(32))
        with pytest.raises(Invalid, match="blocks 2 to 3 of a chain that has 2"):
            await store.put(chain, {2: block(0)})
        with pytest.raises(Invalid, match=r"shape \(3, 50\) of float64; this store's have"):
            await store.put(chain, {0: block(0).astype(np.float64)})
        with pytest.raises(Invalid, match="this store's are arrays of numpy"):
            await store.put(chain, {0: torch.empty(3, 50)})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="the caller's own"):
            async with open_store([alone.address], like=LIKE, name="t4", secret=SECRET):
                raise ValueError("the caller's own")
    for wrong in (np.empty(0), np.empty(2, dtype=object), "text"):
        with pytest.raises(Invalid):
            async with open_store([alone.address], like=wrong, name="t4"):  # type: ignore[type-var]
                pass


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1:1", "cannot connect to 127.0.0.1:1"), ("nowhere", "expected host:port")],
)
async def test_no_node_is_said_with_its_reason(address: str, words: str) -> None:
    with pytest.raises((Unavailable, Invalid), match=words):
        async with open_store([address], like=LIKE, name="t5", secret=SECRET, find_s=0.5):
            pass


async def test_another_secret_is_said(alone: NodeProcess) -> None:
    with pytest.raises(Unavailable, match="another cluster secret"):
        async with open_store(
            [alone.address], like=LIKE, name="t5", secret="wrong" * 5, find_s=0.5
        ):
            pass


async def test_many_callers_share_few_slots(alone: NodeProcess) -> None:
    async with open_store(
        [alone.address], like=LIKE, name="t6", block_tokens=1, slots=3, secret=SECRET
    ) as store:

        async def one(number: int) -> None:
            chain = store.chain(range(1000 * number, 1000 * number + BLOCKS))
            mine = {i: block(100 * number + i) for i in range(BLOCKS)}
            await store.put(chain, mine)
            found = await store.get(chain)
            assert sorted(found) == list(range(BLOCKS))
            assert all((found[i] == mine[i]).all() for i in found)

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(one, number)


async def gone(store: TensorStore[NDArray[np.float32]]) -> None:
    chain = store.chain(range(BLOCKS))
    with anyio.fail_after(5):
        assert await store.get(chain, deadline_s=1) == {}
        result = await store.put(chain, every(), deadline_s=1)
        assert not result.stored and set(result.refused) == set(range(BLOCKS))
        assert await store.lookup(chain, deadline_s=1) == []


async def test_a_dead_node_is_misses_and_a_new_one_is_found() -> None:
    port = str(free_port())
    arguments = ("--standalone", "--slab-bytes", "8MiB", "--port", port)
    own = {"KVASS_CLUSTER_SECRET": SECRET}
    with node(*arguments, **own) as first:
        assert first.address == f"127.0.0.1:{port}"
        with node(*arguments, **own) as late:
            late.until(f"kvass: port {port} on 127.0.0.1 is in use: .* choose another with --port$")
        async with open_store(
            [first.address], like=LIKE, name="t7", block_tokens=1, secret=SECRET
        ) as store:
            chain = store.chain(range(BLOCKS))
            assert len((await store.put(chain, every())).stored) == BLOCKS
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
            await gone(store)
            with node(*arguments, **own) as second:
                second.until("is ready")

                async def is_found() -> bool:
                    return bool((await store.put(chain, every(), deadline_s=1)).stored)

                await until(is_found)
                assert len(await store.get(chain)) == BLOCKS


async def test_two_nodes_by_address_share_the_chains_and_one_that_dies_costs_its_own() -> None:
    arguments = ("--standalone", "--slab-bytes", "8MiB")
    own = {"KVASS_CLUSTER_SECRET": SECRET}
    with node(*arguments, "--id", "n0", **own) as a, node(*arguments, "--id", "n1", **own) as b:
        addresses = [a.address, b.address]
        async with open_store(
            addresses, like=LIKE, name="t9", block_tokens=1, secret=SECRET
        ) as store:
            chains = [store.chain(range(n * 1000, n * 1000 + BLOCKS)) for n in range(16)]
            for chain in chains:
                assert len((await store.put(chain, every())).stored) == BLOCKS
            first, second = await store.client.stats()
            assert first["visible_blocks"] and second["visible_blocks"]
            a.process.send_signal(signal.SIGKILL)
            a.process.wait()
            left = [len(await store.get(chain, deadline_s=2)) for chain in chains]
            assert sum(left) == second["visible_blocks"] and set(left) == {0, BLOCKS}
            # What is computed anew goes to the node that is there.
            lost = chains[left.index(0)]
            assert len((await store.put(lost, every())).stored) == BLOCKS
        # Another client, which names them the other way round, finds the same.
        async with open_store(
            addresses[::-1], like=LIKE, name="t9", block_tokens=1, secret=SECRET
        ) as other:
            assert len(await other.get(lost)) == BLOCKS


async def test_nodes_are_found_by_their_broker() -> None:
    broker = f"127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match=f"the broker {broker} cannot be reached"):
        async with open_store(broker=broker, like=LIKE, name="t8", find_s=0.3, secret=SECRET):
            pass
    with run_broker(broker):
        arguments = ("--broker", broker, "--slab-bytes", "8MiB")
        own = {"KVASS_CLUSTER_SECRET": SECRET}
        with node(*arguments, "--id", "n0", **own) as a, node(*arguments, "--id", "n1", **own) as b:
            a.until("is ready")
            b.until("is ready")
            with pytest.raises(Unavailable, match="another cluster secret"):
                async with open_store(
                    broker=broker, like=LIKE, name="t8", secret="wrong" * 5, find_s=2
                ):
                    pass
            async with open_store(
                broker=broker, like=LIKE, name="t8", block_tokens=1, secret=SECRET
            ) as store:

                async def are_both_found() -> bool:
                    return len(await store.client.stats()) == 2

                await until(are_both_found)
                for number in range(8):
                    chain = store.chain(range(1000 * number, 1000 * number + BLOCKS))
                    assert len((await store.put(chain, every())).stored) == BLOCKS
                    assert len(await store.get(chain)) == BLOCKS
                held = {c["id"]: c["visible_blocks"] for c in await store.client.stats()}
                assert all(held.values()) and sum(map(int, held.values())) == 8 * BLOCKS, held
