"""The broker inside `kvass up`: amqtt on loopback, for one machine.

It keeps nothing on disk and takes any connection: members listen to nobody who has not the
cluster's secret. A cluster on several hosts runs a broker of its own (`--broker host:port`) with
access rules of its own.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from amqtt.broker import Broker
from amqtt.errors import BrokerError

from kvass.common.errors import Unavailable

# amqtt tells every packet at INFO and every lost connection at WARNING; a member says both better.
_LOGGERS = ("amqtt", "amqtt.broker", "transitions", "asyncio.amqtt")


class _Subscriptions(dict[str, Any]):
    """Is walked as it was when the walk began.

    amqtt awaits while it walks its subscriptions: a member that subscribes just then would end the
    connection of the one that is being greeted, which would come again only after a time-out.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.keys()))

    def items(self) -> Any:
        return list(super().items())


@asynccontextmanager
async def run_broker(address: str) -> AsyncIterator[None]:
    """Serve MQTT on `host:port` while the context lasts; raises Unavailable when it is taken."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": address}},
            "plugins": {
                "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
            },
        }
    )
    broker._subscriptions = _Subscriptions()
    try:
        await broker.start()
    except BrokerError as error:
        raise Unavailable(f"broker on {address}: {error}") from None
    try:
        yield
    finally:
        with anyio.move_on_after(5.0, shield=True):
            await broker.shutdown()
