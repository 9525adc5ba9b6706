"""One request's blocks in a worker's pool: its block table and how far its KV is there. Pure.

    position   0 ........ frontier ........ ready block ........ tokens
               KV is here │ to compute     │ KV is here already │ to compute

The frontier counts leading tokens whose KV is in place; blocks beyond it may be ready too (a gap is
only a gap). Both pools use it: prefill for its jobs, decode for its requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvass.common.keys import Chain
from kvass.common.pool.pool import BlockPool


@dataclass(slots=True, eq=False)
class BlockTable:
    """Slots in chain order, with what is in them.

    Mutable fields: `slots` (of the leading blocks, the last one possibly part-filled; each is
    retained once),
    `ready` (for each full block of `chain`: its KV is in its slot), `frontier`.
    """

    pool: BlockPool
    chain: Chain
    slots: list[int] = field(default_factory=list)
    ready: list[bool] = field(default_factory=list)
    frontier: int = 0

    @property
    def block_tokens(self) -> int:
        return self.chain.block_tokens

    @property
    def missing(self) -> list[int]:
        """Indices of full blocks whose KV is not here."""
        return [index for index, ready in enumerate(self.ready) if not ready]

    def blocks(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens take."""
        return -(-tokens // self.block_tokens)

    def lacks(self, tokens: int) -> int:
        """Return how many slots are still to be taken for `tokens` tokens."""
        return max(0, self.blocks(tokens) - len(self.slots))

    def open(self, tokens: int, *, spare: int, whole: bool = True) -> bool:
        """Take slots for `tokens` tokens, sharing what the pool has; all or none.

        `spare` slots must stay available besides: for what others were promised. Unless `whole`,
        slots are taken up to the last block that the pool has, and the rest by `grow`.
        """
        assert not self.slots
        hits = [self.pool.retain_key(key) for key in self.chain.keys]
        shared = sum(slot is not None for slot in hits)
        fits = self.blocks(tokens) - shared + spare <= self.pool.available
        if not whole:
            hits = hits[
                : max((i + 1 for i, slot in enumerate(hits) if slot is not None), default=0)
            ]
        count = self.blocks(tokens) if whole else len(hits)
        fresh = self.pool.allocate(count - shared) if fits else None
        if fresh is None:
            self.pool.release([slot for slot in hits if slot is not None])
            return False
        self.ready = [slot is not None for slot in hits]
        self.ready += [False] * (len(self.chain.keys) - len(hits))
        self.slots = [fresh.pop() if slot is None else slot for slot in hits] + fresh
        self.frontier = 0
        self.advance()
        return True

    def close(self) -> None:
        """Give all slots back; named blocks stay findable until they are evicted."""
        self.pool.release(self.slots)
        self.slots = []
        self.ready = [False] * len(self.chain.keys)
        self.frontier = 0

    def grow(self, tokens: int) -> bool:
        """Take the slots that `tokens` tokens lack; returns False when the pool has too few."""
        count = self.lacks(tokens)
        fresh = self.pool.allocate(count) if count else []
        if fresh is None:
            return False
        self.slots += fresh
        return True

    def extend(self, token: int) -> None:
        """Append a token to the chain; its KV is not there yet."""
        if self.chain.extend((token,)):
            self.ready.append(False)

    def advance(self) -> None:
        """Move the frontier over blocks that are ready."""
        while not self.frontier % self.block_tokens:
            index = self.frontier // self.block_tokens
            if index >= len(self.ready) or not self.ready[index]:
                return
            self.frontier += self.block_tokens

    def adopt(self) -> None:
        """At the frontier, take over blocks that another request has completed meanwhile."""
        self.advance()
        while not self.frontier % self.block_tokens:
            index = self.frontier // self.block_tokens
            if index >= len(self.ready) or not self.share(index):
                return
            self.advance()

    def share(self, index: int) -> bool:
        """Use the pool's copy of block `index` if it has one; returns whether it does.

        It does not either when the pool has no slots for the blocks before it.
        """
        slot = self.pool.retain_key(self.chain.keys[index])
        if slot is None:
            return False
        if not self.grow(index * self.block_tokens):
            self.pool.release([slot])
            return False
        if index < len(self.slots):
            self.pool.release([self.slots[index]])
            self.slots[index] = slot
        else:
            self.slots.append(slot)
        self.ready[index] = True
        return True

    def landed(self, index: int) -> None:
        """Block `index` is whole in its slot: make it ready and findable."""
        assert not self.ready[index]
        key, parent = self.chain.keys[index], self.chain.parent(index)
        if self.pool.name(self.slots[index], key, parent):
            self.ready[index] = True
        else:
            shared = self.share(index)
            assert shared, "a key that cannot be named is in the pool already"

    def computed(self, stop: int) -> list[int]:
        """KV up to token `stop` was written from the frontier on; return the blocks it
        completed."""
        assert stop > self.frontier
        first = self.frontier // self.block_tokens
        self.frontier = stop
        full = [i for i in range(first, stop // self.block_tokens) if not self.ready[i]]
        for index in full:
            self.landed(index)
        self.advance()
        return full

    def gap_stop(self, limit: int) -> int:
        """Return where a run of rows from the frontier must end: at `limit`, or at a ready
        block."""
        first = self.frontier // self.block_tokens + 1
        for index in range(first, min(len(self.ready), self.blocks(limit))):
            if self.ready[index]:
                return min(limit, index * self.block_tokens)
        return limit
