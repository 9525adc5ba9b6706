"""How often a prefill job offers its blocks to a store that has no room."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import trio.testing

from kvass.common.pool.table import BlockTable
from kvass.common.wire import Prefill
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.results import PushResult
from kvass.prefill.publish import ATTEMPTS, Publisher

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Full:
    """A store that has room for so many more blocks, and for `each` of an offer at most; of the
    first offers, until `after`, for none. Mutable: `room`, and `offers`."""

    def __init__(self, room: int, each: int, after: int = 0) -> None:
        self.room = room
        self.each = each
        self.after = after
        self.offers: list[int] = []

    async def push(
        self, chain: object, indices: Sequence[int], *_: object, **__: Any
    ) -> PushResult:
        self.offers.append(len(indices))
        taken = min(self.room, self.each) if len(self.offers) > self.after else 0
        self.room -= min(taken, len(indices))
        refused = dict.fromkeys(indices[taken:], "full")
        return PushResult(stored=set(indices[:taken]), refused=refused)


async def published(store: Full, *parts: int) -> tuple[set[int], float]:
    """Publish so many blocks, part by part; return which are stored, and the seconds."""
    run = SimpleNamespace(stored=set[int](), move=lambda: None)
    table = SimpleNamespace(chain=None, slots=list(range(sum(parts))))
    request = Prefill(job_id="a", tokens=(), hold_owner="a", deadline_s=60.0)
    publisher = Publisher(cast(StoreClient, store), request, cast(BlockTable, table))
    begun_s, first = anyio.current_time(), 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publisher.run, run)
        for part in parts:
            publisher.publish(list(range(first, first + part)))
            first += part
            await publisher.flush()
        tasks.cancel_scope.cancel()
    return run.stored, anyio.current_time() - begun_s


async def test_what_finds_no_room_is_offered_for_a_while() -> None:
    store = Full(room=0, each=1)
    stored, took_s = await published(store, 3)
    assert (stored, len(store.offers)) == (set(), ATTEMPTS)
    assert took_s == pytest.approx(1.55)


async def test_a_job_waits_for_room_once_and_not_for_each_of_its_chunks() -> None:
    store = Full(room=0, each=1)
    _, took_s = await published(store, 3, 3, 3)
    assert store.offers == [3] * ATTEMPTS + [3, 3], "later ones are offered, once"
    assert took_s == pytest.approx(1.55)


async def test_while_some_of_an_offer_is_taken_the_rest_is_offered_again() -> None:
    store = Full(room=20, each=1)
    stored, _ = await published(store, 12, 8)
    assert stored == set(range(20))


async def test_a_later_chunk_that_finds_room_has_time_again() -> None:
    store = Full(room=3, each=1, after=ATTEMPTS)
    stored, _ = await published(store, 3, 3, 3)
    assert stored == {3, 4, 5}
    assert store.offers == [3] * ATTEMPTS + [3, 2, 1] + [3] * ATTEMPTS
