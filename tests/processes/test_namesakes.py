"""Two members under one id: who comes later is refused, unless the first one is dead or stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from bus_stage import free_broker, live, member, started, until
from crew import crew
from kvass.common import namesakes
from kvass.common.errors import Invalid
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.member import JOIN_CHECK_S
from kvass.common.membership import ROLES, Role
from kvass.launch.broker import run_broker

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return BACKEND, dict(BACKEND_OPTIONS)


@pytest.mark.parametrize("role", ROLES)
async def test_a_second_one_is_refused_as_long_as_the_first_lives(role: Role) -> None:
    broker = free_broker()
    async with run_broker(broker), member(broker, role, "one", {}) as first:
        await namesakes.refuse(first)
        await first.announce("127.0.0.1:7")
        async with member(broker, role, "two", {}) as other:
            await namesakes.refuse(other)
        async with member(broker, role, "one", {}) as second:
            expected = f"{role} one runs already: pid {os.getpid()} on this host, at 127.0.0.1:7"
            with pytest.raises(Invalid, match=expected):
                await namesakes.refuse(second)
        with anyio.move_on_after(1.0) as waited:
            await namesakes.watch(first)
        assert waited.cancelled_caught, "one that only tried takes nobody's place"
    async with run_broker(broker), member(broker, role, "one", {}) as third:
        await namesakes.refuse(third)


@pytest.mark.parametrize("role", ROLES)
async def test_one_that_was_killed_is_back_at_once(role: Role) -> None:
    broker = free_broker()
    async with run_broker(broker), started(broker, role, "one") as killed:
        start_id = (await killed.next())["start_id"]
        killed.process.kill()
        async with member(broker, role, "one") as again:
            # What says nothing of itself for a while holds nobody up, should its will be late.
            with anyio.fail_after(JOIN_CHECK_S + 1):
                await namesakes.refuse(again)
            assert again.hello.start_id != start_id
            assert start_id not in again.table, "the last will has cleared it"


@pytest.mark.parametrize("role", ROLES)
async def test_of_two_that_serve_the_older_one_leaves(role: Role) -> None:
    """It was stopped while the other one came, or both came at once."""
    broker = free_broker()
    async with (
        run_broker(broker),
        member(broker, role, "one", {}) as first,
        member(broker, role, "one", {}) as second,
    ):
        await first.announce("127.0.0.1:7")
        await second.announce("127.0.0.1:8")
        await live(first, role, [second.hello.start_id], within_s=2)
        with anyio.fail_after(3), pytest.raises(Invalid, match=r"127\.0\.0\.1:8; this one leaves"):
            await namesakes.watch(first)
        with anyio.move_on_after(1.0) as waited:
            await namesakes.watch(second)
        assert waited.cancelled_caught, "and only that one"


@pytest.mark.model
@pytest.mark.parametrize("member_id", ["prefill-0", "decode-0", "gateway-0"])
async def test_members_started_twice_by_mistake(member_id: str) -> None:
    role = member_id.partition("-")[0]
    with crew("--set", "cluster.max_model_len=1024") as members:
        first = members.add(member_id)
        first.until_ready()
        second = members.add(member_id)
        assert second.wait() == 2
        said = "".join(second.lines)
        assert f"{role} {member_id} runs already: pid {first.process and first.process.pid}" in said
        assert first.is_running
        first.kill()
        members.add(member_id).until_ready()


async def test_nodes_started_twice_by_mistake(tmp_path: Path) -> None:
    flash = ("--set", f'store.flash_dir="{tmp_path}"', "--set", "store.flash_bytes=67108864",
             "--set", "store.flash_segment_bytes=8388608")  # fmt: skip
    with crew("--slab-bytes", "20MiB", *flash) as members:
        first = members.add("store-0")
        first.until_ready()
        second = members.add("store-0")
        assert second.wait() == 2
        said = "".join(second.lines)
        assert f"store store-0 runs already: pid {first.process and first.process.pid}" in said
        assert "node-0 was store-0's, and a process still has it" in said
        assert first.is_running
        # One that has stopped is replaced, and leaves when it wakes.
        first.signal(signal.SIGSTOP)
        third = members.add("store-0")
        third.until_ready()
        first.signal(signal.SIGCONT)
        await until(lambda: not first.is_running, within_s=15)
        assert first.wait() == 2
        assert "this one leaves" in "".join(first.lines)
        assert third.is_running
