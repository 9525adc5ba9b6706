"""Other numeric formats, and less memory than requests want: the same answers, later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster import Answer, Cluster, cluster
from cluster_control import BLOCK, Control

pytestmark = [pytest.mark.process, pytest.mark.model]

SLAB_BYTES = 3 << 20  # 16 blocks


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_the_same_tokens_wherever_the_kv_is(kv_dtype: str) -> None:
    with cluster("--kv-dtype", kv_dtype, "--max-model-len", "1024") as up:
        control = Control(up, (f"cluster.kv_dtype={kv_dtype}", "cluster.max_model_len=1024"))
        prompt = control.prompt(201, seed=1)
        cold = up.ask(prompt)
        assert cold.cached_tokens == 0
        pooled = up.ask(prompt)
        control.forget()
        stored = up.ask(prompt)
        middle = control.chain(prompt).keys[3:8]
        control.forget(middle)
        assert control.drop(middle) == 5
        holed = up.ask(prompt)
        assert {answer.said for answer in (pooled, stored, holed)} == {cold.said}
        assert [each.cached_tokens for each in (pooled, stored, holed)] == [192, 192, 112]
        up.until_idle()


def test_more_streams_than_the_pool_holds() -> None:
    """Two fit whole; as more of them grow, the youngest give way and come back."""
    with cluster(
        "--max-model-len", "256",
        "--set", "decode.pool_blocks=24",
        "--set", "prefill.pool_blocks=24",
    ) as up:  # fmt: skip
        control = Control(up)
        prompts = [control.prompt(60 + 9 * i, seed=20 + i) for i in range(6)]

        def ask(prompt: list[int]) -> Answer:
            return up.stream(prompt, max_tokens=48)

        with ThreadPoolExecutor(len(prompts)) as threads:
            together = list(threads.map(ask, prompts))
        up.until_idle()
        up.until(lambda: suspended(up) > 0, "the load says that streams were suspended")
        assert up.member("decode-0")["load"]["total_blocks"] == 24
        with ThreadPoolExecutor(2) as threads:
            undisturbed = list(threads.map(ask, prompts))
        assert [answer.said for answer in undisturbed] == [answer.said for answer in together]
        up.until_idle()
        assert up.http.post("/v1/completions", json=up.body([5] * 256)).status_code == 400


def suspended(up: Cluster) -> int:
    count: int = up.member("decode-0")["load"]["suspended"]
    return count


@pytest.mark.fault(number=47)
def test_more_prompts_than_the_store_holds() -> None:
    """No prompt's blocks fit whole, and half of what fits may be held: each is held until decode
    has it."""
    with cluster("--slab-bytes", str(SLAB_BYTES), "--max-model-len", "1024") as up:
        control = Control(up, ("cluster.max_model_len=1024",))
        blocks_are_held_until_they_are_pulled(up, control)
        prompts = [control.prompt(290 + 16 * i, seed=30 + i) for i in range(3)]
        cold = [up.ask(prompt, cache_salt="cold") for prompt in prompts]
        assert not [line for line in up.lines if "not stored" in line], "alone, all get through"
        with ThreadPoolExecutor(3) as threads:
            asking = [threads.submit(up.ask, prompt) for prompt in prompts]
            together = [each.result() for each in asking]
        # `full` is an answer: no job waited for room until its time was over, and each says so.
        told = [line for line in up.lines if "kvass.gateway.session: prefill" in line]
        assert all("blocks not stored" in line for line in told)
        assert [answer.said for answer in together] == [answer.said for answer in cold]
        up.until_idle()
        node = up.overview()["store"][0]
        assert node["evictions"] > 0 and node["visible_bytes"] <= SLAB_BYTES
        control.forget()
        again = up.ask(prompts[1])
        assert again.said == cold[1].said
        assert again.cached_tokens <= SLAB_BYTES // control.block_size * BLOCK
        up.until_idle()


def blocks_are_held_until_they_are_pulled(up: Cluster, control: Control) -> None:
    """Others want more than the rest of the slab meanwhile; then nothing is computed twice."""
    prompt = control.prompt(7 * BLOCK + 5, seed=40)
    assert control.prefill("prefill-0", prompt, "its request") == ([(0, 7 * BLOCK)], [])
    for seed in (41, 42):
        control.prefill("prefill-0", control.prompt(6 * BLOCK, seed=seed))
    tokens, computed = control.generate("decode-0", prompt, 4, "its request")
    assert computed == [(7 * BLOCK, 7 * BLOCK + 5)]
    cold = up.ask(prompt, max_tokens=4, cache_salt="cold")
    assert control.tokenizer.decode(tokens) == cold.text
    up.until_idle()
