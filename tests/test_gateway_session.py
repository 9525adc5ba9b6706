"""One request's life against scripted workers: faults of workers, usage, and cancellation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from gateway_stage import ANSWER, BLOCK_TOKENS, ScriptedWorker, Stage, a_stage, answer_of, until
from kvass.common import errors, wire
from kvass.common.config import GatewayConfig
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.wire import Delta
from kvass.gateway.ask import Ask
from kvass.gateway.replies import Usage
from kvass.gateway.session import Session

pytestmark = pytest.mark.anyio
TOKENS = len(ANSWER.encode())
PROMPT = tuple(range(30))  # seven blocks and a tail of two


@pytest.fixture(params=[(BACKEND, dict(BACKEND_OPTIONS)), ("trio", {})], ids=["uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    backend: tuple[str, dict[str, object]] = request.param
    return backend


class Reader:
    """A sink that keeps what came, by choice."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.token_ids: dict[int, bytes] = {}
        self.reasons: dict[int, str] = {}

    def put(self, choice: int, delta: Delta) -> None:
        assert choice not in self.reasons, "nothing comes after the end"
        self.text[choice] = self.text.get(choice, "") + delta.text
        self.token_ids[choice] = self.token_ids.get(choice, b"") + bytes(delta.token_ids)
        if delta.finish_reason:
            self.reasons[choice] = delta.finish_reason


def an_ask(choices: int = 1, max_tokens: int = 100) -> Ask:
    return Ask(
        request_id="r",
        tokens=PROMPT,
        choices=choices,
        sampling=wire.Sampling(seed=7, logit_bias={5: 1.5}),
        stop=wire.Stop(max_tokens=max_tokens),
    )


async def run(stage: Stage, ask: Ask | None = None) -> tuple[Reader, Usage]:
    reader = Reader()
    usage = await a_session(stage, ask or an_ask(), reader).run()
    return reader, usage


def a_session(stage: Stage, ask: Ask, reader: Reader) -> Session:
    end_s = stage.fleet.clock.now_s() + stage.fleet.config.request_timeout_s
    return Session(stage.fleet, ask, reader, end_s=end_s)


def assert_whole(reader: Reader, choices: int = 1) -> None:
    for choice in range(choices):
        assert reader.text[choice] == answer_of(ANSWER, choice)
        assert reader.token_ids[choice] == answer_of(ANSWER, choice).encode()
        assert reader.reasons[choice] == "stop"


async def after(position: int, at: int, act: Callable[[], None]) -> None:
    if position == at:
        act()
        await anyio.sleep_forever()


async def test_decode_alone_answers() -> None:
    async with a_stage() as stage:
        stage.decode.computed = ((0, 30),)
        reader, usage = await run(stage)
    assert_whole(reader)
    assert usage == Usage(30, TOKENS, 0)
    (request,) = stage.decode.generates()
    assert request.tokens == PROMPT and request.prompt_length == 30
    assert request.sampling.logit_bias == {5: 1.5}, "int keys cross the wire"
    assert not request.prefill_pending
    assert stage.store.released == []


async def test_prefill_fills_then_decode_goes_on() -> None:
    async with a_stage(prefills=1) as stage:
        stage.decode.computed = ((28, 30),)
        reader, usage = await run(stage)
    assert_whole(reader)
    assert usage.cached_tokens == 0
    (job,), (request,) = stage.prefill.prefills(), stage.decode.generates()
    assert job.tokens == PROMPT and job.hold_owner == request.hold_owner == "r"
    assert request.prefill_pending
    assert stage.store.released == [], "decode releases what it pulled"


async def test_a_prefill_job_that_is_not_heard_to_its_end_counts_as_computed() -> None:
    async with a_stage(prefills=1) as stage:
        stage.store.stored = {0, 1}
        stage.prefill.before_token = _forever  # it computes, and its reports are late
        async with anyio.create_task_group() as tasks:

            async def have_the_blocks() -> None:
                await until(lambda: bool(stage.decode.generates()))
                stage.decode._over[stage.decode.generates()[0].request_id].set()

            tasks.start_soon(have_the_blocks)
            reader, usage = await run(stage)
    assert_whole(reader)
    assert usage.cached_tokens == 2 * BLOCK_TOKENS


async def test_a_short_missing_suffix_is_left_to_decode() -> None:
    async with a_stage(prefills=1) as stage:
        stage.store.stored = set(range(6))
        stage.decode.computed = ((24, 30),)
        reader, usage = await run(stage)
    assert_whole(reader)
    assert usage.cached_tokens == 24
    assert stage.prefill.requests == []


async def test_a_full_hit_computes_one_token() -> None:
    async with a_stage() as stage:
        stage.decode.computed = ()
        _, usage = await run(stage)
    assert usage.cached_tokens == 29


async def test_a_store_that_fails_is_a_miss() -> None:
    async with a_stage() as stage:
        stage.store.error = errors.Unavailable("no store node")
        reader, _ = await run(stage)
    assert_whole(reader)


