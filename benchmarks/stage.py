"""How much sooner comes the first token when a prompt's blocks are brought up from flash ahead?

    with      the gateway tells the store as soon as it has looked the prompt's blocks up
              (`gateway.stage_s`), before any worker has the request
    without   they are brought up by the pull itself: a second gateway of the same cluster, with
              `gateway.stage_s=0`

alone: nothing else runs. behind others: requests are being answered, so that the decode worker is
busy when the one that is measured comes.

Each repetition computes a fresh prompt of 1,024 tokens, asks for it again, so that it is worth a
place on flash, and waits until it is there. Then the store node is killed and started anew before
each request that is measured: its memory is empty, and workers have forgotten the prompt. Both ways
take turns in being the first. The same from the node's memory is printed beside them.

    python benchmarks/stage.py [--quick] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median, quantiles

import anyio
import anyio.abc
import httpx
import numpy as np

import rig
from kvass.kvstore.client.tensors import open_store
from rig import Figure

PROMPT_TOKENS = 1024
REPETITIONS, QUICK_REPETITIONS = 12, 1
SLAB_BYTES = 192 << 20  # of which a stage may take an eighth: two prompts
# As blocks of the default model, and more than half of the slab: then blocks go down.
FILL_BYTES, FILL_BLOCKS = 192_000, 640
OTHERS, OTHERS_TOKENS = 4, 64
WITH, WITHOUT, MEMORY = "with stage", "without", "from memory"
LOOKS, LOOK_S = 300, 0.1  # at what takes a while
Times = dict[tuple[str, str], list[float]]


@dataclass(frozen=True)
class Bench:
    """A cluster without store nodes, and its two gateways by way."""

    served: rig.Served
    broker: str
    flash: str
    gateways: dict[str, httpx.AsyncClient]

    async def ask(self, way: str, prompt: Sequence[int], tokens: int = 1) -> rig.Answer:
        return await rig.complete(self.gateways[way], self.served.name, prompt, tokens)

    @asynccontextmanager
    async def member(self, *arguments: str) -> AsyncIterator[anyio.abc.Process]:
        """Run one more member; it is killed at the end of the block."""
        command = [sys.executable, "-m", "kvass.launch.cli", *arguments, "--broker", self.broker]
        async with await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                yield process
            finally:
                if process.returncode is None:
                    process.kill()

    async def until_ready(self, role: str, pid: int) -> str:
        """Wait until every gateway sees this process as ready; return its address."""
        waiting = set(self.gateways)
        address = ""
        for _ in range(LOOKS):
            for way in sorted(waiting):
                for each in await _members(self.gateways[way]):
                    if (each["role"], each["pid"], each["state"]) == (role, pid, "ready"):
                        waiting.discard(way)
                        address = str(each["address"])
            if not waiting:
                return address
            await anyio.sleep(LOOK_S)
        raise RuntimeError(f"a {role} was not ready in {LOOKS * LOOK_S:g} s")

    @asynccontextmanager
    async def store(self, prompt: Sequence[int]) -> AsyncIterator[tuple[str, rig.Control]]:
        """Run a store node that has what is on flash; no worker has the prompt's blocks."""
        arguments = ["store", "--id", "store-0", "--slab-bytes", str(SLAB_BYTES)]
        for setting in (f"store.flash_dir={self.flash}", "store.flash_bytes=4GiB"):
            arguments += ["--set", setting]
        async with self.member(*arguments) as process:
            address = await self.until_ready("store", process.pid)
            async with rig.control(self.gateways[WITH]) as control:
                await control.forget(control.chain(prompt).keys)
                yield address, control

    async def first_s(self, way: str, prompt: Sequence[int], others: int) -> float:
        """Return when the first token came, with so many others under way."""
        async with anyio.create_task_group() as tasks:
            for number in range(others):
                other = self.served.prompt(OTHERS_TOKENS, time.time_ns() + number)
                tasks.start_soon(self.ask, WITH, other, OTHERS_TOKENS)
            if others:
                await anyio.sleep(1.0)  # until they are all being answered
            answer = await self.ask(way, prompt)
        if answer.cached_tokens < len(prompt) - 1:
            raise RuntimeError(f"only {answer.cached_tokens} tokens were found, not all")
        return answer.first_s

    async def bring_down(self, address: str, control: rig.Control, prompt: Sequence[int]) -> None:
        """Let the prompt's blocks go to flash: they have been asked for, and memory gets short."""
        await control.until_stored(control.chain(prompt))
        await self.ask(WITH, prompt)
        block = np.full(FILL_BYTES, 1, dtype=np.uint8)
        blocks = dict.fromkeys(range(FILL_BLOCKS), block)
        async with open_store([address], like=block, name=f"filler {time.time_ns()}") as store:
            await store.put(store.chain(range(16 * FILL_BLOCKS)), blocks)
        for _ in range(LOOKS):
            counts = await control.counts()
            down = int(counts["flash_sunk"]) >= len(control.chain(prompt).keys)
            if down and not counts["flash_waiting_blocks"]:
                return
            await anyio.sleep(LOOK_S)
        raise RuntimeError(f"the prompt's blocks did not go to flash: {counts}")


