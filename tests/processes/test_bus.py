"""The bus and the member over a real broker, with members in real processes."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from contextlib import AsyncExitStack, suppress
from functools import partial

import anyio
import anyio.abc
import httpx
import pytest
from amqtt.broker import Broker

from bus_stage import (
    DEAD,
    DEAD_TOPIC,
    FIELDS,
    SEAL,
    free_broker,
    live,
    member,
    silent_way,
    started,
    until,
)
from kvass.common import bus
from kvass.common.errors import Incompatible, Invalid, Unavailable
from kvass.launch.broker import run_broker

pytestmark = pytest.mark.anyio


@pytest.fixture
def broker() -> str:
    return free_broker()


@pytest.mark.process
@pytest.mark.fault(number=49)
async def test_a_killed_member_is_gone_within_a_second_and_its_successor_stays(
    broker: str,
) -> None:
    async with run_broker(broker), member(broker, "gateway", "gateway-0") as watcher:
        async with started(broker, "decode", "decode-0") as first:
            old = (await first.next())["start_id"]
            await live(watcher, "decode", [old], within_s=2)
            async with started(broker, "decode", "decode-0") as second:
                new = (await second.next())["start_id"]
                await live(watcher, "decode", [new], within_s=2)
                os.kill(
                    first.process.pid, signal.SIGKILL
                )  # its last will comes after the new presence
                with anyio.fail_after(1):
                    while old in watcher.table:
                        await watcher.changed()
                assert [each.start_id for each in watcher.live("decode")] == [new]
                os.kill(second.process.pid, signal.SIGKILL)
                await live(watcher, "decode", [], within_s=1)


@pytest.mark.process
async def test_a_kill_is_a_loss_until_it_is_back_and_a_leave_is_none(
    broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvass")

    def lost() -> list[str]:
        return [each.peer.member_id for each in watcher.table.lost(watcher._clock.now_s())]

    def logged(words: str) -> bool:
        return words in caplog.text

    async with run_broker(broker), member(broker, "gateway", "g") as watcher:
        for leaves in (True, False):
            caplog.clear()
            async with started(broker, "store", "store-0", {}) as one:
                start_id = (await one.next())["start_id"]
                await live(watcher, "store", [start_id], within_s=2)
                await until(partial(logged, "store store-0 joined"), within_s=2)
                assert lost() == []
                one.process.send_signal(signal.SIGINT if leaves else signal.SIGKILL)
                with anyio.fail_after(10):  # a process that leaves on a busy machine takes its time
                    while start_id in watcher.table:
                        await watcher.changed()
                assert lost() == ([] if leaves else ["store-0"])
                told = "store store-0 left" if leaves else "store store-0 is lost"
                await until(partial(logged, told), within_s=2)
        async with started(broker, "store", "store-0", {}) as again:
            await live(watcher, "store", [(await again.next())["start_id"]], within_s=2)
            assert lost() == []


async def test_a_goodbye_is_heard_though_nothing_is_acknowledged(broker: str) -> None:
    async with (
        run_broker(broker),
        silent_way(broker) as (way, silence),
        member(broker, "gateway", "g") as watcher,
    ):
        async with member(way, "store", "store-0", {}) as one:
            await one.announce("127.0.0.1:7")
            start_id = one.hello.start_id
            await live(watcher, "store", [start_id], within_s=2)
            silence.set()
        await until(lambda: start_id not in watcher.table, within_s=1)
        assert watcher.table.lost(watcher._clock.now_s()) == [], "it left: it is not lost"


@pytest.mark.process
@pytest.mark.fault(number=24)
async def test_a_member_that_disagrees_is_refused_with_the_field_named(broker: str) -> None:
    async with run_broker(broker), started(broker, "decode", "decode-0") as first:
        await first.next()
        other = FIELDS | {"kv_dtype": "int8"}
        async with started(broker, "prefill", "prefill-0", other) as second:
            said = await second.next()
        assert said["refused"] == "kv_dtype"
        for part in ("int8", "fp8", "decode decode-0"):
            assert part in str(said["message"])


async def test_the_presence_of_the_dead_refuses_nobody(broker: str) -> None:
    async with run_broker(broker), member(broker, "store", "store-0", {}) as publisher:
        sealed = SEAL.close(DEAD_TOPIC, DEAD)
        await publisher._bus.publish(DEAD_TOPIC, sealed, qos=1, retain=True)
        async with member(broker, "prefill", "prefill-0"):
            pass


async def test_a_store_that_serves_any_model_joins_all(broker: str) -> None:
    async with (
        run_broker(broker),
        member(broker, "decode", "decode-0") as decode,
        member(broker, "store", "store-0", {}) as store,
    ):
        await store.announce("127.0.0.1:7", details={"capacity_bytes": 5})
        await live(decode, "store", [store.hello.start_id], within_s=2)
        assert decode.live("store")[0].details == {"capacity_bytes": 5}


@pytest.mark.fault(number=32)
async def test_serving_goes_on_without_the_broker_and_all_rejoin(
    broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvass")
    watcher, decode = member(broker, "gateway", "g"), member(broker, "decode", "d")
    async with AsyncExitStack() as stack:
        async with run_broker(broker):
            await stack.enter_async_context(watcher)
            await stack.enter_async_context(decode)
            await decode.announce("127.0.0.1:7")
            await live(watcher, "decode", [decode.hello.start_id], within_s=2)
            await until(lambda: "decode d joined: 127.0.0.1:7" in caplog.text, within_s=2)
            assert f"{broker}: connected" not in caplog.text, "it was never away"
        await until(lambda: not (watcher._bus.is_up or decode._bus.is_up), within_s=2)
        await anyio.sleep(1.0)  # several attempts to reconnect
        assert [each.member_id for each in watcher.live("decode")] == ["d"], "the last view"
        with pytest.raises(Unavailable):
            await watcher.command("d", "drain")
        async with run_broker(broker):
            await until(lambda: watcher._bus.is_up and decode._bus.is_up, within_s=4)
            assert caplog.text.count(f"broker {broker}: connected") == 2
            async with member(broker, "gateway", "late") as late:  # the broker knows all again
                await live(late, "decode", [decode.hello.start_id], within_s=2)
            await stack.aclose()


async def test_a_member_that_is_taken_for_dead_says_that_it_is_not(broker: str) -> None:
    async with (
        run_broker(broker),
        member(broker, "gateway", "g") as watcher,
        member(broker, "decode", "d") as decode,
    ):
        await decode.announce("127.0.0.1:7")
        start_id = decode.hello.start_id
        await live(watcher, "decode", [start_id], within_s=2)
        topic = bus.Topics("local").presence("decode", "d", start_id)
        gone = watcher.changed
        await watcher._bus.publish(topic, b"", qos=1, retain=True)
        with anyio.fail_after(2):
            await gone()
        await live(watcher, "decode", [start_id], within_s=2)


async def test_a_member_may_subscribe_while_the_broker_greets_another(
    broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """amqtt awaits while it walks its subscriptions; the greeted one's connection was lost."""
    brokers: list[Broker] = []
    start = Broker.start

    async def noted_start(self: Broker) -> None:
        brokers.append(self)
        await start(self)

    monkeypatch.setattr(Broker, "start", noted_start)
    async with run_broker(broker), member(broker, "gateway", "g"):
        subscriptions = brokers[0]._subscriptions
        assert subscriptions
        for walk in (subscriptions, subscriptions.items()):
            for number, _ in enumerate(walk):
                subscriptions[f"came/{len(subscriptions)}/{number}"] = []


