"""Faults of store nodes that die: only what they held is computed again, and no request fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from cluster import Cluster, cluster
from cluster_control import BLOCK, Control
from kvass.common.keys import SEGMENT_BLOCKS
from kvass.kvstore.placement import Placement, StoreNode

pytestmark = [pytest.mark.process, pytest.mark.model]

TOKENS = (SEGMENT_BLOCKS + 4) * BLOCK + 12  # two segments, the second one short
LOST_S = 12.0  # 3 s of silence, on a machine that is busy


def homes(up: Cluster, control: Control, prompt: list[int]) -> list[str]:
    """Return which node each segment of a prompt lives on."""
    nodes = [
        StoreNode(each["id"], each["address"], int(each["details"]["capacity_bytes"]))
        for each in up.members("store")
    ]
    chain = control.chain(prompt)
    firsts = range(0, len(chain.keys), SEGMENT_BLOCKS)
    return [Placement(nodes).order(chain.segment_key(first))[0].member_id for first in firsts]


def split_prompt(up: Cluster, control: Control) -> tuple[list[int], str]:
    """Return a prompt whose first segment lives on another node than the rest, and that node."""
    for seed in count():
        prompt = control.prompt(TOKENS, seed)
        first, rest = homes(up, control, prompt)
        if first != rest:
            return prompt, first
    raise AssertionError


@pytest.mark.fault(number=31)
@pytest.mark.fault(number=46)
def test_store_nodes_die_and_only_what_they_held_is_computed() -> None:
    with cluster("--store", "2", "--max-model-len", "1024", "--chunk-tokens", "128") as up:
        control = Control(up, ("cluster.max_model_len=1024",))
        prompt, lost = split_prompt(up, control)
        said = a_node_with_one_segment_dies(up, control, prompt, lost)
        for forget in (False, True):
            if forget:
                control.forget()
            again = up.ask(prompt)
            assert (again.text, again.cached_tokens) == (said, TOKENS // BLOCK * BLOCK)
        (last,) = up.members("store")
        the_last_node_dies_in_mid_job(up, control, last["id"])
        up.until_idle()


def a_node_with_one_segment_dies(
    up: Cluster, control: Control, prompt: list[int], lost: str
) -> str:
    """Both workers have forgotten everything, and the gateway knows of nothing in their pools: what
    the other node has is pulled by decode, and prefill computes the gap, not what follows it."""
    cold, computed = control.generate("decode-0", prompt, 16)
    assert computed == [(0, TOKENS)]
    control.until_stored(prompt)
    control.forget()
    up.kill(lost)
    gap = SEGMENT_BLOCKS * BLOCK
    holed = up.ask(prompt)  # at once: nobody may have heard of it
    assert holed.text == control.tokenizer.decode(cold)
    assert holed.cached_tokens == TOKENS // BLOCK * BLOCK - gap
    until_lost(up, lost)
    # Its blocks go to their new home, if they are not there yet.
    assert control.prefill("prefill-0", prompt) == ([], [])
    control.until_stored(prompt)
    return holed.text


def the_last_node_dies_in_mid_job(up: Cluster, control: Control, last: str) -> None:
    """A request that is under way, and all after it, do without a store."""
    prompt, next_one = control.prompt(500, seed=1001), control.prompt(150, seed=1002)
    with ThreadPoolExecutor(2) as threads:
        asking = threads.submit(up.stream, prompt)
        up.until(lambda: bool(control.stored(prompt)), "the job's first blocks are stored")
        up.kill(last)
        after = threads.submit(up.ask, next_one)
        answers = [asking.result(), after.result()]
    until_lost(up, last)
    assert up.http.get("/health").json()["degraded"][0]["code"] == "no_store"
    control.forget()
    for each, answer in zip((prompt, next_one), answers, strict=True):
        without = up.ask(each)
        assert (without.said, without.cached_tokens) == (answer.said, 0)


def until_lost(up: Cluster, member_id: str) -> None:
    up.until(
        lambda: member_id not in [each["id"] for each in up.members()],
        f"{member_id} is lost",
        within_s=LOST_S,
    )
