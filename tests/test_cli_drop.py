"""`kvass drop`: what must be given, and whom it tells in which order."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
from rich.console import Console

from kvass.common import errors
from kvass.common.config import Config
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Call, Server, accept, listen
from kvass.common.wire import Done, Forget, Message
from kvass.kvstore import messages as m
from kvass.launch import drop as command
from kvass.launch import operator
from trust import CREDENTIALS

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return BACKEND, dict(BACKEND_OPTIONS)


@asynccontextmanager
async def a_cluster(told: list[Message], blocks: int = 3) -> AsyncIterator[list[dict[str, Any]]]:
    async def dropped(call: Call) -> m.Dropped:
        told.append(call.request)
        return m.Dropped(blocks=blocks)

    async def forgotten(call: Call) -> Done:
        told.append(call.request)
        return Done()

    async with AsyncExitStack() as listeners, anyio.create_task_group() as tasks:
        members = []
        for role, handler in (("store", dropped), ("decode", forgotten)):
            hello = Hello(role, f"{role}-0", "h", f"{role}-s", 1, {})
            kind: type[Message] = m.Drop if role == "store" else Forget
            server = Server(hello, {kind: handler}, CREDENTIALS)
            listener, address = await listen("127.0.0.1")
            await listeners.enter_async_context(listener)
            tasks.start_soon(accept, listener, server.serve_connection)
            members.append({"role": role, "id": f"{role}-0", "address": address, "state": "ready"})
        yield members
        tasks.cancel_scope.cancel()


def unnamed(told: list[Message]) -> list[Message]:
    """Take the ids out of erasures; each has one of its own."""
    drops = [each for each in told if isinstance(each, m.Drop)]
    assert len({each.id for each in drops} - {None}) == len(drops)
    return [msgspec.structs.replace(e, id=None) if isinstance(e, m.Drop) else e for e in told]


async def run(
    monkeypatch: pytest.MonkeyPatch,
    members: list[dict[str, Any]],
    *,
    pools: bool = False,
    **which: str,
) -> tuple[int, str]:
    monkeypatch.setattr(command, "cluster_at", lambda url, console: {"members": members})
    monkeypatch.setattr(operator, "credentials_of", lambda cluster: CREDENTIALS)
    console = Console(record=True, width=200)
    asked = command.chosen(which.get("tenant"), which.get("namespace"), which.get("writer"))
    code = await command.drop(Config(), "somewhere", asked, console, pools=pools)
    return code, console.export_text()


async def test_the_store_is_told_then_the_workers_then_the_store_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Message] = []
    async with a_cluster(told) as members:
        code, text = await run(monkeypatch, members, tenant="alice")
    assert code == 0 and "6 blocks erased" in text
    assert unnamed(told) == [m.Drop(tenant="alice"), Forget(), m.Drop(tenant="alice")]


@pytest.mark.parametrize(
    "which", [{"tenant": "alcie"}, {"writer": "prefil-0"}, {"namespace": "ab" * 32}]
)
async def test_a_name_that_nothing_has_empties_no_pool(
    monkeypatch: pytest.MonkeyPatch, which: dict[str, str]
) -> None:
    told: list[Message] = []
    async with a_cluster(told, blocks=0) as members:
        code, text = await run(monkeypatch, members, pools=False, **which)
    ((what, name),) = which.items()
    assert code == 1 and f"Nothing of {what} '{name}' is on 1 store node" in text
    assert [type(each) for each in told] == [m.Drop]


async def test_what_only_pools_hold_is_erased_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or when a node cannot be asked, which may have it."""
    told: list[Message] = []
    async with a_cluster(told, blocks=0) as members:
        code, text = await run(monkeypatch, members, pools=True, tenant="alice")
        assert code == 0 and "0 blocks erased" in text and "the pools of 1 were emptied" in text
        assert unnamed(told) == [m.Drop(tenant="alice"), Forget(), m.Drop(tenant="alice")]
        told.clear()
        lost = {"role": "store", "id": "store-1", "address": "127.0.0.1:1", "state": "lost"}
        code, text = await run(monkeypatch, [*members, lost], tenant="alice")
    assert code == 1 and "was not told" in text
    assert Forget() in told


async def test_what_one_node_cannot_erase_the_others_do_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Message] = []
    async with a_cluster(told) as members:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{nobody.getsockname()[1]}"
            dead = {"role": "store", "id": "store-1", "address": address, "state": "ready"}
            code, text = await run(monkeypatch, [*members, dead], tenant="alice")
    assert code == 1 and "Not all is erased" in text
    assert unnamed(told) == [m.Drop(tenant="alice"), Forget(), m.Drop(tenant="alice")]


async def test_a_node_that_is_lost_is_not_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_cluster([]) as members:
        lost = {"role": "store", "id": "store-1", "address": "127.0.0.1:1", "state": "lost"}
        code, text = await run(monkeypatch, [*members, lost], tenant="alice")
    assert code == 1 and "store-1 does not answer and was not told: the other nodes tell it" in text
    async with a_cluster([]) as members:
        alone = [each for each in members if each["role"] != "store"]
        code, text = await run(monkeypatch, [*alone, lost], tenant="alice")
    assert code == 1 and "drop again when it is back" in text


async def test_a_node_that_cannot_be_told_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        members = [{"role": "store", "id": "store-0", "address": address, "state": "ready"}]
        code, text = await run(monkeypatch, members, namespace="ab" * 32)
    assert code == 1 and "Not all is erased" in text


@pytest.mark.parametrize("which", [{}, {"namespace": "xyz"}, {"namespace": "abcd"}])
def test_what_names_nothing_is_refused(which: dict[str, str]) -> None:
    with pytest.raises(errors.Invalid, match="drop: "):
        command.chosen(which.get("tenant"), which.get("namespace"), which.get("writer"))
