"""A stream whose last decode worker is lost: what it waits for is told, and what it ends with."""

from __future__ import annotations

import logging

import anyio
import pytest

from gateway_stage import ScriptedWorker, a_stage, until
from kvass.common import errors
from kvass.gateway import session
from test_gateway_session import Reader, a_session, after, an_ask, assert_whole, run

pytestmark = pytest.mark.anyio
WAITS = "r: no other decode worker is ready: waiting up to %g s for one"


@pytest.mark.parametrize("last_words", [errors.Leaving("it is leaving"), None])
async def test_a_worker_that_leaves_in_order_is_no_warning(
    last_words: errors.Leaving | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither for the stream nor for the prefill job that it had; one that dies is one for each."""
    caplog.set_level("INFO")
    async with a_stage(decodes=0) as stage:
        first = ScriptedWorker("decode", 5, last_words=last_words)
        filling = ScriptedWorker("prefill", 5, last_words=last_words)

        async def end_after_some(at: int) -> None:
            if at == 5:
                await stage.start(ScriptedWorker("decode", 6))
                first.die()
                await anyio.sleep_forever()

        first.before_token = end_after_some
        filling.before_token = lambda at: after(at, 2, filling.die)
        for worker in (first, filling):
            await stage.start(worker)
        reader, _ = await run(stage)
    assert_whole(reader)
    lost = "{0} did not answer {1}: the connection was lost"
    for name, call, of in (("decode-5", "Generate", "r"), ("prefill-5", "Prefill", "prefill r")):
        said = f"{name} is leaving" if last_words else lost.format(name, call)
        level = logging.INFO if last_words else logging.WARNING
        line = ("kvass.gateway.session", level, f"{of} on {name}: {said}")
        assert line in caplog.record_tuples
    assert "r resumed on decode-6 after 5 tokens" in caplog.messages
    assert any(each.levelno > logging.INFO for each in caplog.records) == (not last_words)


async def test_a_stream_waits_for_a_worker_to_come_back(caplog: pytest.LogCaptureFixture) -> None:
    async with a_stage() as stage:
        first, late = stage.decode, ScriptedWorker("decode", 9)
        first.before_token = lambda at: after(at, 5, first.die)
        reader = Reader()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a_session(stage, an_ask(), reader).run)
            await until(lambda: WAITS % session.RESUME_WAIT_S in caplog.messages)
            await stage.start(late)
    assert_whole(reader)
    assert len(caplog.messages) == 2, "that it was lost, and once that it is waited for"


async def test_a_stream_that_waits_in_vain_says_for_what(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "RESUME_WAIT_S", 0.3)
    async with a_stage() as stage:
        stage.decode.before_token = lambda at: after(at, 5, stage.decode.die)
        with pytest.raises(errors.Unavailable) as raised:
            await run(stage)
    assert str(raised.value) == (
        "decode-0 was lost after 5 tokens, and no decode worker came within 0.3 s"
    )
    assert caplog.messages.count(WAITS % 0.3) == 1


async def test_a_request_that_never_began_waits_for_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with a_stage() as stage:
        stage.decode.before_token = lambda at: after(at, 0, stage.decode.die)
        with pytest.raises(errors.Unavailable, match="the connection was lost"):
            await run(stage)
    assert not any("waiting" in each for each in caplog.messages)


async def test_a_stream_that_only_full_workers_could_take_ends_as_overloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "RESUME_WAIT_S", 0.3)
    async with a_stage(decodes=2) as stage:
        first, full = stage.decodes
        first.before_token = lambda at: after(at, 5, first.die)
        full.refusal = errors.Overloaded("full", retry_after_s=3)
        with pytest.raises(errors.Overloaded):
            await run(stage)
