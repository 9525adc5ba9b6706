"""The API over real sockets: answers and streams, usage, errors, the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anyio
import httpx
import msgspec
import openai
import pytest

from gateway_stage import ANSWER, MODEL, WINDOW, Stage, a_gateway, answer_of
from kvass.common import errors
from kvass.common.event_loop import BACKEND, BACKEND_OPTIONS
from kvass.common.wire import Delta
from kvass.gateway.outbox import Outbox
from kvass.gateway.replies import Envelope, Usage

pytestmark = pytest.mark.anyio
TOKENS = len(ANSWER.encode())
ASK = {"model": MODEL, "prompt": "x" * 30, "max_tokens": 100}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return BACKEND, dict(BACKEND_OPTIONS)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with a_gateway(prefills=1) as made:
        yield made


async def post(stage: Stage, path: str, body: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=stage.url) as client:
        return await client.post(path, json=body)


async def events(stage: Stage, path: str, body: dict[str, Any]) -> list[Any]:
    """Read a whole stream; its parts must be server-sent events to the byte."""
    async with httpx.AsyncClient(base_url=stage.url) as client:
        response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, rest = response.text.split("\n\n")
    assert rest == "" and all(part.startswith("data: ") for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


async def test_a_completion_in_openais_shape(stage: Stage) -> None:
    stage.decode.computed = ((28, 30),)
    response = await post(stage, "/v1/completions", ASK)
    body = response.json()
    assert response.status_code == 200
    assert body.pop("id").startswith("cmpl-") and body.pop("created") > 1.7e9
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 30,
            "completion_tokens": TOKENS,
            "total_tokens": 30 + TOKENS,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_streamed_completion_is_the_same_text(stage: Stage) -> None:
    *chunks, done = await events(stage, "/v1/completions", ASK)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


async def test_a_streamed_chat_with_usage(stage: Stage) -> None:
    body = CHAT | {"stream_options": {"include_usage": True}, "n": 2}
    *chunks, usage, done = await events(stage, "/v1/chat/completions", body)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [
        {"role": "assistant", "content": ""}
    ] * 2
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == TOKENS + len(answer_of(ANSWER, 1).encode())
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == answer_of(ANSWER, index)
        assert own[-1] == {"index": index, "delta": {}, "logprobs": None, "finish_reason": "stop"}


async def test_a_chat_renders_its_messages(stage: Stage) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
        {"role": "assistant", "content": "c", "name": "x"},
    ]
    response = await post(stage, "/v1/chat/completions", CHAT | {"messages": messages})
    (choice,) = response.json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    text = bytes(stage.decode.generates()[0].tokens).decode()
    assert text == "<system>be brief<user>a\nb<assistant>c<assistant>"
    assert stage.decode.generates()[0].stop.max_tokens == WINDOW - len(text)


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("abc", [b"abc"]),
        (["abc", "d"], [b"abc", b"d"]),
        ([1, 2, 3], [bytes([1, 2, 3])]),
        ([[1, 2], [3]], [bytes([1, 2]), bytes([3])]),
    ],
)
async def test_every_form_of_prompt(stage: Stage, prompt: object, asked: list[bytes]) -> None:
    response = await post(stage, "/v1/completions", ASK | {"prompt": prompt, "n": 2})
    body = response.json()
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == list(range(2 * len(asked)))
    assert [choice["text"] for choice in choices] == [ANSWER, answer_of(ANSWER, 1)] * len(asked)
    assert body["usage"]["prompt_tokens"] == sum(map(len, asked))
    assert sorted({bytes(each.tokens) for each in stage.decode.generates()}) == sorted(asked)


async def test_echo_streamed_and_not(stage: Stage) -> None:
    body = ASK | {"prompt": ["ab", "c"], "echo": True}
    whole = (await post(stage, "/v1/completions", body)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["ab" + ANSWER, "c" + ANSWER]
    *chunks, _ = await events(stage, "/v1/completions", body)
    for index, text in enumerate(["ab" + ANSWER, "c" + ANSWER]):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
    ids = (await post(stage, "/v1/completions", ASK | {"prompt": [65, 66], "echo": True})).json()
    assert ids["choices"][0]["text"] == "AB" + ANSWER


async def test_max_tokens_nothing_and_one_and_left_out(stage: Stage) -> None:
    body = (await post(stage, "/v1/completions", ASK | {"max_tokens": 0, "echo": True})).json()
    assert body["choices"][0]["text"] == "x" * 30
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert stage.decode.requests == [] and stage.prefill.requests == []
    *chunks, _ = await events(stage, "/v1/completions", ASK | {"max_tokens": 0})
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["length"]
    body = (await post(stage, "/v1/completions", ASK | {"max_tokens": 1})).json()
    assert body["choices"][0]["text"] == "G"
    assert body["choices"][0]["finish_reason"] == "length"
    await post(stage, "/v1/completions", {"model": MODEL, "prompt": "abc"})
    assert stage.decode.generates()[-1].stop.max_tokens == 16
    await post(stage, "/v1/completions", {"model": MODEL, "prompt": "a" * (WINDOW - 3)})
    assert stage.decode.generates()[-1].stop.max_tokens == 3


async def test_what_a_worker_is_told(stage: Stage) -> None:
    body = ASK | {
        "temperature": 0,
        "top_p": 0,
        "top_k": -1,
        "seed": -3,
        "stop": "end",
        "logit_bias": {"7": -100, "8": 2.5},
        "stop_token_ids": [9],
        "min_tokens": 2,
        "ignore_eos": True,
        "user": "me",
        "unknown_field": {"x": 1},
        "logprobs": None,
    }
    assert (await post(stage, "/v1/completions", body)).status_code == 200
    request = stage.decode.generates()[0]
    assert request.sampling.temperature == 0 and 0 < request.sampling.top_p < 1e-3
    assert request.sampling.top_k == 0 and request.sampling.seed == -3
    assert request.sampling.logit_bias == {7: -100.0, 8: 2.5}
    assert request.stop.strings == ("end",) and request.stop.token_ids == (9,)
    assert request.stop.min_tokens == 2 and request.stop.ignore_eos
    assert request.salt == b""
    await post(stage, "/v1/completions", ASK | {"cache_salt": "mine"})
    await post(stage, "/v1/completions", ASK)
    salted, plain = stage.decode.generates()[1:]
    assert len(salted.salt) == 32 and plain.salt == b""
    assert salted.sampling.seed != plain.sampling.seed, "random where none is given"
    assert stage.store.lookups[1].keys[0] != stage.store.lookups[2].keys[0]


async def test_the_openai_client(stage: Stage) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="-") as client:
        models = [model.id async for model in await client.models.list()]
        assert models == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        assert whole.choices[0].message.content == ANSWER
        assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
        text = ""
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == ANSWER and chunk.usage is not None
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt="x", temperature=9)
        assert caught.value.param == "temperature"


async def test_a_decode_worker_that_dies_is_not_seen_by_the_client() -> None:
    async with a_gateway(decodes=2) as stage:
        first = stage.decodes[0]

        async def die(position: int) -> None:
            if position == 10:
                first.die()
                await anyio.sleep_forever()

        first.before_token = die
        *chunks, done = await events(stage, "/v1/completions", ASK)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER


async def test_an_error_before_the_first_token_has_its_status(stage: Stage) -> None:
    stage.decode.refusal = errors.Overloaded("full", retry_after_s=7)
    for stream in (False, True):
        response = await post(stage, "/v1/completions", ASK | {"stream": stream})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "7"
        assert response.json()["error"]["code"] == "rate_limit_exceeded"


async def test_an_error_in_mid_stream_is_an_event(stage: Stage) -> None:
    async def fail(position: int) -> None:
        if position == 4:
            raise errors.Invalid("broken")

    stage.decode.before_token = fail
    *chunks, last = await events(stage, "/v1/completions", ASK)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Grü"
    assert last["error"]["message"] == "broken"


async def test_reuse_switched_off_gives_every_request_its_own_blocks(stage: Stage) -> None:
    stage.fleet.served = replace(stage.fleet.served, prefix_reuse=False)
    for _ in range(2):
        await post(stage, "/v1/completions", ASK)
    first, second = stage.decode.generates()
    assert first.salt != second.salt and len(first.salt) == 32


@pytest.mark.parametrize("reason", [0, 7, "7"])
async def test_a_stop_token_is_a_number_and_a_stop_string_a_string(reason: str | int) -> None:
    outbox = Outbox(lambda choice, delta: None)
    for delta in (Delta(text="a"), Delta(finish_reason="stop", stop_reason=reason)):
        outbox.put(0, msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=Delta))
    (piece,) = await outbox.take()
    body = json.loads(json.dumps(Envelope("id", 0, "m", chat=False).whole([piece], Usage())))
    told = body["choices"][0]["stop_reason"]
    assert (told, type(told)) == (reason, type(reason))
