"""MQTT: topics, payloads, one connection that comes back by itself. asyncio only, as aiomqtt is.

    kvass/<cluster>/member/<role>/<id>@<start>   retained; empty: gone (goodbye, or the last will)
    kvass/<cluster>/load/<role>/<id>@<start>     twice a second
    kvass/<cluster>/do/<id>                      commands
    kvass/<cluster>/echo/<start>                 a member's own marker: what came before it has come

Payloads are signed: `seal.py`. The start's id in the topic is what keeps an old last will away from
a new presence. The bus refuses to know who is live and what a payload says, and it buffers nothing
while the broker is down, except what is retained: that is said again on every connection.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import aiomqtt
import anyio

from kvass.common.errors import Invalid

_log = logging.getLogger(__name__)

INCOMING_MAX = (
    4096  # two seconds of the loads of 1,000 members; more is dropped: a newer load follows
)
KEEPALIVE_S = 5  # a member that hangs gets its last will after one and a half of these
CONNECT_TIMEOUT_S = 5.0
PUBLISH_TIMEOUT_S = 2.0
GOODBYE_TIMEOUT_S = 1.0
RETRY_FIRST_S = 0.1
RETRY_LONGEST_S = 1.0  # membership's REJOIN_S counts on it
COMPLAIN_EVERY_S = 30.0
CLEARED_MAX = 1024  # topics; a retained message comes within moments of the subscription

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class MemberTopic(NamedTuple):
    """The parts of a `member` or `load` topic."""

    kind: str
    role: str
    member_id: str
    start_id: str


class Topics:
    """The topics of one cluster."""

    def __init__(self, cluster: str) -> None:
        self._root = f"kvass/{check_name(cluster, 'cluster.name')}"
        self.presences = f"{self._root}/member/#"

    def presence(self, role: str, member_id: str, start_id: str) -> str:
        return f"{self._root}/member/{role}/{member_id}@{start_id}"

    def load(self, role: str, member_id: str, start_id: str) -> str:
        return f"{self._root}/load/{role}/{member_id}@{start_id}"

    def loads(self, role: str) -> str:
        return f"{self._root}/load/{role}/+"

    def commands(self, member_id: str) -> str:
        return f"{self._root}/do/{check_name(member_id, 'member id')}"

    def echo(self, start_id: str) -> str:
        return f"{self._root}/echo/{start_id}"

    def parse(self, topic: str) -> MemberTopic | None:
        """Return a `member` or `load` topic's parts; None when it is another kind."""
        root, _, rest = topic.partition(f"{self._root}/")
        parts = rest.split("/")
        if root or len(parts) != 3 or parts[0] not in ("member", "load"):
            return None
        member_id, at, start_id = parts[2].rpartition("@")
        return MemberTopic(parts[0], parts[1], member_id, start_id) if at else None


class Cleared:
    """The topics that were cleared while one connection listened. Mutable field: `_topics`.

    Nothing says that a broker sends what it has retained before what is said meanwhile. A retained
    message that comes after the clearing of its topic is from before it: whatever was said after
    it comes as a fresh message too. Of two that are not empty, `seal.py`'s numbers tell.
    """

    def __init__(self) -> None:
        self._topics: dict[str, None] = {}

    def hears_old(self, topic: str, payload: bytes, *, is_retained: bool) -> bool:
        """Take note of a message, and return whether it is from before its topic was cleared."""
        if is_retained:
            return topic in self._topics
        self._topics.pop(topic, None)
        if not payload:
            self._topics[topic] = None
            if len(self._topics) > CLEARED_MAX:
                del self._topics[next(iter(self._topics))]
        return False


def host_and_port(broker: str) -> tuple[str, int]:
    """Return a broker's two parts; raises Invalid."""
    if "://" in broker:
        raise Invalid(
            f"cluster.broker is {broker!r}; expected host:port alone, without a scheme: the link "
            "is plain MQTT"
        )
    host, colon, port = broker.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise Invalid(f"cluster.broker is {broker!r}; expected host:port")
    return host.strip("[]"), int(port)


def check_name(name: str, what: str) -> str:
    """Return a name that may be part of a topic; raises Invalid."""
    if _NAME.fullmatch(name) is None:
        raise Invalid(f"{what} is {name!r}; expected up to 64 letters, digits, '.', '_' or '-'")
    return name


