"""Run seeds of the simulated cluster again, or for the first time.

    python tests/simulation/repeat.py 137              one seed: its verdict, and where it failed
    python tests/simulation/repeat.py 137 --trace      and every event, in virtual time
    python tests/simulation/repeat.py 0 --count 1000   many seeds: which failed, and the time

Ends with status 1 if a seed failed. Equal seeds give byte-equal traces.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

from whole import run_seed

FAILURES_SHOWN = 20
PROGRESS_SEEDS = 100


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1, help="run so many seeds, from this one on")
    parser.add_argument("--trace", action="store_true", help="print every event")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)  # mishaps are logged as what they are; the trace has them
    if asked.count == 1:
        return _one(asked.seed, with_trace=asked.trace)
    return _many(range(asked.seed, asked.seed + asked.count))


def _one(seed: int, *, with_trace: bool) -> int:
    outcome = run_seed(seed)
    if with_trace:
        sys.stdout.write(outcome.record.text())
    for failure in outcome.failures:
        traceback.print_exception(failure)
    print(outcome.summary(), file=sys.stderr)
    return bool(outcome.failures)


def _many(seeds: range) -> int:
    begun_s = time.perf_counter()
    failed: list[int] = []
    done: Counter[str] = Counter()
    for seed in seeds:
        outcome = run_seed(seed)
        done.update(outcome.record.counts)
        if outcome.failures:
            failed.append(seed)
            print(outcome.summary(), flush=True)
        if len(failed) >= FAILURES_SHOWN:
            break
        if (seed + 1 - seeds.start) % PROGRESS_SEEDS == 0:
            took_s = time.perf_counter() - begun_s
            print(f"up to seed {seed}: {len(failed)} failed; {took_s:.0f} s", flush=True)
    took_s = time.perf_counter() - begun_s
    print(
        f"{seed + 1 - seeds.start} seeds from {seeds.start}, {len(failed)} failed, {took_s:.0f} s"
    )
    print("done to them: " + ", ".join(f"{kind} {count}" for kind, count in sorted(done.items())))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
