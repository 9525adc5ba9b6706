"""Which erasures a node has heard of, so that it can tell them to nodes that were away. Pure.

    heard ──> kept, the last KEPT_MAX ──> past: their ids alone ──> forgotten: the youngest's age
                 │                           │                          │
    who lacks it │ is told                   └── has missed it ─────────┴─ who was away since
                 v                               v                         before may have missed it
              erases by it                    discards all that it has

Times are of the own clock; ages travel. It refuses to know where blocks are, and files.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from kvass.kvstore.erasure import (
    ID_BYTES,
    KEPT_KEYS_MAX,
    KEPT_MAX,
    PAST_MAX,
    Age,
    Erasure,
    JoinedIds,
    split_ids,
)

# What one node knows all that are up know within a few rounds of `node/copies/exchange.py`.
SLACK_S = 60.0


@dataclass(slots=True, eq=False)
class Kept:
    """One erasure here. `is_done`: in memory and on flash; `bucket_owes`: the bucket has still to
    carry it out. `blocks` and `ends` are for who asks again."""

    erasure: Erasure
    made_s: float
    is_done: bool = False
    bucket_owes: bool = False
    blocks: int = 0
    ends: tuple[bytes, ...] = ()


class Saved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a node writes down. `wall_s` is the host's own wall clock then; ages are of then;
    `past_ages` are floats of four bytes. `owed`: what was not carried out everywhere; `owes_all`:
    all that is below memory was to go, and had not gone."""

    wall_s: float
    erasures: tuple[Erasure, ...]
    past: JoinedIds
    past_ages: Annotated[bytes, Meta(max_length=4 * PAST_MAX)]
    forgotten_s: Age | None
    touched_s: Age | None
    owed: tuple[Erasure, ...] = ()
    owes_all: bool = False

    def __post_init__(self) -> None:
        if len(self.past) % ID_BYTES or len(self.past_ages) % 4:
            raise ValueError("a half id or age")


