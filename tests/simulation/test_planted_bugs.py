"""The simulation has teeth: bugs planted on purpose are each found by some of its first seeds,
which pass without them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np
import pytest

import lives
from hash_model import BLOCK, HashModel
from kvass.common import keys
from kvass.common.checksum import Sums, Words, sum_ranges
from kvass.common.keys import block_key
from kvass.common.model.runner import Rows
from kvass.common.rpc.client import Client
from kvass.decode.loop import DecodeLoop, Ticket
from kvass.decode.worker import Service
from kvass.gateway.session import Session
from kvass.kvstore import messages as m
from kvass.kvstore.client import pulls
from kvass.kvstore.client.pulls import PullOutcome, _Batch
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.index.ledger import Entry, Ledger
from kvass.kvstore.links import NodeLink
from kvass.kvstore.node.calls.arrivals import Arrival, Judged
from kvass.kvstore.node.copies import fills
from kvass.kvstore.node.copies.handover import Handover, Tally
from kvass.kvstore.placement import StoreNode
from kvass.kvstore.router import Router
from kvass.kvstore.transfers import Transfers
from kvass.prefill.job import Run
from kvass.prefill.loop import PrefillLoop
from lives import Life
from scenario import Member
from store_sim import Worker
from whole import run_seed

Plant = Callable[[pytest.MonkeyPatch], None]


def a_leased_slot_is_freed(patch: pytest.MonkeyPatch) -> None:
    """Eviction and removal look at a block's holders, and not at its readers."""
    settle, evictable = Ledger._settle, Ledger._evictable

    def unread(ledger: Ledger, entry: Entry, ask: Callable[[], bool | None]) -> bool | None:
        leases, entry.leases = entry.leases, 0
        try:
            return ask()
        finally:
            entry.leases = leases

    def settles(ledger: Ledger, entry: Entry) -> None:
        unread(ledger, entry, lambda: settle(ledger, entry))

    def evicts(ledger: Ledger, key: bytes) -> bool:
        entry = ledger.entries.get(key)
        if entry is None:
            return False
        return bool(unread(ledger, entry, lambda: evictable(ledger, key)))

    patch.setattr(Ledger, "_settle", settles)
    patch.setattr(Ledger, "_evictable", evicts)


def a_block_is_accepted_unchecked(patch: pytest.MonkeyPatch) -> None:
    """Whatever a transfer brought counts as pulled."""

    def judge(batch: _Batch, indices: Sequence[int], sums: Sums, announced: Words) -> None:
        batch.outcome.take([indices[at] for at in sums.found()], sums.values[sums.whole])

    patch.setattr(_Batch, "_judge", judge)


def a_prefill_wake_up_is_lost(patch: pytest.MonkeyPatch) -> None:
    """A job that has something to compute does not tell the loop."""
    patch.setattr(PrefillLoop, "wake", lambda loop: None)


def a_jobs_own_wake_up_is_lost(patch: pytest.MonkeyPatch) -> None:
    """A job moves on, and those who wait for it do not hear of it."""
    patch.setattr(Run, "move", lambda run: run.on_move())


def a_decode_wake_up_is_lost(patch: pytest.MonkeyPatch) -> None:
    """A request that has its blocks does not tell the loop."""

    async def fetch(loop: DecodeLoop, ticket: Ticket) -> None:
        with anyio.CancelScope() as ticket.fetch_scope:
            await loop._fetcher.fetch(ticket, loop.wake)
        ticket.fetch_scope = None
        if ticket.is_leaving:
            loop._retire(ticket)
        else:
            loop.scheduler.fetched(ticket.sequence)
            ticket.on_pulled()

    patch.setattr(DecodeLoop, "_fetch", fetch)


def a_hold_is_never_released(patch: pytest.MonkeyPatch) -> None:
    """Decode has its blocks, and the store goes on protecting them."""
    patch.setattr(Service, "_release_hold", lambda service, request: None)


def a_call_that_is_left_goes_on(patch: pytest.MonkeyPatch) -> None:
    """A client that leaves does not say so to the worker."""

    def end(client: Client, call_id: int) -> None:
        client._waiting.pop(call_id, None)

    patch.setattr(Client, "_end", end)


def an_unfinished_report_is_believed(patch: pytest.MonkeyPatch) -> None:
    """What a prefill job had computed and not yet said, when its answer was whole, is cached."""
    patch.setattr(Session, "_distrusting", lambda session: contextlib.nullcontext())


def the_salt_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A private chain's blocks have the names of everybody's."""
    patch.setattr(keys, "block_key", lambda parent, tokens, salt=b"": block_key(parent, tokens))


def a_slot_is_reused_while_bytes_move_into_it(patch: pytest.MonkeyPatch) -> None:
    """What was given up while its bytes were on their way is free at once."""
    settle = Ledger._settle

    def settles(ledger: Ledger, entry: Entry) -> None:
        moves, entry.moves = entry.moves, 0
        settle(ledger, entry)
        entry.moves = moves

    patch.setattr(Ledger, "_settle", settles)


def a_block_is_shown_before_it_is_checked(patch: pytest.MonkeyPatch) -> None:
    """A put's blocks are visible because their writer says what they are."""
    judge = Arrival.judge

    def trusting(arrival: Arrival, announced: Words) -> Judged:
        arrival.found.values[:] = announced
        return judge(arrival, announced)

    patch.setattr(Arrival, "judge", trusting)


