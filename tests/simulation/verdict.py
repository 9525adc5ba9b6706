"""What must be true of every run: answers, counts, laws, bytes, and that nothing is left over.

Each check raises AssertionError with what was wrong; a run that passes them all was right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hash_model import BLOCK, WORDS, after, kv_of, reference
from kvass.common.errors import KvassError, Unavailable
from kvass.common.wire import Delta
from kvass.gateway.ask import Ask
from kvass.gateway.fleet import Fleet
from kvass.gateway.replies import Usage
from kvass.kvstore.flash.disk import PAGE, page_memory
from kvass.kvstore.flash.table import pages_in
from lives import Life
from memory_disk import MemoryDisk
from store_sim import LAYOUT, Cluster, SimNode, chain_from

ANSWER_S = 100.0  # of the slowest answer: several attempts, each after a peer was given up


class Reader:
    """A client's side of an answer. Mutable fields: `tokens` and `reasons` by choice, `words`."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.words: dict[int, str] = {}
        self.reasons: dict[int, str] = {}

    def put(self, choice: int, delta: Delta) -> None:
        assert choice not in self.reasons, "something came after an answer's end"
        self.tokens.setdefault(choice, []).extend(delta.token_ids)
        self.words[choice] = self.words.get(choice, "") + delta.text
        if delta.finish_reason:
            self.reasons[choice] = delta.finish_reason


@dataclass(slots=True, eq=False)
class Request:
    """One turn as its client saw it. Mutable fields: all but `ask`.

    It ends once: `usage` (answered), `failure`, or neither (its client left).
    """

    ask: Ask
    begun_s: float
    reader: Reader = field(default_factory=Reader)
    ended_s: float | None = None
    usage: Usage | None = None
    failure: KvassError | None = None

    @property
    def outcome(self) -> str:
        if self.ended_s is None:
            return "never ended"
        if self.usage is not None:
            return f"answered, {self.usage.cached_tokens} cached"
        return f"failed: {self.failure}" if self.failure is not None else "left"

    def tokens(self) -> tuple[int, ...]:
        """Return prompt and answer, whole: a worker may have been ahead of what its client read."""
        return (*self.ask.tokens, *reference(self.ask.tokens, self.ask.stop.max_tokens))


def check_request(request: Request, others: Iterable[Request], *, answers_due: bool) -> None:
    """Every request ends once, in time; tokens are the reference's; the counts are true."""
    ask, reader = request.ask, request.reader
    assert request.ended_s is not None, "the request never ended"
    expected = reference(ask.tokens, ask.stop.max_tokens)
    for choice, tokens in reader.tokens.items():
        right = expected[: len(tokens)]
        assert tokens == right, f"choice {choice} got {tokens}; expected {right}"
    if request.failure is not None:
        assert not answers_due, f"nothing justifies the error: {request.failure!r}"
        assert request.failure.retryable, f"a fault inside is no client's fault: {request.failure}"
    if request.usage is None:
        return
    for choice in range(ask.choices):
        assert reader.tokens[choice] == expected, f"choice {choice} ended early"
        assert reader.reasons[choice] == "length"
        assert reader.words[choice] == "".join(f"t{token}" for token in expected)
    took_s = request.ended_s - request.begun_s
    assert not answers_due or took_s < ANSWER_S, f"the answer took {took_s:.1f} s"
    usage = request.usage
    assert usage.prompt_tokens == len(ask.tokens)
    assert usage.completion_tokens == ask.choices * len(expected)
    most = min(len(ask.tokens) - 1, _shared_tokens(request, others))
    assert 0 <= usage.cached_tokens <= most, f"{usage.cached_tokens} tokens cached of {most}"


