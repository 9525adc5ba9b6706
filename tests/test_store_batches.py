"""What the store's index does for many blocks of a put at once is what it does for one after the
other: the same answers, the same state, whatever comes between."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.common.errors import Invalid
from kvass.kvstore.index.leases import Lease
from kvass.kvstore.index.puts import Move
from kvass.kvstore.index.shares import Allotments
from store_model import (
    GROUPS,
    SESSIONS,
    SIZES,
    key_of,
    new_index,
    order_of,
    space_of,
    tenant_of,
)

STEPS = 100
PUTS = 6
BLOCKS = 12  # a slab's, or a put's at most


class Side:
    """An index that takes a put's blocks at once, or one after the other. Mutable: all fields."""

    def __init__(self, quota_bytes: int, *, at_once: bool) -> None:
        quotas = {"other": quota_bytes, tenant_of(0, 5): quota_bytes} if quota_bytes else {}
        self.index = new_index(allotments=Allotments(quotas=quotas))
        self.index.ledger.copy_bytes = lambda source, target, size: None
        self.at_once = at_once
        self.now_s = 0.0
        self.offered: dict[int, list[bytes]] = {}
        self.moves: list[list[Move]] = []
        self.leases: list[Lease] = []

    def begin(self, number: int, draw: random.Random) -> object:
        chain, first = draw.randrange(4), draw.choice([0, 0, 0, 1, 2, 4])
        groups = draw.choice([*[range(GROUPS)] * 4, range(0, 1), range(1, 2)])
        order = order_of(
            chain,
            range(first, first + draw.choice([1, 2, 3, 4, 4, 6, 8])),
            put_id=f"p{number}",
            session=SESSIONS[number % len(SESSIONS)],
            groups=groups,
            now_s=self.now_s,
            hold=draw.choice(["", "", "j0", "j1"]),
        )
        headers = list(order.headers)
        if draw.random() < 0.1:  # twice the same
            headers.insert(draw.randrange(len(headers) + 1), draw.choice(headers))
        if draw.random() < 0.1:  # of several tenants
            other = draw.randrange(len(headers))
            headers[other] = msgspec.structs.replace(headers[other], tenant="other")
        spares, is_copy = draw.random() < 0.1, draw.random() < 0.15
        as_of = draw.randrange(self.index.erasures.number + 1) if is_copy else None
        self.offered[number] = [header.key for header in headers]
        order = replace(order, headers=headers, spares=spares, as_of=as_of)
        try:
            return self.index.put_begin(order, self.now_s)
        except Invalid as error:
            return str(error)

    def begin_moves(self, number: int, draw: random.Random) -> object:
        wanted = [key for key in self.offered.get(number, []) if draw.random() < 0.85]
        whose = f"p{number}", SESSIONS[number % len(SESSIONS)]
        batches = [wanted] if self.at_once else [[key] for key in wanted]
        begun = [m for keys in batches for m in self.index.begin_moves(*whose, keys, self.now_s)]
        self.moves.append([move for move in begun if move is not None])
        return [move and (move.entry.header.key, move.offset, move.size) for move in begun]

    def end_moves(self, number: int, draw: random.Random) -> object:
        if not self.moves:
            return None
        moves = self.moves.pop(draw.randrange(len(self.moves)))
        share = draw.choice([0.7, 1.0, 1.0])
        sums = [tuple(m.groups) if draw.random() < share else None for m in moves]
        if self.at_once:
            return self.index.end_moves(moves, sums)
        return [self.index.end_move(move, each) for move, each in zip(moves, sums, strict=True)]

    def end_put(self, number: int, draw: random.Random) -> None:
        session = SESSIONS[number % len(SESSIONS)]
        if draw.random() < 0.2:
            self.index.leave(session, self.now_s)
        else:
            self.index.put_abort(f"p{number}", session, self.now_s)

    def pass_time(self, number: int, draw: random.Random) -> None:
        self.now_s += draw.choice([0.1, 0.1, 1.0, 3.0, 40.0])
        self.index.expire(self.now_s)

    def read(self, number: int, draw: random.Random) -> object:
        if self.leases and draw.random() < 0.5:
            lease = self.leases.pop(draw.randrange(len(self.leases)))
            return self.index.get_end(lease.lease_id, self.now_s)
        chain = draw.randrange(4)
        keys = [key_of(chain, index) for index in range(draw.randrange(1, BLOCKS))]
        begun = self.index.get_begin(keys, SIZES[chain], GROUPS, self.now_s)
        self.leases += [begun] if begun is not None else []
        return begun and [(entry.header.key, entry.slot.offset) for entry in begun.entries]

    def erase(self, number: int, draw: random.Random) -> object:
        chain = draw.randrange(4)
        if draw.random() < 0.3:
            return self.index.bar(draw.choice(SESSIONS), [], self.now_s)
        found = {"tenant": tenant_of(chain, 5), "namespace": space_of(chain)}
        by, what = draw.choice([*found.items(), ("key", key_of(chain, 1))])
        return self.index.drop(lambda header: getattr(header, by) == what, self.now_s)

    def protect(self, number: int, draw: random.Random) -> object:
        keys = [key_of(draw.randrange(4), index) for index in range(draw.randrange(6))]
        owner = draw.choice(["j0", "j1"])
        step: Callable[[], Any] = draw.choice(
            [
                lambda: self.index.pin("o", keys, self.now_s + 10, self.now_s),
                lambda: self.index.claim("a", keys, self.now_s),
                lambda: self.index.unhold(owner, keys, self.now_s),
                lambda: self.index.release_hold(owner, self.now_s),
                lambda: sorted(self.index.take_news()),
            ]
        )
        return step()

    def state(self) -> object:
        index, ledger = self.index, self.index.ledger
        ledger.check()
        entries = {
            key: (
                entry.header,
                entry.slot.offset,
                entry.state,
                dict(entry.groups),
                (entry.moves, entry.leases, entry.ends_s),
                key in index.guards,
            )
            for key, entry in ledger.entries.items()
        }
        gone = sorted((e.slot.offset, e.state, e.moves, e.leases) for e in ledger.gone)
        puts = {i: (put.ends_s, set(put.entries)) for i, put in index.puts._puts.items()}
        return entries, gone, puts, index.counts(), ledger._children, sorted(ledger.news)


STEPS_DRAWN = (
    *[Side.begin, Side.begin_moves, Side.end_moves] * 4,
    *[Side.end_put, Side.pass_time, Side.read, Side.read, Side.protect, Side.protect, Side.erase],
)


@given(seed=st.integers(0, 1 << 32), quota_blocks=st.sampled_from([0, 0, 3, 6]))
@settings(max_examples=150)
def test_many_blocks_at_once_are_as_one_after_the_other(seed: int, quota_blocks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sides = [Side(quota_blocks * SIZES[0], at_once=at_once) for at_once in (True, False)]
        patch.setattr(sides[1].index.puts, "_begin_new", lambda put, keys, order: [])
        draw = random.Random(seed)
        for _ in range(STEPS):
            step, number, own = draw.choice(STEPS_DRAWN), draw.randrange(PUTS), draw.random()
            answers = [step(side, number, random.Random(own)) for side in sides]
            assert answers[0] == answers[1], step.__name__
            assert sides[0].state() == sides[1].state(), step.__name__
