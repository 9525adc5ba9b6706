"""What a node does by itself, and what becomes of a bug in it: that costs the piece of work, is
said and counted, and the node goes on.

One that breaks an invariant ends the node, as it does in a call: what its index says can be trusted
no more.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator

import anyio

from kvass.common.errors import breaks_an_invariant

_log = logging.getLogger(__name__)

AGAIN_S = 1.0  # a chore that fails each time must not take a core, nor fill the log


@contextlib.contextmanager
def survived(what: str, faults: dict[str, int]) -> Iterator[None]:
    """Do a piece of work; what it raises is counted among `faults`."""
    try:
        yield
    except Exception as error:
        if breaks_an_invariant(error):
            raise
        faults["bugs"] += 1
        _log.exception("%s met a bug; the node goes on", what)


async def lasting(
    what: str, chore: Callable[[], Awaitable[object]], faults: dict[str, int]
) -> None:
    """Run a chore until it ends or is cancelled: again, after a while, when it has met a bug."""
    while True:
        with survived(what, faults):
            await chore()
            return
        await anyio.sleep(AGAIN_S)
