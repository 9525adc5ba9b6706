"""The cores of this process: which ones it may use, and how many that is worth.

Memory comes from the bank of the core that first touches it, so a process that is pinned before it
makes its pool or slab keeps both on one bank; its threads inherit the cores.
"""

from __future__ import annotations

import math
import os

from kvass.common import control_groups
from kvass.common.control_groups import HERE, View
from kvass.common.errors import Invalid

CPU_MAX = 1 << 16


def parse(text: str, name: str) -> set[int]:
    """Return the cores of a list such as `0-7,16`; raises Invalid, with the setting's name."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdecimal() and (last if dash else first).isdecimal()):
            raise Invalid(f"{name} is {text!r}; expected cores and ranges of them, such as 0-7,16")
        low, high = int(first), int(last or first)
        if not low <= high < CPU_MAX:
            raise Invalid(f"{name} is {text!r}: {part.strip()} is no range of cores")
        found.update(range(low, high + 1))
    return found


def pin(text: str, name: str) -> None:
    """Let this process run on these cores only; nothing when there are none. Call it first: what
    threads there are already stay where they are. Raises as `require`."""
    if text:
        os.sched_setaffinity(0, require(text, name))


def require(text: str, name: str) -> set[int]:
    """Return the cores of a list; raises Invalid for some that this process may not use."""
    wanted, allowed = parse(text, name), os.sched_getaffinity(0)
    if not wanted <= allowed:
        raise Invalid(
            f"{name} is {text!r}; this process may use only {ranges_of(allowed)} (of this machine, "
            "or of its container)"
        )
    return wanted


def usable(view: View = HERE) -> int:
    """Return how many threads can compute at once: cores that this process may use, and no more
    than its control groups have time for."""
    return max(math.ceil(min(len(os.sched_getaffinity(0)), control_groups.cores(view))), 1)


def ranges_of(cores: set[int]) -> str:
    """Write cores as `parse` reads them."""
    parts: list[str] = []
    for core in sorted(cores):
        if core - 1 in cores:
            parts[-1] = parts[-1].partition("-")[0] + f"-{core}"
        else:
            parts.append(str(core))
    return ",".join(parts)
