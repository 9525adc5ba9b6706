"""One seed, one run: trio's scheduler and the virtual clock decide nothing by chance or by time.

trio shuffles the tasks that are ready; its own switch for test frameworks makes it sort them first
and shuffle with a generator that can be seeded. The clock jumps to the next deadline whenever
nobody is ready to run, so a minute takes no time. What is left is order by hash: neither the
program nor a test may let the order of a set of strings, bytes or objects decide anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import trio._core._run as scheduler
import trio.testing

T = TypeVar("T")


def run(seed: int, function: Callable[[], Awaitable[T]]) -> T:
    """Run an async function to its end in an event loop whose every choice the seed makes."""
    switch = "_ALLOW_DETERMINISTIC_SCHEDULING"
    before, state = getattr(scheduler, switch), scheduler._r.getstate()
    setattr(scheduler, switch, True)
    scheduler._r.seed(seed)
    try:
        clock = trio.testing.MockClock(autojump_threshold=0)
        return anyio.run(function, backend="trio", backend_options={"clock": clock})
    finally:
        setattr(scheduler, switch, before)
        scheduler._r.setstate(state)
