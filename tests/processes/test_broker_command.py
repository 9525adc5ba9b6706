"""`kvass broker`: the broker of a cluster on several hosts, as a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import anyio
import pytest
from amqtt.broker import Broker
from amqtt.mqtt.protocol.broker_handler import BrokerProtocolHandler
from anyio.streams.buffered import BufferedByteReceiveStream

from bus_stage import free_broker, live, member
from kvass.common.errors import Invalid
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.launch.broker import run_broker

pytestmark = [pytest.mark.anyio, pytest.mark.process]
KVASS = (sys.executable, "-m", "kvass.launch.cli")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return BACKEND, dict(BACKEND_OPTIONS)


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
async def test_members_meet_at_it_until_it_is_told_to_stop(told: signal.Signals) -> None:
    address = free_broker()
    async with await anyio.open_process([*KVASS, "broker", address], stderr=None) as broker:
        try:
            assert broker.stdout is not None
            said = await BufferedByteReceiveStream(broker.stdout).receive_until(b"\n", 200)
            assert said == f"kvass: broker on {address}".encode()
            async with member(address, "decode", "one") as one:
                await one.announce("127.0.0.1:7")
                async with member(address, "gateway", "two", {}) as two:
                    await live(two, "decode", [one.hello.start_id], within_s=2)
            broker.send_signal(told)
            with anyio.fail_after(10):
                assert await broker.wait() == 0
        finally:
            if broker.returncode is None:
                broker.kill()


def test_an_address_that_cannot_be_had_is_said_in_a_line() -> None:
    taken = free_broker()
    with subprocess.Popen([*KVASS, "broker", taken], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None and "broker on" in first.stdout.readline()
            for address, why in (
                (taken, f"kvass: broker on {taken}: Address already in use\n"),
                ("203.0.113.9:1883", "it is no address of this host"),
                ("nonsense", "expected host:port"),
            ):
                ended = subprocess.run(
                    [*KVASS, "broker", address], capture_output=True, text=True, check=False,
                    timeout=30,
                )  # fmt: skip
                assert (ended.returncode, ended.stdout) == (2, "")
                assert why in ended.stderr and ended.stderr.count("\n") == 1
        finally:
            first.kill()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Broker, "stream_connected"),
        (Broker, "_publish_retained_messages_for_subscription"),
        (Broker, "_client_message_loop"),
        (BrokerProtocolHandler, "mqtt_deliver_next_message"),
        (BrokerProtocolHandler, "wait_disconnect"),
    ],
)
def test_an_amqtt_without_what_is_mended_is_refused(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with run_broker(free_broker()):
            pass

    for base in (each for each in owner.__mro__ if name in vars(each)):
        monkeypatch.delattr(base, name)
    with pytest.raises(Invalid, match=rf"amqtt .* has no {owner.__name__}\.{name}; .*constraints"):
        anyio.run(run)
