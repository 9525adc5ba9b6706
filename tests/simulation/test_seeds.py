"""Seeds of the whole simulated cluster: each is right, each can be repeated, and together they
reach what they are there for. `make soak` runs thousands of others."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from whole import run_seed

SEEDS = 120  # about a minute of one core
CHUNK = 20
CHUNKS = [range(low, low + CHUNK) for low in range(0, SEEDS, CHUNK)]
REPEAT = Path(__file__).with_name("repeat.py")

# What the first seeds must do to the cluster, or see it do.
REACHED = (
    *("kill", "hang", "cut", "split", "drop", "call twice", "frame cut", "frame doubled"),
    *("move failed", "move lost", "move partial", "move corrupt", "move late"),
    *("evictions", "put_corrupt", "pull_corrupt", "push_full", "push_busy", "leases_lost"),
    *("node_timeout", "node_unavailable", "suspended", "resumed"),
    *("drain", "join", "erase", "crowd", "dropped", "erased everywhere", "hot_segments"),
    *("filled", "fill_failed", "copies_untold", "handed over", "survived", "audited"),
    *("flash_sunk", "flash_hits", "flash_risen", "flash_staged", "flash_refused"),
)
REACHED_WITHIN = 100


@functools.cache
def counts_and_failure(seed: int) -> tuple[dict[str, int], str]:
    """Run a seed, once for all tests here."""
    outcome = run_seed(seed)
    return outcome.record.counts, outcome.summary() if outcome.failures else ""


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_seeds(seeds: range) -> None:
    failures = [failure for seed in seeds if (failure := counts_and_failure(seed)[1])]
    assert not failures, "\n".join(failures)


def test_the_seeds_reach_what_they_are_there_for() -> None:
    missing = set(REACHED)
    for seed in range(REACHED_WITHIN):
        missing -= counts_and_failure(seed)[0].keys()
        if not missing:
            return
    raise AssertionError(f"{REACHED_WITHIN} seeds never had: {sorted(missing)}")


def test_a_seed_repeats_its_run_to_the_byte() -> None:
    """In two processes whose sets and dicts are in other orders."""
    traces = {seed: [_trace(seed, hashing) for hashing in "12"] for seed in (3, 11)}
    for first, second in traces.values():
        assert first == second
        assert first.count(b"\n") > 100
    assert len({first for first, _ in traces.values()}) == len(traces)


def _trace(seed: int, hashing: str) -> bytes:
    command = [sys.executable, str(REPEAT), str(seed), "--trace"]
    environment = {**os.environ, "PYTHONHASHSEED": hashing}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