def _shared_tokens(request: Request, others: Iterable[Request]) -> int:
    """Return how many tokens of whole blocks the prompt has in common with any other request that
    began before it ended: nothing else can have been computed for somebody else."""
    most = 0
    for other in others:
        if other is request or other.ask.salt != request.ask.salt:
            continue
        if request.ended_s is None or other.begun_s > request.ended_s:
            continue
        most = max(most, _common(request.ask.tokens, other.tokens()))
    return most // BLOCK * BLOCK


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    pairs = zip(one, two, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def check_audits(lives: Iterable[Life]) -> None:
    """Nobody computed wrong, so no auditor may have found that anybody did."""
    for life in lives:
        if life.auditor is not None and life.auditor.wrong:
            found, barred = life.auditor.wrong, life.auditor.barred
            raise AssertionError(
                f"{life.member_id}'s audit found {found} wrong blocks, and barred {barred} writers"
            )


def check_rest(lives: Iterable[Life], nodes: Iterable[SimNode], fleet: Fleet) -> None:
    """Nobody asks for anything: nothing is used, held, promised or waited for."""
    for life in lives:
        assert life.pool.used == 0, f"{life.member_id} leaks slots: {life.pool.counts()}"
        assert not life.loop._tickets, f"{life.member_id} still has requests"
        assert not life.loop.scheduler.waiting, f"{life.member_id} still has a queue"
        _check_landing(life.member_id, life.worker.store._moving().endpoints.landing.counts())
    names = ("writing_bytes", "retired_bytes", "quarantined_bytes", "guarded_bytes")
    counted = ("leases", "claims", "puts", "waited_blocks", "held_bytes")
    waiting = ("fill_queued_blocks", "copies_waiting")
    for node in nodes:
        if not node.alive:
            continue
        counts = node.node.counts()
        assert not counts["bugs"], f"{node.member_id} met bugs, which its log names"
        for name in (*names, *counted, *waiting):
            assert counts[name] == 0, f"{node.member_id} still has {name}: {counts[name]}"
        _check_landing(node.member_id, node.node._state.endpoints.landing.counts())
        node.index.ledger.check()
    assert not fleet._calls and not fleet._expected, "the gateway still has calls"


def _check_landing(member_id: str, counts: dict[str, int]) -> None:
    for state in ("lent", "quarantined"):
        assert counts[state] == 0, f"{member_id} still has {state} landing memory"


def check_bytes(
    sim: Cluster,
    lives: Iterable[Life],
    requests: Iterable[Request],
    seen: Iterable[tuple[bytes, bytes]],
) -> int:
    """Every block that has a name, in whatever store or pool, or that was `seen`, has the one right
    content; returns how many were looked at."""
    right = _contents(requests)
    looked = 0
    for key, found in seen:
        assert found == right[key], "wrong bytes were read after a crash"
        looked += 1
    for node in sim.nodes.values():
        for key, entry in node.index.ledger.entries.items():
            if node.alive and entry.state == "visible":
                stored = node.slab.view[entry.slot.offset :][: LAYOUT.block_size]
                assert bytes(stored) == right[key], f"{node.member_id} has wrong bytes for a block"
                looked += 1
        for key, below in on_flash(node) if node.alive else ():
            assert below == right[key], f"{node.member_id} has wrong bytes on flash"
            looked += 1
    for life in lives:
        for slot, named in life.pool._names.items():
            found = life.worker.memory.array[slot].tobytes()
            assert found == right[named.key], f"{life.member_id} has wrong bytes for a block"
            looked += 1
    return looked


def on_flash(node: SimNode) -> Iterator[tuple[bytes, bytes | None]]:
    """Read every block that a node finds on flash, as it does for a get, from a disk that is well
    from now on: None is what a get would miss, and should not."""
    if node.node._tiers is None:
        return
    log = node.node._tiers._log
    disk = log._disk
    assert isinstance(disk, MemoryDisk)
    disk.refuses = lambda what, name: None
    with contextlib.suppress(Unavailable):  # that an index could not be written is said once, later
        log._background.settle()
    finds = len(log.catalog)
    keys = [key for sequence in log.sequences() for key in log.keys_in(sequence)]
    assert len(keys) == finds, f"{node.member_id} finds {finds} blocks on flash, has {len(keys)}"
    for key, place in zip(keys, log.catalog.find(keys), strict=True):
        fetched = log.catalog.read(key, place, page_memory(pages_in(place) * PAGE))
        right = fetched is not None and fetched.is_right()
        yield key, bytes(fetched.payload) if fetched is not None and right else None


def _contents(requests: Iterable[Request]) -> dict[bytes, bytes]:
    right: dict[bytes, bytes] = {}
    for request in requests:
        tokens = request.tokens()
        chain, state, cells = chain_from(tokens, request.ask.salt), 0, []
        if chain.keys[-1:] and chain.keys[-1] in right:
            continue
        for position, token in enumerate(tokens):
            cells.append(kv_of(state, token))
            state = after(state, position, cells[-1])
        for index, key in enumerate(chain.keys):
            block = np.array(cells[index * BLOCK : (index + 1) * BLOCK], dtype=np.uint64)
            right[key] = np.repeat(block, WORDS).tobytes()
    return right
