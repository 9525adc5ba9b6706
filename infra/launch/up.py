"""A whole cluster on one machine: the broker in this process, every member in one of its own.

    starting ──all ready, gateway healthy──> serving ──Ctrl-C, SIGTERM──> stopping ──> gone
        └──────a member died──────> stopping      └──a member died: told, and it goes on

It restarts nothing: what a cluster does when a member dies is worth seeing. It stops when the
gateway is gone, since nothing can be asked any more. Members end with it, also when it is killed:
each watches its standard input, whose other end is here. Members that somebody started by hand go
on, without its broker: which those are is said at the end.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
import anyio.abc
import httpx
from anyio.streams.buffered import BufferedByteReceiveStream

from kvass.common.bus import host_and_port
from kvass.common.config import Config
from kvass.common.errors import KvassError, Unavailable
from kvass.common.membership import Role
from kvass.gateway.overview import ABSENT
from kvass.launch.beforehand import require_places, require_roles
from kvass.launch.broker import run_broker
from kvass.launch.by_hand import started_by_hand
from kvass.launch.output import Output
from kvass.launch.role import READY_MARK, with_model

Retained = Callable[[], dict[str, bytes]]  # by topic

PROGRAM: tuple[str, ...] = (sys.executable, "-m", "kvass.launch.member")
LINE_BYTES_MAX = 1 << 16
HEALTH_INTERVAL_S = 0.05
HEALTH_TIMEOUT_S = 120.0  # after all members are ready; it is a matter of one load message
WHOLE_TIMEOUT_S = 3.0
# Whoever signals a whole process group, and make in it, signals this process twice.
SAME_SIGNAL_S = 0.5
PORT_TRIES = 5
BROKER_TIMEOUT_S = 3.0  # for one that is being started beside this process
BROKER_INTERVAL_S = 0.2
# Who leaves first, and the seconds before SIGKILL: the gateway's answers need workers, and what
# workers let go of needs stores. Whoever stops a whole cluster does not wait for long answers.
STOP_ORDER: tuple[tuple[tuple[Role, ...], float], ...] = (
    (("gateway",), 5.0),
    (("prefill", "decode"), 5.0),
    (("store",), 3.0),
)


@dataclass(slots=True)
class MemberProcess:
    """One member's process. Mutable: everything but its name and role."""

    role: Role
    member_id: str
    process: anyio.abc.Process
    ready: anyio.Event = field(default_factory=anyio.Event)
    taken_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many members of each role to start."""

    prefill: int = 1
    decode: int = 1
    store: int = 1

    def member_ids(self) -> list[tuple[Role, str]]:
        """Return every member's role and id; the gateway last."""
        named: list[tuple[Role, str]] = [("store", f"store-{i}") for i in range(self.store)]
        named += [("prefill", f"prefill-{i}") for i in range(self.prefill)]
        named += [("decode", f"decode-{i}") for i in range(self.decode)]
        return [*named, ("gateway", "gateway-0")]


async def run_up(config: Config, counts: Counts, arguments: Sequence[str]) -> int:
    """Run a cluster until SIGINT or SIGTERM; return the exit code.

    `arguments` are passed to every member: the settings that this process was started with.
    """
    require_places(config)
    started_s = time.monotonic()
    with Output(sys.stdout) as output:
        config = with_model(config, progress=True)
        require_roles(config, {role for role, _ in counts.member_ids()})
        supervisor = _Supervisor(config, output, arguments, started_s)
        return await supervisor.run(counts)


