"""What the benchmarks share: a cluster of their own, prompts nobody asked before, and the report.

A benchmark measures through the doors that users have: `kvass up` and HTTP. Only to bring about a
state (blocks gone from a pool, or from everywhere) does it call members, over their own protocol.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
from anyio.streams.buffered import BufferedByteReceiveStream
from rich.console import Console
from rich.table import Table

from kvass.common import config as configuration
from kvass.common.keys import Chain, Namespace, ranges_of
from kvass.common.model.fetch import resolve_model
from kvass.common.model.tokenizer import Tokenizer
from kvass.common.rpc.credentials import credentials_of
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.hello import Hello
from kvass.common.wire import WORKER_REPLIES, Forget, Tags
from kvass.kvstore import messages as m
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.placement import StoreNode

READY = "kvass ready: "
START_S = 180.0  # the default model may have to be fetched
STOP_S = 20.0
LINE_BYTES_MAX = 1 << 16
REQUEST_S = 120.0
CALL_S = 10.0
SETTLE_S = 20.0  # for blocks that are offered to the store in the background
WORDS = (
    "time river stone question answer light machine garden winter theory signal paper "
    "ocean number forest music letter window history engine market silver pattern bridge "
    "moves holds under between slowly because every second another without measures "
    "carries follows between small early open bright the a of and to in with from"
).split()


def required(module: str) -> Any:
    """Return a module that a benchmark compares with; exits when it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        sys.exit(f"{sys.argv[0]} compares with {module}: .venv/bin/pip install {module}")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value and, where it means something, what it is compared with.

    For the table only: `limit`, the greatest value that meets the target, `least`, the smallest, or
    `least_ratio`, the smallest ratio that does.
    """

    name: str
    value: float
    unit: str
    reference: str = ""
    reference_value: float | None = None
    limit: float | None = None
    least_ratio: float | None = None
    least: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.value / self.reference_value if self.reference_value else None

    @property
    def target(self) -> str:
        if self.least_ratio is not None:
            return f"ratio ≥ {self.least_ratio:.2f}"
        if self.least is not None:
            return f"≥ {self.least:.3f}"
        return "" if self.limit is None else f"≤ {self.limit:.3f}"

    @property
    def met(self) -> str:
        if self.least_ratio is not None:
            return "yes" if (self.ratio or 0.0) >= self.least_ratio else "no"
        if self.least is not None:
            return "yes" if self.value >= self.least else "no"
        return "" if self.limit is None else ("yes" if self.value <= self.limit else "no")

    def as_json(self) -> dict[str, str | float | None]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "reference": self.reference,
            "reference_value": self.reference_value,
            "ratio": self.ratio,
        }


def parser(question: str) -> argparse.ArgumentParser:
    """Return a parser of what every benchmark takes: `--json FILE` and `--quick`."""
    made = argparse.ArgumentParser(description=question)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    made.add_argument("--quick", action="store_true", help="fewer repetitions: under a minute")
    return made


def options(question: str) -> argparse.Namespace:
    """Parse what every benchmark takes."""
    return parser(question).parse_args()


def report(title: str, figures: Sequence[Figure], path: Path | None) -> None:
    """Print the figures as a table and, where asked for, write them as JSON."""
    table = Table(title=title, header_style="bold", title_justify="left")
    for column in ("what", "value", "compared with", "its value", "ratio", "target", "met"):
        table.add_column(column, justify="left" if column in ("what", "compared with") else "right")
    for figure in figures:
        table.add_row(
            figure.name,
            f"{figure.value:.3f} {figure.unit}",
            figure.reference,
            "" if figure.reference_value is None else f"{figure.reference_value:.3f}",
            "" if figure.ratio is None else f"{figure.ratio:.2f}",
            figure.target,
            figure.met,
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if path is not None:
        path.write_text(json.dumps([figure.as_json() for figure in figures], indent=2) + "\n")


# --- a cluster ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Cluster:
    """A running `kvass up`. `start_s`: from its start to its word that it is ready."""

    url: str
    lines: list[str] = field(default_factory=list)
    start_s: float = 0.0


@asynccontextmanager
async def cluster(*arguments: str) -> AsyncIterator[Cluster]:
    """Run `kvass up` with these arguments on free ports; stop it on the way out."""
    port = free_port()
    command = [sys.executable, "-m", "kvass.launch.cli", "up", "--port", str(port), *arguments]
    # A salt secret would give blocks other names than the ones dropped here.
    environment = {name: v for name, v in os.environ.items() if name != "KVASS_SALT_SECRET"}
    running = Cluster(f"http://127.0.0.1:{port}")
    started_s = time.monotonic()
    async with await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=environment
    ) as process:
        try:
            async with anyio.create_task_group() as tasks:
                with anyio.fail_after(START_S):
                    await tasks.start(_read_lines, process, running)
                running.start_s = time.monotonic() - started_s
                yield running
                tasks.cancel_scope.cancel()
        finally:
            await _stop(process)


async def _read_lines(
    process: anyio.abc.Process, running: Cluster, *, task_status: anyio.abc.TaskStatus[None]
) -> None:
    assert process.stdout is not None
    stream = BufferedByteReceiveStream(process.stdout)
    try:
        while True:
            line = (await stream.receive_until(b"\n", LINE_BYTES_MAX)).decode(errors="replace")
            running.lines.append(line)
            if line.startswith(READY):
                task_status.started()
    except (anyio.EndOfStream, anyio.IncompleteRead):
        last = "\n".join(running.lines[-20:])
        raise RuntimeError(f"the cluster ended; its last lines were:\n{last}") from None


async def _stop(process: anyio.abc.Process) -> None:
    with anyio.CancelScope(shield=True):
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(STOP_S):
            await process.wait()
        if process.returncode is None:
            process.kill()


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- prompts and requests -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """The default model as a client of the cluster needs to know it."""

    name: str
    folder: Path
    tokenizer: Tokenizer
    block_tokens: int

    @classmethod
    def load(cls) -> Served:
        """Read the default model with the default settings: what `cluster()` serves."""
        settings = configuration.load().cluster
        folder = resolve_model(settings.model, progress=True)
        return cls(
            name=settings.model,
            folder=folder,
            tokenizer=Tokenizer.load(folder),
            block_tokens=settings.block_tokens,
        )

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Return a prompt of so many tokens that shares no block with another seed's."""
        words = random.Random(seed)
        text = f"{uuid.UUID(int=words.getrandbits(128))}: "
        while True:
            text += " ".join(words.choices(WORDS, k=tokens)) + ". "
            ids = self.tokenizer.encode(text)
            if len(ids) >= tokens:
                return ids[:tokens]


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed completion. `first_s`: from sending the request to the first token's event."""

    first_s: float
    text: str
    cached_tokens: int


