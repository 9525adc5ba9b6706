"""What is remembered of blocks that are gone: how often they were used, and when last. Pure.

A table of fixed size, one word a place: a key has one place, and who comes later has it. It
remembers no key, only 20 bits of one, so about one block in a million is taken for another; that
costs a wrong guess, nothing else.
"""

from __future__ import annotations

from array import array

_USES_BITS, _PRINT_BITS = 4, 20
_USES_MASK, _PRINT_MASK = (1 << _USES_BITS) - 1, (1 << _PRINT_BITS) - 1


class Ghosts:
    """`(uses, stamp)` by key, `1 <= uses <= 15`. Mutable field: `_words` (a power of two of them).

    A word is the stamp (40 bits), the key's print, the uses; 0 is an empty place.
    """

    def __init__(self, places: int) -> None:
        self._words = array("Q", bytes(8 * (1 << max(0, places - 1).bit_length())))

    def __len__(self) -> int:
        return len(self._words)

    def add(self, key: bytes, uses: int, stamp: int) -> tuple[int, int] | None:
        """Remember a block; returns what its place remembered before."""
        place, mark = self._place(key)
        before = self._words[place]
        assert 0 < uses <= _USES_MASK
        self._words[place] = (stamp << _PRINT_BITS | mark) << _USES_BITS | uses
        return _memory(before) if before else None

    def take(self, key: bytes) -> tuple[int, int] | None:
        """Forget a block; returns what was remembered of it."""
        place, mark = self._place(key)
        word = self._words[place]
        if not word or word >> _USES_BITS & _PRINT_MASK != mark:
            return None
        self._words[place] = 0
        return _memory(word)

    def all(self) -> list[tuple[int, int]]:
        """Return everything remembered."""
        return [_memory(word) for word in self._words if word]

    def _place(self, key: bytes) -> tuple[int, int]:
        number = int.from_bytes(key[:8], "little")
        return number & (len(self._words) - 1), number >> (64 - _PRINT_BITS)


def _memory(word: int) -> tuple[int, int]:
    return word & _USES_MASK, word >> (_USES_BITS + _PRINT_BITS)