class _Supervisor:
    """Mutable fields: `_members`, `_broker` (its address), `_retained` (what an embedded one has
    retained), `_exit_code`, `_serving` (cancelled when it is time to stop)."""

    def __init__(
        self, config: Config, output: Output, arguments: Sequence[str], started_s: float
    ) -> None:
        self._config = config
        self._output = output
        self._arguments = list(arguments)
        self._started_s = started_s
        self._model_s = time.monotonic() - started_s
        self._members: list[MemberProcess] = []
        self._broker = ""
        self._retained: Retained = dict
        self._exit_code = 0
        self._serving = anyio.CancelScope()

    async def run(self, counts: Counts) -> int:
        signals_of_end = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        with anyio.open_signal_receiver(*signals_of_end) as signals:
            async with _broker(self._config) as found, anyio.create_task_group() as tasks:
                self._broker, self._retained = found
                tasks.start_soon(self._end_on_signal, signals)
                try:
                    with self._serving:
                        await self._serve(counts, tasks)
                finally:
                    with anyio.CancelScope(shield=True):
                        await self._stop()
                tasks.cancel_scope.cancel()
        return self._exit_code

    async def _serve(self, counts: Counts, tasks: anyio.abc.TaskGroup) -> None:
        self._output.say(f"kvass: broker on {self._broker}")
        try:
            for role, member_id in counts.member_ids():
                tasks.start_soon(self._watch, await self._start(role, member_id))
            await self._wait_until_ready()
        except (KvassError, OSError) as error:
            self._output.say(f"kvass: {error}")
            self._exit_code = 1
            return
        await anyio.sleep_forever()

    async def _start(self, role: Role, member_id: str) -> MemberProcess:
        cluster = self._config.cluster
        settings = (
            setting("cluster.broker", self._broker),
            setting("cluster.model", cluster.model),
            setting("cluster.served_model_name", cluster.served_model_name),
        )
        arguments = [*self._arguments, *(part for each in settings for part in ("--set", each))]
        process = await anyio.open_process(
            [*PROGRAM, role, "--id", member_id, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process; it stops the others in order
        )
        member = MemberProcess(role, member_id, process)
        self._members.append(member)
        return member

    async def _watch(self, member: MemberProcess) -> None:
        """Print a member's lines; when it has ended, say so."""
        assert member.process.stdout is not None
        stream = BufferedByteReceiveStream(member.process.stdout)
        with suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError):
            while True:
                self._take_line(member, await _line(stream))
        code = await member.process.wait()
        if self._serving.cancel_called:
            return
        was_ready = member.ready.is_set()
        self._output.say(
            f"kvass: {member.member_id} (pid {member.process.pid}) ended with {_reason(code)}"
            + (f"; {self._way_back(member)}" if was_ready and member.role != "gateway" else "")
        )
        if was_ready and member.role == "gateway":
            self._output.say("kvass: nothing can be asked without the gateway: stopping")
        if not was_ready or member.role == "gateway" or self._all_ended():
            self._exit_code = 1
            self._serving.cancel()

    def _way_back(self, member: MemberProcess) -> str:
        """Return what brings a member back; a gateway's end is this process's."""
        options = shlex.join(_without_gateway(self._arguments))
        return (
            f"`kvass {member.role} --id {member.member_id} --broker {self._broker}"
            f"{' ' if options else ''}{options}` "
            "brings it back"
        )

    def _all_ended(self) -> bool:
        return all(member.process.returncode is not None for member in self._members)

    def _take_line(self, member: MemberProcess, line: str) -> None:
        if line.startswith(READY_MARK):
            imports_s, setup_s, *parts = line.removeprefix(READY_MARK).split()
            member.taken_s = float(imports_s) + float(setup_s)
            named = (part.split("=") for part in (f"imports={imports_s}", *parts))
            member.parts_s = {name: float(seconds) for name, seconds in named}
            member.ready.set()
            return
        self._output.say(f"{member.member_id:<10} | {line}")

    async def _wait_until_ready(self) -> None:
        for member in self._members:
            await member.ready.wait()
        gateway = self._config.gateway
        host = f"[{gateway.host}]" if ":" in gateway.host else gateway.host
        url = f"http://{host}:{gateway.port}"
        async with httpx.AsyncClient(trust_env=False, base_url=url) as client:
            await _wait_until_healthy(client)
            roles = {member.role for member in self._members}
            with anyio.move_on_after(WHOLE_TIMEOUT_S):
                await _wait_until_whole(client, {ABSENT[r].code for r in roles if r in ABSENT})
        self._output.say(self._where_time_went())
        self._output.say(f"kvass ready: {url}")

    def _where_time_went(self) -> str:
        parts = [f"model {self._model_s:.1f}"]
        for member in self._members:
            inner = ", ".join(f"{name} {seconds:.1f}" for name, seconds in member.parts_s.items())
            parts.append(f"{member.member_id} {member.taken_s:.1f} ({inner})")
        total_s = time.monotonic() - self._started_s
        return f"kvass: started in {total_s:.1f} s; seconds: {', '.join(parts)}"

    async def _end_on_signal(self, signals: AsyncIterator[signal.Signals]) -> None:
        """The first signal stops in order; another one, later on, kills."""
        stopping_s = 0.0
        async for number in signals:
            if not self._serving.cancel_called:
                self._output.say(f"kvass: {signal.Signals(number).name}: stopping")
                self._serving.cancel()
                stopping_s = time.monotonic()
            elif time.monotonic() - stopping_s > SAME_SIGNAL_S:
                for member in self._members:
                    _signal_group(member, signal.SIGKILL)

    async def _stop(self) -> None:
        """End every member: SIGTERM, then SIGKILL to its whole process group."""
        for roles, grace_s in STOP_ORDER:
            await self._stop_some([m for m in self._members if m.role in roles], grace_s)
        with suppress(KvassError):  # without the secret nobody could join either
            self._say_who_goes_on()
        self._output.say("kvass: stopped")

    def _say_who_goes_on(self) -> None:
        own_pids = {member.process.pid for member in self._members}
        left = started_by_hand(self._retained(), self._config.cluster, own_pids)
        if left:
            self._output.say(
                f"kvass: started by hand and still running: {', '.join(left)}; stop them by hand"
            )

    async def _stop_some(self, members: Sequence[MemberProcess], grace_s: float) -> None:
        for member in members:
            _signal(member, signal.SIGTERM)
        with anyio.move_on_after(grace_s):
            for member in members:
                await member.process.wait()
        for member in members:
            if member.process.returncode is None:
                self._output.say(f"kvass: {member.member_id} did not leave in time: killed")
            _signal_group(member, signal.SIGKILL)
        for member in members:
            await member.process.wait()
            await member.process.aclose()


