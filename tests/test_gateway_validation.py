"""What the API refuses, in OpenAI's error shape and before any work is sent; what it lets pass."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_stage import MODEL, WINDOW, a_gateway
from kvass.common.errors import Invalid
from kvass.gateway.openai import ChatRequest, CompletionRequest, parse

COMPLETION = {"model": MODEL, "prompt": "hello"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": WINDOW}, "max_tokens"),
    ({"min_tokens": 10, "max_tokens": 9}, "min_tokens"),
    ({"stop": 3}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [256]}, "stop_token_ids"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "2"}}, "logit_bias"),
    ({"logit_bias": {"256": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"guided_json": {}}, "guided_json"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"return_token_ids": True}, "return_token_ids"),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [256]}, "prompt"),
    ({"prompt": [2**32]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "x" * (WINDOW + 1)}, "prompt"),
    ({"prompt": "x" * (WINDOW + 1), "max_tokens": 9}, "prompt"),
    ({"prompt": ["a"] * 2049}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 0}, "logprobs"),
    ({"echo": "yes"}, "echo"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content",
    ),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages.0",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"max_completion_tokens": WINDOW}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": "x" * WINDOW}], "max_tokens": 9}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"continue_final_message": True}, "continue_final_message"),
]


def test_every_wrong_field_is_named_and_nothing_is_sent() -> None:
    async def check() -> None:
        async with (
            a_gateway(prefills=1) as stage,
            httpx.AsyncClient(base_url=stage.url) as client,
        ):
            for change, parameter in BOTH + COMPLETIONS:
                await _refused(client, "/v1/completions", COMPLETION | change, parameter)
            for change, parameter in BOTH + CHATS:
                await _refused(client, "/v1/chat/completions", CHAT | change, parameter)
            assert stage.decode.requests == [] and stage.prefill.requests == []
            assert stage.store.lookups == []

    anyio.run(check)


async def _refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], parameter: str
) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 400, (path, body)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"]
    assert error["param"] == parameter, (path, body, error)


def test_bodies_that_are_no_requests() -> None:
    async def check() -> None:
        async with a_gateway() as stage, httpx.AsyncClient(base_url=stage.url) as client:
            bodies = [
                b"",
                b"{",
                b"[]",
                b"null",
                b'"x"',
                b"\xff\xfe",
                b'{"model": "bytes", "prompt": "\xff"}',
                b'{"model": "bytes", "prompt": "\\ud800"}',
                b'{"model": "bytes", "prompt": "x", "temperature": NaN}',
                b'{"model": "bytes", "prompt": "x", "temperature": Infinity}',
                b'{"model": "bytes", "prompt": "x", "temperature": 1e999}',
                b'{"model": "bytes", "prompt": "x", "logit_bias": {"1": -1e999}}',
                b'{"model": "bytes", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
                b"[" * 10_000,
            ]
            for body in bodies:
                response = await client.post("/v1/completions", content=body)
                assert response.status_code == 400, body[:60]
                assert response.json()["error"]["type"] == "invalid_request_error"
            response = await client.post("/v1/completions", content=b"not json")
            assert response.json()["error"]["message"].startswith("the body is not JSON: ")
            response = await client.post("/v1/completions", content=b"x" * 20_001)
            assert response.status_code == 413
            assert "20000" in response.json()["error"]["message"]
            response = await client.post("/v1/completions", content=_endless(19_999))
            assert response.status_code == 400
            response = await client.post("/v1/completions", content=_endless(50_000))
            assert response.status_code == 413

    anyio.run(check)


async def _endless(size: int) -> Any:
    for _ in range(0, size, 1000):
        yield b" " * min(1000, size)


def test_unknown_models_and_routes() -> None:
    async def check() -> None:
        async with a_gateway() as stage, httpx.AsyncClient(base_url=stage.url) as client:
            for path, body in (
                ("/v1/completions", COMPLETION),
                ("/v1/chat/completions", CHAT),
            ):
                response = await client.post(path, json=body | {"model": "gpt"})
                assert response.status_code == 404
                assert response.json()["error"]["code"] == "model_not_found"
            assert (await client.get("/v1/models/gpt")).status_code == 404
            response = await client.get("/v1/nothing")
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "unknown_url"
            response = await client.get("/v1/completions")
            assert response.status_code == 405 and response.headers["allow"] == "POST"
            assert response.json()["error"]["param"] is None
            assert (await client.get("/docs")).status_code == 404

    anyio.run(check)


def test_a_prompt_beyond_the_window_names_both_numbers() -> None:
    async def check() -> None:
        async with a_gateway() as stage, httpx.AsyncClient(base_url=stage.url) as client:
            body = COMPLETION | {"prompt": "x" * 300}
            error = (await client.post("/v1/completions", json=body)).json()["error"]
            assert "256 tokens" in error["message"] and "300 in the prompt" in error["message"]
            assert error["code"] == "context_length_exceeded"

    anyio.run(check)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"temperature": None, "stop": None, "n": None, "logprobs": None, "tools": None},
        {"stop": []},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"temperature": 1, "top_p": 1, "presence_penalty": 0},
        {"response_format": {"type": "text"}, "skip_special_tokens": True},
        {"response_format": {"type": "text", "json_schema": None}},
        {"stream": False, "stream_options": None},
        {"quux": [1, {"a": None}]},
    ],
)
def test_fields_that_change_nothing_pass(fields: dict[str, Any]) -> None:
    parse(json.dumps(COMPLETION | fields).encode(), CompletionRequest)
    parse(json.dumps(CHAT | fields).encode(), ChatRequest)


def test_neutral_values_of_what_is_not_supported_pass() -> None:
    chat = {"logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none"}
    parse(json.dumps(CHAT | chat).encode(), ChatRequest)
    completion = {"suffix": "", "best_of": 2, "n": 2, "use_beam_search": False}
    parse(json.dumps(COMPLETION | completion).encode(), CompletionRequest)
    with pytest.raises(Invalid):
        parse(json.dumps(CHAT | {"top_logprobs": False}).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprobs": True}, "logprobs = true is not"),
        (
            {"response_format": {"type": "json_schema"}},
            "of type 'json_schema' is not",
        ),
        ({"tools": [{"type": "function"}]}, "tools is not"),
        ({"messages": [{"role": "tool", "content": ""}]}, "message of role 'tool' is not"),
    ],
)
def test_what_is_not_supported_is_named_as_clients_wrote_it(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(Invalid, match=f"{words} supported yet$"):
        parse(json.dumps(CHAT | fields).encode(), ChatRequest)


def test_half_a_surrogate_pair_is_told_as_that() -> None:
    with pytest.raises(Invalid, match="surrogates come in pairs"):
        parse(b'{"prompt": "\\ud800 a"}', CompletionRequest)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
names = sorted((CompletionRequest.model_fields | ChatRequest.model_fields).keys())


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(names), json_values), st.booleans())
def test_whatever_comes_is_a_request_or_invalid(fields: dict[str, Any], chat: bool) -> None:
    body = json.dumps((CHAT if chat else COMPLETION) | fields).encode()
    try:
        parse(body, ChatRequest if chat else CompletionRequest)
    except Invalid as error:
        assert error.http_status == 400


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_invalid(body: bytes) -> None:
    with pytest.raises(Invalid):
        parse(body, CompletionRequest)