class WrongModel(HashModel):
    """Of one piece in some eight the first row has a wrong bit: checksums are right, bytes not."""

    def _run(self, piece: Rows) -> int:
        state = super()._run(piece)
        if piece.write and state % 8 == 0:
            position = piece.start
            self._cells[piece.slots[position // BLOCK], position % BLOCK] ^= np.uint64(1)
        return state


def a_worker_computes_wrong(patch: pytest.MonkeyPatch) -> None:
    """A prefill worker does, after its known answer was right. It audits nobody: it would find the
    others wrong, who differ from it."""
    start = lives._start_prefill

    def starts(worker: Worker, member: Member, *rest: Any) -> Life:
        life = start(worker, member, *rest)
        if member.member_id == "prefill-0":
            assert isinstance(life.loop, PrefillLoop)
            life.loop._steps = WrongModel(worker.memory)
            life.auditor = None
        return life

    patch.setattr(lives, "_start_prefill", starts)


def a_copy_is_taken_unchecked(patch: pytest.MonkeyPatch) -> None:
    """A node that takes copies believes that what it got is what the other one has."""

    async def trusting(
        transfers: Transfers,
        link: NodeLink,
        chain: m.Named,
        slots: Mapping[int, int],
        *,
        ends_s: float,
    ) -> PullOutcome:
        outcome = await pulls.pull(transfers, link, chain, slots, ends_s=ends_s)
        for index, why in outcome.missed.items():
            if why == "corrupt":
                outcome.take(
                    [index], sum_ranges(transfers.places([slots[index]]), transfers.share, 1)
                )
        return outcome

    patch.setattr(fills, "pull", trusting)


def a_drain_is_over_too_early(patch: pytest.MonkeyPatch) -> None:
    """A node says that others have all its blocks, once it has told them."""

    async def leave(handover: Handover) -> Tally:
        for member_id, entries in handover.batches(handover._visible()):
            await handover.tell(member_id, entries)
        return Tally()

    patch.setattr(Handover, "leave", leave)


def a_reader_asks_the_first_home_only(patch: pytest.MonkeyPatch) -> None:
    """Where a copy of a dead node's blocks is, nobody looks."""
    looked_at = Router._looked_at

    def first(
        router: Router, segment: bytes, *, writing: bool, spread: bool
    ) -> Sequence[StoreNode]:
        return looked_at(router, segment, writing=writing, spread=spread)[:1]

    patch.setattr(Router, "_looked_at", first)


def a_block_on_flash_is_found_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    """What is on its way to a file counts as in it, whatever becomes of it."""
    publish = FlashLog._publish

    def publishes(log: FlashLog) -> None:
        appender = log._appender
        written, appender.written = appender.written, appender.position
        publish(log)
        appender.written = written

    patch.setattr(FlashLog, "_publish", publishes)


# With each bug the number of seeds within which it must be found, and what finds it.
BUGS: list[tuple[Plant, int, str]] = [
    (a_leased_slot_is_freed, 20, "a leased slot was given back"),
    (a_block_is_accepted_unchecked, 40, ""),  # in a pool, in the store, or in an answer
    (a_prefill_wake_up_is_lost, 20, "not done in their time"),
    (a_jobs_own_wake_up_is_lost, 20, "not done in their time"),
    (a_decode_wake_up_is_lost, 20, "not done in 300 s"),
    (the_salt_is_forgotten, 40, "tokens cached of"),
    (a_slot_is_reused_while_bytes_move_into_it, 160, "given back while bytes moved into it"),
    (a_block_is_shown_before_it_is_checked, 20, "visible that was not checked"),
    (a_worker_computes_wrong, 60, "audit found"),
    (a_copy_is_taken_unchecked, 60, ""),
    (a_drain_is_over_too_early, 100, "may leave, and a block goes with it"),
    (a_block_on_flash_is_found_before_it_is_written, 120, "wrong bytes on flash"),
    (a_reader_asks_the_first_home_only, 60, "nobody finds after a crash"),
    (a_hold_is_never_released, 20, "guarded_bytes"),
    (a_call_that_is_left_goes_on, 20, ""),
    (an_unfinished_report_is_believed, 120, "tokens cached of"),
]


@pytest.mark.parametrize(("plant", "count", "says"), BUGS, ids=[bug[0].__name__ for bug in BUGS])
def test_a_planted_bug_is_found(
    plant: Plant, count: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    runs = map(run_seed, range(count))
    found = next((each for each in runs if each.failures and says in each.summary()), None)
    assert found is not None, f"none of {count} seeds found it so"
    monkeypatch.undo()
    assert not run_seed(found.seed).failures, "the seed passes without the bug"
