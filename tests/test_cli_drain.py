"""`kvass drain`: what an operator is told, and with which exit code; Ctrl-C; `kvass forget`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from rich.console import Console

import trust
from kvass.common.config import Config
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Call, Server, accept, listen
from kvass.common.wire import Done
from kvass.kvstore import messages as m
from kvass.launch import drain as command
from kvass.launch import operator, status
from trust import CREDENTIALS

pytestmark = pytest.mark.anyio
COUNTS = {
    "draining": 1, "drained": 0, "drain_held": 0, "handover_left": 0, "handover_handed": 0,
    "handover_elsewhere": 0, "handover_refused": 0,
}  # fmt: skip


@asynccontextmanager
async def a_node(told: list[str], *looks: dict[str, int]) -> AsyncIterator[list[dict[str, Any]]]:
    """Serve a store node that shows these counts, look after look; yields the cluster's members."""
    left = list(looks)

    async def drained(call: Call) -> Done:
        assert isinstance(call.request, m.Drain)
        told.append(call.request.how)
        return Done()

    async def stats(call: Call) -> m.StatsReply:
        return m.StatsReply(counts=COUNTS | (left.pop(0) if len(left) > 1 else left[0]))

    who = Hello("store", "store-0", "h", "s", 1, {})
    server = Server(who, {m.Drain: drained, m.Stats: stats}, CREDENTIALS)
    listener, address = await listen("127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(accept, listener, server.serve_connection)
        yield [{"role": "store", "id": "store-0", "address": address, "state": "ready"}]
        tasks.cancel_scope.cancel()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    async def run(members: list[dict[str, Any]], how: m.DrainHow = "begin") -> tuple[int, str]:
        monkeypatch.setattr(command, "cluster_at", lambda url, console: {"members": members})
        monkeypatch.setattr(operator, "credentials_of", lambda cluster: CREDENTIALS)
        monkeypatch.setattr(command, "LOOK_S", 0.01)
        console = Console(record=True, width=200)
        one = command.Drain("store-0", how, console)
        with anyio.fail_after(10):
            code = await one.run(Config(), "somewhere")
        return code, console.export_text()

    return run


DONE = {"drained": 1, "handover_handed": 5, "handover_elsewhere": 2}
HELD = {"drain_held": 1, "handover_handed": 5, "handover_refused": 3, "handover_left": 4}


async def test_a_drain_says_how_many_went_where(run: Callable[..., Any]) -> None:
    told: list[str] = []
    async with a_node(told, {"handover_left": 7}, {"handover_left": 3}, DONE) as members:
        code, text = await run(members)
    assert (code, told) == (0, ["begin"])
    for words in (
        "7 copies are still to be taken",
        "3 copies are",
        "5 blocks were handed over, 2 were elsewhere already, 0 were refused",
        "It may be stopped",
    ):
        assert words in text


async def test_a_drain_says_how_the_process_is_stopped(run: Callable[..., Any]) -> None:
    async with a_node([], DONE) as members:
        code, text = await run([members[0] | {"pid": 4321}])
    assert code == 0 and "`kill -TERM 4321` on its host (127.0.0.1:" in text


async def test_only_store_nodes_are_drained(run: Callable[..., Any]) -> None:
    worker = {"role": "prefill", "id": "store-0", "address": "h:1", "state": "ready", "pid": 7}
    code, text = await run([worker])
    assert code == 1 and "is no store node, and only those are drained. `kill -TERM 7`" in text


async def test_a_drain_that_would_lose_blocks_says_so_and_what_may_be_done(
    run: Callable[..., Any],
) -> None:
    async with a_node([], HELD) as members:
        code, text = await run(members)
    assert code == 1
    for words in (
        "3 were refused for want of room, 4 are nowhere else",
        "is not drained: 4 blocks",
        "kvass drain store-0 --force",
        "kvass drain store-0 --cancel",
    ):
        assert words in text


async def test_force_says_what_is_lost_and_is_no_failure(run: Callable[..., Any]) -> None:
    told: list[str] = []
    async with a_node(told, HELD, HELD | {"drain_held": 0, "drained": 1}) as members:
        code, text = await run(members, "force")
    assert (code, told) == (0, ["force"])
    assert "with a loss: 4 blocks go with it" in text


async def test_cancel_puts_a_node_back(run: Callable[..., Any]) -> None:
    told: list[str] = []
    async with a_node(told, {}) as members:
        code, text = await run(members, "cancel")
    assert (code, told) == (0, ["cancel"]) and "takes blocks again" in text
    async with a_node([], {"handover_left": 3}, {"draining": 0}) as members:
        code, text = await run(members)
    assert code == 1 and "somebody has cancelled it" in text


@pytest.mark.parametrize(("state", "words"), [("lost", "is lost"), ("", "is not known")])
async def test_a_node_that_is_not_there_is_said(
    run: Callable[..., Any], state: str, words: str
) -> None:
    members = [{"role": "store", "id": "store-1", "address": "127.0.0.1:1", "state": "ready"}]
    if state:
        members.append(members[0] | {"id": "store-0", "state": state})
    code, text = await run(members)
    assert code == 1 and words in text and "store nodes: store-1" in text


PROGRAM = """
import json
import sys
from kvass.common.config import Config
from kvass.launch import drain, operator
from rich.console import Console
sys.path.append(sys.argv[1])
from trust import CREDENTIALS
operator.credentials_of = lambda cluster: CREDENTIALS
members = json.loads(sys.argv[2])
def cluster_at(url, console):
    if not members:
        raise KeyboardInterrupt
    return {"members": members}
drain.cluster_at = cluster_at
sys.exit(drain.drain(Config(), "somewhere", "store-0", sys.argv[3], Console(width=200)))
"""


async def interrupted(
    members: list[dict[str, Any]], how: m.DrainHow, words: str
) -> tuple[int | None, str]:
    """Run the command in a process of its own and interrupt it once it says these words."""
    folder = str(Path(trust.__file__ or "").parent)
    arguments = [sys.executable, "-c", PROGRAM, folder, json.dumps(members), how]
    said = ""
    async with await anyio.open_process(arguments, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        with anyio.fail_after(30):
            async for data in process.stdout:
                said += data.decode()
                if words and words in said:
                    process.send_signal(signal.SIGINT)
                    words = ""
            return await process.wait(), said


async def test_ctrl_c_says_that_the_drain_goes_on_and_how_to_undo_it() -> None:
    async with a_node([], {"handover_left": 9}) as members:
        code, said = await interrupted(members, "begin", "9 copies")
    assert code == 130, said
    for words in ("goes on draining by itself", "kvass drain store-0` looks", "store-0 --cancel"):
        assert words in said
    code, said = await interrupted([], "begin", "")
    assert code == 130 and "nothing has changed" in said


def test_forget_tells_the_gateway_and_says_why_it_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[httpx.Request] = []
    answers = [
        httpx.Response(200, json={"forgotten": "store-1"}),
        httpx.Response(404, json={"error": {"message": "no member; there are: store-7"}}),
        httpx.Response(401, json={"error": {"message": "no key"}}),
        httpx.Response(403, json={"error": {"message": "a tenant's"}}),
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answers[len(asked) - 1]

    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr("httpx.Client", client)
    console = Console(record=True, width=400)
    codes = [status.forget("gateway:1", "store-1", console) for _ in range(3)]
    monkeypatch.setenv(status.KEY_VARIABLE, "sk-0123456789abcdef")
    codes.append(status.forget("gateway:1", "store-1", console))
    assert codes == [0, 1, 1, 1]
    assert (asked[0].method, asked[0].url.path) == ("DELETE", "/v1/cluster/lost/store-1")
    assert "authorization" not in asked[0].headers
    assert asked[3].headers["authorization"] == "Bearer sk-0123456789abcdef"
    text = console.export_text()
    for words in (
        "store-1 is forgotten",
        "there are: store-7",
        "KVASS_OPERATOR_KEY is not set: no key. Set",
        "the key that KVASS_OPERATOR_KEY holds: a tenant's. Set",
        "[operators] in the gateway's",
    ):
        assert words in text
    assert "sk-0123" not in text
