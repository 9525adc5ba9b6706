"""Block tables against a dumb model: whatever is opened, shared, pulled, computed, grown, forgotten
and closed in any order, what a table calls ready is there, and only its own slots are written."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvass.common.keys import Chain, Namespace
from kvass.common.pool.pool import BlockPool
from kvass.common.pool.table import BlockTable

BLOCK, SLOTS = 2, 6

Prefix = tuple[int, ...]


def chain_of(tokens: Prefix) -> Chain:
    chain = Chain(Namespace(bytes(32)), BLOCK)
    chain.extend(tokens)
    return chain


@dataclass(eq=False)
class Owner:
    """A request: its table and the tokens that the table is for. `is_open`: it has slots."""

    table: BlockTable
    tokens: Prefix
    is_open: bool = False

    @property
    def reach(self) -> int:
        """Tokens that the table has slots for."""
        return min(len(self.tokens), len(self.table.slots) * BLOCK)


class TableMachine(RuleBasedStateMachine):
    """Each cell of a slot holds the prefix whose last token's KV was written there."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SLOTS)
        self.owners: list[Owner] = []
        self.cells: dict[tuple[int, int], Prefix] = {}
        self.names: dict[bytes, Prefix] = {}

    # --- what happens ---

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        spare=st.integers(0, 2),
        whole=st.booleans(),
    )
    def arrive(self, tokens: list[int], spare: int, whole: bool) -> None:
        owner = Owner(BlockTable(self.pool, chain_of(tuple(tokens))), tuple(tokens))
        self.owners.append(owner)
        self._open(owner, spare, whole)

    @rule(data=st.data(), spare=st.integers(0, 2), whole=st.booleans())
    def open(self, data: st.DataObject, spare: int, whole: bool) -> None:
        """Ask again, or come back."""
        owner = self._one(data, is_open=False)
        if owner is not None:
            self._open(owner, spare, whole)

    def _open(self, owner: Owner, spare: int, whole: bool) -> None:
        table, before = owner.table, self.pool.counts()
        there = [self.pool.find(key) for key in table.chain.keys]
        owner.is_open = table.open(len(owner.tokens), spare=spare, whole=whole)
        if not owner.is_open:
            after = self.pool.counts()
            assert (after["private"], after["shared"]) == (before["private"], before["shared"])
            return
        assert table.ready == [slot is not None for slot in there]
        taken = [index + 1 for index, slot in enumerate(there) if slot is not None]
        need = -(-len(owner.tokens) // BLOCK)
        assert len(table.slots) == (need if whole else max(taken, default=0))
        assert table.lacks(len(owner.tokens)) == need - len(table.slots)
        promised = table.lacks(len(owner.tokens)) + spare
        assert self.pool.available >= promised, "what runs already has less than it was promised"

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        owner, index = self._missing(data)
        if owner is not None:
            table = owner.table
            there = self.pool.find(table.chain.keys[index])
            lacks = table.lacks(index * BLOCK) >= self.pool.available
            shared = table.share(index)
            assert shared == table.ready[index]
            assert shared == (there is not None) or lacks, "only for want of slots before it"
            assert not shared or table.slots[index] == there

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        """A pull ends: the block is whole in the slot that the table had for it."""
        owner, index = self._missing(data)
        if owner is not None and owner.table.grow((index + 1) * BLOCK):
            self._write(owner, index * BLOCK, (index + 1) * BLOCK)
            owner.table.landed(index)
            assert owner.table.ready[index]

    @rule(data=st.data(), rows=st.integers(1, 5))
    def compute(self, data: st.DataObject, rows: int) -> None:
        owner = self._one(data, is_open=True)
        if owner is None:
            return
        table = owner.table
        table.advance()
        if table.frontier >= owner.reach:
            return
        stop = table.gap_stop(min(owner.reach, table.frontier + rows))
        first = table.frontier // BLOCK
        self._write(owner, table.frontier, stop)
        missing = table.missing
        done = table.computed(stop)
        assert done == [i for i in missing if first <= i < stop // BLOCK]
        assert table.frontier >= stop

    @rule(data=st.data(), token=st.integers(0, 1))
    def generate(self, data: st.DataObject, token: int) -> None:
        owner = self._one(data, is_open=True)
        if owner is not None and len(owner.tokens) < 2 * SLOTS:
            owner.tokens += (token,)
            owner.table.extend(token)
            available = self.pool.available
            grown = owner.table.grow(len(owner.tokens))
            assert grown == (owner.reach == len(owner.tokens))
            assert grown or available <= SLOTS - len(owner.table.slots)
            if not grown:  # what a request does that lacks a slot: it gives the others up
                owner.table.close()
                owner.is_open = False

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        owner = self._one(data, is_open=True)
        if owner is not None:
            owner.table.adopt()
            index, rest = divmod(owner.table.frontier, BLOCK)
            if not rest and index < len(owner.table.ready):
                assert self.pool.find(owner.table.chain.keys[index]) is None

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """Suspended, or over: it may come back."""
        owner = self._one(data, is_open=True)
        if owner is not None:
            for _ in range(2):  # ends may come twice
                owner.table.close()
            owner.is_open = False
            assert not any(owner.table.ready) and not owner.table.frontier

    @rule()
    def forget(self) -> None:
        self.pool.forget()

    # --- the model ---

    def _one(self, data: st.DataObject, *, is_open: bool) -> Owner | None:
        fitting = [owner for owner in self.owners if owner.is_open == is_open]
        return fitting[data.draw(st.integers(0, len(fitting) - 1))] if fitting else None

    def _missing(self, data: st.DataObject) -> tuple[Owner | None, int]:
        """Choose a block that may be pulled: its own rows are not being computed yet."""
        owner = self._one(data, is_open=True)
        if owner is None:
            return None, 0
        table = owner.table
        indices = [index for index in table.missing if index * BLOCK >= table.frontier]
        return (owner, data.draw(st.sampled_from(indices))) if indices else (None, 0)

    def _write(self, owner: Owner, start: int, stop: int) -> None:
        for position in range(start, stop):
            slot = owner.table.slots[position // BLOCK]
            assert not any(owner.table.ready[position // BLOCK :][:1]), "a whole block is written"
            assert self._users(slot) == 1, "a slot that others use is written"
            self.cells[slot, position % BLOCK] = owner.tokens[: position + 1]
        for index, key in enumerate(owner.table.chain.keys):
            self.names[key] = owner.tokens[: (index + 1) * BLOCK]

    def _users(self, slot: int) -> int:
        return sum(owner.table.slots.count(slot) for owner in self.owners)

    # --- what must hold ---

    @invariant()
    def slots_conserve(self) -> None:
        assert sum(self.pool.counts().values()) == SLOTS
        held = {slot for owner in self.owners for slot in owner.table.slots}
        assert self.pool.used == len(held)

    @invariant()
    def what_is_ready_is_there(self) -> None:
        for owner in self.owners:
            table = owner.table
            assert len(set(table.slots)) == len(table.slots)
            whole = {i for i, ready in enumerate(table.ready) if ready}
            positions = {p for i in whole for p in range(i * BLOCK, (i + 1) * BLOCK)}
            for position in positions | set(range(table.frontier)):
                cell = table.slots[position // BLOCK], position % BLOCK
                assert self.cells[cell] == owner.tokens[: position + 1]
            for index in whole:
                assert self.pool.find(table.chain.keys[index]) == table.slots[index]

    @invariant()
    def a_name_means_its_content(self) -> None:
        for key, prefix in self.names.items():
            slot = self.pool.find(chain_of(prefix).keys[-1])
            assert chain_of(prefix).keys[-1] == key
            for offset in range(BLOCK if slot is not None else 0):
                last = len(prefix) - BLOCK + offset + 1
                assert slot is not None and self.cells[slot, offset] == prefix[:last]


TableMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestTables = TableMachine.TestCase


def test_a_block_that_others_have_is_shared_before_its_place_was_taken() -> None:
    pool = BlockPool(SLOTS)
    tokens = (0, 1, 0, 1)
    first, second = (BlockTable(pool, chain_of(tokens)) for _ in range(2))
    assert second.open(4, spare=0, whole=False) and second.slots == []
    assert first.open(4, spare=0)
    first.computed(4)
    assert second.share(1) and second.slots[1] == first.slots[1]
    assert second.missing == [0] and second.slots[0] not in first.slots
