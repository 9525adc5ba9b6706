"""What all tests share: the event loop, how hard Hypothesis tries, and where the time went."""

from __future__ import annotations

import pytest
from hypothesis import settings

from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from parts import spent

# A shared machine is slow at times; how long an example takes is no property of ours.
settings.register_profile("kvass", deadline=None)
settings.register_profile("soak", deadline=None, max_examples=3000)
settings.load_profile("kvass")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return BACKEND, dict(BACKEND_OPTIONS)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = spent(report for each in terminalreporter.stats.values() for report in each)
    if len(lines) > 1:
        terminalreporter.section("time by part")
        for line in lines:
            terminalreporter.line(line)
