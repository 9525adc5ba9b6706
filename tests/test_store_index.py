"""Single promises of the store's index, by name; any order of anything is `test_store_machine`."""

from __future__ import annotations

from kvass.kvstore.index.index import Index, Limits
from store_model import GROUPS, PUT_S, SIZES, SLAB, key_of, new_index, order_of, store


def test_a_probe_never_pins() -> None:
    index = new_index()
    store(index, 0, range(6))
    store(index, 1, range(2, 6))
    for _ in range(5):
        index.lookup([key_of(0, i) for i in range(6)], 1.0)
    order = order_of(3, range(6), now_s=2.0)
    assert set(index.put_begin(order, 2.0)) == {"granted"}


def test_the_least_used_chain_goes_first_from_its_end() -> None:
    index = new_index()
    store(index, 0, range(6))
    store(index, 1, range(2, 6))
    index.lookup([key_of(0, i) for i in range(6)], 1.0)
    index.put_begin(order_of(3, range(4), now_s=2.0), 2.0)
    found = index.lookup([key_of(1, i) for i in range(6)], 2.0)
    assert found == [True] * 4 + [False] * 2


def test_a_put_with_a_gap_makes_young_what_each_span_goes_on_from() -> None:
    index = new_index()
    store(index, 0, range(3, 6))
    store(index, 1, range(3, 6))
    assert index.put_begin(order_of(0, [2, 6], put_id="gap", now_s=1.0), 1.0) == ["granted"] * 2
    assert index.put_begin(order_of(3, range(6), now_s=1.0), 1.0) == ["granted"] * 6
    assert index.lookup([key_of(0, i) for i in range(3, 6)], 1.0) == [True] * 3
    assert index.lookup([key_of(1, i) for i in range(3, 6)], 1.0) == [True, False, False]


def test_full_of_held_blocks_is_an_answer() -> None:
    index = new_index()
    store(index, 0, range(6), hold="job")
    order = order_of(1, range(2, 6), put_id="q", hold="job-2")
    assert index.put_begin(order, 0.0) == ["full"] * 4
    index.release_hold("job", 1.0)
    assert index.put_begin(order, 1.0) == ["granted"] * 4


def test_a_put_that_comes_after_its_job_is_over_holds_nothing() -> None:
    index = new_index()
    index.release_hold("job", 0.0)
    store(index, 0, range(6), hold="job")  # its blocks are new
    index.put_begin(order_of(0, range(6), put_id="q", hold="job"), 1.0)  # or there already
    assert index.counts()["held_bytes"] == 0
    assert index.counts()["visible_blocks"] == 6


def test_a_lease_from_before_a_restart_is_not_held() -> None:
    index = new_index()
    store(index, 0, range(1))
    lease = index.get_begin([key_of(0, 0)], 128, GROUPS, 0.0)
    assert lease is not None
    restarted = Index(SLAB, Limits(epoch="e2"))
    store(restarted, 0, range(1))
    assert restarted.get_begin([key_of(0, 0)], 128, GROUPS, 0.0) is not None
    assert not restarted.get_end(lease.lease_id, 0.1)
    assert index.get_end(lease.lease_id, 0.1)


def test_of_two_writers_the_first_commit_wins() -> None:
    index = new_index()
    assert index.put_begin(order_of(0, range(1), put_id="p"), 0.0) == ["granted"]
    assert index.put_begin(order_of(0, range(1), put_id="q", session="s1"), 0.0) == ["busy"]
    move = index.begin_moves("p", "s0", [key_of(0, 0)], 0.0)[0]
    assert move is not None and index.end_move(move, (1, 2))
    assert index.put_begin(order_of(0, range(1), put_id="q", session="s1"), 0.0) == ["visible"]


def test_a_block_is_visible_when_every_head_group_is_in() -> None:
    index = new_index()
    for group, put_id in ((1, "p"), (0, "q")):
        order = order_of(0, range(1), put_id=put_id, groups=range(group, group + 1))
        assert index.put_begin(order, 0.0) == ["granted"]
        assert index.lookup([key_of(0, 0)], 0.0) == [False]
        move = index.begin_moves(put_id, "s0", [key_of(0, 0)], 0.0)[0]
        assert move is not None and index.end_move(move, (10 + group,))
    entry = index.ledger.visible(key_of(0, 0))
    assert entry is not None and entry.header.checksums == (10, 11)


def test_half_a_block_is_given_up_at_its_deadline() -> None:
    index = new_index()
    index.put_begin(order_of(0, range(1), groups=range(1)), 0.0)
    move = index.begin_moves("p", "s0", [key_of(0, 0)], 0.0)[0]
    assert move is not None and index.end_move(move, (1,))
    index.leave("s0", 1.0)  # what is in stays: another writer may bring the rest
    assert index.counts()["writing_blocks"] == 1
    index.expire(PUT_S)
    assert index.counts()["free_bytes"] == SLAB


def test_a_size_that_can_never_fit_is_full() -> None:
    index = Index(256, Limits(epoch="e"))
    assert index.put_begin(order_of(2, range(1)), 0.0) == ["full"]
    assert index.counts()["free_bytes"] == 256


def test_a_lease_of_an_earlier_start_is_not_held() -> None:
    before, now = new_index("e1"), new_index("e2")
    for index in (before, now):
        store(index, 0, range(2))
    key = key_of(0, 0)
    old = before.get_begin([key], SIZES[0], GROUPS, 1.0)
    new = now.get_begin([key], SIZES[0], GROUPS, 1.0)
    assert old is not None and new is not None
    assert not now.get_renew(old.lease_id, 1.1)
    assert not now.get_end(old.lease_id, 1.1)
    assert now.get_end(new.lease_id, 1.2)


def test_blocks_are_moved_together_for_a_larger_one_but_not_while_they_are_read() -> None:
    for leased in (None, 4):
        index = new_index()
        moved: list[tuple[int, int, int]] = []
        index.ledger.copy_bytes = lambda *copy, moved=moved: moved.append(copy)
        store(index, 0, range(6))
        store(index, 3, range(6))
        before = {key: entry.slot.offset for key, entry in index.ledger.entries.items()}
        if leased is not None:
            assert index.get_begin([key_of(0, leased)], SIZES[0], GROUPS, 0.0) is not None
        gone = {key_of(0, i) for i in (1, 3, 5)}
        index.drop(lambda header, gone=gone: header.key in gone, 0.0)  # type: ignore[misc]
        assert index.put_begin(order_of(2, range(1)), 0.0) == ["granted"]
        index.ledger.check()
        now = {key: entry.slot.offset for key, entry in index.ledger.entries.items()}
        others = [key for key in before if key in now]
        if leased is None:
            assert index.counts()["evictions"] == 0 and index.counts()["relocated"] == 2
            changed = {(before[key], now[key]) for key in others if before[key] != now[key]}
            assert {(source, target) for source, target, _ in moved} == changed
        else:
            assert now[key_of(0, leased)] == before[key_of(0, leased)]
