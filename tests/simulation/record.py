"""What happened in a simulated run, line by line, in virtual time: equal runs have equal traces."""

from __future__ import annotations

import anyio


class Record:
    """Mutable fields: `lines`; `counts` of what was done and what came of it, by kind."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.counts: dict[str, int] = {}

    def note(self, event: str) -> None:
        """Write down an event."""
        self.lines.append(f"{anyio.current_time():.6f} {event}")

    def count(self, kind: str, times: int = 1) -> None:
        """Count what was done to the cluster, or what it did about it."""
        if times:
            self.counts[kind] = self.counts.get(kind, 0) + times

    def text(self) -> str:
        """Return the whole trace."""
        return "".join(f"{line}\n" for line in self.lines)
