"""What was erased lately and who may not write, so that neither comes back. Pure.

    drop ──> a number: no copy that was begun before it (fill, rise, handover) of what matches is
             taken here; what is begun later is of blocks that were put anew
    bar  ──> the writer's blocks are dropped, and for a while nothing of his is taken, from nobody

Erasures are numbered as this node hears of them, and who brings a copy says as of which number:
another node had heard of all up to there when it said what it has (`node/copies/exchange.py`), or
all up to there had been carried out on the own flash when it was looked at. So what was erased
cannot come back however late it is, and what is put anew has its copies. Of a bar alone copies are
refused for a while, right ones too. It refuses to know where blocks are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

from kvass.common.block import BlockHeader

Matches = Callable[[BlockHeader], bool]

# How long it is known what was erased: whatever was begun before that, seconds ago as a rule, is
# refused. And so long no copy is taken of what a bar found to be wrong, from nobody: who has it may
# not have heard yet that it is.
MARK_S = 60.0
MARKS_MAX = 1024
# A barred worker is looked at, mended and started anew, under another name or after this.
BAR_S = 3600.0
BARRED_MAX = 1024


class _Mark(NamedTuple):
    number: int
    ends_s: float
    matches: Matches


class Erasures:
    """Mutable fields: `number` (erasures so far), `settled` (those up to here have been carried out
    below memory, too), `_marks` (in order) and `_wrong` (those of bars), `_forgotten` (the number
    of the last one of which is not known what it erased), `_barred` (writers, with the times when
    that ends), and the count `refused`, of blocks."""

    def __init__(self) -> None:
        self.number = 0
        self.settled = 0
        self._marks: deque[_Mark] = deque()
        self._wrong: deque[_Mark] = deque(maxlen=MARKS_MAX)
        self._forgotten = 0
        self._barred: dict[str, float] = {}
        self.refused = 0

    def mark(self, matches: Matches, now_s: float, *, bars: bool = False) -> None:
        """What matches was erased now."""
        self.number += 1
        mark = _Mark(self.number, now_s + MARK_S, matches)
        self._marks.append(mark)
        if bars:
            self._wrong.append(mark)
        if len(self._marks) > MARKS_MAX:
            self._forgotten = self._marks.popleft().number

    def settle(self) -> None:
        """All that was erased so far has been erased below memory, too."""
        self.settled = self.number

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
        self, headers: Iterable[BlockHeader], now_s: float, *, as_of: int | None
    ) -> set[bytes]:
        """Return the keys of the blocks that must not be taken; see `refuses`."""
        if not self._barred and (as_of is None or not self._may_refuse(as_of, now_s)):
            return set()
        return {h.key for h in headers if self.refuses(h, now_s, as_of=as_of)}

    def refuses(self, header: BlockHeader, now_s: float, *, as_of: int | None) -> bool:
        """Whether a block must not be taken: its writer is barred; or it is a copy, begun as of
        that number, and what it is of was erased since."""
        refused = self._is_barred(header.writer, now_s)
        if as_of is not None and not refused and self._may_refuse(as_of, now_s):
            refused = as_of < self._forgotten or any(
                mark.matches(header) for mark in (*self._since(as_of), *self._wrong)
            )
        self.refused += refused
        return refused

    def _may_refuse(self, as_of: int, now_s: float) -> bool:
        """Forget what is over; return whether any copy of that number would be refused."""
        while self._is_over(now_s):
            self._forgotten = self._marks.popleft().number
        while self._wrong and self._wrong[0].ends_s <= now_s:
            self._wrong.popleft()
        return as_of < self.number or bool(self._wrong)

    def _is_over(self, now_s: float) -> bool:
        """Whether the first mark is: what has not been carried out below memory is not, since what
        rises meanwhile is as of before it."""
        first = self._marks[0] if self._marks else None
        return first is not None and first.ends_s <= now_s and first.number <= self.settled

    def _since(self, as_of: int) -> Iterator[_Mark]:
        return takewhile(lambda mark: mark.number > as_of, reversed(self._marks))

    def _is_barred(self, writer: str, now_s: float) -> bool:
        end_s = self._barred.get(writer)
        if end_s is not None and end_s <= now_s:
            del self._barred[writer]
        return writer in self._barred
