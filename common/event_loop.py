"""The event loop that members run on, and tests and benchmarks with them.

uvloop (libuv under asyncio): a call between two idle processes takes two thirds of the time that
asyncio's own loop needs (`benchmarks/transfer.py` prints the calls of a get).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar, TypeVarTuple

import anyio

BACKEND = "asyncio"
BACKEND_OPTIONS: Mapping[str, object] = {"use_uvloop": True}

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


def run(function: Callable[[*Arguments], Awaitable[T]], *arguments: *Arguments) -> T:
    """Run an async function in a loop of its own, to its end."""
    return anyio.run(function, *arguments, backend=BACKEND, backend_options=dict(BACKEND_OPTIONS))
