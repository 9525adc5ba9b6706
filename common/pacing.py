"""When a line that may be due a thousand times a second is written: the first at once, then one now
and then, which says how many were not. Pure.

It refuses to know what the line says. How many there were in all is a count's to tell: those after
the last line are said with the next.
"""

from __future__ import annotations

EVERY_S = 5.0  # a person reads no faster


class Pacing:
    """Of one kind of line. Mutable fields: `_said_s` and `_unsaid` (when one was written last, and
    how many were not since). One thread at a time."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._said_s: float | None = None
        self._unsaid = 0

    def more(self, now_s: float) -> str | None:
        """Return what to add to a line: how many were left out before it; None to leave it out,
        too."""
        if self._said_s is not None and now_s - self._said_s < self._every_s:
            self._unsaid += 1
            return None
        unsaid, self._said_s, self._unsaid = self._unsaid, now_s, 0
        return f" ({unsaid} more since the last line)" if unsaid else ""
