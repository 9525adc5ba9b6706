"""How many files and sockets this process may have open, and whether enough of them are left.

Whoever runs out of descriptors in Python is told so, and goes on. UCX is not so: where its accept()
meets EMFILE it aborts the process. It refuses to know what descriptors are for.
"""

from __future__ import annotations

import os
import resource

from kvass.common.errors import Invalid, Overloaded

WANTED = 65_536  # of a process, where the system allows as many: a thousand peers take several each
NEEDED = 128  # a member that is ready has about 40; below this it is ready, and serves nobody
FREE_MIN = 64  # an agent of UCX takes 5, and one for each connection that its port is given


def require_enough() -> None:
    """Raise Invalid where the system allows this process too few to serve anybody."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _count(hard) < NEEDED:
        raise Invalid(
            f"this process may open {hard} files and sockets at most (the hard limit of open "
            f"files); it needs {NEEDED} at least, and {WANTED} with many peers: raise it (ulimit "
            "-Hn, LimitNOFILE of systemd, --ulimit nofile of a container)"
        )


def allow() -> None:
    """Use what the system allows, which is more than the usual soft limit of 1,024. Raises as
    `require_enough`."""
    require_enough()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = int(min(_count(hard), WANTED))
    if _count(soft) < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def require_free(what: str) -> None:
    """Raise Overloaded unless this process may open FREE_MIN more; `what` wants them."""
    most = _count(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # one was the listing's own
    except OSError:  # it takes one
        used = int(min(most, WANTED))
    if most - used < FREE_MIN:
        raise Overloaded(
            f"{what} needs {FREE_MIN} free descriptors: this process has {used} files and sockets "
            f"open, of {most:g} (raise the limit of open files)"
        )


def _count(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
