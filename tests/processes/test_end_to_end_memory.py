"""Other numeric formats, and less memory than requests want: the same answers, later."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster import Answer, Cluster, cluster
from cluster_control import BLOCK, Control

pytestmark = [pytest.mark.process, pytest.mark.model]


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
        "--max-model-len", "512",
        "--set", "decode.pool_blocks=40",
        "--set", "prefill.pool_blocks=40",
    ) as up:  # fmt: skip
        control = Control(up)
        prompts = [control.prompt(60 + 9 * i, seed=20 + i) for i in range(6)]

        def ask(prompt: list[int]) -> Answer:
            return up.stream(prompt, max_tokens=80)

        with ThreadPoolExecutor(len(prompts)) as threads:
            together = list(threads.map(ask, prompts))
        up.until_idle()
        up.until(lambda: suspended(up) > 0, "the load says that streams were suspended")
        assert up.member("decode-0")["load"]["total_blocks"] == 40
        with ThreadPoolExecutor(2) as threads:
            undisturbed = list(threads.map(ask, prompts))
        assert [answer.said for answer in undisturbed] == [answer.said for answer in together]
        up.until_idle()
        assert up.http.post("/v1/completions", json=up.body([5] * 512)).status_code == 400


def suspended(up: Cluster) -> int:
    count: int = up.member("decode-0")["load"]["suspended"]
    return count


@pytest.mark.fault(number=47)
def test_more_prompts_than_the_store_holds() -> None:
    """Two thirds of a prompt's blocks fit, and half of those may be held."""
    with cluster("--slab-bytes", str(8 << 20), "--max-model-len", "2048") as up:
        control = Control(up)
        prompts = [control.prompt(800 + 16 * i, seed=30 + i) for i in range(3)]
        cold = [up.ask(prompt, cache_salt="cold") for prompt in prompts]
        with ThreadPoolExecutor(3) as threads:
            together = list(threads.map(up.ask, prompts))
        # `full` is an answer: no job waited for room until its time was over.
        assert not [line for line in up.lines if "kvass.gateway.session: prefill" in line]
        assert [answer.said for answer in together] == [answer.said for answer in cold]
        up.until_idle()
        node = up.overview()["store"][0]
        assert node["evictions"] > 0 and node["visible_bytes"] <= 8 << 20
        order = random.Random(1).sample(range(3), 3)
        for index in order:
            control.forget()
            again = up.ask(prompts[index])
            assert again.said == together[index].said
            assert again.cached_tokens <= len(prompts[index]) // BLOCK * BLOCK
        up.until_idle()
