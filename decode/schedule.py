"""Which rows each decode step computes, and who gets slots. Pure: no I/O, no clock, no torch.

A request's life, with what it owns:

    waiting ──admit──> fetching ──fetched──> running ──finish──> over
       ^   slots for every token  │ pulls write    │ steps write
       │   are promised           │ its slots      │ its slots
       └────────── suspend (the youngest, when a running request needs a slot) ──┘

Every prompt token is one row, and so is every generated one: a tail, a gap that the store could not
fill and the next token of a stream are the same thing here, a range of positions whose KV is not
there yet. The last position's row gives logits. If its KV is there already (a full hit), only its
query is computed and nothing is written.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from kvass.common.pool.pool import BlockPool
from kvass.common.pool.table import BlockTable
from kvass.common.wire import Generate, Range

State = Literal["waiting", "fetching", "running", "over"]


@dataclass(slots=True, eq=False)
class Sequence:
    """One request as the scheduler sees it. Everything but `request` changes.

    `tokens` is the prompt and what was generated; `computed` collects the prompt's token ranges
    that were computed here; `unoffered` the blocks completed here that the store was not offered
    yet; `in_step` says that a running step uses the slots.
    """

    request: Generate
    table: BlockTable
    tokens: list[int]
    computed: list[Range] = field(default_factory=list)
    unoffered: list[int] = field(default_factory=list)
    state: State = "waiting"
    in_step: bool = False
    suspended_count: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of one sequence in a step. `write`: their KV is stored; `logits`: the last
    row gives the next token."""

    sequence: Sequence
    start: int
    stop: int
    write: bool
    logits: bool


class Scheduler:
    """Admission, steps and suspension over one pool.

    Mutable fields: `waiting` (in order), `admitted` (oldest first: fetching and running).
    """

    def __init__(self, pool: BlockPool, *, chunk_tokens: int, batch_requests: int) -> None:
        self.pool = pool
        self.chunk_tokens = chunk_tokens
        self.batch_requests = batch_requests
        self.waiting: deque[Sequence] = deque()
        self.admitted: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a request, behind those of the same or a more urgent priority."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].request.priority > sequence.request.priority:
            place -= 1
        self.waiting.insert(place, sequence)

    def admit(self) -> list[Sequence]:
        """Give slots to waiting requests in order, as far as they go; return those now fetching."""
        entered = []
        while self.waiting and len(self.admitted) < self.batch_requests:
            sequence = self.waiting[0]
            # One more block for each admitted request keeps admission from suspending at once.
            spare = self._promised(("fetching", "running")) + len(self.admitted)
            if not sequence.table.open(len(sequence.tokens), spare=spare, whole=False):
                break
            self.waiting.popleft()
            sequence.state = "fetching"
            self.admitted.append(sequence)
            entered.append(sequence)
        return entered

    def fetched(self, sequence: Sequence) -> None:
        """The store has given what it has: what is still missing is computed here."""
        if sequence.state == "fetching":
            sequence.state = "running"
            sequence.table.advance()

    def finish(self, sequence: Sequence) -> None:
        """End a request in any state, any number of times; its slots go back.

        Not to be called while the sequence is `in_step`.
        """
        assert not sequence.in_step, "a step still uses these slots"
        if sequence.state == "waiting":
            self.waiting.remove(sequence)
        elif sequence.state != "over":
            self.admitted.remove(sequence)
            sequence.table.close()
        sequence.state = "over"

    def next_step(self) -> list[Piece]:
        """Choose the rows of the next step: each stream's next token, then chunks of prompts.

        May suspend the youngest running requests to find slots for older ones.
        """
        pieces: list[Piece] = []
        budget = self.chunk_tokens
        computing: set[bytes] = set()
        for sequence in list(self.admitted):
            if sequence.state != "running":
                continue
            sequence.table.adopt()
            piece = self._piece(sequence, budget)
            if piece is None or self._is_computed_by_other(piece, computing):
                continue
            if not self._grow(piece):
                continue
            if piece.stop - piece.start > 1:
                budget -= piece.stop - piece.start
            sequence.in_step = True
            pieces.append(piece)
        return pieces

    def stepped(self, piece: Piece, token: int | None) -> None:
        """Account for a computed piece and, if it gave logits, for the token sampled from them."""
        sequence = piece.sequence
        sequence.in_step = False
        if piece.write:
            self._note_computed(sequence, piece.start, piece.stop)
            sequence.unoffered += sequence.table.computed(piece.stop)
        if token is not None:
            sequence.tokens.append(token)
            sequence.table.extend(token)

    def _promised(self, states: tuple[State, ...]) -> int:
        """Return how many slots requests in these states will still take for what they have."""
        chosen = (other for other in self.admitted if other.state in states)
        return sum(other.table.lacks(len(other.tokens)) for other in chosen)

    def _grow(self, piece: Piece) -> bool:
        """Make sure that a piece's tokens have slots, suspending younger requests for them if need
        be. What those that are fetching were promised is not taken: they cannot be suspended."""
        sequence = piece.sequence
        while count := sequence.table.lacks(piece.stop):
            room = self.pool.available - self._promised(("fetching",))
            if count <= room and sequence.table.grow(piece.stop):
                break
            # The list is in order of age, and only later entries are younger: what this step has
            # chosen already is never suspended.
            victim = next(other for other in reversed(self.admitted) if other.state == "running")
            self._suspend(victim)
            if victim is sequence:
                return False
        return True

    def _suspend(self, sequence: Sequence) -> None:
        """Take a request's slots; it comes back as prompt plus its tokens so far."""
        assert not sequence.in_step, "only requests after the current one are suspended"
        self.admitted.remove(sequence)
        sequence.table.close()
        sequence.state = "waiting"
        sequence.suspended_count += 1
        self.waiting.appendleft(sequence)

    def _piece(self, sequence: Sequence, budget: int) -> Piece | None:
        table, stop = sequence.table, len(sequence.tokens)
        if table.frontier >= stop - 1:
            return Piece(sequence, stop - 1, stop, write=table.frontier < stop, logits=True)
        if budget <= 0:
            return None
        end = table.gap_stop(min(stop, table.frontier + budget))
        return Piece(sequence, table.frontier, end, write=True, logits=end == stop)

    def _is_computed_by_other(self, piece: Piece, computing: set[bytes]) -> bool:
        """Whether an earlier piece of this step computes the same first block already."""
        table = piece.sequence.table
        keys = table.chain.keys[piece.start // table.block_tokens : table.blocks(piece.stop)]
        if not piece.write or not keys:
            return False
        if piece.start % table.block_tokens == 0 and keys[0] in computing:
            return True
        computing.update(keys)
        return False

    def _note_computed(self, sequence: Sequence, start: int, stop: int) -> None:
        stop = min(stop, sequence.request.prompt_length)
        if start < stop:
            if sequence.computed and sequence.computed[-1][1] == start:
                start = sequence.computed.pop()[0]
            sequence.computed.append((start, stop))