async def test_choices_share_one_prefill_and_start_after_the_first_token() -> None:
    async with a_stage(prefills=1) as stage:
        seen: list[int] = []

        async def note(position: int) -> None:
            seen.append(len(stage.decode.generates()))

        stage.decode.before_token = note
        reader, usage = await run(stage, an_ask(choices=3))
    assert_whole(reader, 3)
    assert seen[0] == 1, "the others wait for the first one's prompt"
    requests = stage.decode.generates()
    assert len(stage.prefill.prefills()) == 1
    assert {each.sampling.choice for each in requests} == {0, 1, 2}
    assert [each.prefill_pending for each in requests] == [True, False, False]
    assert usage.completion_tokens == sum(len(answer_of(ANSWER, i).encode()) for i in range(3))


async def test_blocks_that_prefill_could_not_store_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with a_stage(prefills=1) as stage:
        stage.prefill.missing = ((0, 2), (5, 6))
        await run(stage)
        count = stage.registry.get_sample_value("kvass_prefill_blocks_not_stored_total")
    (line,) = [each for each in caplog.messages if "not stored" in each]
    assert line.startswith("prefill r on prefill-0: 3 of 7 blocks not stored")
    assert count == 3


async def test_prefill_worker_dies_and_another_takes_over() -> None:
    async with a_stage(prefills=2) as stage:
        first, second = stage.prefills
        first.before_token = lambda position: after(position, 3, first.die)
        stage.decode.computed = ((28, 30),)
        reader, usage = await run(stage)
    assert_whole(reader)
    assert len(first.prefills()) == len(second.prefills()) == 1
    assert first.prefills()[0].hold_owner == second.prefills()[0].hold_owner
    assert usage.cached_tokens == 0
    assert len(stage.decode.generates()) == 1, "decode did not notice"


async def test_every_prefill_worker_dies_and_decode_computes() -> None:
    async with a_stage(prefills=2) as stage:
        for worker in stage.prefills:
            worker.before_answer = _die(worker)
        stage.decode.computed = ((0, 30),)
        reader, usage = await run(stage)
    assert_whole(reader)
    assert usage.cached_tokens == 0
    assert len(stage.decode.generates()) == 1


def _die(worker: ScriptedWorker) -> Callable[[], Awaitable[None]]:
    async def die() -> None:
        worker.die()
        await anyio.sleep_forever()

    return die


async def test_prefill_that_refuses_is_left_to_decode_at_once() -> None:
    async with a_stage(prefills=1) as stage:
        stage.prefill.refusal = errors.Overloaded("full")
        stage.decode.computed = ((24, 30),)
        stage.store.stored = set()
        reader, usage = await run(stage)
    assert_whole(reader)
    assert usage.cached_tokens == 24, "a refusal computed nothing"


async def test_prefill_that_hangs_is_given_up_when_membership_loses_it() -> None:
    async with a_stage(prefills=1) as stage:

        async def hang() -> None:
            stage.members.table.saw_gone(stage.prefill.hello.start_id)
            await anyio.sleep_forever()

        stage.prefill.before_answer = hang
        reader, _ = await run(stage)
        await until(lambda: stage.prefill.cancelled == ["r.0"])
    assert_whole(reader)


