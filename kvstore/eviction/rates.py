"""How soon blocks are used again, learned from those that were. Pure.

It is told when blocks of a class begin to wait for their next use, when that comes, and when a wait
is given up. From these it works out, for each class and age, Gittins' index: the most that keeping
a block for some time can return, in uses, for each unit of that time. It refuses to know blocks,
bytes and clocks: an age counts whatever its caller counts.

Blocks that still wait are evidence too: if only those counted that came back, every old block would
look promising. They are counted by when their wait began, in spans that widen as it lasts.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

CLASSES = 8  # of blocks used once, twice, …, eight times and more: beyond that nothing differs
AGE_MAX = 1 << 22  # where the last bin begins: an hour, at a thousand touches a second
SPAN_MIN, SPANS_MAX = 64, 512  # finer than the ages that matter; few enough to add up in 1 ms
ENDS_MAX = 1 << 18  # then all evidence so far counts half: plenty for every bin, and habits change
PRIOR_WEIGHT = 50.0  # blocks that a guess counts for: two chat requests' in the trace
PRIOR_CHANCE, PRIOR_FALL = 0.01, 0.7  # what is guessed without evidence, falling from bin to bin
REFIT_MIN, REFIT_MAX = 128, 4096
_DENSE = 5  # bins of one age each, before they grow by √2


def _edges() -> list[int]:
    edges = list(range(_DENSE))
    while edges[-1] < AGE_MAX:
        edges.append(max(edges[-1] + 1, int(edges[-1] * 2**0.5)))
    return edges


EDGES = _edges()
BINS = len(EDGES)
_WIDTHS = [end - start for start, end in zip(EDGES, [*EDGES[1:], 2 * EDGES[-1]], strict=True)]


def bin_of(age: int) -> int:
    """Return the bin that an age is in."""
    return bisect_right(EDGES, age) - 1


class ReuseRates:
    """Mutable fields: `rates` (by class and bin; they never rise with age), `_again` and `_lost`
    (waits that ended in a use, or were given up, by class and bin), `_ends` (how many), `_waiting`
    (by class: how many since which span), `_span`, `_due` (when to learn again).
    """

    def __init__(self) -> None:
        # Before anything is known: used more often is better, older is worse.
        self.rates = [[(kind + 1) / (1 + edge) for edge in EDGES] for kind in range(CLASSES)]
        self._again = [[0.0] * BINS for _ in range(CLASSES)]
        self._lost = [[0.0] * BINS for _ in range(CLASSES)]
        self._ends = 0.0
        self._waiting: list[dict[int, int]] = [{} for _ in range(CLASSES)]
        self._span = SPAN_MIN
        self._due = REFIT_MIN

    def began(self, kind: int, now: int, count: int) -> None:
        """Blocks of class `kind` were used now and wait for their next use."""
        waiting, span = self._waiting[kind], now // self._span
        waiting[span] = waiting.get(span, 0) + count

    def came(self, kind: int, since: int, now: int, count: int) -> None:
        """Blocks that waited since then are used again."""
        self._again[kind][bin_of(now - since)] += count
        self._end(kind, since, count)

    def lost(self, kind: int, since: int, now: int, count: int) -> None:
        """Whether blocks that waited since then are used again, nobody will know."""
        self._lost[kind][bin_of(now - since)] += count
        self._end(kind, since, count)

    def _end(self, kind: int, since: int, count: int) -> None:
        waiting, span = self._waiting[kind], since // self._span
        waiting[span] -= count
        assert waiting[span] >= 0, "a wait ended twice"
        if not waiting[span]:
            del waiting[span]
        self._ends += count

    def learn(self, now: int) -> None:
        """Work the rates out anew when it is time: the more is known, the less often."""
        if now < self._due:
            return
        self._due = now + min(REFIT_MAX, max(REFIT_MIN, now // 32))
        self._widen(now)
        exposed = [self._exposed(kind, now) for kind in range(CLASSES)]
        guesses = self._guesses(exposed)
        for kind in range(CLASSES):
            rows = zip(self._again[kind], exposed[kind], guesses, strict=True)
            self.rates[kind] = _indices(
                [(came + PRIOR_WEIGHT * guess) / (n + PRIOR_WEIGHT) for came, n, guess in rows]
            )
        if self._ends > ENDS_MAX:
            self._ends /= 2
            for counts in (*self._again, *self._lost):
                counts[:] = [count / 2 for count in counts]

    def _widen(self, now: int) -> None:
        first = min((min(waiting) for waiting in self._waiting if waiting), default=now)
        while now // self._span - first > SPANS_MAX:
            self._span, first = self._span * 2, first // 2
            for kind, waiting in enumerate(self._waiting):
                joined: dict[int, int] = {}
                for span, count in waiting.items():
                    joined[span // 2] = joined.get(span // 2, 0) + count
                self._waiting[kind] = joined

    def _exposed(self, kind: int, now: int) -> list[float]:
        """Return how many blocks were seen through each bin, until a use or to its end; those
        whose wait was given up in it, or lasts, count half."""
        unsure = self._lost[kind][:]
        for span, count in self._waiting[kind].items():
            unsure[bin_of(max(0, now - span * self._span - self._span // 2))] += count
        ends = [came + cut for came, cut in zip(self._again[kind], unsure, strict=True)]
        reached = list(accumulate(reversed(ends)))[::-1]
        return [all_ - cut / 2 for all_, cut in zip(reached, unsure, strict=True)]

    def _guesses(self, exposed: list[list[float]]) -> list[float]:
        """Return each bin's chance over all classes; where little was seen, from the bin before.

        Without the fall, an age that no block has reached yet would promise as much as the last
        one that did, and blocks would be kept for it.
        """
        guesses, chance = [], PRIOR_CHANCE
        for place in range(BINS):
            guess = chance * (PRIOR_FALL if place > _DENSE else 1.0)
            came = sum(self._again[kind][place] for kind in range(CLASSES))
            seen = sum(exposed[kind][place] for kind in range(CLASSES))
            chance = (came + PRIOR_WEIGHT * guess) / (seen + PRIOR_WEIGHT)
            guesses.append(chance)
        return guesses


def _indices(chances: list[float]) -> list[float]:
    """Return Gittins' index at the start of each bin, from the chances of a use within each.

    Made never to rise with age, so that of one class the oldest is always the least: measured on
    the trace, that costs nothing.
    """
    indices: list[float] = []
    for start in range(BINS):
        left, spent, best = 1.0, 0.0, 0.0
        for place in range(start, BINS):
            after = left * (1 - chances[place])
            spent += (left + after) / 2 * _WIDTHS[place]
            left = after
            best = max(best, (1 - left) / spent)
        indices.append(min(best, indices[-1]) if indices else best)
    return indices
