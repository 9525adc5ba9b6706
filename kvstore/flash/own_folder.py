"""Which of the folders in `store.flash_dir` a node uses: several nodes of one host may name the
same.

    its own of an earlier life ─held─> waited for: a process that was killed holds it for a moment
            │ free                         │ still held
            v                              v
          taken         one that is nobody's, one of a start that is over, a new one

Who has a folder writes his name into its lock file, and it is left to him: whoever comes first may
be new, and the others have not come yet. An id with its process's in it was made for one start and
does not come back: such a node has no folder of its own, it waits for one whose process is ending,
then takes whichever is free. Only where there can be no more folders, any free one is taken. No two
processes ever have one folder: the lock is the system's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvass.common.errors import Unavailable
from kvass.common.transport.identity import Identity, start_ticks
from kvass.kvstore.flash.disk import RealDisk
from kvass.kvstore.flash.folder import LOCK_NAME, FolderTaken

_log = logging.getLogger(__name__)

FOLDERS_MAX = 64  # nodes that share a `flash_dir`
# The kernel takes apart what a killed process had, memory first: seconds for a large slab.
WAIT_S = 10.0
# One that seems to run on may have been killed just now; if it does run, it keeps its folder.
RUNS_S = 2.0
LOOK_S = 0.05
PF_EXITING = 0x4  # of a process's flags, in /proc/<pid>/stat: it runs no more code of its own


@dataclass(frozen=True, slots=True)
class Owner:
    """What is written into a lock file."""

    member_id: str = ""
    host_id: str = ""
    pid: int = 0
    ticks: int = 0

    def text(self) -> str:
        return f"{self.member_id} {self.host_id} {self.pid} {self.ticks}\n"

    @property
    def comes_back(self) -> bool:
        """Whether another start may have this id: it was given, and not made of role, host and
        process."""
        made = self.member_id.count("-") >= 2 and self.member_id.endswith(f"-{self.pid}")
        return bool(self.member_id) and not made

    def is_ending(self, host_id: str) -> bool:
        """Whether its process is over, or about to be, as far as that can be seen from here."""
        return self.host_id == host_id and not _runs(self.pid, self.ticks)


def own_folder(
    root: Path,
    member_id: str,
    identity: Identity,
    *,
    wait_s: float = WAIT_S,
    sleep: Callable[[float], None] = time.sleep,
) -> RealDisk:
    """Take the folder that is this node's, or another one; raises Unavailable. Blocks, for
    `wait_s` at most."""
    if not root.parent.exists():  # where a disk is not mounted, another one would fill
        parent = root.parent.absolute()  # a relative one is seen to lie in the wrong place
        raise Unavailable(f"store.flash_dir {root}: {parent} does not exist (is the disk mounted?)")
    folders = [root / f"node-{number}" for number in range(FOLDERS_MAX)]
    owners = {folder: _owner_of(folder) for folder in folders if folder.is_dir()}
    own = [folder for folder, owner in owners.items() if owner.member_id == member_id]
    left = {folder: owner for folder, owner in owners.items() if not owner.comes_back}
    ending = [folder for folder, owner in left.items() if owner.is_ending(identity.host_id)]
    me = Owner(member_id, identity.host_id, identity.pid, start_ticks(identity.pid) or 0)
    ends_s = time.monotonic() + wait_s
    for folder in own or ending:
        disk = _taken(folder, ends_s, sleep, identity.host_id)
        if disk is not None:
            return _named(disk, folder, me, "its own" if own else _was(owners[folder]))
        _log.warning(
            "flash: %s was %s's, and a process still has it: this node takes another folder. Does "
            "a second node run under this id?",
            folder, owners[folder].member_id or "nobody",
        )  # fmt: skip
    if own:  # the other one's is where this id's blocks are, and is to be found again
        me = replace(me, member_id="")
    free = sorted((f for f in folders if f not in own), key=lambda f: _liking(owners.get(f)))
    for folder in free:
        disk = _taken(folder, 0.0, sleep)
        if disk is not None:
            owner = owners.get(folder)
            return _named(disk, folder, me, "a new one" if owner is None else _was(owner))
    raise Unavailable(f"{root} serves {FOLDERS_MAX} nodes already")


def _liking(owner: Owner | None) -> int:
    """Order folders: first those that nobody wrote his name into, then those of starts that are
    over, those that are not there, and last those that are somebody else's."""
    if owner is None:
        return 2
    return 3 if owner.comes_back else int(bool(owner.member_id))


def _was(owner: Owner) -> str:
    return f"which was {owner.member_id}'s" if owner.member_id else "which was there"


def _taken(
    folder: Path,
    ends_s: float,
    sleep: Callable[[float], None],
    host_id: str = "",
) -> RealDisk | None:
    """Take a folder as soon as it is free, until the time is over; sooner where its process is on
    this host, and is seen to run on."""
    runs_until_s = time.monotonic() + RUNS_S
    while True:
        try:
            return RealDisk(folder)
        except FolderTaken:
            now_s = time.monotonic()
            if now_s >= ends_s or (now_s >= runs_until_s and _is_held_on(folder, host_id)):
                return None
        sleep(LOOK_S)


def _is_held_on(folder: Path, host_id: str) -> bool:
    owner = _owner_of(folder)
    return owner.host_id == host_id and not owner.is_ending(host_id)


def _named(disk: RealDisk, folder: Path, owner: Owner, why: str) -> RealDisk:
    try:
        (folder / LOCK_NAME).write_text(owner.text())
    except OSError as error:  # a full disk: what is there can be served all the same
        _log.warning("flash: cannot write who has %s: %s", folder, error)
    _log.info("flash: this node uses %s, %s", folder, why)
    return disk


def _owner_of(folder: Path) -> Owner:
    try:
        parts = (folder / LOCK_NAME).read_text().split()
        member_id, host_id, pid, ticks = parts
        return Owner(member_id, host_id, int(pid), int(ticks))
    except (OSError, ValueError):
        return Owner()  # of an earlier version, or never finished


def _runs(pid: int, ticks: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    state, *fields = stat.rpartition(")")[2].split()
    return int(fields[18]) == ticks and state not in "ZX" and not int(fields[5]) & PF_EXITING