class Bus:
    """One client of the broker.

    Mutable fields: `_client` (None while the link is down), `_retained` (what is said again on each
    connection), `_subscriptions`, `_is_awaited` (the broker's absence was told, its return was
    not), `links` (connections made so far). `on_message` is called with topic and payload, in
    order; `on_link_up` after each connection, with the subscriptions made, before their messages;
    `on_link_down` when it is lost. `own_topic` is cleared by the last will, and by the goodbye,
    which says `last_words` on it before.
    """

    def __init__(
        self,
        broker: str,
        *,
        client_id: str,
        own_topic: str,
        subscriptions: Sequence[str],
        on_message: Callable[[str, bytes], None],
        on_link_up: Callable[[], Awaitable[None]],
        on_link_down: Callable[[], None],
        last_words: Callable[[], bytes] | None = None,
    ) -> None:
        self.broker = broker
        self._host, self._port = host_and_port(broker)
        self._client_id = client_id
        self._own_topic = own_topic
        self._subscriptions = list(subscriptions)
        self._on_message = on_message
        self._on_link_up = on_link_up
        self._on_link_down = on_link_down
        self._last_words = last_words
        self._retained: dict[str, bytes] = {}
        self._client: aiomqtt.Client | None = None
        self._is_awaited = False
        self.links = 0

    @property
    def is_up(self) -> bool:
        return self._client is not None

    async def run(self) -> None:
        """Connect, receive, and connect again, for ever; on cancellation say goodbye."""
        retry_s, complained_s = RETRY_FIRST_S, -COMPLAIN_EVERY_S
        while True:
            links = self.links
            try:
                await self._session()
            except (aiomqtt.MqttError, OSError) as error:
                now_s = anyio.current_time()
                if self.links > links or now_s - complained_s >= COMPLAIN_EVERY_S:
                    _log.warning("broker %s: %s; trying again every second", self.broker, error)
                    complained_s, self._is_awaited = now_s, True
            if self.links > links:
                retry_s = RETRY_FIRST_S
            await anyio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, RETRY_LONGEST_S)

    async def publish(
        self, topic: str, payload: bytes, *, qos: int = 0, retain: bool = False
    ) -> bool:
        """Send one message; False when the link is down or the broker doesn't take it in time."""
        if self._client is None:
            return False
        try:
            await self._client.publish(
                topic, payload, qos=qos, retain=retain, timeout=PUBLISH_TIMEOUT_S
            )
        except aiomqtt.MqttError:
            return False  # the session's own task sees the lost link
        return True

    async def retain(self, topic: str, payload: bytes) -> None:
        """Publish a retained message now, and again on every connection, until the goodbye."""
        self._retained[topic] = payload
        await self.publish(topic, payload, qos=1, retain=True)

    async def subscribe(self, topic: str) -> None:
        """Receive one more topic, from now on."""
        self._subscriptions.append(topic)
        if self._client is not None:
            try:
                await self._client.subscribe(topic, timeout=PUBLISH_TIMEOUT_S)
            except aiomqtt.MqttError:
                pass  # the link is lost: the next connection subscribes to all

    async def _session(self) -> None:
        client = aiomqtt.Client(
            self._host,
            self._port,
            identifier=self._client_id,
            will=aiomqtt.Will(self._own_topic, b"", qos=1, retain=True),
            keepalive=KEEPALIVE_S,
            timeout=CONNECT_TIMEOUT_S,
            max_queued_incoming_messages=INCOMING_MAX,
        )
        # Shielded: half-open, the client would leave a socket behind. Its connecting is bounded.
        with anyio.CancelScope(shield=True):
            await client.__aenter__()
        try:
            await client.subscribe([(topic, 0) for topic in self._subscriptions])
            self._client = client
            self.links += 1
            if self._is_awaited:
                _log.info("broker %s: connected", self.broker)
                self._is_awaited = False
            for topic, payload in self._retained.items():
                await self.publish(topic, payload, qos=1, retain=True)
            await self._on_link_up()
            await self._receive(client)
        except anyio.get_cancelled_exc_class():
            await self._say_goodbye()
            raise
        finally:
            self._client = None
            self._on_link_down()
            with anyio.move_on_after(GOODBYE_TIMEOUT_S, shield=True):
                await _disconnect(client)

    async def _receive(self, client: aiomqtt.Client) -> None:
        cleared = Cleared()
        async for message in client.messages:
            topic, payload = message.topic.value, message.payload
            if not isinstance(payload, bytes):
                continue
            if not payload and topic in self._retained:
                # Somebody took us for dead (a last will of a connection we lost): say it again.
                await self.publish(topic, self._retained[topic], qos=1, retain=True)
                continue
            if cleared.hears_old(topic, payload, is_retained=message.retain):
                continue
            self._on_message(topic, payload)

    async def _say_goodbye(self) -> None:
        topics, self._retained = list(self._retained), {}
        # All are sent before any is acknowledged: the orderly end that follows calls off the last
        # will, so that what was not sent for want of an answer would never be said.
        with anyio.move_on_after(GOODBYE_TIMEOUT_S, shield=True):
            async with anyio.create_task_group() as tasks:
                if self._last_words is not None and self._own_topic in topics:
                    words = self._last_words()
                    tasks.start_soon(partial(self.publish, self._own_topic, words, qos=1))
                for topic in topics:
                    tasks.start_soon(partial(self.publish, topic, b"", qos=1, retain=True))


async def _disconnect(client: aiomqtt.Client) -> None:
    try:
        await client.__aexit__(None, None, None)
    except aiomqtt.MqttError:
        pass  # it was lost before: nothing is left to close
