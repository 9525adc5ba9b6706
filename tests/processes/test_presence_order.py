"""Who joins ends up with the last that everybody said, whatever is under way just then."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import pytest
from amqtt.broker import Broker
from amqtt.mqtt.disconnect import DisconnectPacket
from amqtt.mqtt.publish import PublishPacket

from bus_stage import DEAD, DEAD_TOPIC, SEAL, free_broker, member, until
from kvass.common import bus
from kvass.launch.broker import run_broker

pytestmark = [pytest.mark.anyio, pytest.mark.fault(number=49)]


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> list[Broker]:
    """The brokers that this test starts."""
    found: list[Broker] = []
    start = Broker.start

    async def noted_start(self: Broker) -> None:
        found.append(self)
        await start(self)

    monkeypatch.setattr(Broker, "start", noted_start)
    return found


class Pause:
    """Holds what a broker does at one place. Mutable fields: the two events."""

    def __init__(self) -> None:
        self.reached, self.over = anyio.Event(), anyio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.over.wait()


def pause_before(monkeypatch: pytest.MonkeyPatch, step: str) -> Pause:
    """Hold every broker before a step of its, from now on."""
    pause, proceed = Pause(), getattr(Broker, step)

    async def held(self: Broker, *arguments: Any) -> Any:
        await pause()
        return await proceed(self, *arguments)

    monkeypatch.setattr(Broker, step, held)
    return pause


async def test_who_subscribes_after_a_will_has_not_heard_what_it_cleared(
    brokers: list[Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """amqtt greeted with the retained messages of others' subscriptions, before the own ones."""
    address = free_broker()
    async with run_broker(address), member(address, "gateway", "g") as watcher:
        await watcher._bus.publish(DEAD_TOPIC, SEAL.close(DEAD_TOPIC, DEAD), qos=1, retain=True)
        await until(lambda: "dead" in watcher.table, within_s=2)
        pause = pause_before(monkeypatch, "_handle_subscription")

        async def clear() -> None:
            await pause.reached.wait()
            await watcher._bus.publish(DEAD_TOPIC, b"", qos=1, retain=True)
            await until(lambda: "dead" not in watcher.table, within_s=2)
            pause.over.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(clear)
            async with member(address, "gateway", "new") as newcomer:
                assert watcher.hello.start_id in newcomer.table
                assert "dead" not in newcomer.table


@asynccontextmanager
async def client(address: str, will_topic: str) -> AsyncIterator[anyio.abc.SocketStream]:
    """A client of the broker, its last will an empty retained message, as bytes on a socket."""

    def text(words: str) -> bytes:
        return struct.pack(">H", len(words)) + words.encode()

    will, clean, kept, at_least_once = 0x04, 0x02, 0x20, 0x08
    flags = bytes([4, will | clean | kept | at_least_once])
    said = text("MQTT") + flags + struct.pack(">H", 5) + text("c") + text(will_topic) + text("")
    host, port = bus.host_and_port(address)
    async with await anyio.connect_tcp(host, port) as stream:
        await stream.send(bytes([0x10, len(said)]) + said)
        assert await stream.receive(4) == b"\x20\x02\x00\x00"
        yield stream


@pytest.mark.parametrize("ends_by", ["death", "goodbye"])
async def test_the_last_words_of_a_client_come_before_its_end(
    brokers: list[Broker], monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    """amqtt ended it first: the rest was dropped, or came after the will, and stayed."""
    address = free_broker()
    async with run_broker(address), client(address, "t") as stream:
        pause = pause_before(monkeypatch, "_handle_message_delivery")
        for number in range(1, 4):
            said = PublishPacket.build("t", b"%d" % number, number, False, 1, True)
            await stream.send(bytes(said.to_bytes()))
            assert await stream.receive(4) == b"\x40\x02" + struct.pack(">H", number)
        await pause.reached.wait()
        ended = anyio.Event()
        end = Broker._handle_disconnect

        async def noted_end(self: Broker, *arguments: Any) -> None:
            await end(self, *arguments)
            ended.set()

        monkeypatch.setattr(Broker, "_handle_disconnect", noted_end)
        if ends_by == "goodbye":
            await stream.send(bytes(DisconnectPacket().to_bytes()))
        else:
            await stream.send_eof()
        await asyncio.sleep(0.05)  # the broker has read it
        pause.over.set()
        with anyio.fail_after(2):
            await ended.wait()
        await asyncio.sleep(0.05)  # whatever it does after that
        kept = {topic: bytes(each.data) for topic, each in brokers[0].retained_messages.items()}
        assert kept == ({"t": b"3"} if ends_by == "goodbye" else {})


async def test_a_retained_message_that_comes_after_the_will_is_not_news(
    brokers: list[Broker],
) -> None:
    """Brokers of several threads or hosts send what is retained beside what is said meanwhile."""
    address = free_broker()
    async with run_broker(address), member(address, "gateway", "g") as watcher:
        (_, sending), *_ = brokers[0].sessions.values()
        presence, later = (SEAL.close(DEAD_TOPIC, DEAD) for _ in range(2))
        marker = bus.Topics("local").presence("decode", "decode-9", "marker")
        refused = watcher._metrics.messages_refused

        async def sent(topic: str, payload: bytes, *, retain: bool) -> None:
            """Send it, and wait until it is heard: garbage that follows is counted."""
            count = refused._value.get()
            await sending.mqtt_publish(topic, payload, 0, retain=retain)
            await sending.mqtt_publish(marker, b"\xc1", 0, retain=False)
            await until(lambda: refused._value.get() > count, within_s=2)

        await sent(DEAD_TOPIC, b"", retain=False)
        await sent(DEAD_TOPIC, presence, retain=True)
        assert "dead" not in watcher.table
        await sent(DEAD_TOPIC, presence, retain=False)
        assert "dead" in watcher.table, "it was taken for dead and said that it is not"
        await sent(DEAD_TOPIC, later, retain=True)
        assert "dead" in watcher.table


def test_few_cleared_topics_are_remembered() -> None:
    cleared = bus.Cleared()
    topics = [str(number) for number in range(bus.CLEARED_MAX + 1)]
    for topic in topics:
        assert not cleared.hears_old(topic, b"", is_retained=False)
    assert [each for each in topics if not cleared.hears_old(each, b"p", is_retained=True)] == ["0"]
