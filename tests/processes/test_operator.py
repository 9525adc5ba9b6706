"""What an operator sees and does when store nodes die, leave and drain: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from crew import Crew, Seat, crew
from kvass.common.config import Config
from kvass.kvstore.client.tensors import open_store
from kvass.kvstore.messages import DrainHow
from kvass.launch import status
from kvass.launch.drain import Drain
from kvass.launch.look import show_store

pytestmark = [pytest.mark.anyio, pytest.mark.process, pytest.mark.model]
KVASS = (sys.executable, "-m", "kvass.launch.cli")
SETTINGS = ("--set", "store.slab_bytes=8MiB", "--set", "store.replicas=2")
LIKE = np.empty((2, 16, 64), np.float32)


class Desk:
    """An operator in front of a crew: a gateway and two store nodes."""

    def __init__(self, members: Crew) -> None:
        self.crew = members
        self.gateway = members.gateways["gateway-0"]
        self.first, self.second = members.seats["store-0"], members.seats["store-1"]

    def store(self) -> tuple[int, str]:
        """`kvass status --store`: its exit code, and what it says."""
        console = Console(record=True, width=400)
        code = show_store(self.gateway.url, [], Config(), console, as_json=False)
        return code, console.export_text()

    async def drain(self, how: DrainHow = "begin") -> tuple[int, str]:
        """`kvass drain store-0`, likewise."""
        console = Console(record=True, width=400)
        code = await Drain("store-0", how, console).run(Config(), self.gateway.url)
        return code, console.export_text()

    def listed(self, member_id: str) -> dict[str, Any]:
        """Return a member's entry; empty when it is not listed."""
        entries = self.gateway.overview()["members"]
        return next((each for each in entries if each["id"] == member_id), {})

    def until(self, seat: Seat, state: str) -> None:
        """Wait until the gateway shows a member so; not at all: empty."""
        name = seat.member_id
        self.gateway.until(
            lambda: self.listed(name).get("state", "") == state, f"{name} is {state!r}"
        )

    def kill_second(self) -> None:
        self.until(self.second, "ready")
        self.second.kill()
        self.until(self.second, "lost")


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with crew(*SETTINGS) as members:
        for name in ("gateway-0", "store-0", "store-1"):
            members.add(name)
        members.until_whole()
        yield Desk(members)


@pytest.mark.fault(number=49)
def test_a_node_that_was_killed_is_lost_until_it_is_back_or_forgotten(desk: Desk) -> None:
    code, text = desk.store()
    assert code == 0 and "2 store nodes, 2 well" in text
    desk.kill_second()
    ran = subprocess.run(
        [*KVASS, "status", "--store", "--url", desk.gateway.url], capture_output=True, text=True,
        timeout=60, env=os.environ | {"COLUMNS": "400", "NO_COLOR": "1"},
    )  # fmt: skip
    since = desk.listed("store-1")["lost_since"]
    assert ran.returncode == 1, ran.stderr
    assert f"store-1 is lost: nothing was heard of it since {since}" in ran.stdout
    assert "store-0 shall keep 2 copies of each block (store.replicas)" in ran.stdout
    said = [each["message"] for each in desk.gateway.overview()["degraded"]]
    assert any(each.startswith(f"store store-1 is lost since {since}: ") for each in said)
    assert any("store.replicas is 2" in each for each in said)
    assert status.forget(desk.gateway.url, "store-0", Console()) == 1
    assert status.forget(desk.gateway.url, "store-1", Console()) == 0
    assert desk.listed("store-1") == {}
    desk.second.start()
    desk.kill_second()
    desk.second.start()
    desk.until(desk.second, "ready")
    assert "lost_since" not in desk.listed("store-1")


async def test_a_drain_that_would_lose_blocks_is_held_up_then_forced_or_cancelled(
    desk: Desk,
) -> None:
    desk.until(desk.second, "ready")
    desk.second.signal(signal.SIGTERM)
    assert desk.second.wait() == 0
    desk.until(desk.second, "")  # it said that it leaves, so it is not lost
    blocks = {index: np.full_like(LIKE, index) for index in range(4)}
    broker = desk.crew.address
    async with open_store(broker=broker, like=LIKE, name="drained") as store:
        chain = store.chain(range(64))
        assert (await store.put(chain, blocks)).stored == set(blocks)
        code, text = await desk.drain()
        assert code == 1 and "store-0 is not drained: 4 blocks are nowhere else" in text
        assert "4 blocks are nowhere else" in desk.store()[1]
        assert set(await store.get(chain)) == set(blocks), "it still answers"
    code, text = await desk.drain("cancel")
    assert code == 0 and "takes blocks again" in text
    code, text = await desk.drain("force")
    assert code == 0 and "with a loss: 4 blocks go with it" in text
    desk.until(desk.first, "draining")
    assert (await desk.drain("cancel"))[0] == 0
    desk.until(desk.first, "ready")
    desk.second.start()
    desk.until(desk.second, "ready")
    code, text = await desk.drain()
    assert code == 0 and "others have all" in text
