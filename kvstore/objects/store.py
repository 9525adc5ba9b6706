"""Where objects are: the seam. A bucket behind it is `s3.py`; tests have one in memory.

Every fault (nobody answers, an answer that says no, too late) is Unavailable, with what was to be
done in its message and never a secret; what follows is the tier's matter.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from kvass.kvstore.objects.shelf import Listed

DELETES_MAX = 1000  # of one call: S3's bound of one request


class ObjectStore(Protocol):
    """A bucket, or a part of one, that belongs to one cluster. Each call ends within seconds."""

    async def put(self, name: str, data: memoryview) -> None:
        """Make an object, or make it anew: whole, or not at all."""
        ...

    async def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """Return ranges of an object's bytes, shorter ones where it ends; None when it is not
        there."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects, those that are there."""
        ...

    def pages(self, under: str) -> AsyncGenerator[list[Listed], None]:
        """Return, page after page, the objects whose names begin with these parts."""
        ...
