"""What a node knows of erasures: whoever comes back is told all, or knows that it may have missed
one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flash_model import header_of
from kvass.common.keys import KEY_BYTES
from kvass.kvstore.erasure import (
    ID_BYTES,
    KEPT_KEYS_MAX,
    Criteria,
    Erasure,
    Exchange,
    Exchanged,
    joined,
    split,
)  # fmt: skip
from kvass.kvstore.index.erasures import BAR_S, Erasures
from kvass.kvstore.index.heard import SLACK_S, Heard, Saved

NODES, KEPT, PAST = 3, 3, 5


def id_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def erasure(number: int, age_s: float = 0.0, keys: int = 0) -> Erasure:
    named = joined([bytes([n % 256]) * KEY_BYTES for n in range(keys)]) if keys else None
    return Erasure(id_of(number), age_s, tenant=f"t{number}", keys=named)


def restarted(node: Heard, now_s: float, wall_s: float) -> Heard:
    """Return what the next life knows; its clock begins anew."""
    data = msgspec.msgpack.encode(node.saved(now_s, wall_s))
    after = Heard()
    after.load(msgspec.msgpack.decode(data, type=Saved), 1.0, wall_s + 5.0)
    return after


class ComingAndGoing(RuleBasedStateMachine):
    """Nodes that hear of erasures, are away, restart, meet: a block that a node has was written
    after every erasure that it was told of, or it goes. Here the blocks of a node are the erasures
    that cover something which it has not erased (`dirty`)."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1e6
        self.count = 0
        self.nodes = [Heard(KEPT, PAST) for _ in range(NODES)]
        self.dirty: list[set[int]] = [set() for _ in range(NODES)]
        self.up = [True] * NODES

    @rule(passes_s=st.floats(0, 3 * SLACK_S))
    def time(self, passes_s: float) -> None:
        self.now_s += passes_s

    @rule()
    def erase(self) -> None:
        self.count += 1
        for number, node in enumerate(self.nodes):
            if self.up[number]:
                node.add(erasure(self.count), self.now_s).is_done = True
            else:
                self.dirty[number].add(self.count)
        if not any(self.up):
            for dirty in self.dirty:  # nobody was told: it has not happened
                dirty.discard(self.count)

    @rule(number=st.integers(0, NODES - 1))
    def leave(self, number: int) -> None:
        if sum(self.up) > 1:  # who heard stays until somebody else has
            self.up[number] = False

    @rule(number=st.integers(0, NODES - 1))
    def come(self, number: int) -> None:
        if self.up[number]:
            return
        self.up[number] = True
        for other in range(NODES):
            if other != number and self.up[other]:
                self.meet(number, other)
        assert not self.dirty[number], "it has something that was erased"

    def meet(self, one: int, two: int) -> None:
        for here, there in ((one, two), (two, one)):
            mine, theirs = self.nodes[here], self.nodes[there]
            past, forgotten_s = theirs.past(), theirs.forgotten_s(self.now_s)
            if mine.may_have_missed(past, forgotten_s, self.now_s):
                self.dirty[here].clear()
            mine.learn(past, forgotten_s, self.now_s)
            for each in theirs.lacking(mine.ids(), self.now_s):
                if each.id not in mine:
                    mine.add(each, self.now_s).is_done = True
                    self.dirty[here].discard(int.from_bytes(each.id, "big"))
            mine.touch(self.now_s)

    @rule()
    def all_meet(self) -> None:
        """As they do every few seconds."""
        for one in range(NODES):
            for two in range(one):
                if self.up[one] and self.up[two]:
                    self.meet(one, two)

    @invariant()
    def bounded(self) -> None:
        for node in self.nodes:
            assert len(node) <= KEPT and len(node.past()) <= ID_BYTES * PAST


TestComingAndGoing = ComingAndGoing.TestCase


