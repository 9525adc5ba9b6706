"""What all tests share: the event loop, how hard Hypothesis tries, and where the time went."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from parts import spent

# As workers do (launch/role.py): two test processes whose torch threads spin while they wait take
# each other's cores, and what takes a minute takes five. Before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shared machine is slow at times; how long an example takes is no property of ours.
settings.register_profile("kvass", deadline=None)
settings.register_profile("soak", deadline=None, max_examples=3000)
settings.load_profile("kvass")


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """What production runs on. Modules that run a broker in the test's own loop get asyncio's: when
    one was stopped in it, closing uvloop's hung once in many runs, where no test's timeout reaches.
    """
    if hasattr(request.module, "run_broker"):
        return "asyncio", {}
    return BACKEND, dict(BACKEND_OPTIONS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = spent(report for each in terminalreporter.stats.values() for report in each)
    if len(lines) > 1:
        terminalreporter.section("time by part")
        for line in lines:
            terminalreporter.line(line)