class Heard:
    """Mutable fields: `_kept` by id, `_keys` (that they name), `_past` (ids of those not kept any
    more, with when they were made, the first one first), `forgotten_at_s` (when the youngest of the
    rest was made), `touched_at_s` (when this node last knew all that another one knows)."""

    def __init__(self, kept_max: int = KEPT_MAX, past_max: int = PAST_MAX) -> None:
        self._kept_max = kept_max
        self._past_max = past_max
        self._kept: dict[bytes, Kept] = {}
        self._keys = 0
        self._past: dict[bytes, float] = {}
        self.forgotten_at_s: float | None = None
        self.touched_at_s: float | None = None

    def __contains__(self, erasure_id: object) -> bool:
        return erasure_id in self._kept or erasure_id in self._past

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Kept]:
        return iter(list(self._kept.values()))

    def get(self, erasure_id: bytes) -> Kept | None:
        """Return what is kept under an id."""
        return self._kept.get(erasure_id)

    def ids(self) -> tuple[bytes, ...]:
        """Return the ids of all that are kept."""
        return tuple(self._kept)

    def past(self) -> bytes:
        """Return the ids of those that are not kept any more."""
        return b"".join(self._past)

    def add(self, erasure: Erasure, now_s: float) -> Kept:
        """Keep one that was not heard before; the oldest go when there are too many."""
        assert erasure.id not in self
        kept = self._kept[erasure.id] = Kept(erasure, now_s - erasure.age_s)
        self._keys += erasure.key_count
        if erasure.key_count > KEPT_KEYS_MAX:
            self._let_go(kept)
        while len(self._kept) > self._kept_max or self._keys > KEPT_KEYS_MAX:
            # What is still owed goes last: who lets it go forgets to carry it out.
            self._let_go(min(self._kept.values(), key=lambda e: (not e.is_done, e.made_s)))
        return kept

    def _let_go(self, kept: Kept) -> None:
        del self._kept[kept.erasure.id]
        self._keys -= kept.erasure.key_count
        self._note_past(kept.erasure.id, kept.made_s)

    def _note_past(self, erasure_id: bytes, made_s: float) -> None:
        self._past[erasure_id] = made_s
        while len(self._past) > self._past_max:
            self._note_forgotten(self._past.pop(next(iter(self._past))))

    def _note_forgotten(self, made_s: float) -> None:
        if self.forgotten_at_s is None or made_s > self.forgotten_at_s:
            self.forgotten_at_s = made_s

    # --- what is told ---

    def told(self, erasure_ids: Iterable[bytes], now_s: float) -> tuple[Erasure, ...]:
        """Return those of these that are kept, with their ages."""
        found = (self._kept[each] for each in erasure_ids if each in self._kept)
        return tuple(_aged(each, now_s) for each in found)

    def lacking(self, theirs: Iterable[bytes], now_s: float) -> tuple[Erasure, ...]:
        """Return what somebody lacks who has heard these."""
        have = set(theirs)
        return self.told([each for each in self._kept if each not in have], now_s)

    def unknown(self, theirs: Iterable[bytes]) -> tuple[bytes, ...]:
        """Return those of these ids that were never heard of here."""
        return tuple(each for each in dict.fromkeys(theirs) if each not in self)

    def forgotten_s(self, now_s: float) -> float | None:
        """Return the age of the youngest of which not even the id is known; None: there is none."""
        return _age(self.forgotten_at_s, now_s)

    # --- being away ---

    def may_have_missed(self, past: bytes, forgotten_s: float | None, now_s: float) -> bool:
        """Whether there is, or may be, an erasure that this node has not heard of and that a peer,
        who says this of itself, cannot tell it any more."""
        if self.unknown(split_ids(past)):
            return True
        if forgotten_s is None:
            return False
        return self.touched_at_s is None or now_s - forgotten_s > self.touched_at_s - SLACK_S

    def learn(self, past: bytes, forgotten_s: float | None, now_s: float) -> None:
        """Whatever this node may have missed of these, it has nothing left of."""
        for erasure_id in self.unknown(split_ids(past)):
            self._note_past(erasure_id, now_s)
        if forgotten_s is not None:
            self._note_forgotten(now_s - forgotten_s)

    def touch(self, now_s: float) -> None:
        """This node now knows all that a peer knows."""
        self.touched_at_s = now_s

    # --- what lasts ---

    def saved(self, now_s: float, wall_s: float, *, owes_all: bool = False) -> Saved:
        """Return what is to be written down, apart what is not carried out yet."""
        done, owed = list[Erasure](), list[Erasure]()
        for each in self._kept.values():
            is_over = each.is_done and not each.bucket_owes
            (done if is_over else owed).append(_aged(each, now_s))
        return Saved(
            wall_s,
            tuple(done),
            self.past(),
            array("f", (now_s - made_s for made_s in self._past.values())).tobytes(),
            self.forgotten_s(now_s),
            _age(self.touched_at_s, now_s),
            tuple(owed),
            owes_all,
        )

    def load(self, saved: Saved, now_s: float, wall_s: float) -> None:
        """Take in what an earlier life has written down; what is owed is not done."""
        away_s = max(wall_s - saved.wall_s, 0.0)
        ages = array("f", saved.past_ages)
        for erasure_id, age_s in zip(split_ids(saved.past), ages, strict=False):
            self._note_past(erasure_id, now_s - away_s - age_s)
        if saved.forgotten_s is not None:
            self._note_forgotten(now_s - away_s - saved.forgotten_s)
        if saved.touched_s is not None:
            self.touched_at_s = now_s - away_s - saved.touched_s
        for erasures, is_done in ((saved.erasures, True), (saved.owed, False)):
            for erasure in erasures:
                if erasure.id not in self:
                    older = msgspec.structs.replace(erasure, age_s=erasure.age_s + away_s)
                    self.add(older, now_s).is_done = is_done


def _aged(kept: Kept, now_s: float) -> Erasure:
    return msgspec.structs.replace(kept.erasure, age_s=max(now_s - kept.made_s, 0.0))


def _age(made_s: float | None, now_s: float) -> float | None:
    return None if made_s is None else max(now_s - made_s, 0.0)