async def test_the_broker_leaves_no_connection_open(broker: str) -> None:
    port = int(broker.rpartition(":")[2])
    async with run_broker(broker):
        async with await anyio.connect_tcp("127.0.0.1", port) as stranger:
            await stranger.send(b"GET / HTTP/1.1\r\n" + bytes(100))
            await stranger.send_eof()
            with anyio.fail_after(2), pytest.raises(anyio.EndOfStream):
                await stranger.receive()
        silent = await anyio.connect_tcp("127.0.0.1", port)
        await anyio.sleep(0.05)
    async with silent:
        with anyio.fail_after(2), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await silent.receive()


async def test_the_broker_ends_soon_while_clients_speak(broker: str) -> None:
    """amqtt waited for a reader whose cancellation was lost, and listened on after its end."""
    port = int(broker.rpartition(":")[2])

    async def speak(name: bytes) -> None:
        with suppress(anyio.BrokenResourceError):
            async with await anyio.connect_tcp("127.0.0.1", port) as client:
                await client.send(b"\x10\x0e\0\4MQTT\4\2\0\x3c\0\2" + name)  # CONNECT
                while True:
                    await client.send(b"\x30\6\0\3a/bx")  # PUBLISH
                    await anyio.sleep(random.random() * 0.002)

    for _ in range(6):  # it hung in two of five
        async with anyio.create_task_group() as speaking:
            async with run_broker(broker):
                for number in range(4):
                    speaking.start_soon(speak, b"s%d" % number)
                await anyio.sleep(0.3)
                ends_s = anyio.current_time()
            assert anyio.current_time() - ends_s < 2
            with pytest.raises(OSError):
                await anyio.connect_tcp("127.0.0.1", port)


