"""Faults of who is who: other settings, other hashes, an address or a name that had another process
behind it. Members are started one by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import anyio
import anyio.to_thread
import pytest

from cluster import START_S, Cluster
from cluster_control import Control
from crew import Crew, crew
from kvass.common import config
from kvass.common.membership import LIVE_S
from kvass.common.model.fetch import resolve_model
from kvass.common.model.identity import worker_fields
from kvass.common.model.spec import load_spec
from kvass.common.rpc.credentials import credentials_of
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Call, Server, listen
from kvass.common.wire import Delta, Generate

pytestmark = [pytest.mark.process, pytest.mark.model]

SMALL = ("--set", "cluster.max_model_len=1024")


@pytest.fixture
def members() -> Iterator[Crew]:
    with crew() as running:
        yield running


def started(members: Crew, *arguments: str) -> tuple[Cluster, Control]:
    """Start the smallest cluster of these settings; return its gateway, and control over it."""
    settings = (*SMALL, *arguments)
    for member_id in ("decode-0", "gateway-0"):
        members.add(member_id, *settings)
    members.until_whole()
    up = members.gateways["gateway-0"]
    return up, Control(up, tuple(each for each in settings if each != "--set"))


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Crew, Cluster, Control]]:
    """A decode worker and a gateway; each test leaves them as it found them."""
    with crew() as members:
        yield (members, *started(members))


# --- names ----------------------------------------------------------------------------------------

DERIVE = """
import json, sys
from kvass.common import config, keys
from kvass.common.model.fetch import resolve_model
from kvass.common import config
from kvass.common.membership import LIVE_S
from kvass.common.model.fetch import resolve_model
from kvass.common.model.identity import worker_fields
from kvass.common.model.spec import load_spec
folder = resolve_model(config.DEFAULT_MODEL, progress=False)
fields = worker_fields(folder, load_spec(folder), config.load(None, []).cluster, "cpu")
chain = keys.Chain(keys.Namespace(bytes.fromhex(fields["namespace"])), 16)
chain.extend(range(1000, 1100))
facts = {name: {other: 1 for other in {"x", "y", "z"}} for name in {"a", "b", "c", "d"}}
keys.self_check()
print(json.dumps([fields, keys.namespace_of(facts).hex(), [key.hex() for key in chain.keys]]))
"""


@pytest.mark.fault(number=20)
def test_every_process_derives_the_same_names() -> None:
    """Whatever the seed of its hashes, and so the order of its sets."""
    said = set()
    for seed in ("0", "1", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", DERIVE], check=True, capture_output=True, text=True, timeout=60,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )  # fmt: skip
        said.add(done.stdout)
    assert len(said) == 1
    _, _, derived = json.loads(said.pop())
    assert len(derived) == 6


@pytest.mark.fault(number=20)
def test_a_worker_that_derives_other_names_does_not_start() -> None:
    """Big-endian token ids: what a careless port to another machine would have."""
    code = (
        "import struct, sys\n"
        "from kvass.common import keys\n"
        "class Swapped:\n"
        "    pack = staticmethod(lambda form, *ids: struct.pack(form.replace('<', '>'), *ids))\n"
        "keys.struct = Swapped\n"
        "from kvass.launch import cli\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "decode", "--broker", "127.0.0.1:1"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "keys.json has" in done.stderr and "Traceback" not in done.stderr, done.stderr


# --- settings -------------------------------------------------------------------------------------

OTHERS = {
    "kv_dtype": ("bf16", "fp8"),
    "block_tokens": ("32", "16"),
    "max_model_len": ("2048", "1024"),
}


@pytest.mark.fault(number=19)
@pytest.mark.fault(number=24)
def test_members_that_differ_are_refused_and_find_nothing_of_each_other(members: Crew) -> None:
    members.add("store-0")
    up, control = started(members)
    prompt = control.prompt(200, seed=1)
    cold = up.ask(prompt)
    control.until_stored(prompt)
    assert up.ask(prompt).cached_tokens == 192

    strangers = {
        name: members.add(f"{role}-{name}", *SMALL, "--set", f"cluster.{name}={value}")
        for (name, (value, _)), role in zip(
            OTHERS.items(), ("decode", "gateway", "gateway"), strict=True
        )
    }
    for name, seat in strangers.items():
        assert seat.wait(START_S) != 0
        (said,) = [line for line in seat.lines if line.startswith("kvass:")]
        assert f"{name} differs" in said and all(value in said for value in OTHERS[name]), said
        assert "Traceback" not in "".join(seat.lines)
    assert up.ask(prompt, cache_salt="still").said == cold.said

    for member_id in ("decode-0", "gateway-0"):
        members.seats[member_id].signal(signal.SIGTERM)
        assert members.seats[member_id].wait() == 0
    # The same store, other settings: under other names, so there is nothing to be found.
    other, its_control = started(members, "--set", "cluster.kv_dtype=int8")
    assert its_control.namespace != control.namespace
    first = other.ask(prompt)
    assert first.cached_tokens == 0
    assert other.ask(prompt).said == first.said
    other.until_idle()


CHANGES_KV = ("kv_dtype=bf16", "kv_dtype=int8", "block_tokens=32", "head_groups=3")


@pytest.mark.fault(number=19)
def test_every_setting_that_changes_kv_is_in_the_namespace() -> None:
    """Compared as every worker computes it when it starts."""
    folder = resolve_model(config.DEFAULT_MODEL, progress=False)
    spec = load_spec(folder)

    def namespace(device: str, *settings: str) -> str | int:
        cluster = config.load(None, settings).cluster
        return worker_fields(folder, spec, cluster, device)["namespace"]

    plain = namespace("cpu")
    others = {namespace("cpu", f"cluster.{each}") for each in CHANGES_KV} | {namespace("gpu")}
    assert len(others | {plain}) == len(CHANGES_KV) + 2


# --- starts ---------------------------------------------------------------------------------------


@pytest.mark.fault(number=36)
def test_a_stranger_at_a_workers_address_is_asked_nothing(
    pair: tuple[Crew, Cluster, Control],
) -> None:
    """The broker hangs meanwhile, so that the gateway's view is the old one."""
    members, up, control = pair
    prompt = control.prompt(60, seed=2)
    cold = up.ask(prompt, cache_salt="cold")
    decode = members.seats["decode-0"]
    members.broker.signal(signal.SIGSTOP)
    decode.kill()
    try:
        status, asked = anyio.run(impostor, decode.port, up, prompt)
    finally:
        members.broker.signal(signal.SIGCONT)
    assert (status, asked) == (503, 0)
    decode.start()
    members.until_whole()
    assert up.ask(prompt).said == cold.said
    up.until_idle()


