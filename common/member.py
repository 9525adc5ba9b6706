"""What the process of every role shares: identity, presence, load, commands, the table, metrics.

    async with Member(config, role="decode", member_id="decode-0", cluster_fields=fields,
                      load=lambda: {"running": 3}) as member:
        listener, address = await listen(config.host)
        await member.announce(address)
        ...                                   # member.table, member.live("store"), member.follow(…)

Entering waits for the broker, compares what all must agree on with the members that are there, and
raises Incompatible, naming the field, when this process differs. Leaving says goodbye. Between the
two, a broker that is down costs nothing but news: the table keeps its last view.

It refuses to know what a role does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import anyio
import anyio.abc
import msgspec
from prometheus_client import CollectorRegistry

from kvass.common import bus, metrics, metrics_port, seal, wire
from kvass.common.clock import Clock, RealClock
from kvass.common.config import DEFAULT_BROKER, Config, difference
from kvass.common.errors import Incompatible, Invalid, KvassError, Unauthorized, Unavailable
from kvass.common.membership import ROLES, Entry, Load, NodeTable, Peer, Role, State
from kvass.common.roll_call import RollCall
from kvass.common.rpc.credentials import credentials_of
from kvass.common.rpc.hello import Hello
from kvass.common.secret import REMEDY
from kvass.common.transport.identity import own_identity

_log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.5
JOIN_CHECK_S = 2.0  # four loads: a presence that nobody stands behind any more says nothing
COMMANDS_QUEUED = 16  # operators send them by hand; more at once is a mistake somewhere
GOODBYE_S = 2.0

# Whose loads a role receives: gateways route by them, workers need to know which stores are there.
FOLLOWED: Mapping[Role, tuple[Role, ...]] = {
    "gateway": ROLES,
    "prefill": ("store",),
    "decode": ("store",),
    "store": ("store",),
}

FOREIGN_MAX = 64  # presences of another secret that are looked at before joining

CommandHandler = Callable[[seal.Command], Awaitable[None]]


class Member:
    """One process in the cluster; see the module. asyncio only, as the bus is.

    Mutable fields: `_peer` (its own presence), `_seen` (who was live at the last look), `_changed`
    and `_load_came` (set and replaced at each change and each load), `_foreign` (topics of members
    that sign with another secret, and whether a load of theirs has come), `_heard` (start ids whose
    loads are received though their role is not followed). `cluster_fields` is empty for
    members that serve any model. `load` is called twice a second in the event loop. `on_command`
    gets this member's commands, one after the other.
    """

    def __init__(
        self,
        config: Config,
        *,
        role: Role,
        member_id: str,
        cluster_fields: Mapping[str, str | int],
        load: Callable[[], Load],
        on_command: CommandHandler | None = None,
        clock: Clock | None = None,
    ) -> None:
        identity = own_identity()
        self._topics = bus.Topics(config.cluster.name)
        self._host = config.host
        self._load = load
        self._on_command = on_command
        self._clock: Clock = clock or RealClock()
        self.credentials = credentials_of(config.cluster)
        self.hello = Hello(
            role=role,
            member_id=bus.check_name(member_id, "member id"),
            host_id=identity.host_id,
            start_id=identity.start_id,
            pid=identity.pid,
            cluster=dict(cluster_fields),
        )
        self._peer = Peer(
            role=role,
            member_id=member_id,
            start_id=identity.start_id,
            host_id=identity.host_id,
            pid=identity.pid,
            state="joining",
            started_s=time.time(),
            cluster=dict(cluster_fields),
        )
        self.table = NodeTable(FOLLOWED[role])
        self._roll_call = RollCall(self.table, FOLLOWED[role], identity.start_id)
        self.registry: CollectorRegistry = metrics.new_registry()
        self._metrics = metrics.MemberMetrics(self.registry)
        self._own = (role, member_id, identity.start_id)
        self._bus = bus.Bus(
            config.cluster.broker or DEFAULT_BROKER,
            client_id=f"kvass-{identity.start_id}",
            own_topic=self._topics.presence(*self._own),
            last_words=self._last_words,
            subscriptions=[
                self._topics.presences,
                self._topics.commands(member_id),
                self._topics.echo(identity.start_id),
                *(self._topics.loads(each) for each in FOLLOWED[role]),
            ],
            on_message=self._on_message,
            on_link_up=self._on_link_up,
            on_link_down=self._on_link_down,
        )
        self._changed = anyio.Event()
        self._load_came = anyio.Event()
        self.told = anyio.Event()
        self._seal = seal.Seal(self.credentials.secret)
        self._orders = seal.Orders(identity.start_id)
        self._foreign: dict[bus.MemberTopic, bool] = {}
        self._heard: set[str] = set()
        self._seen: tuple[int, list[str]] = (0, [])
        self._commands, self._commands_received = anyio.create_memory_object_stream[seal.Command](
            COMMANDS_QUEUED
        )

    async def __aenter__(self) -> Self:
        self._membership = self._join_and_leave()
        await self._membership.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # As if the body had ended well: an error of its stays what it is, in no group.
        await self._membership.__aexit__(None, None, None)

    @asynccontextmanager
    async def _join_and_leave(self) -> AsyncIterator[None]:
        endpoint = metrics_port.serve(self._host, self.registry)
        self._peer = msgspec.structs.replace(self._peer, metrics_address=endpoint.address)
        try:
            async with self.linked() as tasks:
                await self.compare()
                await self.announce("", state="joining")
                tasks.start_soon(self._report)
                tasks.start_soon(self._obey)
                yield
        finally:
            with anyio.move_on_after(GOODBYE_S, shield=True):
                await endpoint.close()

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[anyio.abc.TaskGroup]:
        """Hear who is there, seen by nobody: nothing was announced. Yields the tasks that end with
        the link; `told` is set once all has come that the broker keeps."""
        refusal: KvassError | None = None
        with self._commands, self._commands_received:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._bus.run)
                try:
                    yield tasks
                except KvassError as error:  # stays what it is, in no group
                    refusal = error
                tasks.cancel_scope.cancel()
        if refusal is not None:
            raise refusal

    async def announce(
        self,
        address: str,
        *,
        state: State = "ready",
        details: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Say where this member is reached and what state it is in; again whenever that changes.

        `details` replaces what was said before when it is given.
        """
        self._peer = msgspec.structs.replace(
            self._peer,
            address=address,
            state=state,
            details=self._peer.details if details is None else dict(details),
        )
        topic = self._topics.presence(*self._own)
        await self._bus.retain(topic, self._seal.close(topic, self._peer))

    def _last_words(self) -> bytes:
        """Let others tell a leave from a death, after which nobody says anything."""
        leaving = msgspec.structs.replace(self._peer, state="draining")
        return self._seal.close(self._topics.presence(*self._own), leaving)

    def live(self, role: Role) -> list[Peer]:
        """Return the live, ready members of a role, in order of id."""
        return self.table.live(role, self._clock.now_s())

    def load_of(self, peer: Peer) -> Load:
        """Return a member's last load; empty when its role is not followed or none has come."""
        return self.table.load(peer.start_id)

    async def hear(self, peer: Peer) -> None:
        """Receive this member's loads from now on, also where its role is not followed."""
        if peer.role not in FOLLOWED[self._peer.role] and peer.start_id not in self._heard:
            self._heard.add(peer.start_id)
            await self._bus.subscribe(self._topics.load(peer.role, peer.member_id, peer.start_id))

    def refused(self, peer: Peer) -> None:
        """Leave a member out for a while: a connection to it was refused or lost."""
        self.table.refused(peer.start_id, self._clock.now_s())
        self._notice()

    async def changed(self) -> None:
        """Wait until somebody comes, goes, or says something new of itself (not: a load)."""
        await self._changed.wait()

    async def follow(self, role: Role, apply: Callable[[list[Peer]], None]) -> None:
        """Call `apply` with the live members of a role, now and after each change, for ever."""
        applied: list[Peer] | None = None
        while True:
            changed, peers = self._changed, self.live(role)
            if peers != applied:
                apply(peers)
                applied = peers
            await changed.wait()

    async def command(self, member_id: str, verb: str, **arguments: str | int | float) -> None:
        """Tell a member to do something; raises Unavailable when no such member is known, or the
        broker doesn't take it."""
        starts = [e.peer.start_id for e in self.table.entries() if e.peer.member_id == member_id]
        if not starts:
            raise Unavailable(f"no member {member_id!r} is known here")
        topic = self._topics.commands(member_id)
        command = seal.new_command(verb, starts[-1], time.time(), arguments)
        if not await self._bus.publish(topic, self._seal.close(topic, command), qos=1):
            raise Unavailable(f"the broker {self._bus.broker} does not take commands now")

    async def compare(self) -> None:
        """Wait until `told`; raise Incompatible for a difference from a member that lives, and
        Unauthorized if all have another secret."""
        await self.told.wait()
        ours = self.hello.cluster
        for entry in self.table.entries():
            peer, theirs = entry.peer, entry.peer.cluster
            if not ours or not theirs or peer.start_id == self._peer.start_id:
                continue
            name = difference(ours, theirs)
            if name is not None and await self._is_alive(entry):
                who = f"{peer.role} {peer.member_id}"
                raise Incompatible(name, ours.get(name), theirs.get(name), who=who)
        if self._foreign and not self.table.entries() and await self._is_foreign_alive():
            raise Unauthorized(
                f"the members of this cluster at the broker {self._bus.broker} have another "
                "cluster secret than this process, whose is from "
                f"{self.credentials.secret.source}: {REMEDY}; or give this cluster a name of its "
                "own (cluster.name)"
            )

    async def _is_alive(self, entry: Entry) -> bool:
        """Wait for a load of this member: a broker may keep the presence of the dead."""
        await self.hear(entry.peer)
        with anyio.move_on_after(JOIN_CHECK_S):
            while entry.load_heard_s is None:
                await self._load_came.wait()
        return entry.load_heard_s is not None

    async def _is_foreign_alive(self) -> bool:
        """Wait for a load of a member with another secret, as `_is_alive` does."""
        for about in self._foreign:
            await self._bus.subscribe(self._topics.load(*about[1:]))
        with anyio.move_on_after(JOIN_CHECK_S):
            while not any(self._foreign.values()):
                await self._load_came.wait()
        return any(self._foreign.values())

    async def _on_link_up(self) -> None:
        self.table.link_up(self._clock.now_s())
        self._metrics.bus_up.set(1)
        self._metrics.bus_links.set(self._bus.links)
        topic = self._topics.echo(self._peer.start_id)
        await self._bus.publish(topic, self._seal.close(topic, None))

    def _on_link_down(self) -> None:
        self.table.link_down()
        self._metrics.bus_up.set(0)

    def _on_message(self, topic: str, payload: bytes) -> None:
        try:
            self._take(topic, payload)
        except Unauthorized as error:
            self._metrics.messages_refused.inc()
            self._note_foreign(topic, error)
        except Invalid as error:
            self._metrics.messages_refused.inc()
            _log.warning("message on %s: %s", topic, error)

    def _take(self, topic: str, payload: bytes) -> None:
        about = self._topics.parse(topic)
        now_s = self._clock.now_s()
        if topic == self._topics.commands(self._peer.member_id):
            command = self._seal.open(topic, payload, seal.Command).body
            self._orders.check(command, time.time())
            self._queue_command(command)
        elif topic == self._topics.echo(self._peer.start_id):
            self._seal.open(topic, payload, type(None))
            self.told.set()
        elif about is None:
            return  # another cluster's: amqtt alone greets everybody with all that it has retained
        elif about.kind == "load":
            number, load = self._seal.open(topic, payload, wire.Facts)
            if self._seal.step(topic, number) <= 0:
                raise Invalid("it was heard before")
            self.table.saw_load(about.start_id, load, now_s)
            self._wake_joining()
        elif not payload:
            self.table.saw_gone(about.start_id)
        else:
            number, peer = self._seal.open(topic, payload, Peer)
            if self._seal.step(topic, number) < 0:
                raise Invalid("a later one was heard before")
            if (peer.role, peer.member_id, peer.start_id) != about[1:]:
                raise Invalid(f"it speaks of {peer.role} {peer.member_id}@{peer.start_id}")
            self.table.saw_presence(peer, now_s)
        self._notice()

    def _note_foreign(self, topic: str, error: Unauthorized) -> None:
        """Say once that somebody without our secret speaks; remember who, if it is us who err."""
        if not self._foreign:
            _log.warning(
                "message on %s: %s (from %s); such are ignored, and counted only from now on",
                topic,
                error,
                self.credentials.secret.source,
            )
        about = self._topics.parse(topic) or bus.MemberTopic("", "", "", topic)
        member = about._replace(kind="member")
        if member in self._foreign or len(self._foreign) < FOREIGN_MAX:
            self._foreign[member] = self._foreign.get(member, False) or about.kind == "load"
        self._wake_joining()

    def _wake_joining(self) -> None:
        self._load_came.set()
        self._load_came = anyio.Event()

    def _queue_command(self, command: seal.Command) -> None:
        try:
            self._commands.send_nowait(command)
        except anyio.WouldBlock:
            raise Invalid(f"{COMMANDS_QUEUED} commands wait already") from None

    def _notice(self) -> None:
        """Wake those who wait for a change, if who is live has changed since the last look."""
        now_s = self._clock.now_s()
        live = [e.peer.start_id for e in self.table.entries() if self.table.is_live(e, now_s)]
        seen = (self.table.version, live)
        if seen != self._seen:
            self._seen = seen
            self._changed.set()
            self._changed = anyio.Event()

    async def _report(self) -> None:
        """Send the load, look who went silent, and tell who came and went."""
        while True:
            self.table.tick(self._clock.now_s())
            self.table.forget_unconfirmed(self._clock.now_s())
            self._notice()
            for level, text in self._roll_call.look(self._clock.now_s()):
                _log.log(level, "%s", text)
            for role in ROLES:
                self._metrics.members.labels(role).set(len(self.live(role)))
            topic = self._topics.load(*self._own)
            await self._bus.publish(topic, self._seal.close(topic, dict(self._load())))
            await anyio.sleep(LOAD_INTERVAL_S)

    async def _obey(self) -> None:
        async for command in self._commands_received:
            if self._on_command is None:
                _log.warning("command %r: this role takes none", command.verb)
                continue
            _log.info("command %s %s", command.verb, command.arguments)
            try:
                await self._on_command(command)
            except KvassError as error:
                _log.warning("command %r failed: %s", command.verb, error)
