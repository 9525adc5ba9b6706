"""The decode scheduler against a model that remembers every token's KV: no row is computed twice
into a shared block, no slot has two owners, every request ends with all its tokens, whatever the
order of arrivals, pulls, cancellations and shortages."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvass.common.keys import Chain, Namespace
from kvass.common.pool.pool import BlockPool
from kvass.common.pool.table import BlockTable
from kvass.common.wire import Generate, Sampling, Stop
from kvass.decode.schedule import Piece, Scheduler, Sequence

BLOCK = 4
SLOTS = 8
NAMESPACE = Namespace(bytes(32))

Prefix = tuple[int, ...]


def next_token(tokens: list[int]) -> int:
    """The model: what follows depends on every token before."""
    return (sum(tokens) * 31 + len(tokens)) % 5


def make_sequence(pool: BlockPool, prompt: list[int], name: str, max_tokens: int) -> Sequence:
    chain = Chain(NAMESPACE, BLOCK)
    chain.extend(prompt)
    request = Generate(
        request_id=name,
        tokens=tuple(prompt),
        prompt_length=len(prompt),
        sampling=Sampling(),
        stop=Stop(max_tokens=max_tokens),
        deadline_s=1.0,
    )
    return Sequence(request, BlockTable(pool, chain), list(prompt))


class Memory:
    """What each (slot, offset) holds: the prefix whose last token's KV was written there."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], Prefix] = {}

    def compute(self, piece: Piece) -> int | None:
        """Do what a step does, checking that everything it reads is there."""
        sequence = piece.sequence
        table = sequence.table
        for position in range(piece.start, piece.stop):
            cell = (table.slots[position // BLOCK], position % BLOCK)
            if piece.write:
                assert not any(table.ready[position // BLOCK : position // BLOCK + 1]), (
                    "a row is written into a block that is complete"
                )
                self.cells[cell] = tuple(sequence.tokens[: position + 1])
        for position in range(piece.stop):
            cell = (table.slots[position // BLOCK], position % BLOCK)
            assert self.cells[cell] == tuple(sequence.tokens[: position + 1])
        return next_token(sequence.tokens) if piece.logits else None

    def fill(self, sequence: Sequence, index: int) -> None:
        """Do what a pull of a block does."""
        for offset in range(BLOCK):
            prefix = tuple(sequence.tokens[: index * BLOCK + offset + 1])
            self.cells[sequence.table.slots[index], offset] = prefix


class ScheduleMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SLOTS)
        self.scheduler = Scheduler(self.pool, chunk_tokens=6, batch_requests=3)
        self.memory = Memory()
        self.live: list[Sequence] = []
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), max_tokens=st.integers(1, 12)
    )
    def arrive(self, prompt: list[int], max_tokens: int) -> None:
        self.count += 1
        sequence = make_sequence(self.pool, prompt, str(self.count), max_tokens)
        self.scheduler.add(sequence)
        self.live.append(sequence)

    @rule()
    def admit(self) -> None:
        for sequence in self.scheduler.admit():
            assert sequence.state == "fetching"

    @precondition(lambda self: any(s.state == "fetching" for s in self.live))
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        fetching = [s for s in self.live if s.state == "fetching"]
        sequence = data.draw(st.sampled_from(fetching))
        missing, is_over = sequence.table.missing, data.draw(st.booleans())
        if missing:
            for index in data.draw(st.lists(st.sampled_from(missing), unique=True)):
                if not sequence.table.share(index):
                    assert sequence.table.grow((index + 1) * BLOCK), "a promise is broken"
                    self.memory.fill(sequence, index)
                    sequence.table.landed(index)
        if is_over:
            self.scheduler.fetched(sequence)

    @rule()
    def step(self) -> None:
        pieces = self.scheduler.next_step()
        assert sum(p.stop - p.start for p in pieces if p.stop - p.start > 1) <= 6
        tokens = [self.memory.compute(piece) for piece in pieces]
        for piece, token in zip(pieces, tokens, strict=True):
            self.scheduler.stepped(piece, token)
            sequence = piece.sequence
            generated = len(sequence.tokens) - sequence.request.prompt_length
            if generated >= sequence.request.stop.max_tokens:
                self._end(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(self.live)))

    @rule()
    def run_dry(self) -> None:
        """Nothing starves: with all pulls over, every request ends in a bounded number of steps."""
        for _ in range(400):
            for sequence in self.scheduler.admit():
                self.scheduler.fetched(sequence)
            for sequence in list(self.live):
                self.scheduler.fetched(sequence)
            if not self.live:
                break
            self.step()
        assert not self.live, "a request starves"

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.scheduler.finish(sequence)  # ends may come twice
        self.live.remove(sequence)
        tokens = list(sequence.request.tokens)
        while len(tokens) < len(sequence.tokens):
            tokens.append(next_token(tokens))
        assert sequence.tokens == tokens

    @invariant()
    def slots_conserve(self) -> None:
        assert sum(self.pool.counts().values()) == SLOTS
        held = [slot for s in self.live for slot in s.table.slots]
        assert self.pool.used == len(set(held))
        assert set(self.scheduler.waiting) | set(self.scheduler.admitted) == set(self.live)


TestSchedule = ScheduleMachine.TestCase


def running(pool: BlockPool, prompt: list[int]) -> tuple[Scheduler, Sequence]:
    scheduler = Scheduler(pool, chunk_tokens=64, batch_requests=4)
    sequence = make_sequence(pool, prompt, "r", 4)
    scheduler.add(sequence)
    scheduler.admit()
    scheduler.fetched(sequence)
    return scheduler, sequence


def test_a_full_hit_computes_one_row_and_writes_nothing() -> None:
    pool = BlockPool(SLOTS)
    prompt = [1] * (2 * BLOCK)
    scheduler, first = running(pool, prompt)
    (piece,) = scheduler.next_step()
    assert (piece.start, piece.stop, piece.write, piece.logits) == (0, 2 * BLOCK, True, True)
    scheduler.stepped(piece, 3)
    scheduler.finish(first)
    scheduler, second = running(pool, prompt)
    (piece,) = scheduler.next_step()
    assert (piece.start, piece.stop, piece.write, piece.logits) == (7, 8, False, True)
    scheduler.stepped(piece, 3)
    assert second.computed == []


def test_only_the_gap_is_computed() -> None:
    pool = BlockPool(SLOTS)
    prompt = list(range(5 * BLOCK + 1))
    scheduler, first = running(pool, prompt)
    (piece,) = scheduler.next_step()
    scheduler.stepped(piece, None)
    keys = first.table.chain.keys
    scheduler.finish(first)
    pool.forget(keys[2:4])
    scheduler, second = running(pool, prompt)
    (piece,) = scheduler.next_step()
    assert (piece.start, piece.stop, piece.logits) == (2 * BLOCK, 4 * BLOCK, False)
    scheduler.stepped(piece, None)
    (piece,) = scheduler.next_step()
    assert (piece.start, piece.stop, piece.logits) == (5 * BLOCK, 5 * BLOCK + 1, True)
    assert second.computed == [(2 * BLOCK, 4 * BLOCK)]


def test_one_step_computes_a_shared_prefix_once() -> None:
    pool = BlockPool(SLOTS)
    scheduler = Scheduler(pool, chunk_tokens=64, batch_requests=4)
    pair = [make_sequence(pool, [1] * BLOCK + [tail], str(tail), 4) for tail in (2, 3)]
    for sequence in pair:
        scheduler.add(sequence)
    for sequence in scheduler.admit():
        scheduler.fetched(sequence)
    (piece,) = scheduler.next_step()
    scheduler.stepped(piece, 0)
    pieces = scheduler.next_step()
    assert [(p.start, p.stop) for p in pieces] == [(5, 6), (4, 5)]


def test_the_youngest_gives_up_its_slots() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, chunk_tokens=64, batch_requests=4)
    old, young = (make_sequence(pool, [n] * (BLOCK - 1), str(n), 20) for n in (1, 2))
    for sequence in (old, young):
        scheduler.add(sequence)
    for sequence in scheduler.admit():
        scheduler.fetched(sequence)
    while young.state == "running":
        for piece in scheduler.next_step():
            scheduler.stepped(piece, 0)
    assert young.suspended_count == 1 and old.suspended_count == 0
    assert young.table.slots == [] and len(young.tokens) > BLOCK