def setting(name: str, value: str) -> str:
    """Return a `--set` argument whose value is a TOML string."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}="{escaped}"'


@asynccontextmanager
async def _broker(config: Config) -> AsyncIterator[tuple[str, Retained]]:
    """Run the embedded broker on a free port, unless the config names another one: that goes on,
    with whoever is there, and what it has retained is not asked for."""
    named = config.cluster.broker
    if named:
        await _reach(named)
        yield named, dict
        return
    for _ in range(PORT_TRIES - 1):
        address = f"127.0.0.1:{_free_port()}"
        try:
            broker = run_broker(address)
            retained = await broker.__aenter__()
        except Unavailable:
            continue  # somebody took the port in between
        try:
            yield address, retained
        finally:
            await broker.__aexit__(None, None, None)
        return
    raise Unavailable(f"no free port for the broker, {PORT_TRIES} times in a row")


async def _reach(broker: str) -> None:
    """Wait for somebody to listen where a broker should be; raises Invalid and Unavailable.

    Members wait for ever for a broker that was there once. One that never was is told here, before
    they are started.
    """
    host, port = host_and_port(broker)
    reason = "no answer"
    with anyio.move_on_after(BROKER_TIMEOUT_S):
        while True:
            try:
                await (await anyio.connect_tcp(host, port)).aclose()
                return
            except OSError as error:
                reason = str(error.__cause__ or error)
            await anyio.sleep(BROKER_INTERVAL_S)
    raise Unavailable(
        f"the broker {broker} cannot be reached ({reason}): start it, or leave out --broker and "
        "`kvass up` runs one of its own"
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _line(stream: BufferedByteReceiveStream) -> str:
    data = await stream.receive_until(b"\n", LINE_BYTES_MAX)
    return data.decode(errors="replace").rstrip("\r")


async def _wait_until_healthy(client: httpx.AsyncClient) -> None:
    answer = "nothing"
    with anyio.move_on_after(HEALTH_TIMEOUT_S):
        while True:
            try:
                response = await client.get("/health")
            except httpx.HTTPError as error:
                answer = repr(error)
            else:
                if response.status_code == 200:
                    return
                answer = f"{response.status_code} {response.text[:200]}"
            await anyio.sleep(HEALTH_INTERVAL_S)
    raise Unavailable(f"the gateway is not healthy after {HEALTH_TIMEOUT_S:g} s: {answer}")


async def _wait_until_whole(client: httpx.AsyncClient, awaited: set[str]) -> None:
    """Wait until the gateway has heard of every kind of member that was started: until none of the
    reasons that it gives has a code that is `awaited` to go."""
    while True:
        with suppress(httpx.HTTPError, ValueError):  # it is ending: whoever watches it knows
            reasons = (await client.get("/health")).json().get("degraded", [])
            if awaited.isdisjoint(reason["code"] for reason in reasons):
                return
        await anyio.sleep(HEALTH_INTERVAL_S)


def _without_gateway(arguments: Sequence[str]) -> list[str]:
    """Return options without `--set gateway.…`, which tell no other member anything."""
    kept: list[str] = []
    for argument in arguments:
        if argument.startswith("gateway.") and kept and kept[-1] == "--set":
            kept.pop()
        else:
            kept.append(argument)
    return kept


def _reason(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _signal(member: MemberProcess, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        member.process.send_signal(number)


def _signal_group(member: MemberProcess, number: signal.Signals) -> None:
    """Signal whatever is left of a member's process group (it leads one, as its session)."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(member.process.pid, number)