@pytest.mark.parametrize("position", [0, 1, 3, 4, 9, 10, TOKENS - 1])
async def test_decode_worker_dies_and_the_stream_resumes(
    position: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with a_stage(decodes=2) as stage:
        first, second = stage.decodes
        first.before_token = lambda at: after(at, position, first.die)
        second.computed = ((0, 30),)
        reader, usage = await run(stage)
        resumed = stage.fleet.metrics.resumed._value.get()
    assert_whole(reader)
    assert usage == Usage(30, TOKENS, 0)
    (request,) = second.generates()
    assert bytes(request.tokens[30:]) == ANSWER.encode()[:position]
    assert request.stop.max_tokens == 100
    assert resumed == (1 if position else 0)
    line = f"r resumed on decode-1 after {position} tokens"
    assert (line in caplog.messages) == (position > 0)


async def test_decode_worker_hangs_and_the_stream_resumes() -> None:
    async with a_stage(decodes=2) as stage:
        first, second = stage.decodes

        def vanish() -> None:
            stage.members.table.saw_gone(first.hello.start_id)

        first.before_token = lambda at: after(at, 5, vanish)
        reader, _ = await run(stage)
        await until(lambda: len(first.cancelled) == 1)
    assert_whole(reader)
    assert len(second.generates()) == 1


async def test_a_request_that_never_began_is_refused_at_once() -> None:
    async with a_stage(decodes=2) as stage:
        for worker in stage.decodes:
            worker.before_answer = _die(worker)
        with pytest.raises(errors.Unavailable):
            await run(stage)


async def test_a_full_worker_sends_the_request_to_another() -> None:
    async with a_stage(decodes=2) as stage:
        stage.decodes[0].refusal = errors.Overloaded("full", retry_after_s=3)
        reader, _ = await run(stage)
        assert_whole(reader)
        stage.decodes[1].refusal = errors.Overloaded("full", retry_after_s=3)
        with pytest.raises(errors.Overloaded) as caught:
            await run(stage)
    assert caught.value.retry_after_s == 3


async def test_full_queues_are_refused_before_anything_is_sent() -> None:
    async with a_stage(prefills=1) as stage:
        load = {"waiting": 4, "waiting_max": 4, "waiting_tokens": 5000}
        stage.members.table.saw_load(stage.decode.hello.start_id, load, 0.0)
        with pytest.raises(errors.Overloaded) as caught:
            await run(stage)
    assert caught.value.retry_after_s == 5
    assert stage.prefill.requests == [] and stage.decode.requests == []


async def test_a_prompt_that_no_pool_holds_is_refused_before_anything_is_sent() -> None:
    async with a_stage(prefills=1) as stage:
        stage.members.table.saw_load(stage.decode.hello.start_id, {"total_blocks": 7}, 0.0)
        with pytest.raises(errors.Invalid, match=r"30 tokens.*28"):
            await run(stage)
    assert stage.prefill.requests == [] and stage.decode.requests == []


async def test_an_invalid_request_is_not_tried_elsewhere() -> None:
    async with a_stage(decodes=2) as stage:
        stage.decodes[0].refusal = errors.Invalid("no", parameter="x")
        with pytest.raises(errors.Invalid):
            await run(stage)
    assert stage.decodes[1].requests == []


async def test_the_deadline_ends_everything() -> None:
    config = GatewayConfig(request_timeout_s=0.3, prefill_tokens_min=8)
    async with a_stage(prefills=1, config=config) as stage:
        stage.prefill.before_answer = anyio.sleep_forever
        with pytest.raises(errors.DeadlineExceeded):
            await run(stage)
        await until(lambda: bool(stage.prefill.cancelled and stage.decode.cancelled))
    assert stage.store.released == ["r"]


async def _forever(_: int) -> None:
    await anyio.sleep_forever()


@pytest.mark.parametrize("boundary", ["in prefill", "after prefill", "in mid-stream"])
async def test_a_client_that_leaves_cancels_everything(boundary: str) -> None:
    async with a_stage(prefills=1) as stage:
        if boundary == "in prefill":
            stage.prefill.before_token = lambda at: after(at, 2, lambda: None)
        elif boundary == "after prefill":
            stage.decode.before_token = _forever
        else:
            stage.decode.before_token = lambda at: after(at, 4, lambda: None)
        reader = Reader()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a_session(stage, an_ask(), reader).run)
            if boundary == "in prefill":
                await until(lambda: bool(stage.prefill.requests and stage.decode.requests))
            elif boundary == "after prefill":
                await until(lambda: bool(stage.prefill.finished))
            else:
                await until(lambda: len(reader.token_ids.get(0, b"")) == 4)
            tasks.cancel_scope.cancel()
        await until(lambda: stage.decode.cancelled == ["r.0.0"])
        if boundary == "in prefill":
            await until(lambda: stage.prefill.cancelled == ["r.0"])
        assert stage.fleet._calls == []
    assert stage.store.released == ["r"]


async def test_the_worker_that_served_a_prefix_gets_its_next_turn() -> None:
    async with a_stage(decodes=3) as stage:
        stage.decodes[0].answer = stage.decodes[1].answer = stage.decodes[2].answer
        first, *_ = stage.decodes
        stage.fleet.members.refused(stage.members.live("decode")[0])
        await run(stage)
        served = [len(each.requests) for each in stage.decodes]
        assert served == [0, 1, 0]
        stage.members.add(first.hello, first.address)  # back, and first by name
        tokens = (*PROMPT, *ANSWER.encode(), *range(6))
        turn = Ask("t", tokens, 1, wire.Sampling(), wire.Stop(max_tokens=100))
        await run(stage, turn)
    assert [len(each.requests) for each in stage.decodes] == [0, 2, 0]
    assert len(tokens) // BLOCK_TOKENS > 7


async def test_what_was_just_sent_counts_before_the_next_load_comes() -> None:
    async with a_stage(decodes=2) as stage:
        for worker in stage.decodes:
            worker.before_token = _forever
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                ask = Ask(str(number), PROMPT, 1, wire.Sampling(), wire.Stop(max_tokens=9))
                tasks.start_soon(a_session(stage, ask, Reader()).run)
            await until(lambda: sum(len(each.requests) for each in stage.decodes) == 6)
            tasks.cancel_scope.cancel()
    assert [len(each.requests) for each in stage.decodes] == [3, 3]


async def test_a_stale_address_is_refused() -> None:
    async with a_stage(decodes=2) as stage:
        first, second = stage.decodes
        stage.members.table.saw_gone(first.hello.start_id)
        stage.members.add(first.hello, second.address)  # another process has it now
        reader, _ = await run(stage)
        assert_whole(reader)
    assert first.requests == []