def test_slots_are_taken_when_they_are_filled() -> None:
    """A request that waits for its KV holds none of the slots that it was promised."""
    pool = BlockPool(SLOTS)
    scheduler = Scheduler(pool, chunk_tokens=BLOCK, batch_requests=4)
    sequence = make_sequence(pool, list(range(3 * BLOCK)), "r", 4)
    scheduler.add(sequence)
    scheduler.admit()
    assert sequence.state == "fetching" and pool.used == 0
    scheduler.fetched(sequence)
    for count in (1, 2, 3):
        (piece,) = scheduler.next_step()
        assert pool.used == count
        scheduler.stepped(piece, None)


@pytest.mark.parametrize("is_older", [True, False])
def test_what_a_pull_was_promised_is_not_taken(is_older: bool) -> None:
    """However long others grow, the blocks that come later find their slots."""
    pool = BlockPool(SLOTS)
    scheduler = Scheduler(pool, chunk_tokens=64, batch_requests=4)
    growing = make_sequence(pool, [1], "growing", 30)
    fetching = make_sequence(pool, list(range(4 * BLOCK)), "fetching", 4)
    for sequence in (growing, fetching) if is_older else (fetching, growing):
        scheduler.add(sequence)
    assert len(scheduler.admit()) == 2
    scheduler.fetched(growing)
    while growing.state == "running":
        for piece in scheduler.next_step():
            scheduler.stepped(piece, 0)
    assert len(growing.tokens) == 4 * BLOCK + 1, "it had all slots that were promised to nobody"
    assert fetching.table.grow(4 * BLOCK)


def test_nobody_is_admitted_to_slots_that_are_promised() -> None:
    pool = BlockPool(SLOTS)
    scheduler = Scheduler(pool, chunk_tokens=64, batch_requests=4)
    for name in ("first", "second"):
        scheduler.add(make_sequence(pool, [*map(ord, name * 4)][: 4 * BLOCK], name, 4))
    assert len(scheduler.admit()) == 1 and pool.used == 0
