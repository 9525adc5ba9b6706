"""The store's index against a dumb model: operations, faults and copies, in any order.

The model keeps what a slab would hold: a token for each slot, written when a transfer starts
and when it ends. So a slot that is reused too early, by whatever path, shows as a wrong token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvass.common.block import BlockHeader
from kvass.kvstore.index.leases import Lease
from kvass.kvstore.index.ledger import Entry
from kvass.kvstore.node.copies.fills import OWN_SESSION
from store_draws import Places, chains, groups, holds, ranges, readings, seldom, sessions, wrongs
from store_model import (
    CLAIM_S,
    GROUPS,
    HOLD_S,
    SESSIONS,
    SIZES,
    SLAB,
    Moving,
    copier,
    key_of,
    land,
    move_in,
    new_index,
    order_of,
    space_of,
    tenant_of,
)


class IndexMachine(RuleBasedStateMachine):
    """See the module."""

    moves = Bundle("moves")
    leases = Bundle("leases")
    puts = Bundle("puts")
    fills = Bundle("fills")
    limits: Mapping[str, object] = {}  # of the index; a subclass draws some

    @initialize()
    def start(self) -> None:
        self.now_s = 0.0
        self.life = 0
        self.count = 0
        self.sessions: dict[str, str] = {}  # by put id
        self.past: set[str] = set()  # leases of earlier starts
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.life += 1
        self.index = new_index(f"e{self.life}", **self.limits)
        self.memory: dict[int, object] = {}  # by byte offset of a head group: whose bytes
        self.expected: dict[int, object] = {}  # what transfers in flight own
        self.index.ledger.copy_bytes = copier(self.memory, self.expected, lambda: self.held)
        self.claims: dict[bytes, tuple[str, float]] = {}
        self.held: dict[str, Lease] = {}
        self.holds: dict[str, tuple[float, set[bytes]]] = {}
        self.jobs_over: set[str] = set()
        self.protected: set[bytes] = set()
        self.dropped: set[bytes] = set()
        self.before: dict[bytes, Entry] = {}

    # --- what happens ---

    @rule(step_s=st.sampled_from([0.1, 1.0, 3.0, 40.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        self.index.expire(self.now_s)

    @rule(chain=chains, indices=ranges, owner=st.sampled_from(["a", "b"]))
    def claim(self, chain: int, indices: range, owner: str) -> None:
        keys = [key_of(chain, i) for i in indices]
        verdicts = self.index.claim(owner, keys, self.now_s)
        for key, verdict in zip(keys, verdicts, strict=True):
            known_owner, ends_s = self.claims.get(key, ("", -1.0))
            others = ends_s > self.now_s and known_owner != owner
            assert not (others and verdict == "granted"), "a live claim was given to another"
            if verdict == "granted":
                self.claims[key] = (owner, self.now_s + CLAIM_S)
            elif verdict == "visible":
                assert self.index.ledger.visible(key) is not None
            elif not others:
                refused = key not in self.index.ledger.entries and not self.index.draining
                assert not refused, "nobody's block was refused"

    @rule(owner=st.sampled_from(["a", "b"]))
    def release_claims(self, owner: str) -> None:
        self.index.release_claims(owner, self.now_s)
        self.claims = {k: v for k, v in self.claims.items() if v[0] != owner}

    @rule(target=puts, chain=chains, indices=ranges, session=sessions, groups=groups, hold=holds)
    def put_begin(
        self, chain: int, indices: range, session: str, groups: range, hold: str
    ) -> object:
        return multiple(*self._put_begin(chain, indices, session, groups, hold))

    def _put_begin(
        self, chain: int, indices: range, session: str, groups: range, hold: str
    ) -> list[tuple[str, str, bytes]]:
        self.count += 1
        put_id, now_s = f"p{self.count}", self.now_s
        self.sessions[put_id] = session
        whose = {"put_id": put_id, "session": session, "hold": hold}
        order = order_of(chain, indices, groups=groups, now_s=now_s, **whose)
        verdicts = self.index.put_begin(order, self.now_s)
        assert not self.index.draining or "granted" not in verdicts, "a drained node took a put"
        again = self.index.put_begin(order, self.now_s)
        kept = [b == "granted" for a, b in zip(verdicts, again, strict=True) if a == "granted"]
        assert all(kept), "put_begin must be idempotent"
        granted = [h.key for h, v in zip(order.headers, again, strict=True) if v == "granted"]
        if hold and granted and hold not in self.jobs_over:
            ends_s, keys = self.holds.get(hold, (0.0, set()))
            live = keys if ends_s > self.now_s else set()
            self.holds[hold] = (self.now_s + HOLD_S, live | set(granted))
        return [(order.put_id, session, key) for key in granted]

    @rule(target=moves, put=consumes(puts))
    def begin_move(self, put: tuple[str, str, bytes]) -> object:
        return self._begin_move(put) or multiple()

    def _begin_move(self, put: tuple[str, str, bytes]) -> Moving | None:
        return self._begin_moves([put])[0]

    def _begin_moves(self, puts: Sequence[tuple[str, str, bytes]]) -> list[Moving | None]:
        """Begin moves of one put, all at once."""
        if not puts:
            return []
        put_id, session, _ = puts[0]
        keys = [key for _, _, key in puts]
        moves = self.index.begin_moves(put_id, session, keys, self.now_s)
        again = self.index.begin_moves(put_id, session, keys, self.now_s)
        assert again == [None] * len(keys), "a commit that comes twice is none"
        where = self.memory, self.expected, self.life
        return [None if move is None else move_in(move, *where) for move in moves]

    @rule(moving=consumes(moves), good=st.booleans())
    def end_move(self, moving: Moving, good: bool) -> None:
        if moving.life == self.life:  # else it ended with the process whose memory it moved into
            self._end_moves([moving], [good])

    def _end_moves(self, all_moving: Sequence[Moving], good: Sequence[bool]) -> None:
        """Moves of one put end, all at once."""
        for moving in all_moving:
            land(moving, self.memory, self.expected)
        each = zip(all_moving, good, strict=True)
        sums = [(1,) * len(moving.places) if right else None for moving, right in each]
        self.index.end_moves([moving.move for moving in all_moving], sums)

    @rule(chain=chains, indices=ranges, session=sessions, hold=holds, read=readings, wrong=wrongs)
    def put_whole(
        self, chain: int, indices: range, session: str, hold: str, read: Places, wrong: Places
    ) -> None:
        """The ordinary case, so that what lies behind it is reached; while chains are `read`."""
        for each in read:
            self.get_begin(each, range(6))
        granted = self._put_begin(chain, indices, session, range(GROUPS), hold)
        self.nothing_protected_is_evicted_and_no_parent_before_its_children()
        moving = [each for each in self._begin_moves(granted) if each is not None]
        assert len(moving) == len(granted)
        self._end_moves(moving, [place not in wrong for place in range(len(moving))])

    @rule(target=fills, chain=chains, indices=ranges)
    def begin_fill(self, chain: int, indices: range) -> object:
        """Copies come from another node: to this one, its writer is itself."""
        granted = self._put_begin(chain, indices, OWN_SESSION, range(GROUPS), "")
        moving = [self._begin_move(put) for put in granted]
        assert None not in moving
        return (granted[0][0], moving) if granted else multiple()

    @rule(fill=consumes(fills), good=st.booleans())
    def end_fill(self, fill: tuple[str, list[Moving]], good: bool) -> None:
        for moving in fill[1]:
            self.end_move(moving, good)
        self.index.put_abort(fill[0], OWN_SESSION, self.now_s)
        assert not self._promised() & {fill[0]}, "a fill that is over still holds places"

    @rule(put=puts)
    def abort(self, put: tuple[str, str, bytes]) -> None:
        self.index.put_abort(put[0], put[1], self.now_s)
        assert not self._promised() & {put[0]}, "an aborted put still holds places"

    @rule(session=sessions)
    def crash(self, session: str) -> None:
        self.index.leave(session, self.now_s)
        left = self._promised() & self.sessions.keys()
        assert all(self.sessions[put_id] != session for put_id in left), "a dead writer's puts"

    def _promised(self) -> set[str]:
        """Return the puts that somebody may still bring bytes for."""
        entries = self.index.ledger.entries.values()
        groups = [g for entry in entries for g in entry.groups.values()]
        return {g.put_id for g in groups if g.checksum is None}

    @rule(one_in=seldom)
    def crash_of_the_node(self, one_in: int) -> None:
        """It starts anew with an empty slab: leases, claims, puts and holds of before are none."""
        if not one_in:
            self.past |= self.held.keys()
            self._begin_anew()

    @rule(one_in=seldom)
    def drain(self, one_in: int) -> None:
        """No new puts and claims; what is under way goes on. A restart ends it."""
        self.index.draining = self.index.draining or not one_in

    @rule(chain=chains, indices=ranges)
    def status(self, chain: int, indices: range) -> None:
        keys = [key_of(chain, i) for i in indices]
        visible, unclaimed = self.index.status(keys, self.now_s)
        entries = self.index.ledger.entries
        assert visible == [k for k in keys if self.index.ledger.visible(k) is not None]
        live = {k for k, (_, ends_s) in self.claims.items() if ends_s > self.now_s}
        assert unclaimed == [k for k in keys if k not in entries and k not in live]

    @rule(chain=chains, indices=ranges)
    def lookup(self, chain: int, indices: range) -> None:
        keys = [key_of(chain, i) for i in indices]
        found = self.index.lookup(keys, self.now_s)
        assert found == [self.index.ledger.visible(key) is not None for key in keys]

    @rule(target=leases, chain=chains, indices=ranges)
    def get_begin(self, chain: int, indices: range) -> object:
        keys = [key_of(chain, i) for i in indices]
        lease = self.index.get_begin(keys, SIZES[chain], GROUPS, self.now_s)
        if lease is None:
            return multiple()
        self.held[lease.lease_id] = lease
        return lease

    @rule(lease=leases)
    def get_renew(self, lease: Lease) -> None:
        held = self.index.get_renew(lease.lease_id, self.now_s)
        assert held == (self.held.get(lease.lease_id) is lease and lease.ends_s > self.now_s)

    @rule(lease=consumes(leases))
    def get_end(self, lease: Lease) -> None:
        alive = self.held.get(lease.lease_id) is lease and lease.ends_s > self.now_s
        assert self.index.get_end(lease.lease_id, self.now_s) == alive
        if alive:
            del self.held[lease.lease_id]

    @rule(chain=chains, indices=ranges, owner=st.sampled_from(["o0", "o1"]))
    def pin(self, chain: int, indices: range, owner: str) -> None:
        keys = [key_of(chain, i) for i in indices]
        self.index.pin(owner, keys, self.now_s + 10, self.now_s)

    @rule(owner=st.sampled_from(["o0", "o1"]))
    def unpin(self, owner: str) -> None:
        self.index.unpin(owner, self.now_s)

    @rule(owner=st.sampled_from(["j0", "j1"]))
    def release_hold(self, owner: str) -> None:
        self.index.release_hold(owner, self.now_s)
        self.holds.pop(owner, None)
        self.jobs_over.add(owner)
        self.protected = set()

    @rule(chain=chains, indices=ranges, owner=st.sampled_from(["j0", "j1"]))
    def unhold(self, chain: int, indices: range, owner: str) -> None:
        keys = [key_of(chain, i) for i in indices]
        self.index.unhold(owner, keys, self.now_s)
        self.holds.get(owner, (0.0, set()))[1].difference_update(keys)
        self.protected = set()

    @rule(chain=chains, by=st.sampled_from(["writer", "tenant", "namespace", "key"]))
    def drop(self, chain: int, by: str) -> None:
        wanted = {
            "writer": SESSIONS[chain],
            "tenant": tenant_of(chain, 5),
            "namespace": space_of(chain),
            "key": key_of(chain, 1),
        }[by]
        self._drop(lambda header: getattr(header, by) == wanted)

    @rule(lease=leases, which=st.integers(0, 3))
    def find_corrupt(self, lease: Lease, which: int) -> None:
        """A reader's doubt was right: the block is gone for all but who reads it now."""
        entry = lease.entries[which % len(lease.entries)]
        key = entry.header.key
        if self.index.ledger.visible(key) is not entry:
            self.index.found_corrupt(entry, self.now_s)  # dropped or replaced meanwhile: no news
            return
        self.dropped.add(key)
        self.index.found_corrupt(entry, self.now_s)
        assert self.index.ledger.visible(key) is None
        for _, keys in self.holds.values():
            keys.discard(key)

    @rule(lease=leases)
    def drop_while_it_is_read(self, lease: Lease) -> None:
        keys = {entry.header.key for entry in lease.entries}
        self._drop(lambda header: header.key in keys)

    def _drop(self, matches: Callable[[BlockHeader], bool]) -> None:
        self.dropped |= {k for k, e in self.index.ledger.entries.items() if matches(e.header)}
        self.index.drop(matches, self.now_s)
        assert not any(matches(e.header) for e in self.index.ledger.entries.values())
        for _, keys in self.holds.values():
            keys -= self.dropped

    # --- what must hold ---

    @invariant()
    def every_slot_has_one_state(self) -> None:
        self.index.ledger.check()
        counts = self.index.counts()
        states = ("free", "writing", "visible", "retired", "quarantined")
        assert sum(counts[f"{s}_bytes"] for s in states) == counts["total_bytes"]

    @invariant()
    def leases_are_counts_on_what_can_be_read(self) -> None:
        leases = self.index.leases._leases
        assert self.past.isdisjoint(leases), "a lease from before a restart is held"
        counted = Counter(entry for lease in leases.values() for entry in lease.entries)
        for entry in {*self.index.ledger.entries.values(), *self.index.ledger.gone}:
            assert entry.leases == counted[entry], "a lease is counted twice, or not at all"
            assert not entry.leases or entry.state in ("visible", "retired")

    @invariant()
    def a_block_that_is_written_has_a_writer(self) -> None:
        for entry in self.index.ledger.entries.values():
            if entry.state == "writing":
                assert any(group.put_id for group in entry.groups.values())
                assert entry.ends_s > self.now_s

    @invariant()
    def bytes_are_whose_they_should_be(self) -> None:
        readable = [e for e in self.index.ledger.entries.values() if e.state == "visible"]
        self.held = {k: v for k, v in self.held.items() if v.ends_s > self.now_s}
        for entry in [*readable, *(e for v in self.held.values() for e in v.entries)]:
            for group in range(GROUPS):
                place = entry.slot.offset + group * entry.group_size
                assert self.memory[place] == entry.header.key, "other bytes under a block's name"
        kept = {*self.index.ledger.entries.values(), *self.index.ledger.gone}
        for lease in self.held.values():
            assert kept.issuperset(lease.entries), "a leased slot is free"
        for moving in self.expected.values():
            assert isinstance(moving, Moving)
            assert moving.move.entry in kept, "a slot is free while bytes move into it"

    @invariant()
    def nothing_protected_is_evicted_and_no_parent_before_its_children(self) -> None:
        now = {k: e for k, e in self.index.ledger.entries.items() if e.state == "visible"}
        evicted = self.before.keys() - now.keys() - self.dropped
        parents = {entry.header.parent for entry in now.values()}
        assert not evicted & parents, "a parent went before its child"
        assert not evicted & self.protected, "a held block was evicted"
        self.protected = set()
        for ends_s, keys in self.holds.values():
            keys.intersection_update(self.index.ledger.entries)  # one that was given up holds none
            self.protected |= keys if ends_s > self.now_s else set()
        leased = {entry for lease in self.held.values() for entry in lease.entries}
        assert leased.isdisjoint(self.before[key] for key in evicted), "a leased block was evicted"
        for key in now:
            self.claims.pop(key, None)  # the claim on a block ends when it is there
        self.before = now
        self.dropped = set()

    @invariant()
    def protection_is_bounded(self) -> None:
        assert self.index.guards.size_bytes <= SLAB // 2
        protected = {k for k in self.index.ledger.entries if k in self.index.guards}
        sizes = [self.index.ledger.entries[k].header.length for k in protected]
        assert sum(sizes) == self.index.guards.size_bytes, "protection outlived its block"

    def teardown(self) -> None:
        """At rest nothing is left over: every slot is visible or free."""
        for moving in {id(m): m for m in self.expected.values()}.values():
            assert isinstance(moving, Moving) and moving.life == self.life
            self.index.end_move(moving.move, None)
        self.index.expire(self.now_s + 1e6)
        counts = self.index.counts()
        for name in ("writing_bytes", "retired_bytes", "quarantined_bytes", "guarded_bytes"):
            assert counts[name] == 0, name
        for name in ("leases", "claims", "puts"):
            assert counts[name] == 0, name
        self.index.drop(lambda header: True, self.now_s + 1e6)
        assert self.index.ledger.extents.free_bytes == SLAB
        self.index.ledger.check()


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=200, stateful_step_count=50)
