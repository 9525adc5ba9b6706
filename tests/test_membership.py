"""The node table: who is live, in whatever order messages come."""

from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st

from kvass.common.membership import (
    ASLEEP_S,
    DEMOTED_S,
    LIVE_S,
    LOST_MAX,
    LOST_S,
    REJOIN_S,
    WAKING_S,
    NodeTable,
    Peer,
    Role,
    State,
)
from kvass.common.roll_call import RollCall


def peer(
    member_id: str = "decode-0",
    start_id: str = "a",
    *,
    role: Role = "decode",
    state: State = "ready",
    started_s: float = 1.0,
) -> Peer:
    return Peer(
        role=role,
        member_id=member_id,
        start_id=start_id,
        host_id="h",
        pid=1,
        state=state,
        started_s=started_s,
    )


def linked(now_s: float = 0.0) -> NodeTable:
    table = NodeTable()
    table.link_up(now_s - REJOIN_S)
    return table


def ids(table: NodeTable, now_s: float, role: str = "decode") -> list[str]:
    return [each.start_id for each in table.live(role, now_s)]


def test_only_ready_members_are_live() -> None:
    table = linked()
    table.saw_presence(peer(state="joining"), 0.0)
    assert ids(table, 0.0) == []
    table.saw_presence(peer(state="ready"), 0.1)
    assert ids(table, 0.1) == ["a"]
    table.saw_presence(peer(state="draining"), 0.2)
    assert ids(table, 0.2) == []


def test_silence_ends_life_and_a_load_brings_it_back() -> None:
    table = linked()
    table.saw_presence(peer(), 0.0)
    assert ids(table, LIVE_S) == ["a"]
    assert ids(table, LIVE_S + 0.01) == []
    table.saw_load("a", {"running": 2}, LIVE_S + 1)
    assert ids(table, LIVE_S + 1) == ["a"]
    assert table.load("a") == {"running": 2}


def test_whoever_was_stopped_has_heard_of_nobody_and_judges_nobody() -> None:
    table = linked()
    table.saw_presence(peer(), 0.0)
    table.saw_presence(peer("decode-1", "b"), 0.0)
    table.tick(0.0)
    woke_s = 100.0
    assert ids(table, woke_s) == ["a", "b"], "before the first tick after it"
    table.tick(woke_s)
    assert ids(table, woke_s) == ["a", "b"]
    table.saw_load("a", {}, woke_s + 0.4)
    for ticks in range(1, 4):
        table.tick(woke_s + ticks * WAKING_S / 3)
    assert ids(table, woke_s + WAKING_S) == ["a"], "and then as ever"


def test_ticks_in_time_change_no_judgement() -> None:
    table = linked()
    table.saw_presence(peer(), 0.0)
    for ticks in range(1 + round(LIVE_S / ASLEEP_S)):
        table.tick(ticks * ASLEEP_S)
    assert ids(table, LIVE_S) == ["a"]
    assert ids(table, LIVE_S + 0.01) == []


def test_an_old_last_will_does_not_end_a_new_start() -> None:
    table = linked()
    table.saw_presence(peer(start_id="old", started_s=1.0), 0.0)
    table.saw_presence(peer(start_id="new", started_s=2.0), 1.0)
    assert ids(table, 1.0) == ["new"]  # one start of each id: the later
    table.saw_gone("old")
    assert ids(table, 1.0) == ["new"]


def test_the_last_view_is_kept_while_the_link_is_down() -> None:
    table = linked()
    table.saw_presence(peer(), 0.0)
    table.link_down()
    assert ids(table, 1000.0) == ["a"]
    table.link_up(1000.0)
    assert ids(table, 1000.0 + REJOIN_S - 0.01) == ["a"], "others need time to come back, too"
    assert ids(table, 1000.0 + REJOIN_S) == []