async def impostor(port: int, up: Cluster, prompt: list[int]) -> tuple[int, int]:
    """Answer at a worker's address, as another start; return the status of a completion that is
    asked for meanwhile, and how often this one was asked."""
    asked = 0

    async def generate(call: Call) -> None:
        nonlocal asked
        asked += 1
        await call.send(Delta(token_ids=(1,), text="forged", finish_reason="stop"))

    def ask() -> int:
        return up.http.post("/v1/completions", json=up.body(prompt)).status_code

    hello = Hello("decode", "decode-0", "host", "another-start", os.getpid(), cluster={})
    listener, _ = await listen("127.0.0.1", port)
    async with listener, anyio.create_task_group() as tasks:
        server = Server(hello, {Generate: generate}, credentials_of(config.ClusterConfig()))
        tasks.start_soon(listener.serve, server.serve_connection)
        status = await anyio.to_thread.run_sync(ask)
        tasks.cancel_scope.cancel()
    return status, asked


@pytest.mark.fault(number=49)
def test_a_late_last_will_takes_nobody_else_along(
    pair: tuple[Crew, Cluster, Control],
) -> None:
    """A worker hangs and is started again under its name; then the one that hung dies."""
    members, up, control = pair
    prompt = control.prompt(60, seed=3)
    cold = up.ask(prompt, cache_salt="cold")
    hung = members.seats.pop("decode-0")
    hung.signal(signal.SIGSTOP)
    try:
        again = members.add("decode-0", *SMALL)
        again.until_ready()
        assert again.process is not None
        pid = again.process.pid
        up.until(
            lambda: up.member("decode-0")["pid"] == pid, "the new start is the one that counts"
        )
        assert up.ask(prompt).said == cold.said
    finally:
        hung.kill()  # only now the broker sends its will
    answers = [up.ask(prompt, cache_salt=str(i)).said for i in range(5)]
    assert set(answers) == {cold.said}
    assert up.member("decode-0")["pid"] == pid
    up.until_idle()


@pytest.mark.fault(number=33)
def test_a_gateway_that_was_stopped_takes_nobody_for_lost(
    pair: tuple[Crew, Cluster, Control],
) -> None:
    """Its stream goes on where it was, and it serves at once."""
    members, up, control = pair
    prompt = control.prompt(60, seed=4)
    cold = up.ask(prompt, cache_salt="cold", max_tokens=60)
    gateway, begun = members.seats["gateway-0"], list[str]()
    before = len(gateway.lines)
    with ThreadPoolExecutor(1) as threads:
        streaming = threads.submit(up.stream, prompt, max_tokens=60, seen=begun.append)
        up.until(lambda: len(begun) > 2, "a stream")
        gateway.signal(signal.SIGSTOP)
        time.sleep(LIVE_S + 1.0)
        gateway.signal(signal.SIGCONT)
        assert up.ask(prompt, max_tokens=60).said == cold.said
        assert streaming.result().said == cold.said
    assert not [line for line in gateway.lines[before:] if "stopped being heard of" in line]
    up.until_idle()
