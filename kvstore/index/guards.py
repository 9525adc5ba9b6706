"""What protects blocks from eviction for a while: holds and pins. Pure.

A *hold* keeps a committed block until the job that asked for it has pulled it; a *pin* keeps what
an operator or a caller wants kept. Both have an owner and a deadline, and count against one cap, so
they can never fill the slab; a pin's owner has a quota besides. It refuses to know what a block is:
it counts the bytes of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from kvass.kvstore.index.deadlines import Deadlines

GuardKind = Literal["hold", "pin"]
Owner = tuple[GuardKind, str]

# No owner of pins may take more than this share of what all holds and pins may take together.
PIN_QUOTA_SHARE = 0.25


@dataclass(slots=True)
class _Guard:
    ends_s: float
    size_bytes: int = 0
    keys: dict[bytes, int] = field(default_factory=dict)


class Guards:
    """Protected keys by owner. Mutable fields: `_guards`, `_counts` (guards on a key), `_bytes`
    (protected bytes; each block once), `_deadlines`."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self._guards: dict[Owner, _Guard] = {}
        self._counts: dict[bytes, int] = {}
        self._bytes = 0
        self._deadlines: Deadlines[Owner] = Deadlines(self._ends_s)

    @property
    def size_bytes(self) -> int:
        """Bytes that are held or pinned, each block counted once."""
        return self._bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that may be held besides."""
        return self.cap_bytes - self._bytes

    def bytes_of(self, kind: GuardKind) -> int:
        """Return the bytes under guards of one kind, a block counted once an owner."""
        return sum(guard.size_bytes for owner, guard in self._guards.items() if owner[0] == kind)

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        return len(self._guards)

    def _ends_s(self, owner: Owner) -> float | None:
        guard = self._guards.get(owner)
        return None if guard is None else guard.ends_s

    def add(self, owner: Owner, key: bytes, size_bytes: int, ends_s: float) -> bool:
        """Protect `key` until `ends_s` at least; all of the owner's keys get the later end.

        Returns False, and changes nothing, when the cap or the owner's quota is reached.
        """
        guard = self._guards.get(owner)
        if guard is None or key not in guard.keys:
            fresh = 0 if key in self._counts else size_bytes
            if self._bytes + fresh > self.cap_bytes:
                return False
            mine = size_bytes + (guard.size_bytes if guard else 0)
            if owner[0] == "pin" and mine > self.cap_bytes * PIN_QUOTA_SHARE:
                return False
            if guard is None:
                guard = self._guards[owner] = _Guard(ends_s)
            guard.keys[key] = size_bytes
            guard.size_bytes += size_bytes
            self._counts[key] = self._counts.get(key, 0) + 1
            self._bytes += fresh
        guard.ends_s = max(guard.ends_s, ends_s)
        self._deadlines.add(owner, guard.ends_s)
        return True

    def release(self, owner: Owner) -> list[bytes]:
        """End the owner's protection; return the keys that nothing protects any more."""
        guard = self._guards.pop(owner, None)
        if guard is None:
            return []
        return [key for key, size in guard.keys.items() if self._uncount(key, size)]

    def release_keys(self, owner: Owner, keys: Iterable[bytes]) -> list[bytes]:
        """End the owner's protection of some keys; return those that nothing protects any more."""
        guard = self._guards.get(owner)
        if guard is None:
            return []
        free: list[bytes] = []
        for key in keys:
            size = guard.keys.pop(key, None)
            if size is not None:
                guard.size_bytes -= size
                if self._uncount(key, size):
                    free.append(key)
        if not guard.keys:
            del self._guards[owner]
        return free

    def forget(self, key: bytes) -> None:
        """The block is gone: no guard counts it any more."""
        if key not in self._counts:
            return
        for owner in [owner for owner, guard in self._guards.items() if key in guard.keys]:
            guard = self._guards[owner]
            size = guard.keys.pop(key)
            guard.size_bytes -= size
            self._uncount(key, size)
            if not guard.keys:
                del self._guards[owner]

    def expire(self, now_s: float) -> Iterator[bytes]:
        """End guards that ran out; yield the keys that nothing protects any more."""
        for owner in self._deadlines.due(now_s):
            yield from self.release(owner)

    def _uncount(self, key: bytes, size_bytes: int) -> bool:
        self._counts[key] -= 1
        if self._counts[key]:
            return False
        del self._counts[key]
        self._bytes -= size_bytes
        return True
