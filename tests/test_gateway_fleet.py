"""What the gateway believes of its workers shuts none out for good."""

from __future__ import annotations

import pytest

from gateway_stage import a_stage
from kvass.common import wire
from kvass.gateway import route
from kvass.gateway.ask import Ask
from test_gateway_session import PROMPT, run

pytestmark = pytest.mark.anyio


async def test_prefill_computes_again_what_was_erased_everywhere() -> None:
    """As by `kvass drop`: the store lacks it, and the decode worker's pool was emptied."""
    async with a_stage(prefills=1) as stage:
        peer = stage.members.live("decode")[0]
        for emptied, jobs in [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3)]:
            stage.members.table.saw_load(
                peer.start_id, {"emptied_count": emptied}, stage.members.clock.now_s()
            )
            await run(stage)
            assert len(stage.prefill.prefills()) == jobs


async def test_a_worker_that_was_measured_in_a_bad_moment_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route, "RETRY_S", 0.05)
    async with a_stage(prefills=2) as stage:
        fast, slow = stage.members.live("prefill")
        for peer, rate in [(fast, 1000), (slow, 500)]:
            load = {"prefill_tokens_s": rate}
            stage.members.table.saw_load(peer.start_id, load, stage.members.clock.now_s())
        for number in range(200):
            tokens = (number, *PROMPT)
            ask = Ask(f"r{number}", tokens, 1, wire.Sampling(), wire.Stop(max_tokens=100))
            await run(stage, ask)
            if stage.prefills[1].prefills():
                break
    counts = [len(each.prefills()) for each in stage.prefills]
    assert counts[0] > 0 and counts[1] == 1


async def test_nothing_is_hoped_of_workers_that_are_all_unused() -> None:
    """Else, after a night, any prompt would be computed anew rather than moved."""
    async with a_stage(prefills=2) as stage:
        for peer in stage.members.live("prefill"):
            stage.fleet._used_s[peer.start_id] = stage.members.clock.now_s() - 3600.0
        workers = stage.fleet.workers("prefill")
        assert [worker.hoped_tokens_s for worker in workers] == [route.PREFILL_TOKENS_S] * 2
