"""Work and time without threads: what tests and the simulation give to whoever waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

import anyio.lowlevel

T = TypeVar("T")


class ManualClock:
    """A clock that a test moves by hand. Mutable field: `time_s`."""

    def __init__(self, time_s: float = 0.0) -> None:
        self.time_s = time_s

    def now_s(self) -> float:
        return self.time_s


class InlineExecutor:
    """Runs the work in the event loop."""

    async def run(self, function: Callable[[], T]) -> T:
        await anyio.lowlevel.checkpoint()
        return function()


class InlineFutures(Executor):
    """Runs what it is given at once."""

    def submit(self, function, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        done: Future[object] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:  # told where the result is asked for, as by a thread
            done.set_exception(error)
        return done