async def complete(
    client: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int
) -> Answer:
    """Stream one greedy completion. Raises RuntimeError with the server's answer if it fails."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_s, text, usage = 0.0, "", dict[str, Any]()
    started_s = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body, timeout=REQUEST_S) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"the stream failed: {data}")
            first_s = first_s or time.perf_counter() - started_s
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
    return Answer(first_s, text, usage["prompt_tokens_details"]["cached_tokens"])


# --- bringing about a state -----------------------------------------------------------------------


class Control:
    """Makes members lose blocks. Open it with `control`."""

    def __init__(
        self, namespace: Namespace, workers: Sequence[str], dialer: Dialer, store: StoreClient
    ) -> None:
        self._namespace = namespace
        self._workers = workers
        self._dialer = dialer
        self._store = store

    def chain(self, tokens: Sequence[int]) -> Chain:
        """Return the block names of a prompt, as the cluster derives them."""
        chain = Chain(self._namespace, configuration.load().cluster.block_tokens)
        chain.extend(tokens)
        return chain

    async def forget(self, keys: Sequence[bytes]) -> None:
        """Drop blocks from every worker's own pool."""
        for address in self._workers:
            client = await self._dialer.client(address)
            await client.call(Forget(keys=tuple(keys)), deadline_s=CALL_S)

    async def drop(self, keys: Sequence[bytes]) -> None:
        """Drop blocks from every store node."""
        await self._store.drop(keys=keys)

    async def counts(self) -> dict[str, str | int]:
        """Return the counts of the first store node."""
        return dict((await self._store.stats())[0])

    async def on_flash(self, chain: Chain) -> int:
        """Return how many of a chain's blocks the store has on flash alone."""
        every = list(range(len(chain.keys)))
        count = 0
        for link in self._store.router.links():
            request = m.Lookup(spans=tuple(m.spans_of(chain, [(0, len(every))])))
            reply = await link.call(request, deadline_s=CALL_S)
            (found,) = link.told(every, reply.on_flash)
            count += len(found)
        return count

    async def until_stored(self, chain: Chain) -> None:
        """Wait until the store has all of a chain's blocks."""
        missing = set(range(len(chain.keys)))
        with anyio.fail_after(SETTLE_S):
            while missing:
                there = await self._store.wait(
                    chain, ranges_of(sorted(missing)), until="visible", deadline_s=CALL_S
                )
                missing -= {index for first, stop in there.visible for index in range(first, stop)}


@asynccontextmanager
async def control(client: httpx.AsyncClient) -> AsyncIterator[Control]:
    """Connect to every member that the gateway lists."""
    overview = (await client.get("/v1/cluster")).json()
    members, namespace = overview["members"], Namespace(bytes.fromhex(overview["namespace"]))
    credentials = credentials_of(configuration.ClusterConfig())
    hello = Hello("bench", "bench-0", "bench", uuid.uuid4().hex, os.getpid(), cluster={})
    async with anyio.create_task_group() as tasks:
        store = StoreClient(hello, tasks, credentials)
        store.set_nodes(
            [
                StoreNode(each["id"], each["address"], int(each["details"]["capacity_bytes"]))
                for each in members
                if each["role"] == "store"
            ]
        )
        workers = [each["address"] for each in members if each["role"] in ("prefill", "decode")]
        yield Control(
            namespace, workers, Dialer(tasks, hello, Tags(WORKER_REPLIES), credentials), store
        )
        tasks.cancel_scope.cancel()
