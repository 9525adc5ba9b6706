"""Which segments are read so often that one node is too few, and how many copies they earn. Pure.

A node counts the reads of the segments that it is home of. One that takes much more than its share
of them is hot: the node says so in its answers, readers spread over as many copies, and those fill
by being read. As each of `c` copies then sees one read in `c`, one that comes here counts for `c`,
so that a segment does not cool by having been spread.

Counts fade: both the reads of a segment and of all lose half of their weight every HALF_LIFE_S.
Memory is bounded: of the segments beyond SEGMENTS_MAX the least read go first (as in Space-Saving,
Metwally et al. 2005, without its error bounds: what is hot is never among them).
"""

from __future__ import annotations

from dataclasses import dataclass

SEGMENTS_MAX = 4096
HALF_LIFE_S = 10.0
COPIES_MAX = 16
# A segment that takes this part of a node's other reads is worth a copy more; half of it, and the
# copy goes again. Below so many (faded) reads nothing is known.
SHARE = 0.5
READS_MIN = 32.0


@dataclass(slots=True)
class _Count:
    """Mutable fields: all. `here` are the reads that came here, `reads` an estimate of all, both as
    of the last fading; `copies` as last said."""

    here: float = 0.0
    reads: float = 0.0
    copies: int = 1


class Heat:
    """Mutable fields: `_counts` by segment key, `_total` of the reads here, `_faded_s`."""

    def __init__(self) -> None:
        self._counts: dict[bytes, _Count] = {}
        self._total = 0.0
        self._faded_s = 0.0

    def read(self, segment_key: bytes, now_s: float, *, most: int = COPIES_MAX) -> int:
        """Count one read; return how many copies the segment shall have now, at `most` one a
        node."""
        self._fade(now_s)
        count = self._counts.get(segment_key)
        if count is None:
            if len(self._counts) >= SEGMENTS_MAX:
                self._forget()
            count = self._counts[segment_key] = _Count()
        count.here += 1
        count.reads += count.copies
        self._total += 1
        count.copies = self._earned(count, min(most, COPIES_MAX))
        return count.copies

    def hot(self) -> int:
        """Return how many segments have more copies than one."""
        return sum(count.copies > 1 for count in self._counts.values())

    def _earned(self, count: _Count, most: int) -> int:
        """Return the copies that spread a segment's reads to SHARE of what else the node serves."""
        if count.reads < READS_MIN:
            return 1
        others = max(self._total - count.here, 1.0)
        wanted = count.reads / (SHARE * others)
        if count.copies / 2 <= wanted <= count.copies <= most:
            return count.copies  # not worth the move
        copies = 1
        while copies < wanted:
            copies *= 2
        return min(copies, most)

    def _fade(self, now_s: float) -> None:
        """Halve everything once a half-life, and drop what has faded away."""
        while now_s - self._faded_s >= HALF_LIFE_S:
            if not self._counts:
                self._faded_s = now_s
                return
            self._faded_s += HALF_LIFE_S
            self._total /= 2
            for key, count in list(self._counts.items()):
                count.here /= 2
                count.reads /= 2
                if count.reads < 1:
                    self._total -= count.here
                    del self._counts[key]

    def _forget(self) -> None:
        for key in sorted(self._counts, key=lambda key: self._counts[key].reads)[
            : SEGMENTS_MAX // 8
        ]:
            self._total -= self._counts.pop(key).here
