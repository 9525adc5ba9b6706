"""Faults of a request's blocks, by HTTP: wrong bytes, wrong places, wrong counts. Every answer is
the cold one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import foreign_memory
from cluster import Cluster, cluster
from cluster_control import BLOCK, Control

pytestmark = [pytest.mark.process, pytest.mark.model]

CHUNK = 128
WINDOW = 1024


@pytest.fixture(scope="module")
def up() -> Iterator[Cluster]:
    """A cluster whose prefill worker computes whatever is missing, and whose pools are small enough
    to be searched."""
    with cluster(
        "--max-model-len", str(WINDOW),
        "--chunk-tokens", str(CHUNK),
        "--slab-bytes", str(256 << 20),
        "--set", "gateway.prefill_tokens_min=16",
        "--set", "prefill.pool_blocks=256",
        "--set", "decode.pool_blocks=256",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def control(up: Cluster) -> Control:
    return Control(up, (f"cluster.max_model_len={WINDOW}",))


@pytest.fixture(autouse=True)
def nothing_is_left(up: Cluster) -> Iterator[None]:
    yield
    up.until_idle()


def cached(tokens: int, missing: int = 0) -> int:
    """Return how many prompt tokens are not computed, with so many missing in full blocks."""
    return min(tokens // BLOCK * BLOCK - missing, tokens - 1)


def store_counts(up: Cluster) -> dict[str, int]:
    (node,) = up.overview()["store"]
    found: dict[str, int] = node
    return found


# --- wrong bytes ----------------------------------------------------------------------------------


@pytest.mark.fault(number=11)
@pytest.mark.fault(number=16)
def test_blocks_that_rot_in_the_store_are_computed_again(up: Cluster, control: Control) -> None:
    prompt, rotten = control.prompt(200, seed=1), (0, 5, 11)
    cold = up.ask(prompt)
    control.until_stored(prompt)
    right = control.places(prompt)
    control.forget()
    for index in rotten:
        foreign_memory.flip(right[index].pid, right[index].address + 1000 * index)
    before = store_counts(up)["corrupt"]

    holed = up.ask(prompt)
    assert (holed.said, holed.cached_tokens) == (cold.said, cached(200, len(rotten) * BLOCK))
    up.until(lambda: store_counts(up)["corrupt"] == before + len(rotten), "the rot is counted")

    again = up.ask(prompt)  # from the pool, where nothing of what failed may be
    assert (again.said, again.cached_tokens) == (cold.said, cached(200))
    control.until_stored(prompt)
    now = control.places(prompt)
    assert {i: place.checksum for i, place in now.items()} == {
        i: place.checksum for i, place in right.items()
    }
    control.forget()
    stored = up.ask(prompt)
    assert (stored.said, stored.cached_tokens) == (cold.said, cached(200))
    assert store_counts(up)["corrupt"] == before + len(rotten)


@pytest.mark.fault(number=25)
def test_a_prompt_that_is_cached_whole_writes_into_no_shared_block(
    up: Cluster, control: Control
) -> None:
    prompt = control.prompt(4 * BLOCK, seed=2)
    cold = up.ask(prompt)
    control.until_stored(prompt)
    places = control.places(prompt)
    last = foreign_memory.read(places[3].pid, places[3].address, control.block_size)
    decode = up.member("decode-0")["pid"]
    (shared,) = foreign_memory.find(decode, last)

    # Other numbers than it should hold, so that a write of the right ones is seen.
    negated = bytes(byte ^ 0x80 for byte in last)
    foreign_memory.write(decode, shared, negated)
    assert up.ask(prompt, max_tokens=1).cached_tokens == 4 * BLOCK - 1
    assert foreign_memory.read(decode, shared, len(last)) == negated

    foreign_memory.write(decode, shared, last)
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda _: up.ask(prompt), range(3)))
    assert {answer.said for answer in together} == {cold.said}
    assert {answer.cached_tokens for answer in together} == {4 * BLOCK - 1}
    assert foreign_memory.read(decode, shared, len(last)) == last
    assert control.places(prompt) == places


# --- wrong places ---------------------------------------------------------------------------------


@pytest.mark.fault(number=13)
@pytest.mark.parametrize("tokens", [3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_blocks_come_to_their_positions(up: Cluster, control: Control, tokens: int) -> None:
    """With none to all of the blocks in the workers' own pools, from the start or from the end; the
    others are in the store, or nowhere."""
    prompt = control.prompt(tokens, seed=tokens)
    cold = up.ask(prompt, cache_salt="cold", max_tokens=6)
    assert cold.cached_tokens == 0
    up.ask(prompt)
    keys = control.chain(prompt).keys
    count = len(keys)
    from_start = [range(local, count) for local in range(count + 1)]
    from_end = [range(0, count - local) for local in range(1, count)]
    for cut, is_lost in (
        *((cut, False) for cut in from_start + from_end),
        *((cut, True) for cut in from_end),
    ):
        control.until_stored(prompt)
        gone = [keys[index] for index in cut]
        if gone:
            control.forget(gone)
        if is_lost:
            assert control.drop(gone) == len(gone)
        missing = len(gone) * BLOCK if is_lost else 0
        answer = up.ask(prompt, max_tokens=6)
        assert (answer.said, answer.cached_tokens) == (cold.said, cached(tokens, missing)), cut


@pytest.mark.fault(number=13)
@pytest.mark.fault(number=43)
@pytest.mark.parametrize("tokens", [3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_prefill_computes_at_their_positions_what_nobody_has(
    up: Cluster, control: Control, tokens: int
) -> None:
    """A prompt whose beginning was asked before: of its blocks the first are in both workers'
    pools, the next ones in the store, and prefill computes the rest, for decode to pull."""
    prompt = control.prompt(tokens, seed=100 + tokens)
    cold = up.ask(prompt, cache_salt="cold", max_tokens=6)
    count = len(control.chain(prompt).keys)
    for known in range(1, count + 1):
        pooled, salt = known // 2, f"{known} known"
        begun = prompt[: known * BLOCK]
        up.ask(begun, cache_salt=salt, max_tokens=1)
        control.until_stored(begun, salt)
        control.forget(control.chain(begun, salt).keys[pooled:])
        answer = up.ask(prompt, cache_salt=salt, max_tokens=6)
        there = min(known * BLOCK, tokens - 1)
        assert (answer.said, answer.cached_tokens) == (cold.said, there), salt


# --- wrong counts ---------------------------------------------------------------------------------


@pytest.mark.fault(number=43)
def test_cached_tokens_are_exactly_those_that_were_not_computed(
    up: Cluster, control: Control
) -> None:
    prompt = control.prompt(100, seed=3)
    for fields in ({"n": 2}, {"stream": False}, {"max_tokens": 1}):
        salt = f"cold {fields}"
        assert usage(up, prompt, cache_salt=salt, **fields) == (100, 0)
        assert usage(up, prompt, cache_salt=salt, **fields) == (100, 96)
    assert up.stream(prompt, cache_salt="stream", max_tokens=2).cached_tokens == 0
    assert up.stream(prompt, cache_salt="stream", max_tokens=2).cached_tokens == 96

    up.ask(prompt, max_tokens=2)
    for shared in (1, 15, 16, 17, 50, 99):
        other = [*prompt[:shared], *control.prompt(100, seed=4 + shared)]
        assert up.ask(other, max_tokens=2).cached_tokens == shared // BLOCK * BLOCK, shared
    # A prompt that goes on where a cached one ended, and two prompts of which one is cached.
    longer = [*prompt, *control.prompt(60, seed=5)]
    assert up.ask(longer, max_tokens=2).cached_tokens == 96
    assert usage(up, [prompt, control.prompt(100, seed=6)]) == (200, 96)


def usage(up: Cluster, prompt: object, **fields: object) -> tuple[int, int]:
    """Ask; return the tokens of the prompt, and those that were cached."""
    response = up.http.post(
        "/v1/completions", json=up.body([], **{"max_tokens": 2} | fields) | {"prompt": prompt}
    )
    assert response.status_code == 200, response.text
    found = response.json()["usage"]
    return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.fault(number=43)
def test_cached_tokens_of_a_conversation(up: Cluster) -> None:
    messages = [{"role": "user", "content": "Name a colour, then a second one, then a third."}]
    body = up.body([], max_tokens=2) | {"messages": messages}
    del body["prompt"]
    counted = []
    for _ in range(2):
        found = up.http.post("/v1/chat/completions", json=body).json()["usage"]
        counted.append(found["prompt_tokens_details"]["cached_tokens"])
    assert counted == [0, cached(found["prompt_tokens"])] and counted[1] >= 2 * BLOCK


# --- edges ----------------------------------------------------------------------------------------

EDGES = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, WINDOW - 4)


@pytest.mark.fault(number=26)
@pytest.mark.parametrize("tokens", EDGES)
def test_prompts_at_every_edge(up: Cluster, control: Control, tokens: int) -> None:
    """The same from the worker's pool, from the store, and as decode alone computes it."""
    prompt = control.prompt(tokens, seed=1000 + tokens)
    cold = up.ask(prompt, max_tokens=4)
    assert (cold.prompt_tokens, cold.cached_tokens, cold.tokens) == (tokens, 0, 4)
    warm = up.ask(prompt, max_tokens=4)
    assert (warm.said, warm.cached_tokens) == (cold.said, cached(tokens))
    control.until_stored(prompt)
    control.forget()
    stored = up.stream(prompt, max_tokens=4)
    assert (stored.said, stored.cached_tokens) == (cold.said, cached(tokens))
    control.forget()
    if control.chain(prompt).keys:
        control.drop(control.chain(prompt).keys)
    alone, computed = control.generate("decode-0", prompt, 4)
    assert computed == [(0, tokens)]
    assert control.tokenizer.decode(alone) == cold.text


@pytest.mark.fault(number=26)
def test_what_does_not_fit_is_refused_before_any_work(up: Cluster, control: Control) -> None:
    up.until_idle()
    before = store_counts(up)
    too_long = control.prompt(WINDOW, seed=7)
    for body in (
        up.body([]),
        up.body(""),
        up.body([]) | {"prompt": [too_long[:3], []]},
        up.body(too_long, max_tokens=1),
        up.body(too_long[:1000], max_tokens=25),
        up.body(" and" * (WINDOW + 1)),
        up.body([5, 1 << 20]),
    ):
        response = up.http.post("/v1/completions", json=body)
        assert response.status_code == 400, body
        assert response.json()["error"]["type"] == "invalid_request_error"
    chat = {name: value for name, value in up.body([]).items() if name != "prompt"}
    for messages in ([], [{"role": "user", "content": " and" * (WINDOW + 1)}]):
        response = up.http.post("/v1/chat/completions", json=chat | {"messages": messages})
        assert response.status_code == 400, messages
    after = store_counts(up)
    for name in ("hits", "misses", "stored", "claims"):
        assert after[name] == before[name], name
    assert up.used_blocks("prefill-0") == up.used_blocks("decode-0") == 0
