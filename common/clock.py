"""The one place that reads time. Pure modules take `now_s`; shells take a `Clock`."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import anyio


class Clock(Protocol):
    """Monotonic seconds. Differences mean something; absolute values do not."""

    def now_s(self) -> float: ...


class RealClock:
    """The machine's monotonic clock: also right outside an event loop and in threads."""

    def now_s(self) -> float:
        return time.monotonic()


class LoopClock:
    """The event loop's clock: real under asyncio, virtual under trio's mock clock."""

    def now_s(self) -> float:
        try:  # a tenth of the time that anyio takes to find out where it runs
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return anyio.current_time()