async def _members(client: httpx.AsyncClient) -> list[dict[str, object]]:
    try:
        response = await client.get("/v1/cluster")
    except httpx.TransportError:
        return []  # the gateway starts itself
    found: list[dict[str, object]] = response.json()["members"]
    return found


async def repetition(bench: Bench, turn: int, times: Times) -> None:
    """Take one fresh prompt through all of it."""
    prompt = bench.served.prompt(PROMPT_TOKENS, time.time_ns())
    companies = (("alone", 0), (f"behind {OTHERS} others", OTHERS))
    async with bench.store(prompt) as (address, control):
        await bench.ask(WITH, prompt)
        await bench.bring_down(address, control, prompt)
        for company, others in companies:
            await control.forget(control.chain(prompt).keys)
            times[company, MEMORY].append(await bench.first_s(WITH, prompt, others))
    for company, others in companies:
        for way in (WITH, WITHOUT)[:: 1 if turn % 2 else -1]:
            async with bench.store(prompt) as (_, control):
                if await control.on_flash(control.chain(prompt)) < PROMPT_TOKENS // 16:
                    raise RuntimeError("the prompt's blocks are not all on flash alone")
                times[company, way].append(await bench.first_s(way, prompt, others))


async def measure(served: rig.Served, repetitions: int) -> Times:
    """Return the seconds to the first token by company and way."""
    times: Times = defaultdict(list)
    port = rig.free_port()
    with tempfile.TemporaryDirectory() as folder:
        async with (
            rig.cluster("--store", "0") as cluster,
            httpx.AsyncClient(trust_env=False, base_url=cluster.url) as client,
            httpx.AsyncClient(trust_env=False, base_url=f"http://127.0.0.1:{port}") as other,
        ):
            broker = next(line for line in cluster.lines if "broker on " in line)
            gateways = {WITH: client, WITHOUT: other}
            bench = Bench(served, broker.rpartition(" ")[2], folder, gateways)
            off = ("gateway", "--port", str(port), "--set", "gateway.stage_s=0")
            async with bench.member(*off) as process:
                await bench.until_ready("gateway", process.pid)
                for way in gateways:  # what is slow the first time only
                    await bench.ask(way, served.prompt(OTHERS_TOKENS, time.time_ns()))
                for number in range(repetitions):
                    await repetition(bench, number, times)
    return times


def figures(times: Times) -> list[Figure]:
    """Return median and 90th percentile of each, beside the same without."""
    found = []
    for company in dict.fromkeys(company for company, _ in times):
        for way in (WITH, MEMORY):
            for name, of in (("median", median), ("p90", _p90)):
                value, reference = of(times[company, way]), of(times[company, WITHOUT])
                found.append(Figure(f"{company}, {way}, {name}", value, "s", WITHOUT, reference))
    return found


def _p90(values: Sequence[float]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def main() -> None:
    given = rig.options((__doc__ or "").splitlines()[0])
    repetitions = QUICK_REPETITIONS if given.quick else REPETITIONS
    times = anyio.run(measure, rig.Served.load(), repetitions)
    rig.report(f"First token of {PROMPT_TOKENS} tokens from flash", figures(times), given.json)


if __name__ == "__main__":
    main()
