"""The broker inside `kvass up` and `kvass broker`: amqtt, and what it lacks for us.

It keeps nothing on disk and takes any connection: members listen to nobody who has not the
cluster's secret. Who wants access rules runs another one (`--broker host:port`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import anyio
from amqtt.broker import Broker
from amqtt.errors import BrokerError
from amqtt.mqtt.protocol.broker_handler import BrokerProtocolHandler

from kvass.common.addresses import require_own
from kvass.common.bus import host_and_port
from kvass.common.errors import Invalid, Unavailable

# amqtt tells every packet at INFO, every lost connection at WARNING and whoever speaks no MQTT at
# ERROR: a member says the first two better, the third is nobody's concern. What has no level would
# be written from the event loop, to a terminal that need not be read.
_LOGGERS = ("amqtt", "amqtt.broker", "transitions", "asyncio.amqtt")
# How long connections may take to end with the broker. They are on the same loop: what takes longer
# waits for something that does not come.
_ENDING_S = 0.5
# What is mended here by its name: where amqtt has it no more, a mend would do nothing, and say so
# to nobody.
_MENDED: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        Broker,
        (
            "stream_connected",
            "_publish_retained_messages_for_subscription",
            "_client_message_loop",
            "_stop_handler",
        ),
    ),
    (BrokerProtocolHandler, ("mqtt_deliver_next_message", "wait_disconnect")),
)


class _Subscriptions(dict[str, Any]):
    """Is walked as it was when the walk began.

    amqtt awaits while it walks its subscriptions: a member that subscribes just then would end the
    connection of the one that is being greeted, which would come again only after a time-out.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.keys()))

    def items(self) -> Any:
        return list(super().items())


class _LastWords:
    """Lets a connection end only when all that came on it is taken in.

    It stands between a connection's handler and the loop of amqtt that asks it for messages and for
    the end. Mutable field: `_asked`, set while that loop waits for a message.
    """

    def __init__(self, handler: Any, said: asyncio.Queue[Any]) -> None:
        self._said = said
        self._asked = asyncio.Event()
        self._next, self._end = handler.mqtt_deliver_next_message, handler.wait_disconnect
        handler.mqtt_deliver_next_message, handler.wait_disconnect = self._deliver, self._wait

    async def _deliver(self) -> Any:
        self._asked.set()
        message = await self._next()
        self._asked.clear()
        return message

    async def _wait(self) -> Any:
        end = await self._end()
        while not (self._asked.is_set() and self._said.empty()):
            await asyncio.sleep(0)  # whoever asked takes it in the next turn
            await self._asked.wait()
        return end


class _Broker(Broker):  # type: ignore[misc]  # amqtt has no types
    """Tells everybody the last that was said on a topic, and leaves no connection open.

    What amqtt 0.12.1 does wrong, and what mends it:

    - It walks its subscriptions while they change: `_Subscriptions`.
    - It greets whoever connects with what is retained for the subscriptions of all others. If that
      is cleared before the newcomer has subscribed itself, nobody ever tells it so:
      `_publish_retained_messages_for_subscription`.
    - It ends a client at once, though messages of its still wait: what it said last is lost after a
      goodbye, and comes after its last will if it died, and stays: `_client_message_loop`.
    - It forgets the connection of a peer that left before it had said a word of MQTT, and of one
      that was killed while the broker ended: `stream_connected`, `close`.
    - It ends while it still accepts, and waits forever for a reader to whom a message comes as it
      is cancelled (`asyncio.wait_for` before Python 3.12 loses the cancellation), or that is
      cancelled before its first turn: `close`, `_stop_handler`.

    Mutable field: `_open`, the connections being served. Raises Invalid if amqtt is not as it was.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        _require_mended(self)
        self._subscriptions = _Subscriptions()
        self._open: set[asyncio.StreamWriter] = set()

    async def stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        self._open.add(writer)
        try:
            await super().stream_connected(reader, writer, listener_name)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Any
    ) -> None:
        subscribers = self._subscriptions.get(subscription[0], [])
        if any(each.client_id == session.client_id for each, _ in subscribers):
            await super()._publish_retained_messages_for_subscription(subscription, session)

    async def _client_message_loop(self, client_session: Any, handler: Any) -> None:
        _LastWords(handler, client_session.delivered_message_queue)
        await super()._client_message_loop(client_session, handler)

    async def _stop_handler(self, handler: Any) -> None:
        await asyncio.sleep(0)  # the reader's first turn
        await super()._stop_handler(handler)

    async def close(self) -> None:
        """End soon after _ENDING_S, whatever connections do; nobody is accepted from the start."""
        for server in self._servers.values():
            server.instance.close()
        try:
            async with anyio.create_task_group() as ending:
                ending.start_soon(self._hurry)
                await self.shutdown()
                ending.cancel_scope.cancel()
        finally:  # also when time was up before this had a turn
            self._close_connections()
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(0)  # a connection's end is its loop's next turn

    async def _hurry(self) -> None:
        await anyio.sleep(_ENDING_S)
        self._close_connections()

    def _close_connections(self) -> None:
        for writer in self._open:
            writer.transport.abort()


def _require_mended(broker: Broker) -> None:
    absent = [
        f"{owner.__name__}.{name}"
        for owner, names in _MENDED
        for name in names
        if not hasattr(owner, name)
    ]
    for name in ("_subscriptions", "_servers"):
        if type(getattr(broker, name, None)) is not dict:
            absent.append(f"Broker.{name}")
    if absent:
        raise Invalid(
            f"amqtt {version('amqtt')} is another one than the broker of Kvass was written for: it "
            f"has no {', '.join(absent)}; install the one that constraints.txt names"
        )


@asynccontextmanager
async def run_broker(address: str) -> AsyncIterator[Callable[[], dict[str, bytes]]]:
    """Serve MQTT on `host:port` while the context lasts; raises Unavailable when it is taken.

    Yields what returns the retained messages, by topic.
    """
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    broker = _Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": address}},
            "plugins": {
                "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
            },
        }
    )
    try:
        await broker.start()
    except BrokerError as error:
        cause = error.__cause__ or error.__context__
        why = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else error
        raise Unavailable(f"broker on {address}: {why}") from None
    try:
        yield lambda: {
            topic: bytes(message.data) for topic, message in broker.retained_messages.items()
        }
    finally:
        with anyio.move_on_after(2 * _ENDING_S, shield=True):
            await broker.close()


async def serve_broker(address: str) -> None:
    """Serve MQTT on `host:port` until SIGTERM or SIGINT. Raises Invalid for an address that is none
    of this machine's, Unavailable when it is taken."""
    host, _ = host_and_port(address)
    require_own(host)
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with run_broker(address):
            print(f"kvass: broker on {address}", flush=True)
            async for _ in signals:
                return