def test_a_member_that_went_while_the_link_was_down_is_forgotten() -> None:
    table = NodeTable(followed=())
    table.link_up(0.0)
    for name in ("a", "b"):
        table.saw_presence(peer(name, name), 0.0)
    table.link_down()
    table.link_up(100.0)
    table.saw_presence(peer("b", "b"), 100.1)
    table.forget_unconfirmed(100.0 + REJOIN_S - 0.01)
    assert ids(table, 100.0) == ["a", "b"]
    table.forget_unconfirmed(100.0 + REJOIN_S)
    assert [entry.peer.start_id for entry in table.entries()] == ["b"]


def test_a_role_that_is_not_followed_is_judged_by_presence_alone() -> None:
    table = NodeTable(followed=("store",))
    table.link_up(-REJOIN_S)
    table.saw_presence(peer(), 0.0)
    assert ids(table, 1000.0) == ["a"]
    table.saw_gone("a")
    assert ids(table, 1000.0) == []


def test_a_refused_connection_demotes_for_a_while() -> None:
    table = linked()
    table.saw_presence(peer(), 0.0)
    table.refused("a", 0.0)
    assert ids(table, DEMOTED_S - 0.01) == []
    assert ids(table, DEMOTED_S) == ["a"]
    table.refused("a", 2.0)
    table.saw_presence(peer(), 2.1)  # it speaks up: no reason to wait
    assert ids(table, 2.1) == ["a"]


def test_version_counts_changes_of_who_is_there_only() -> None:
    table = linked()
    table.saw_presence(peer(), 0.0)
    version = table.version
    table.saw_load("a", {}, 0.1)
    table.saw_presence(peer(), 0.2)
    table.saw_gone("somebody else")
    assert table.version == version
    table.saw_gone("a")
    assert table.version == version + 1


def test_a_log_has_one_line_for_each_member_that_changes() -> None:
    table = linked()
    table.saw_presence(peer("me", "own"), 0.0)
    for name in ("a", "b", "c"):
        table.saw_presence(peer(name, name, role="store"), 0.0)
    roll_call = RollCall(table, ("decode", "store"), "own")

    def said(now_s: float) -> list[str]:
        return [f"{logging.getLevelName(level)} {text}" for level, text in roll_call.look(now_s)]

    assert said(0.0) == ["INFO joined the cluster; ready: 3 store nodes"]
    table.saw_presence(peer("p", "p", role="prefill"), 0.1)  # not asked for
    table.saw_presence(peer("d", "d", state="joining"), 0.1)
    assert said(0.1) == []
    table.saw_presence(peer("d", "d"), 0.2)
    assert said(0.2) == ["INFO decode d joined: , pid 1"]
    table.refused("d", 0.3)
    assert said(0.3) == [], "whoever was refused tells"
    table.saw_presence(peer("a", "a", role="store", state="draining"), 0.4)
    table.saw_gone("b")
    assert said(0.4) == [
        "WARNING store b is lost: it went without a goodbye",
        "INFO store a is leaving",
    ]
    table.saw_gone("a")
    table.saw_load("c", {}, 3.0)
    assert said(3.1) == ["INFO store a left"]
    assert said(3.3) == ["WARNING decode d is lost: nothing heard of it for 3 s"]
    table.refused("d", 3.4)
    assert said(3.4) == []
    table.saw_load("d", {}, 3.5)
    assert said(3.5 + DEMOTED_S) == ["INFO decode d is back"]
    assert said(6.6) == [
        "WARNING decode d is lost: nothing heard of it for 3 s",
        "WARNING store c is lost: nothing heard of it for 3 s",
    ]
    table.saw_gone("c")
    assert said(6.7) == [], "it was told"


def lost(table: NodeTable, now_s: float) -> list[tuple[str, float]]:
    return [(each.peer.member_id, each.since_s) for each in table.lost(now_s)]


