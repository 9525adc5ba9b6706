"""Whether a bucket answers, and when to ask it again. Pure.

    answers ──FAULTS_MAX calls in a row fail──> out: nobody asks it
       ^                                           │ a wait, twice as long each time
       └────────── the next listing works <────────┘

One call that fails is no outage: S3 says "slow down" at times.
"""

from __future__ import annotations

FAULTS_MAX = 3
FIRST_WAIT_S, LAST_WAIT_S = 1.0, 60.0


class Outage:
    """Mutable fields: `_faults` (in a row), `_begun_s` (None: it answers), `_wait_s`, `_again_s`
    (when it is asked next)."""

    def __init__(self) -> None:
        self._faults = 0
        self._begun_s: float | None = None
        self._wait_s = FIRST_WAIT_S
        self._again_s = 0.0

    @property
    def is_on(self) -> bool:
        return self._begun_s is not None

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to ask again."""
        return self.is_on and now_s >= self._again_s

    def failed(self, now_s: float) -> bool:
        """A call has failed; returns whether that is where an outage begins."""
        self._faults += 1
        # Those that were under way when it began say nothing new.
        return self._faults >= FAULTS_MAX and not self.is_on and self.begin(now_s)

    def begin(self, now_s: float) -> bool:
        """It does not answer; returns whether that is new."""
        begins = not self.is_on
        if begins:
            self._begun_s, self._wait_s = now_s, FIRST_WAIT_S
        else:
            self._wait_s = min(2 * self._wait_s, LAST_WAIT_S)
        self._again_s = now_s + self._wait_s
        return begins

    def worked(self, now_s: float) -> float | None:
        """A call was answered; returns how long an outage was that ends with it."""
        begun_s, self._begun_s, self._faults = self._begun_s, None, 0
        return None if begun_s is None else now_s - begun_s
