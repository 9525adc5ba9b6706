"""Who a process is to its peers: a host and a start, never an address or a PID.

Two processes with equal `host_id` may try cross-memory attach: they run under the same kernel boot,
see each other's PIDs (same PID namespace) and have the same user. `start_id` is new with each
start, so that nobody takes a restarted process for the one it replaced.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Identity:
    """A running process."""

    host_id: str
    start_id: str
    pid: int


def own_identity() -> Identity:
    """Return an identity for this start of this process; call it once and share the result."""
    return Identity(host_id=_host_id(), start_id=secrets.token_hex(16), pid=os.getpid())


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name is in parentheses and may hold anything; field 22 counts from after it.
    return int(stat.rpartition(")")[2].split()[19])


def _host_id() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    parts = f"{boot_id}/{pid_namespace}/{os.getuid()}"
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()
