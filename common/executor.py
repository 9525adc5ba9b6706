"""The one way to run blocking work: a thread in production; inline in the simulation, which has an
executor of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import anyio

T = TypeVar("T")


class Executor(Protocol):
    """Runs plain functions off the event loop."""

    async def run(self, function: Callable[[], T]) -> T:
        """Return the function's result. The work always runs to its end, also when the caller is
        cancelled: the cancellation takes effect after it."""
        ...


class ThreadExecutor:
    """`threads` threads of its own, in the order of the calls; asyncio only.

    Compute uses one thread for good: OpenMP keeps a pool of workers for each thread that calls it.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[[], T]) -> T:
        work = self._pool.submit(function)
        with anyio.CancelScope(shield=True):
            result = await asyncio.wrap_future(work)
        return result

    def close(self) -> None:
        """Let running work end; start nothing more."""
        self._pool.shutdown(wait=True, cancel_futures=True)
