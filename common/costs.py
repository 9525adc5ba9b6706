"""Load or recompute: what a block costs either way, from what was measured lately. Pure.

Loading a range pays when bytes ÷ bandwidth + round trip < tokens ÷ prefill rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_WEIGHT = 0.2  # of the newest measurement: about five of them to follow a change
_ROUND_TRIP_S = 0.001  # two calls on one host, measured 0.3 ms each when idle
_BANDWIDTH_START = 1e9  # bytes a second, until something was measured: loopback TCP gives that


class Costs:
    """Running estimates. Mutable fields: `bytes_per_s` (of all pulls together), `tokens_per_s` (of
    prefill), `_pulls` (under way)."""

    def __init__(self, tokens_per_s: float) -> None:
        assert tokens_per_s > 0
        self.bytes_per_s = _BANDWIDTH_START
        self.tokens_per_s = tokens_per_s
        self._pulls = 0

    @contextmanager
    def pulling(self) -> Iterator[None]:
        """Count a pull while it is under way. Pulls share the way, as prompts share a step: one's
        own time would tell of its company, and all would compute what each could have loaded."""
        self._pulls += 1
        try:
            yield
        finally:
            self._pulls -= 1

    def pulled(self, size_bytes: int, seconds: float) -> None:
        """Learn from a pull, while it is still counted."""
        if size_bytes and seconds > 0:
            rate = max(self._pulls, 1) * size_bytes / seconds
            self.bytes_per_s += _WEIGHT * (rate - self.bytes_per_s)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Learn from a step over `tokens` prompt tokens."""
        if tokens and seconds > 0:
            self.tokens_per_s += _WEIGHT * (tokens / seconds - self.tokens_per_s)

    def loading_pays(self, size_bytes: int, tokens: int) -> bool:
        """Whether a range of `tokens` tokens comes sooner from the store than from computing it."""
        load_s = size_bytes / self.bytes_per_s + _ROUND_TRIP_S
        return load_s < tokens / self.tokens_per_s
