"""Python's collector of cycles, kept from stopping a process that serves.

A full collection walks every object. What a worker has loaded, torch above all, are some hundred
thousand that live as long as it does: a tenth of a second between two tokens, for nothing.
"""

from __future__ import annotations

import gc

# A step or a get makes some hundred objects that the collector counts, and nearly all die at once.
THRESHOLDS = (20_000, 20, 20)


def spare_what_is_loaded() -> None:
    """Collect what loading has left, and from now on only what comes later. Call it once all is
    loaded, in a process of one's own."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
