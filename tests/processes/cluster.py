"""A real cluster for tests: `kvass up` in a process of its own, on free ports, stopped whatever
happens.

It knows processes, sockets and HTTP; what only members' own protocol can do (drop blocks, ask one
decode worker) is in `cluster_control.py`. What the cluster prints is passed on, so that a test that
fails shows it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from ports import free_port

MODEL = "smollm2-135m-instruct"
START_S = 180.0  # with the model to be fetched and a machine that does other things
STOP_S = 25.0  # the grace of every role together, and some
REQUEST_S = 120.0
POLL_S = 0.05
SHARED_MEMORY = Path("/dev/shm")
# What a node has out for somebody, by the names of its counts: all zero when nothing runs.
STORE_OPEN = ("claims", "leases", "puts", "held_bytes", "pinned_bytes", "writing_bytes",
              "retired_bytes", "quarantined_bytes")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion: its text, in the pieces that it came in, and what it cost."""

    pieces: tuple[str, ...]
    finish_reason: str
    prompt_tokens: int
    tokens: int
    cached_tokens: int

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def said(self) -> tuple[str, str, int]:
        """What must be the same for the same prompt, however it was served."""
        return self.text, self.finish_reason, self.tokens


@dataclass(slots=True, eq=False)
class Cluster:
    """A running `kvass up`. Mutable: `lines`, what it printed."""

    process: subprocess.Popen[str]
    port: int
    http: httpx.Client
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # --- asking ---

    def body(self, prompt: Sequence[int] | str, **fields: Any) -> dict[str, Any]:
        """Return a greedy request; `fields` override."""
        plain = prompt if isinstance(prompt, str) else list(prompt)
        greedy = {"model": MODEL, "prompt": plain, "max_tokens": 16, "temperature": 0}
        return greedy | {"ignore_eos": True} | fields

    def ask(self, prompt: Sequence[int] | str, **fields: Any) -> Answer:
        """Complete a prompt in one piece."""
        response = self.http.post("/v1/completions", json=self.body(prompt, **fields))
        assert response.status_code == 200, response.text
        whole = response.json()
        choice = whole["choices"][0]
        return _answer([choice["text"]], choice["finish_reason"], whole["usage"])

    def stream(
        self, prompt: Sequence[int] | str, *, seen: Callable[[str], object] = str, **fields: Any
    ) -> Answer:
        """Stream a completion; `seen` is called with each piece of text as it comes."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        pieces: list[str] = []
        reason, usage = "", dict[str, Any]()
        with self.http.stream(
            "POST", "/v1/completions", json=self.body(prompt, **options, **fields)
        ) as response:
            assert response.status_code == 200, response.read().decode()
            for event in events(response):
                for choice in event["choices"]:
                    pieces.append(choice["text"])
                    seen(choice["text"])
                    reason = choice["finish_reason"] or reason
                usage = event.get("usage") or usage
        return _answer(pieces, reason, usage)

    # --- looking ---

    def overview(self) -> dict[str, Any]:
        """Return `/v1/cluster`."""
        response = self.http.get("/v1/cluster")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def members(self, *roles: str) -> list[dict[str, Any]]:
        """Return the members that are ready, of these roles or of all."""
        listed = [each for each in self.overview()["members"] if each["state"] == "ready"]
        return [each for each in listed if not roles or each["role"] in roles]

    def member(self, member_id: str) -> dict[str, Any]:
        """Return one member's entry, in whatever state."""
        entries = self.overview()["members"]
        found: dict[str, Any] = next(each for each in entries if each["id"] == member_id)
        return found

    def used_blocks(self, member_id: str) -> int:
        """Return how many blocks of a worker's pool are in use now, as its own metrics say."""
        return int(self.metric(member_id, "kvass_kv_cache_used_blocks"))

    def metric(self, member_id: str, sample: str) -> float:
        """Return what a member's own metrics say; `sample` has its labels as they are printed."""
        text = self.http.get(f"http://{self.member(member_id)['metrics_address']}/metrics").text
        found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def in_use(self) -> dict[str, int]:
        """Return everything that somebody holds now, in pools and in store nodes, if not zero."""
        counts = {
            each["id"]: self.used_blocks(each["id"]) for each in self.members("prefill", "decode")
        }
        for node in self.overview()["store"]:
            counts |= {f"{node['id']} {name}": node[name] for name in STORE_OPEN}
        return {name: count for name, count in counts.items() if count}

    def until(self, condition: Callable[[], bool], what: str, *, within_s: float = 20.0) -> None:
        """Wait for a condition; fails with `what` and the counts when it does not come."""
        give_up_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < give_up_s, f"not within {within_s:g} s: {what}"
            assert self.process.poll() is None, "the cluster has ended"
            time.sleep(POLL_S)

    def until_idle(self, *, within_s: float = 20.0) -> None:
        """Wait until nobody holds anything: pools, claims, leases, holds, puts."""
        give_up_s = time.monotonic() + within_s
        while in_use := self.in_use():
            assert time.monotonic() < give_up_s, f"still in use after {within_s:g} s: {in_use}"
            time.sleep(POLL_S)

    # --- ending ---

    def kill(self, member_id: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a member a signal, by its id."""
        os.kill(self.member(member_id)["pid"], number)

    def processes(self) -> list[psutil.Process]:
        """Return the members' processes, and whatever they started."""
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return children

    def end(self, number: signal.Signals) -> int:
        """Send `kvass up` a signal and return its exit code when it has ended."""
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


def _answer(pieces: Sequence[str], reason: str, usage: dict[str, Any]) -> Answer:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return Answer(
        pieces=tuple(pieces),
        finish_reason=reason,
        prompt_tokens=usage["prompt_tokens"],
        tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Iterate over a stream's events; fails for an error among them or a stream that breaks off."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            yield event
    raise AssertionError("the stream ended without [DONE]")


@contextmanager
def cluster(*arguments: str) -> Iterator[Cluster]:
    """Run `kvass up` until the end of the block; then it is stopped and nothing may be left."""
    shared_memory = set(SHARED_MEMORY.iterdir())
    with _up(arguments) as running, closing(running.http):
        _until_ready(running)
        processes, ports = running.processes(), listening(running)
        yield running
        if running.process.poll() is None:
            assert running.end(signal.SIGTERM) == 0
            assert not any("Traceback" in line for line in running.lines)
        assert_gone(processes, ports, shared_memory)


@contextmanager
def _up(arguments: Sequence[str]) -> Iterator[Cluster]:
    port = free_port()
    # A salt secret would give blocks other names than the ones that tests derive.
    environment = {name: v for name, v in os.environ.items() if name != "KVASS_SALT_SECRET"}
    with subprocess.Popen(
        [sys.executable, "-m", "kvass.launch.cli", "up", "--port", str(port), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_S, trust_env=False)
        running = Cluster(process, port, http)
        reader = threading.Thread(target=_pass_on, args=(running,), daemon=True)
        reader.start()
        members: list[psutil.Process] = []
        try:
            yield running
        finally:
            if process.poll() is None:
                members = running.processes()
                process.kill()
            for member in members:
                if member.is_running():
                    member.kill()
            reader.join(5)


def _pass_on(running: Cluster) -> None:
    assert running.process.stdout is not None
    for line in running.process.stdout:
        running.lines.append(line)
        print(line, end="", flush=True)


def _until_ready(running: Cluster) -> None:
    give_up_s = time.monotonic() + START_S
    while f"kvass ready: {running.url}\n" not in running.lines:
        assert running.process.poll() is None, "the cluster ended before it was ready"
        assert time.monotonic() < give_up_s, f"the cluster was not ready within {START_S:g} s"
        time.sleep(POLL_S)


def listening(running: Cluster) -> set[tuple[str, int]]:
    """Return the TCP addresses that a cluster's processes listen on."""
    tree = [psutil.Process(running.process.pid), *running.processes()]
    return {
        (each.laddr.ip, each.laddr.port)
        for process in tree
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


def assert_gone(
    processes: Sequence[psutil.Process],
    ports: set[tuple[str, int]],
    shared_memory: set[Path],
    within_s: float = 10.0,
) -> None:
    """Fail if a process lives, a port is listened on or an entry of shared memory is left."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    assert not alive, alive
    for address in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(address) != 0, f"{address} is still listened on"
    left = set(SHARED_MEMORY.iterdir()) - shared_memory - _mapped_by_others()
    assert not left, left


def _mapped_by_others() -> set[Path]:
    """Return the entries of shared memory that processes which live use: not what we left."""
    mapped: set[Path] = set()
    for process in psutil.process_iter():
        try:
            mapped |= {Path(each.path) for each in process.memory_maps()}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has gone meanwhile, or is nobody's whom we could ask
    return mapped
