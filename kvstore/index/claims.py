"""Who is computing which block, so that nobody else does. Pure.

    claim ──renew (claim again)──> … ──block visible──> over
      └──not renewed for `claim_s`──> nobody's; the first who asks gets it, the others see it taken

A claim is a hint with a deadline, never a lock: a block that is put without one is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvass.common.errors import Overloaded
from kvass.kvstore.index.deadlines import Deadlines

CLAIMS_MAX = 1 << 18  # 4 M tokens in the making; some 100 MB


@dataclass(slots=True)
class _Claim:
    owner: str
    ends_s: float


class Claims:
    """Claims by key. Mutable fields: `_claims`, `_owned` (keys by owner), `_deadlines`."""

    def __init__(self, claim_s: float) -> None:
        self._claim_s = claim_s
        self._claims: dict[bytes, _Claim] = {}
        self._owned: dict[str, set[bytes]] = {}
        self._deadlines: Deadlines[bytes] = Deadlines(self.ends_s)

    def __len__(self) -> int:
        return len(self._claims)

    def owner(self, key: bytes) -> str | None:
        """Return who claims `key`. Call `expire` first."""
        claim = self._claims.get(key)
        return None if claim is None else claim.owner

    def ends_s(self, key: bytes) -> float | None:
        """Return when the claim on `key` runs out, or None when there is none."""
        claim = self._claims.get(key)
        return None if claim is None else claim.ends_s

    def take(self, owner: str, key: bytes, now_s: float) -> bool:
        """Claim or renew `key`; returns False when it is somebody else's."""
        claim = self._claims.get(key)
        if claim is not None and claim.owner != owner:
            return False
        if claim is None:
            if len(self._claims) >= CLAIMS_MAX:
                raise Overloaded(f"{CLAIMS_MAX} blocks are claimed on this node")
            claim = self._claims[key] = _Claim(owner, 0.0)
            self._owned.setdefault(owner, set()).add(key)
        claim.ends_s = now_s + self._claim_s
        self._deadlines.add(key, claim.ends_s)
        return True

    def end(self, key: bytes) -> bool:
        """The claim on `key` is over, if there is one; returns whether there was."""
        claim = self._claims.pop(key, None)
        if claim is None:
            return False
        owned = self._owned[claim.owner]
        owned.discard(key)
        if not owned:
            del self._owned[claim.owner]
        return True

    def release(self, owner: str) -> list[bytes]:
        """End all claims of `owner`; return their keys."""
        keys = list(self._owned.get(owner, ()))
        for key in keys:
            self.end(key)
        return keys

    def expire(self, now_s: float) -> Iterator[bytes]:
        """End claims that ran out; yield their keys."""
        for key in self._deadlines.due(now_s):
            self.end(key)
            yield key
