"""What was erased lately and who may not write, so that neither comes back. Pure.

    drop ──> a mark: for a while no copy (fill, repair, handover) of what matches is taken here
    bar  ──> the writer's blocks are dropped, and for a while nothing of his is taken, from nobody

Before a node takes a copy from another it makes sure that this one has heard of every erasure that
itself has heard of (`node/copies/exchange.py`); but a copy may be under way, from there or from the
own flash, and come after the blocks were erased. A mark outlives any that was begun before. What a
writer puts anew after a drop is taken: it is new. It refuses to know where blocks are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvass.common.block import BlockHeader

Matches = Callable[[BlockHeader], bool]

# A fill's description and copies under way, and what rises: seconds each.
MARK_S = 60.0
MARKS_MAX = 256  # drops are an operator's; the oldest mark goes
# A barred worker is looked at, mended and started anew, under another name or after this.
BAR_S = 3600.0
BARRED_MAX = 1024


class Erasures:
    """Mutable fields: `_marks` (with the time when they end, in order), `_barred` (writers, with
    theirs), and the count `refused`, of blocks."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, Matches]] = deque(maxlen=MARKS_MAX)
        self._barred: dict[str, float] = {}
        self.refused = 0

    def mark(self, matches: Matches, now_s: float) -> None:
        """What matches was erased now."""
        self._marks.append((now_s + MARK_S, matches))

    def bar(self, writer: str, now_s: float, age_s: float = 0.0) -> None:
        """Take nothing of this writer for a while, which began `age_s` ago."""
        ends_s = max(now_s + BAR_S - age_s, self._barred.pop(writer, now_s))
        if ends_s <= now_s:
            return
        self._barred[writer] = ends_s
        if len(self._barred) > BARRED_MAX:
            del self._barred[next(iter(self._barred))]

    @property
    def barred_count(self) -> int:
        """How many writers are barred, or were and have not written since."""
        return len(self._barred)

    def refused_of(
        self, headers: Iterable[BlockHeader], now_s: float, *, is_copy: bool
    ) -> set[bytes]:
        """Return the keys of the blocks that must not be taken; see `refuses`."""
        if not self._barred and not (is_copy and self._marks):
            return set()
        return {h.key for h in headers if self.refuses(h, now_s, is_copy=is_copy)}

    def refuses(self, header: BlockHeader, now_s: float, *, is_copy: bool) -> bool:
        """Whether a block must not be taken: its writer is barred, or it is a copy of what was
        erased."""
        while self._marks and self._marks[0][0] <= now_s:
            self._marks.popleft()
        refused = self._is_barred(header.writer, now_s) or (
            is_copy and any(matches(header) for _, matches in self._marks)
        )
        self.refused += refused
        return refused

    def _is_barred(self, writer: str, now_s: float) -> bool:
        end_s = self._barred.get(writer)
        if end_s is not None and end_s <= now_s:
            del self._barred[writer]
        return writer in self._barred