async def test_the_broker_ends_soon_whatever_it_does_with_a_newcomer() -> None:
    """amqtt cancelled readers before their first turn, and waited for what those never said."""
    for turns in range(16):
        address = free_broker()
        port = int(address.rpartition(":")[2])
        async with run_broker(address), await anyio.connect_tcp("127.0.0.1", port) as client:
            await anyio.sleep(0.01)
            await client.send(b"\x10\x0e\0\4MQTT\4\2\0\x3c\0\2me")  # CONNECT
            for _ in range(turns):
                await asyncio.sleep(0)
            ends_s = anyio.current_time()
        assert anyio.current_time() - ends_s < 0.4, turns


async def test_the_broker_leaves_no_connection_open_after_a_halt(broker: str) -> None:
    """All its times are up at once then."""
    port = int(broker.rpartition(":")[2])
    async with AsyncExitStack() as stack:
        async with run_broker(broker):
            clients = [
                await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", port))
                for _ in range(3)
            ]
            await anyio.sleep(0.05)
            asyncio.get_running_loop().call_soon(time.sleep, 1.2)
        for client in clients:
            with anyio.fail_after(1), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await client.receive()


@pytest.mark.process
async def test_commands_reach_their_member_only(broker: str) -> None:
    async with (
        run_broker(broker),
        member(broker, "gateway", "g") as watcher,
        started(broker, "decode", "decode-0") as first,
        started(broker, "decode", "decode-1") as second,
    ):
        starts = [(await each.next())["start_id"] for each in (first, second)]
        await live(watcher, "decode", starts, within_s=2)
        await watcher.command("decode-1", "forget", keys="all", count=2)
        await watcher.command("decode-0", "drain")
        with anyio.fail_after(5):
            said = await first.next()
            assert said == {"command": "drain", "arguments": {}}
            said = await second.next()
            assert said == {"command": "forget", "arguments": {"keys": "all", "count": 2}}


async def test_garbage_is_refused_counted_and_changes_nothing(broker: str) -> None:
    async with run_broker(broker), member(broker, "gateway", "g") as watcher:
        topics = bus.Topics("local")
        for topic, payload in (
            (topics.presence("decode", "d", "s"), b"\xc1garbage"),
            (topics.presence("decode", "d", "s"), {"role": "decode"}),
            (topics.load("decode", "d", "s"), [1]),
            (topics.commands("g"), {"verb": 7}),
        ):
            sealed = payload if isinstance(payload, bytes) else SEAL.close(topic, payload)
            await watcher._bus.publish(topic, sealed)
        refused = watcher._metrics.messages_refused
        await until(lambda: refused._value.get() >= 4, within_s=2)
        assert [each.peer.role for each in watcher.table.entries()] == ["gateway"]


async def test_metrics_are_served_on_loopback(broker: str) -> None:
    async with run_broker(broker), member(broker, "store", "store-0", {}) as one:
        address = one._peer.metrics_address
        assert address.startswith("127.0.0.1:")
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{address}/metrics")).text
        assert "kvass_bus_up 1.0" in text and "process_resident_memory_bytes" in text


async def test_an_error_of_the_body_stays_what_it_is(broker: str) -> None:
    with pytest.raises(Incompatible):
        async with run_broker(broker), member(broker, "decode", "d"):
            raise Incompatible("a", 1, 2, who="them")


async def test_a_cancelled_service_that_holds_a_member_ends(broker: str) -> None:
    async def serve(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(member(broker, "store", "store-0", {}))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.follow, "store", lambda peers: None)
                task_status.started()

    async with run_broker(broker), member(broker, "gateway", "g") as watcher:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                await tasks.start(serve)
                tasks.cancel_scope.cancel()
        assert len(watcher.table.entries()) == 1, "it said goodbye"


def test_topics_name_their_parts() -> None:
    topics = bus.Topics("local")
    parsed = topics.parse(topics.load("decode", "decode-0", "abc"))
    assert parsed == ("load", "decode", "decode-0", "abc")
    assert topics.parse(topics.commands("decode-0")) is None
    assert topics.parse("kvass/other/member/decode/d@s") is None


@pytest.mark.parametrize("name", ["", "a/b", "a+", "#", "a@b", "x" * 65])
def test_names_that_would_break_a_topic_are_invalid(name: str) -> None:
    with pytest.raises(Invalid):
        bus.Topics(name)
    with pytest.raises(Invalid):
        bus.Topics("local").commands(name)
