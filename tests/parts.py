"""Where a run's time went, by part: `make test` has a budget."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

PROCESSES, CHAOS, SIMULATION, REST = "real processes", "chaos", "simulation", "the rest"


def part_of(node_id: str) -> str:
    """Return the part that a test belongs to, by where it is."""
    if node_id.startswith("tests/processes/test_chaos.py"):
        return CHAOS
    if node_id.startswith("tests/processes/"):
        return PROCESSES
    return SIMULATION if node_id.startswith("tests/simulation/") else REST


def spent(reports: Iterable[object]) -> list[str]:
    """Return a line a part, the longest first: what its tests took, with set-up and tear-down."""
    seconds, tests = defaultdict[str, float](float), Counter[str]()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            part = part_of(report.nodeid)
            seconds[part] += report.duration
            tests[part] += report.when == "call"
    ordered = sorted(seconds.items(), key=lambda each: -each[1])
    return [f"{time_s:7.1f} s  {part} ({tests[part]})" for part, time_s in ordered]
