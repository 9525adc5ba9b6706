"""What the kernel gives this process at most: the machine's memory and cores, or less where a
control group that it is in says so.

A limit binds all that is below its group, so each group counts, from the process's own up to the
root. Both versions of control groups are read, and the two mixed. In a container the path that the
kernel names may not be in its view of the file system: then what is there counts, and the root is,
which is the container's own group. It refuses to know what the memory and the cores are for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class View:
    """Where the kernel shows them."""

    proc: Path = Path("/proc")
    groups: Path = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Names:
    """How one version of control groups names the files of memory."""

    limit: str
    usage: str
    inactive: str  # in `memory.stat`: of the page cache, what is dropped first, of all groups below


HERE = View()
_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def total_bytes(view: View = HERE) -> int:
    """Return the memory that this process and all others of its group may have together."""
    limits = (_number(group / names.limit) for group, names in _memory_groups(view))
    return min([_meminfo("MemTotal", view), *(each for each in limits if each is not None)])


def available_bytes(view: View = HERE) -> int:
    """Return the memory that the machine and each control group can still give; 0 when one is
    full. As the machine's, a group's page cache that was not used lately is to be had."""
    available = [_meminfo("MemAvailable", view)]
    for group, names in _memory_groups(view):
        limit, usage = _number(group / names.limit), _number(group / names.usage)
        if limit is not None and usage is not None:
            inactive = min(_fields(group / "memory.stat").get(names.inactive, 0), usage)
            available.append(limit - usage + inactive)
    return max(min(available), 0)


def cores(view: View = HERE) -> float:
    """Return how many cores' time this process and its group may take; infinity where no control
    group has a quota."""
    quotas = [math.inf]
    for group, version in _groups("cpu", view):
        if version == 1:
            quota, period = (
                _number(group / "cpu.cfs_quota_us"),
                _number(group / "cpu.cfs_period_us"),
            )
        else:
            parts = _text(group / "cpu.max").split()
            quota, period = map(_whole, parts) if len(parts) == 2 else (None, None)
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas)


def _memory_groups(view: View) -> Iterator[tuple[Path, _Names]]:
    for group, version in _groups("memory", view):
        yield group, _VERSION_1 if version == 1 else _VERSION_2


def _groups(controller: str, view: View) -> Iterator[tuple[Path, int]]:
    """Yield the folders of the groups that may bound this process, with their version."""
    for line in _text(view.proc / "self/cgroup").splitlines():
        number, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controller in controllers.split(","):
            for mount in sorted({controller, controllers}):
                yield from ((group, 1) for group in _upwards(view.groups / mount, path))
        elif number == "0" and not controllers:
            for root in (view.groups, view.groups / "unified"):  # the latter beside version 1
                yield from ((group, 2) for group in _upwards(root, path))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Yield a group's folder and all that are above it."""
    names = [name for name in path.split("/") if name]
    if ".." in names:  # it lies beside what this process sees
        names = []
    for count in range(len(names), -1, -1):
        yield root.joinpath(*names[:count])


def _meminfo(name: str, view: View) -> int:
    return _fields(view.proc / "meminfo")[name] * 1024


def _fields(file: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines are a name and a number."""
    found: dict[str, int] = {}
    for line in _text(file).splitlines():
        parts = line.replace(":", " ").split()
        if len(parts) >= 2 and (number := _whole(parts[1])) is not None:
            found[parts[0]] = number
    return found


def _number(file: Path) -> int | None:
    return _whole(_text(file))


def _whole(text: str) -> int | None:
    """Return a number; None where there is none, or no limit ("max")."""
    try:
        return int(text)
    except ValueError:
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""  # no such group in our view, or its controller is off
