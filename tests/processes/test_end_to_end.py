"""One cluster as a user starts it, asked as users ask: by the API, and by the golden rule.

The golden rule: at temperature 0 a request's tokens are the same however its KV came about.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from cluster import MODEL, Answer, Cluster, cluster, listening
from cluster_control import BLOCK, Control

pytestmark = [pytest.mark.process, pytest.mark.model]

TOKENS = 320


@pytest.fixture(scope="module")
def up() -> Iterator[Cluster]:
    with cluster() as running:
        yield running


@pytest.fixture(scope="module")
def control(up: Cluster) -> Control:
    return Control(up)


@pytest.fixture(scope="module")
def client(up: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.url}/v1", api_key="-", timeout=120) as opened:
        yield opened


def cached(tokens: int, missing: int = 0) -> int:
    """Return how many prompt tokens are not computed, with so many missing in full blocks."""
    return min(tokens // BLOCK * BLOCK - missing, tokens - 1)


# --- the API --------------------------------------------------------------------------------------


def test_every_port_is_on_loopback(up: Cluster) -> None:
    assert {ip for ip, _ in listening(up)} == {"127.0.0.1"}


def test_models_are_listed(up: Cluster, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    listed = up.http.get("/v1/models").json()
    assert listed["data"][0]["max_model_len"] == up.overview()["max_model_len"] == 8192


def test_completions_with_the_openai_client(up: Cluster, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 12}
    whole = client.completions.create(**asked, temperature=0)
    assert "Paris" in whole.choices[0].text
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    pieces = list(client.completions.create(**asked, temperature=0, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    by_hand = up.ask(asked["prompt"], max_tokens=12, ignore_eos=False)
    assert by_hand.text == whole.choices[0].text


def test_chat_with_the_openai_client(up: Cluster, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? One word."}]
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert text is not None and "Paris" in text
    streaming = asked | {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = client.chat.completions.create(**streaming)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    assert pieces[0].choices[0].delta.role == "assistant"
    assert last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    raw = up.http.post("/v1/chat/completions", json=asked).json()
    assert raw["choices"][0]["message"]["content"] == text


def test_a_stream_joins_to_the_whole(up: Cluster, control: Control) -> None:
    prompt = control.prompt(40, seed=1)
    whole, streamed = up.ask(prompt), up.stream(prompt)
    assert streamed.said == whole.said
    assert len(streamed.pieces) > 8
    assert whole.prompt_tokens == streamed.prompt_tokens == 40


def test_several_prompts_and_choices_in_one_request(up: Cluster, control: Control) -> None:
    prompts = [control.prompt(30, seed=2), control.prompt(50, seed=3)]
    body = up.body([]) | {"prompt": prompts, "n": 2}
    choices = up.http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    alone = [up.ask(prompt).text for prompt in prompts for _ in range(2)]
    assert [choice["text"] for choice in choices] == alone


def test_what_is_wrong_is_refused_with_its_name(up: Cluster, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="8192"):
        client.completions.create(model=MODEL, prompt=[5] * 8192, max_tokens=1)
    up.until_idle()


@pytest.mark.parametrize("member_id", ["prefill-0", "decode-0"])
def test_a_workers_metrics_are_fed(up: Cluster, control: Control, member_id: str) -> None:
    counters = (
        "kvass_step_seconds_count",
        "kvass_worker_prompt_tokens_total",
        "kvass_worker_computed_tokens_total",
    )
    before = [up.metric(member_id, name) for name in counters]
    up.ask(control.prompt(TOKENS + 5, seed=4 if member_id == "prefill-0" else 5))  # with a tail
    assert all(up.metric(member_id, n) > was for n, was in zip(counters, before, strict=True))
    assert up.metric(member_id, 'kvass_block_misses_total{reason="failed"}') == 0
    assert up.metric(member_id, 'kvass_block_refusals_total{reason="failed"}') == 0
    assert up.metric(member_id, "kvass_kv_cache_total_blocks") > 0
    assert up.metric(member_id, "kvass_waiting") == 0


# --- the golden rule ------------------------------------------------------------------------------


@pytest.mark.fault(number=13)
@pytest.mark.fault(number=43)
@pytest.mark.parametrize("tokens", [TOKENS - 1, TOKENS, TOKENS + 1])
def test_the_same_tokens_wherever_the_kv_is(up: Cluster, control: Control, tokens: int) -> None:
    prompt = control.prompt(tokens, seed=tokens)
    cold = up.ask(prompt)
    assert cold.cached_tokens == 0

    warm = up.ask(prompt)
    assert (warm.said, warm.cached_tokens) == (cold.said, cached(tokens))

    control.forget()
    stored = up.stream(prompt)
    assert (stored.said, stored.cached_tokens) == (cold.said, cached(tokens))

    middle = control.chain(prompt).keys[4:12]
    control.forget(middle)
    assert control.drop(middle) == len(middle)
    holed = up.ask(prompt)
    assert (holed.said, holed.cached_tokens) == (cold.said, cached(tokens, len(middle) * BLOCK))

    control.forget()
    control.drop(control.chain(prompt).keys)
    again = up.ask(prompt)
    assert (again.said, again.cached_tokens) == (cold.said, 0)


@pytest.mark.fault(number=43)
def test_a_small_hole_is_filled_by_decode(up: Cluster, control: Control) -> None:
    prompt = control.prompt(200, seed=20)
    cold = up.ask(prompt)
    hole = control.chain(prompt).keys[6:8]  # less than prefill_tokens_min
    for forgotten in (hole, ()):  # the rest from the own pool, then from the store
        control.forget(forgotten)
        assert control.drop(hole) == len(hole)
        holed = up.ask(prompt)
        assert (holed.said, holed.cached_tokens) == (cold.said, cached(200, len(hole) * BLOCK))


@pytest.mark.parametrize("source", ["pool", "store"])
def test_a_conversation_goes_on_from_what_decode_wrote(
    up: Cluster, control: Control, source: str
) -> None:
    prompt = control.prompt(100, seed=31 if source == "pool" else 32)
    first = up.ask(prompt, max_tokens=30)
    answer, _ = control.generate("decode-0", prompt, 30)
    assert control.tokenizer.decode(answer) == first.text
    # The last token was sampled, and nothing followed: its KV was never computed.
    there = (len(prompt) + len(answer) - 1) // BLOCK * BLOCK
    turn = [*prompt, *answer, *control.prompt(30, seed=33)]
    cold = up.ask(turn, cache_salt=source)
    assert cold.cached_tokens == 0
    if source == "store":
        control.until_stored(turn[:there])
        control.forget()
    second = up.ask(turn)
    assert (second.said, second.cached_tokens) == (cold.said, there)


def test_a_salt_of_ones_own_finds_nothing_of_others(up: Cluster, control: Control) -> None:
    prompt = control.prompt(150, seed=40)
    plain = up.ask(prompt)
    salted = [up.ask(prompt, cache_salt="mine") for _ in range(2)]
    assert [each.cached_tokens for each in salted] == [0, cached(150)]
    assert {each.said for each in salted} == {plain.said}


def test_equal_prompts_at_once_are_computed_once(up: Cluster, control: Control) -> None:
    prompt = control.prompt(TOKENS, seed=50)
    before = stored_count(up)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: up.ask(prompt), range(4)))
    assert len({answer.said for answer in answers}) == 1
    assert up.ask(prompt, cache_salt="alone").said == answers[0].said
    up.until_idle()
    # Twice the prompt (plain and salted) and what was generated, in full blocks.
    assert stored_count(up) - before <= 2 * (TOKENS // BLOCK + 1)


def test_different_prompts_at_once_do_not_disturb_each_other(up: Cluster, control: Control) -> None:
    prompts = [control.prompt(90 + 7 * i, seed=60 + i) for i in range(6)]

    def ask(prompt: list[int]) -> Answer:
        return up.stream(prompt, max_tokens=16)

    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(ask, prompts))
    control.forget()
    assert [ask(prompt).said for prompt in prompts] == [answer.said for answer in together]
    up.until_idle()


def stored_count(up: Cluster) -> int:
    return sum(node["stored"] for node in up.overview()["store"])
