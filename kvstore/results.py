"""What a store client's calls return. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvass.common.wire import Range


@dataclass(frozen=True, slots=True)
class WaitResult:
    """Both empty: the deadline has passed."""

    visible: list[Range]
    unclaimed: list[Range]


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """`taken`: somebody else computes or writes these now."""

    granted: list[Range]
    visible: list[Range]
    taken: list[Range]


@dataclass(frozen=True, slots=True)
class PushResult:
    """`stored`: committed now, or visible already. `refused`, with one of `observe.REFUSALS`."""

    stored: set[int]
    refused: dict[int, str]
