"""The summary that says where a run's time went."""

from __future__ import annotations

from typing import Literal

import pytest

from parts import CHAOS, PROCESSES, REST, SIMULATION, part_of, spent


@pytest.mark.parametrize(
    ("node_id", "part"),
    [
        ("tests/processes/test_chaos.py::test_chaos", CHAOS),
        ("tests/processes/test_bus.py::test_x[a/b]", PROCESSES),
        ("tests/simulation/test_seeds.py::test_y", SIMULATION),
        ("tests/test_cli.py::test_z", REST),
    ],
)
def test_each_test_is_in_a_part(node_id: str, part: str) -> None:
    assert part_of(node_id) == part


def report(
    node_id: str, when: Literal["setup", "call", "teardown"], time_s: float
) -> pytest.TestReport:
    return pytest.TestReport(node_id, ("", None, ""), {}, "passed", None, when, duration=time_s)


def test_all_of_a_test_counts() -> None:
    reports: list[object] = [
        report("tests/test_cli.py::test_z", "setup", 0.5),
        report("tests/test_cli.py::test_z", "call", 1.0),
        report("tests/processes/test_bus.py::test_x", "setup", 20.0),
        report("tests/processes/test_bus.py::test_x", "call", 10.0),
        report("tests/processes/test_bus.py::test_x", "teardown", 5.25),
    ]
    assert spent([*reports, "a warning"]) == [
        f"   35.2 s  {PROCESSES} (1)",
        f"    1.5 s  {REST} (1)",
    ]
