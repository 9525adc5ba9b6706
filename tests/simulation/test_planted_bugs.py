"""The simulation has teeth: bugs planted on purpose are each found by some of its first seeds,
which pass without them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import anyio
import pytest

from kvass.common.rpc.client import Client
from kvass.decode.loop import DecodeLoop, Ticket
from kvass.decode.worker import Service
from kvass.gateway.session import Session
from kvass.kvstore.ledger import Entry, Ledger
from kvass.kvstore.pulls import _Batch
from kvass.prefill.job import Run
from kvass.prefill.loop import PrefillLoop
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

    def judge(
        batch: _Batch,
        found: Mapping[int, tuple[int, ...]],
        announced: Mapping[int, tuple[int, ...]],
    ) -> None:
        batch.outcome.pulled.update(found)

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
            await loop._fetcher.fetch(ticket)
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


# With each bug the number of seeds within which it must be found, and what finds it.
BUGS: list[tuple[Plant, int, str]] = [
    (a_leased_slot_is_freed, 20, "a leased slot was given back"),
    (a_block_is_accepted_unchecked, 40, ""),  # in a pool, in the store, or in an answer
    (a_prefill_wake_up_is_lost, 20, "not done in their time"),
    (a_jobs_own_wake_up_is_lost, 20, "not done in their time"),
    (a_decode_wake_up_is_lost, 20, "not done in 300 s"),
    (a_hold_is_never_released, 20, "guarded_bytes"),
    (a_call_that_is_left_goes_on, 20, ""),
    (an_unfinished_report_is_believed, 120, "tokens cached of"),
]


@pytest.mark.parametrize(("plant", "count", "says"), BUGS, ids=[bug[0].__name__ for bug in BUGS])
def test_a_planted_bug_is_found(
    plant: Plant, count: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = next((each for each in map(run_seed, range(count)) if each.failures), None)
    assert found is not None, f"none of {count} seeds found it"
    assert says in found.summary()
    monkeypatch.undo()
    assert not run_seed(found.seed).failures, "the seed passes without the bug"
