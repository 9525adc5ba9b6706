"""Faults of store nodes that die: only what they held is computed again, and no request fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from cluster import Cluster, cluster
from cluster_control import BLOCK, Control
from kvass.common.keys import SEGMENT_BLOCKS
from kvass.kvstore.placement import StoreNode, order

pytestmark = [pytest.mark.process, pytest.mark.model]

TOKENS = 2 * SEGMENT_BLOCKS * BLOCK + 76  # three segments, the last one short
LOST_S = 12.0  # 3 s of silence, on a machine that is busy


def homes(up: Cluster, control: Control, prompt: list[int]) -> list[str]:
    """Return which node each segment of a prompt lives on."""
    nodes = [
        StoreNode(each["id"], each["address"], int(each["details"]["capacity_bytes"]))
        for each in up.members("store")
    ]
    chain = control.chain(prompt)
    firsts = range(0, len(chain.keys), SEGMENT_BLOCKS)
    return [order(chain.segment_key(first), nodes)[0].member_id for first in firsts]


def split_prompt(up: Cluster, control: Control) -> tuple[list[int], str]:
    """Return a prompt whose middle segment lives on another node than the rest, and that node."""
    for seed in count():
        prompt = control.prompt(TOKENS, seed)
        first, middle, last = homes(up, control, prompt)
        if first == last != middle:
            return prompt, middle
    raise AssertionError


@pytest.mark.fault(number=31)
@pytest.mark.fault(number=46)
def test_store_nodes_die_and_only_what_they_held_is_computed() -> None:
    with cluster("--store", "2", "--max-model-len", "2048") as up:
        control = Control(up, ("cluster.max_model_len=2048",))
        prompt, lost = split_prompt(up, control)
        cold = up.ask(prompt)
        control.until_stored(prompt)
        a_node_with_one_segment_dies(up, control, prompt, lost)
        for forget in (False, True):
            if forget:
                control.forget()
            again = up.ask(prompt)
            assert (again.said, again.cached_tokens) == (cold.said, TOKENS // BLOCK * BLOCK)
        (last,) = up.members("store")
        the_last_node_dies_in_mid_job(up, control, last["id"])
        assert up.ask(prompt).said == cold.said
        up.until_idle()


def a_node_with_one_segment_dies(
    up: Cluster, control: Control, prompt: list[int], lost: str
) -> None:
    cold = up.ask(prompt)
    control.forget()
    up.kill(lost)
    gap = SEGMENT_BLOCKS * BLOCK
    holed = up.ask(prompt)  # at once: nobody may have heard of it
    assert (holed.said, holed.cached_tokens) == (cold.said, TOKENS // BLOCK * BLOCK - gap)
    until_lost(up, lost)
    up.ask(prompt)  # its blocks go to their new home, if they are not there yet
    control.until_stored(prompt)


def the_last_node_dies_in_mid_job(up: Cluster, control: Control, last: str) -> None:
    """A request that is under way, and all after it, do without a store."""
    prompt, next_one = control.prompt(1100, seed=1001), control.prompt(300, seed=1002)
    with ThreadPoolExecutor(2) as threads:
        asking = threads.submit(up.stream, prompt)
        up.until(lambda: bool(control.stored(prompt)), "the job's first blocks are stored")
        up.kill(last)
        after = threads.submit(up.ask, next_one)
        answers = [asking.result(), after.result()]
    until_lost(up, last)
    assert "store" in up.http.get("/health").json()["degraded"][0]
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
