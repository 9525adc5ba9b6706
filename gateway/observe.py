"""One request as its client sees it, measured: first token, between tokens, to the end, outcome."""

from __future__ import annotations

import logging
import math

from kvass.common import errors
from kvass.common.clock import Clock
from kvass.common.metrics import RequestMetrics
from kvass.common.wire import Delta
from kvass.gateway.replies import Usage

HIT_RATE_MEMORY_S = 120.0  # the last minutes: old prompts fade by 1/e in this time

_OUTCOMES: tuple[tuple[type[errors.KvassError], str], ...] = (
    (errors.Invalid, "invalid"),
    (errors.Overloaded, "overloaded"),
    (errors.Unavailable, "unavailable"),
    (errors.DeadlineExceeded, "deadline"),
)


def outcome_of(error: errors.KvassError) -> str:
    """Return the label under which a failed request is counted."""
    return next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "error")


def note_failure(log: logging.Logger, error: errors.KvassError, what: str) -> None:
    """Say what failed at a worker, and goes on at another: no warning where it leaves in order."""
    is_leave = isinstance(error, errors.Leaving)
    log.log(logging.INFO if is_leave else logging.WARNING, "%s: %s", what, error)


class HitRate:
    """The share of prompt tokens that were not computed, of late. Mutable fields: all."""

    def __init__(self) -> None:
        self.prompt = self.cached = 0.0
        self._last_s = 0.0

    def add(self, usage: Usage, now_s: float) -> float:
        """Take in one request; return the share."""
        kept = math.exp(-max(0.0, now_s - self._last_s) / HIT_RATE_MEMORY_S)
        self._last_s = now_s
        self.prompt = self.prompt * kept + usage.prompt_tokens
        self.cached = self.cached * kept + usage.cached_tokens
        return self.cached / self.prompt if self.prompt else 0.0


class Watch:
    """Follows one request. Mutable fields: `_first_seen`, `_last_s` by choice."""

    def __init__(self, metrics: RequestMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._start_s = clock.now_s()
        self._first_seen = False
        self._last_s: dict[int, float] = {}

    def saw(self, choice: int, delta: Delta) -> None:
        """Take in what a worker sent."""
        if not delta.token_ids:
            return
        now_s = self._clock.now_s()
        if not self._first_seen:
            self._first_seen = True
            self._metrics.first_token_seconds.observe(now_s - self._start_s)
        last_s = self._last_s.get(choice)
        if last_s is not None:
            self._metrics.inter_token_seconds.observe((now_s - last_s) / len(delta.token_ids))
        self._last_s[choice] = now_s

    def served(self, usage: Usage, hit_rate: HitRate) -> None:
        """The request was answered whole."""
        now_s = self._clock.now_s()
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.cached_tokens.inc(usage.cached_tokens)
        self._metrics.generated_tokens.inc(usage.completion_tokens)
        self._metrics.hit_rate.set(hit_rate.add(usage, now_s))
        self.ended("ok")

    def ended(self, outcome: str) -> None:
        """The request is over, this way."""
        self._metrics.requests.labels(outcome).inc()
        self._metrics.end_to_end_seconds.observe(self._clock.now_s() - self._start_s)
