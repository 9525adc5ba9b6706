"""Who is listened to on the bus: members that know the secret, and what they say now."""

from __future__ import annotations

import time
from typing import Any

import pytest

from bus_stage import FIELDS, SEAL, free_broker, live, member, started, until
from kvass.common import bus, wire
from kvass.common.seal import Command, Seal, new_command
from kvass.common.secret import Secret
from kvass.launch.broker import run_broker

pytestmark = pytest.mark.anyio


@pytest.fixture
def broker() -> str:
    return free_broker()


@pytest.mark.process
@pytest.mark.fault(number=45)
async def test_a_member_with_another_secret_cannot_join_and_says_why(
    broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret = {"KVASS_CLUSTER_SECRET": "what somebody else knows"}
    async with run_broker(broker), member(broker, "decode", "d") as there:
        for role in ("store", "prefill"):  # one follows no loads of decode workers, nor the other
            async with started(broker, role, "late", FIELDS, **secret) as stranger:
                said = await stranger.next()
            assert said["refused"] == "secret"
            for words in (
                broker,
                "another cluster secret",
                "from KVASS_CLUSTER_SECRET: give every",
            ):
                assert words in str(said["message"])
        assert [each.peer.member_id for each in there.table.entries()] == ["d"]


@pytest.mark.fault(number=45)
async def test_what_is_not_signed_is_ignored_counted_and_told_once(
    broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    obeyed: list[str] = []

    async def obey(command: Command) -> None:
        obeyed.append(command.command_id)

    strange = Seal(Secret("what somebody else knows", "elsewhere"))
    async with run_broker(broker), member(broker, "gateway", "g", obey=obey) as one:
        topics, start_id = bus.Topics("local"), one.hello.start_id
        await one.announce("127.0.0.1:7")
        await live(one, "gateway", [start_id], within_s=2)
        heard: list[tuple[str, bytes]] = []
        publish = one._bus.publish

        async def record(topic: str, payload: bytes, **terms: Any) -> bool:
            heard.append((topic, payload))
            return await publish(topic, payload, **terms)

        one._bus.publish = record  # type: ignore[method-assign]
        await one.command("g", "drain")
        topic, true = next(each for each in heard if each[0] == topics.commands("g"))
        await until(lambda: len(obeyed) == 1, within_s=2)
        forged = new_command("drain", start_id, time.time(), {})
        late = new_command("drain", start_id, time.time() - 3600, {})
        refused = one._metrics.messages_refused._value.get
        before = refused()
        messages = (
            (topic, wire.pack([1, {"verb": "drain", "arguments": {}}])),
            (topic, strange.close(topic, forged)),
            (topic, SEAL.close(topics.commands("other"), forged)),
            (topic, true),
            (topic, SEAL.close(topic, new_command("drain", "last-start", time.time(), {}))),
            (topic, SEAL.close(topic, late)),
            (topics.load("store", "s", "s"), strange.close(topics.load("store", "s", "s"), {})),
        )
        for each in messages:
            await publish(*each)
        await until(lambda: refused() == before + len(messages), within_s=2)
        assert len(obeyed) == 1
        assert caplog.text.count("not signed with this cluster's secret") == 1


@pytest.mark.parametrize("secret", ["", "what somebody else knows"])
async def test_two_clusters_at_one_broker_say_nothing_of_each_other(
    broker: str, secret: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """amqtt sends a new member what the other cluster's members said."""
    async with run_broker(broker), member(broker, "gateway", "g") as one:
        await one.announce("127.0.0.1:7")
        await live(one, "gateway", [one.hello.start_id], within_s=2)
        if secret:
            monkeypatch.setenv("KVASS_CLUSTER_SECRET", secret)
        async with member(broker, "gateway", "g", cluster="other") as two:
            await two.announce("127.0.0.1:8")
            await live(two, "gateway", [two.hello.start_id], within_s=2)
            assert [each._metrics.messages_refused._value.get() for each in (one, two)] == [0, 0]
    assert not [each for each in caplog.records if each.levelname == "WARNING"], caplog.text


async def test_what_a_dead_member_said_does_not_bring_it_back(broker: str) -> None:
    async with run_broker(broker), member(broker, "gateway", "g") as watcher:
        topics = bus.Topics("local")
        async with member(broker, "decode", "d") as dead:
            await dead.announce("127.0.0.1:7")
            await live(watcher, "decode", [dead.hello.start_id], within_s=2)
            topic = topics.load("decode", "d", dead.hello.start_id)
            presence = topics.presence("decode", "d", dead.hello.start_id)
            ready = dead._bus._retained[presence]
            load = dead._seal.close(topic, {"running": 1})
            await dead._bus.publish(topic, load)
            await until(lambda: watcher.load_of(dead._peer) == {"running": 1}, within_s=2)
            await dead.announce("127.0.0.1:7", state="draining")
            await live(watcher, "decode", [], within_s=2)
            refused = watcher._metrics.messages_refused._value.get
            before = refused()
            await watcher._bus.publish(presence, ready)
            await watcher._bus.publish(topic, load)
            await until(lambda: refused() == before + 2, within_s=2)
            assert not watcher.live("decode")
