"""Ports for members that are told theirs: below those that the system gives out by itself.

A port that was free a moment ago may be anybody's connection by the time a member takes it, so none
of the system's range will do; and tests that run side by side have ranges of their own.
"""

from __future__ import annotations

import itertools
import os
import random
import socket

LOW, SHARE, SHARES = 12_000, 2_000, 10  # up to 32,000; Linux gives out ports from 32,768 on

_WORKER = int("".join(filter(str.isdigit, os.environ.get("PYTEST_XDIST_WORKER", ""))) or 0)
_NEXT = itertools.count(random.randrange(SHARE))


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody has now, and that this process has not named of
    late."""
    for number in itertools.islice(_NEXT, SHARE):
        port = LOW + _WORKER % SHARES * SHARE + number % SHARE
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError("no port is free")
