"""Faults that systems of this kind have had, by number: what `@pytest.mark.fault(number=…)` means.

`pytest -m "fault(number=11)"` runs everything that is about one of them, simulated or on real
processes. `ON_PROCESSES` are those that a test on real processes must prove; `test_faults.py`
watches that each has one. The numbers are those of the project's catalogue of faults; one that no
test here carries has no line.
"""

from __future__ import annotations

FAULTS: dict[int, str] = {
    1: "A reader outlives its lease, and reads what the slot's next owner has put there.",
    2: "A request goes while its bytes are on the way, and they land in its slots' next owner.",
    3: "A peer dies or hangs in mid-transfer: its slots leak, or are given away too early.",
    4: "Abort, end, failure and timeout of one request meet, in any order, and release twice.",
    6: "A client leaves, at any boundary, and work or memory stays behind.",
    8: "A writer dies between begin and commit: its keys stay blocked, or half of it is read.",
    9: "A get and a put, or two puts, of the same key at once.",
    11: "A transfer says that it succeeded, and moved nothing, or a part, or zeros.",
    13: "Blocks are loaded into the wrong positions, when a part of them was there already.",
    16: "A block that failed its check is found again by the next request.",
    17: "A store node restarts, and old names or places lead to other bytes.",
    19: "A long neighbour or another setting changes KV that is stored under the same name.",
    20: "Processes derive different names from the same tokens.",
    24: "Members with different settings work together, instead of being refused by name.",
    25: "The whole prompt is cached: its last token is computed into a block that others share.",
    26: "Prompts at every edge: none, one token, a block, a chunk, the pool, the window, over it.",
    29: "A prefill worker dies in the middle of a job.",
    30: "A decode worker dies in the middle of a stream.",
    31: "A store node dies.",
    32: "The broker is away for a while.",
    33: "A worker hangs instead of dying.",
    36: "Another process has the address of one that is gone.",
    38: "One tenant floods, and others wait behind all of it.",
    40: "A stop string, split over tokens, leaks its beginning or holds back too much.",
    41: "A character, split over tokens, comes out as a replacement character.",
    43: "`cached_tokens` counts what was computed, or not all that was not.",
    45: "A side door is open to whoever reaches it, or takes what it cannot know to be meant.",
    46: "A node with one segment of a long prompt dies, and all that follows is computed again.",
    47: "More long prompts are in flight than the store holds.",
    48: "A worker with bad memory or a bad kernel stores wrong KV under right names.",
    49: "The last will of a member's earlier start comes after the presence of its next one.",
}

ON_PROCESSES = frozenset(FAULTS) - {17, 32, 38}