def test_a_restart_knows_what_was_done_and_how_old_it_is() -> None:
    node = Heard()
    node.add(erasure(1, age_s=10.0), 100.0).is_done = True
    node.add(erasure(2), 100.0)  # not erased everywhere: it is still to be carried out
    node.touch(120.0)
    after = restarted(node, now_s=130.0, wall_s=5_000.0)
    assert [(each.erasure.id, each.is_done) for each in after] == [
        (id_of(1), True),
        (id_of(2), False),
    ]
    (told,) = after.told((id_of(1),), 1.0)
    assert told.age_s == pytest.approx(10 + 30 + 5)
    assert after.touched_at_s == pytest.approx(1.0 - 5 - 10)
    assert not after.may_have_missed(b"", None, 1.0)
    assert after.may_have_missed(b"", 10.0, 1.0), "one that was made since"
    assert not after.may_have_missed(b"", 20.0 + SLACK_S, 1.0)
    assert after.may_have_missed(id_of(7), None, 1.0) and not after.may_have_missed(
        id_of(1), None, 1.0
    )


def test_a_wall_clock_that_was_set_back_makes_nothing_younger() -> None:
    node = Heard()
    node.add(erasure(1, age_s=10.0), 100.0).is_done = True
    after = Heard()
    after.load(node.saved(100.0, 5_000.0), 1.0, 1_000.0)
    assert after.told(after.ids(), 1.0)[0].age_s == pytest.approx(10.0)


def test_who_never_met_anybody_may_have_missed_what_was_forgotten() -> None:
    assert Heard().may_have_missed(b"", 1e9, 0.0)
    assert not Heard().may_have_missed(b"", None, 0.0)


def test_an_erasure_that_names_too_many_keys_is_remembered_by_its_id_alone() -> None:
    node = Heard()
    node.add(erasure(1, keys=3), 0.0)
    node.add(erasure(2, keys=KEPT_KEYS_MAX + 1), 0.0)
    assert node.ids() == (id_of(1),) and id_of(2) in node
    assert Heard().may_have_missed(node.past(), None, 0.0)
    node.add(erasure(3, keys=KEPT_KEYS_MAX), 1.0)
    assert node.ids() == (id_of(3),), "the oldest goes"


def test_what_is_forgotten_first_is_what_was_made_first() -> None:
    node = Heard(kept_max=2, past_max=1)
    for number, age_s in ((1, 5.0), (2, 50.0), (3, 1.0), (4, 0.0)):
        node.add(erasure(number, age_s), 100.0)
    assert set(node.ids()) == {id_of(3), id_of(4)}
    assert node.past() == id_of(1) and node.forgotten_s(100.0) == pytest.approx(50.0)


@given(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=5))
def test_keys_come_back_as_they_went(keys: list[bytes]) -> None:
    assert split(joined(keys)) == keys


def test_a_bar_told_late_ends_when_it_ends_elsewhere() -> None:
    erasures = Erasures()
    erasures.bar("w", 100.0, age_s=BAR_S - 10)
    assert erasures._is_barred("w", 109.0) and not erasures._is_barred("w", 110.0)
    erasures.bar("w", 200.0, age_s=BAR_S + 1)
    assert not erasures._is_barred("w", 200.0)
    erasures.bar("w", 300.0)
    erasures.bar("w", 300.0, age_s=100.0)
    assert erasures._is_barred("w", 300.0 + BAR_S - 1), "the later end counts"


def test_no_criteria_are_all_blocks() -> None:
    assert all(Criteria()(header_of(number)) for number in range(4))
    red = Criteria(tenant=header_of(0).tenant)
    assert [red(header_of(number)) for number in range(4)] == [True, False, False, True]


@pytest.mark.parametrize(
    "message",
    [{"bars": True}, {"keys": b"x" * (KEY_BYTES + 1)}, {"after": b"x", "writer": "w"}],
)
def test_what_cannot_be_carried_out_is_none(message: dict[str, object]) -> None:
    plain = {"id": id_of(1), "age_s": 0.0, "namespace": None, "tenant": None, "writer": None}
    fields = {**plain, "keys": None, "bars": False, "after": b"", **message}
    with pytest.raises(msgspec.ValidationError, match=r"a bar names a writer|a half key"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(list(fields.values())), type=Erasure)


@pytest.mark.parametrize("kind", [Exchange, Exchanged])
def test_half_ids_are_refused(kind: type[Exchange] | type[Exchanged]) -> None:
    whole = msgspec.to_builtins(kind(()), builtin_types=(bytes,))
    with pytest.raises(msgspec.ValidationError, match="a half id"):
        msgspec.convert({**whole, "past": b"x" * (ID_BYTES + 1)}, type=kind)
