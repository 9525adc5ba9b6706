"""A process with too few descriptors says so: at its start, and before UCX would abort it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvass.common import descriptors
from kvass.common.config import Config, TransportConfig
from kvass.common.descriptors import FREE_MIN, NEEDED
from kvass.common.errors import Invalid, Overloaded
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.transport.identity import own_identity
from kvass.common.transport.landing import TcpLanding
from kvass.common.transport.mover import Mover
from kvass.common.transport.seam import EndpointCard, Region
from kvass.common.transport.tcp import TcpTransport
from kvass.launch.beforehand import require_places
from transport_peer import address_of, memory, whole

SIZE = 1 << 16


@contextmanager
def limited(count: int) -> Iterator[None]:
    """Let this process have so many descriptors: the limit, not the descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_member_that_could_serve_nobody_does_not_start() -> None:
    """In a process of its own: a hard limit never rises again."""
    code = (
        "import resource, sys; from kvass.common.config import Config; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({NEEDED - 1}, {NEEDED - 1})); "
        "from kvass.launch.role import run_role; sys.exit(run_role('store', Config(), 'store-0'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"kvass: this process may open {NEEDED - 1} files and sockets at most")
    assert f"needs {NEEDED} at least" in line
    assert "LimitNOFILE" in line


def test_members_are_not_even_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(Invalid, match="may open 64 files and sockets at most"):
        require_places(Config())


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (128, 128, None),
        (128, 4096, 4096),
        (128, resource.RLIM_INFINITY, descriptors.WANTED),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
        (descriptors.WANTED, 1 << 20, None),
    ],
)
def test_the_soft_limit_is_raised(
    soft: int, hard: int, then: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    descriptors.allow()
    assert set_to == ([] if then is None else [(then, hard)])


def test_what_is_free_is_counted() -> None:
    used = len(os.listdir("/proc/self/fd")) - 1
    with limited(used + FREE_MIN):
        descriptors.require_free("a test")
        with open("/dev/null"), pytest.raises(Overloaded, match="a test needs 64 free descriptors"):
            descriptors.require_free("a test")
    with limited(1), pytest.raises(Overloaded):  # too few even to count them
        descriptors.require_free("a test")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return BACKEND, dict(BACKEND_OPTIONS)


@pytest.mark.anyio
async def test_no_agent_is_made_where_ucx_would_abort_the_process() -> None:
    mover, array, who = Mover(), memory(SIZE, 1), own_identity()
    config = TransportConfig()
    try:
        landing = TcpLanding(mover, who, SIZE, interface=config.interface)
        writer = TcpTransport(
            mover, who, [Region(address_of(array), SIZE)], interface=config.interface
        )
        await writer.attach(EndpointCard("tcp", "host", "start", 1, 1, b"metadata"))
        copies = whole(address_of(array), 1 << 30, SIZE)
        with limited(len(os.listdir("/proc/self/fd")) + FREE_MIN // 2):
            with pytest.raises(Overloaded, match="landing memory for TCP needs 64 free"):
                await landing.lend(SIZE)
            with pytest.raises(Overloaded, match="an agent that writes over TCP needs 64 free"):
                await writer.write("start", copies, tag=b"tag", deadline_s=5)
    finally:
        mover.close()