def test_who_went_without_a_goodbye_is_remembered_for_a_while() -> None:
    table = linked()
    for name in ("a", "b", "c", "d"):
        table.saw_presence(peer(name, name, role="store"), 0.0)
    table.saw_presence(peer("j", "j", state="joining"), 0.0)
    table.saw_load("a", {}, 1.0)
    table.saw_presence(peer("b", "b", role="store", state="draining"), 1.0)
    for name in ("a", "b", "c", "j"):
        table.saw_gone(name)
    assert lost(table, 1.0) == [("a", 1.0), ("c", 0.0)], "b said that it leaves, j never served"
    assert table.forget_lost("c") and not table.forget_lost("c") and not table.forget_lost("d")
    assert lost(table, LOST_S) == [("a", 1.0)]
    assert lost(table, 1.0 + LOST_S) == []


def test_a_lost_member_that_is_back_is_lost_no_more() -> None:
    table = linked()
    table.saw_presence(peer(), 0.0)
    table.saw_gone("a")
    table.saw_presence(peer(start_id="b", state="joining", started_s=2.0), 1.0)
    assert lost(table, 1.0) == [("decode-0", 0.0)], "it is not ready yet"
    table.saw_presence(peer(start_id="b", started_s=2.0), 2.0)
    assert lost(table, 2.0) == []
    table.saw_presence(peer(start_id="c", started_s=3.0), 3.0)
    table.saw_gone("b")
    assert lost(table, 3.0) == [], "its last will came after its successor"


def test_what_went_while_the_link_was_down_is_remembered_from_when_that_was_noticed() -> None:
    table = linked()
    table.saw_presence(peer(), 0.0)
    table.link_down()
    up_s = 2 * LOST_S
    table.link_up(up_s)
    table.tick(up_s + REJOIN_S)
    table.forget_unconfirmed(up_s + REJOIN_S)
    assert lost(table, up_s + REJOIN_S) == [("decode-0", 0.0)]
    assert lost(table, up_s + REJOIN_S + LOST_S) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["joining", "ready", "draining", "gone", "forget"]),
            st.integers(0, 2),
            st.integers(0, 1),
        ),
        max_size=30,
    )
)
def test_lost_is_whoever_was_ready_last_and_went(steps: list[tuple[str, int, int]]) -> None:
    """Against a model: the state of each start, and the ids whose last ready start has gone."""
    table, states, expected = linked(), dict[tuple[int, int], str](), set[str]()
    for now_s, (what, member, start) in enumerate(steps):
        name, start_id = f"m{member}", f"{member}.{start}"
        if what == "forget":
            table.forget_lost(name)
            expected.discard(name)
        elif what == "gone":
            was = states.pop((member, start), "")
            table.saw_gone(start_id)
            others = [state for (each, _), state in states.items() if each == member]
            if was == "ready" and "ready" not in others:
                expected.add(name)
        else:
            states[member, start] = what
            table.saw_presence(peer(name, start_id, state=what), float(now_s))  # type: ignore[arg-type]
            if what == "ready":
                expected.discard(name)
        assert {each for each, _ in lost(table, float(now_s))} == expected


def test_what_is_remembered_is_bounded() -> None:
    table = linked()
    for number in range(LOST_MAX + 5):
        table.saw_presence(peer(f"m{number}", f"{number}"), float(number))
        table.saw_gone(f"{number}")
    left = lost(table, 0.0)
    assert len(left) == LOST_MAX and ("m0", 0.0) not in left


@given(st.permutations(["old presence", "old gone", "new presence", "old load", "new load"]))
def test_any_order_of_two_starts_ends_with_the_new_one(order: list[str]) -> None:
    table = linked()
    for what in order:
        start_id, kind = what.split()
        if kind == "presence":
            started_s = {"old": 1.0, "new": 2.0}[start_id]
            table.saw_presence(peer(start_id=start_id, started_s=started_s), 0.0)
        elif kind == "gone":
            table.saw_gone(start_id)
        else:
            table.saw_load(start_id, {}, 0.0)
    assert ids(table, 0.0) == ["new"]
