"""What `kvass status --store` finds wrong with a node's flash tier, each with what to do. Pure."""

from __future__ import annotations

from typing import Protocol


class Counted(Protocol):
    """A node's counts by name; 0 of what it has not."""

    def count(self, name: str) -> int: ...


def flash(node: Counted) -> list[str]:
    """Return what is wrong; empty when it is well, or the node has no flash."""
    texts = []
    if node.count("flash_off"):
        texts.append(
            "its flash tier has stepped aside, and it goes on with DRAM alone: its log says why; "
            "it tries again every half minute, or, where it could not be opened, at its next start"
        )
    if node.count("flash_closed") and node.count("erasures_owed"):
        texts.append(
            f"flash: {node.count('erasures_owed')} erasures could not be done on its disk, so "
            "nothing is served from it: its log says why; mend it, it tries again every half minute"
        )
    elif node.count("flash_closed"):
        texts.append(
            "flash: nothing is served from it before other store nodes have said what was erased "
            "while it was away, and they do not answer: see whether it reaches them"
        )
    if node.count("flash_full"):
        texts.append(
            "its flash takes nothing more (its log says why), and what is on it is still read: "
            "make room on the disk, or give it less with store.flash_bytes"
        )
    if node.count("flash_unopened_files"):
        texts.append(
            f"flash: {node.count('flash_unopened_files')} files could not be opened, are not "
            "served and not erased by drops: raise the limit of open files (ulimit -n, or "
            "LimitNOFILE= of its service) and start it again"
        )
    faults = node.count("flash_read_faults") + node.count("flash_write_faults")
    if faults or node.count("flash_corrupt"):
        texts.append(
            f"flash: {faults} faults of the disk, {node.count('flash_corrupt')} corrupt records "
            "since the start: see its log and the disk's own health report"
        )
    return texts
