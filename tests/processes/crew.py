"""A cluster whose members tests start one by one, as an operator does by hand: each is a command
line that can be killed, stopped and started again, at the address that it had.

The broker is a process too. What members print is passed on, and kept.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from cluster import POLL_S, REQUEST_S, START_S, Cluster
from kvass.launch.role import READY_MARK
from ports import free_port

HERE = Path(__file__).parent
STOP_S = 30.0


@dataclass(slots=True, eq=False)
class Seat:
    """A member's command line and the process that it runs in now. Mutable: all but the first
    three; `lines` are those of all its processes."""

    member_id: str
    port: int
    command: tuple[str, ...]
    process: subprocess.Popen[str] | None = None
    lines: list[str] = field(default_factory=list)
    is_ready: threading.Event = field(default_factory=threading.Event)
    reader: threading.Thread | None = None

    @property
    def role(self) -> str:
        return self.member_id.partition("-")[0]

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Run the command line; `is_ready` is set once the member says so."""
        assert not self.is_running
        self.is_ready = threading.Event()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={name: v for name, v in os.environ.items() if name != "KVASS_SALT_SECRET"},
        )
        arguments = (self.process, self.is_ready)
        self.reader = threading.Thread(target=self._read, args=arguments, daemon=True)
        self.reader.start()

    def _read(self, process: subprocess.Popen[str], is_ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(READY_MARK):
                is_ready.set()
                continue
            self.lines.append(line)
            print(f"{self.member_id:<10} | {line}", end="", flush=True)

    def until_ready(self) -> None:
        """Wait until the member that was started last is ready."""
        give_up_s = time.monotonic() + START_S
        while not self.is_ready.wait(POLL_S):
            assert self.is_running, f"{self.member_id} ended: {self.lines[-5:]}"
            assert time.monotonic() < give_up_s, f"{self.member_id} was not ready"

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End the process now; a stopped one too."""
        assert self.process is not None
        self.process.kill()
        self.wait()

    def wait(self, within_s: float = STOP_S) -> int:
        """Wait for the process's end; return its exit code."""
        assert self.process is not None and self.process.stdin is not None
        code = self.process.wait(within_s)
        if self.reader is not None:
            self.reader.join(5)
        self.process.stdin.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Crew:
    """The members of one cluster, by id. Mutable: `seats`, `gateways`."""

    def __init__(self, broker: Seat, address: str, settings: Sequence[str], on: ExitStack) -> None:
        self.broker = broker
        self.address = address
        self.settings = tuple(settings)
        self.seats: dict[str, Seat] = {}
        self.gateways: dict[str, Cluster] = {}
        self._on = on

    def add(self, member_id: str, *arguments: str, program: str = "member_at.py") -> Seat:
        """Start a member; its role is the first part of its id."""
        role, port = member_id.partition("-")[0], free_port()
        place = ("--port", str(port)) if role == "gateway" else ()
        command = (
            *(sys.executable, str(HERE / program), str(port)),
            *(role, "--id", member_id, "--broker", self.address),
            *(*place, *self.settings, *arguments),
        )
        seat = self.seats[member_id] = Seat(member_id, port, command)
        seat.start()
        if role == "gateway":
            assert self.broker.process is not None
            url = f"http://127.0.0.1:{port}"
            http = httpx.Client(base_url=url, timeout=REQUEST_S, trust_env=False)
            self._on.enter_context(closing(http))
            self.gateways[member_id] = Cluster(self.broker.process, port, http)
        return seat

    def until_whole(self) -> None:
        """Wait until every gateway sees every member as ready."""
        running = {each.member_id for each in self.seats.values() if each.is_running}
        for member_id in running:
            self.seats[member_id].until_ready()
        for member_id in running & self.gateways.keys():
            _until_seen(self.gateways[member_id], running)

    def stop(self) -> None:
        """End every member by SIGTERM, the gateways first, and then the broker."""
        for roles in (("gateway",), ("prefill", "decode"), ("store",)):
            leaving = [s for s in self.seats.values() if s.role in roles and s.is_running]
            for seat in leaving:
                seat.signal(signal.SIGCONT)
                seat.signal(signal.SIGTERM)
            for seat in leaving:
                assert seat.wait() == 0, seat.member_id


@contextmanager
def crew(*settings: str) -> Iterator[Crew]:
    """Run a broker; whatever was added to the crew is stopped at the end of the block. `settings`
    are given to every member."""
    address = f"127.0.0.1:{free_port()}"
    command = (sys.executable, str(HERE / "broker_process.py"), address)
    broker = Seat("broker", 0, command)
    with ExitStack() as stack:
        broker.start()
        members = Crew(broker, address, settings, stack)
        stack.callback(_kill_all, members)
        while "ready\n" not in broker.lines:
            assert broker.is_running, broker.lines
            time.sleep(POLL_S)
        yield members
        members.stop()


def _until_seen(gateway: Cluster, member_ids: set[str]) -> None:
    gateway.until(
        lambda: {each["id"] for each in gateway.members()} == member_ids,
        f"the gateway sees all of {sorted(member_ids)}",
    )


def _kill_all(members: Crew) -> None:
    for seat in (*members.seats.values(), members.broker):
        if seat.is_running:
            seat.kill()
