"""The book of a landing memory: who has which bytes, and when its agent must be rebuilt. Pure.

    free ──lend──> lent ──landed──> landed ──settle──> free
                    │                 │
                    ├──settle──> free ├──abandon──> quarantined ──rebuilt──> free
                    └──rebuilt (the bound was reached)──> orphaned ──settle or abandon──> free

Late bytes may land in what is quarantined until the agent that owns the memory is destroyed. That
also ends every clean loan, so it waits until none is out; but never longer than `BOUND_S`, and not
once the quarantine has reached its cap. Nothing is lent during the last `DRAIN_S` of the wait.

Invariants: ranges never overlap; free + lent (landed and orphaned ones too) + quarantined == total.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ALIGNMENT = 4096  # a loan's bytes share no page with another's
LOANS_MAX = 1_024
BOUND_S = 5.0  # from the first abandoned loan to the rebuild, however busy the landing is
DRAIN_S = 1.0  # a loan lasts milliseconds, so nearly all end by themselves within this
QUARANTINE_SHARE = 0.5  # of the memory; with more the landing would be too small to be useful

LoanState = Literal["lent", "landed", "quarantined", "orphaned"]


@dataclass(slots=True)
class LentRange:
    """Bytes [offset, offset + size) under a tag. Mutable field: `state`."""

    offset: int
    size: int
    state: LoanState = "lent"


class LoanBook:
    """Mutable fields: `_loans` by tag, in order of offset; `_quarantined_since_s`."""

    def __init__(self, size: int) -> None:
        if size < ALIGNMENT:
            raise ValueError(f"a landing memory of {size} bytes; expected at least {ALIGNMENT}")
        self.size = size // ALIGNMENT * ALIGNMENT
        self._loans: dict[bytes, LentRange] = {}
        self._quarantined_since_s: float | None = None

    def lend(self, tag: bytes, size: int, now_s: float) -> int | None:
        """Return the offset of `size` contiguous bytes, or None when none are free now."""
        assert tag not in self._loans and size > 0
        if len(self._loans) >= LOANS_MAX or self._draining(now_s):
            return None
        size = -(-size // ALIGNMENT) * ALIGNMENT
        offset = 0
        for loan in sorted(self._loans.values(), key=lambda loan: loan.offset):
            if loan.offset - offset >= size:
                break
            offset = loan.offset + loan.size
        if self.size - offset < size:
            return None
        self._loans[tag] = LentRange(offset, size)
        return offset

    def is_lent(self, tag: bytes) -> bool:
        """Return whether an arrival under `tag` means anything."""
        loan = self._loans.get(tag)
        return loan is not None and loan.state == "lent"

    def landed(self, tag: bytes) -> None:
        """Note that a loan's bytes are there and its writer has heard so: it needs no agent any
        more. A no-op for one that has ended."""
        if self.is_lent(tag):
            self._loans[tag].state = "landed"

    def settle(self, tag: bytes) -> None:
        """Take a loan back; a no-op for one that has ended."""
        loan = self._loans.get(tag)
        if loan is not None and loan.state != "quarantined":
            del self._loans[tag]

    def abandon(self, tag: bytes, now_s: float) -> None:
        """Quarantine a loan; a no-op for one that has ended."""
        loan = self._loans.get(tag)
        if loan is None or loan.state == "quarantined":
            return
        if loan.state == "orphaned":
            del self._loans[tag]  # its agent is gone: nothing can land there
            return
        loan.state = "quarantined"
        if self._quarantined_since_s is None:
            self._quarantined_since_s = now_s

    def rebuild_due_s(self) -> float | None:
        """Return from when on the agent must be rebuilt (-inf: now); None when it need not."""
        if self._quarantined_since_s is None:
            return None
        if self._bytes("lent") == 0 or self._bytes("quarantined") >= self.size * QUARANTINE_SHARE:
            return float("-inf")
        return self._quarantined_since_s + BOUND_S

    def rebuilt(self) -> list[bytes]:
        """Note that the agent was destroyed: free the quarantine, return the tags of lent ones that
        it took with it. Their bytes stay taken until they are settled or abandoned."""
        self._quarantined_since_s = None
        orphans = []
        for tag, loan in list(self._loans.items()):
            if loan.state == "quarantined":
                del self._loans[tag]
                continue
            if loan.state == "lent":
                orphans.append(tag)
            loan.state = "orphaned"
        return orphans

    def is_empty(self) -> bool:
        """Return whether nothing is awaited: nothing is lent and nothing is in quarantine."""
        return not any(loan.state in ("lent", "quarantined") for loan in self._loans.values())

    def counts(self) -> dict[str, int]:
        """Return bytes by state; free, lent and quarantined sum to total."""
        quarantined = self._bytes("quarantined")
        lent = sum(self._bytes(state) for state in ("lent", "landed", "orphaned"))
        return {
            "free": self.size - lent - quarantined,
            "lent": lent,
            "quarantined": quarantined,
            "total": self.size,
        }

    def _bytes(self, state: LoanState) -> int:
        return sum(loan.size for loan in self._loans.values() if loan.state == state)

    def _draining(self, now_s: float) -> bool:
        since_s = self._quarantined_since_s
        return since_s is not None and now_s >= since_s + BOUND_S - DRAIN_S
