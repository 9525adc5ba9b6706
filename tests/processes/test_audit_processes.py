"""A worker that computes wrong after its known answer was right: another one finds it."""

from __future__ import annotations

import pytest

from cluster import Cluster
from cluster_control import BLOCK, Control
from crew import crew

pytestmark = [pytest.mark.process, pytest.mark.model]

SETTINGS = ("--set", "cluster.max_model_len=1024")
# Three workers on two cores: their threads would wait for each other.
THREADS = ("--set", "prefill.threads=1", "--set", "decode.threads=1")
BLOCKS = 8  # all of them are compared by one audit
SUSPICION_S = 20.0


@pytest.mark.fault(number=48)
def test_a_worker_that_stores_one_wrong_bit_is_barred_and_nothing_of_it_is_left() -> None:
    with crew(*SETTINGS, *THREADS) as members:
        members.add("store-0")
        # It would find the others wrong: of two workers that differ, each has but its own word.
        members.add("prefill-0", "--set", "prefill.audit_share=0", program="wrong_member.py")
        members.add("prefill-1", "--set", "prefill.audit_share=1")
        members.add("decode-0")
        members.add("gateway-0")
        members.until_whole()
        up = members.gateways["gateway-0"]
        control = Control(up, SETTINGS[1:])
        prompt = control.prompt(BLOCKS * BLOCK + 5, seed=1)
        longer = [*prompt[: BLOCKS * BLOCK], *control.prompt(4 * BLOCK, seed=2)]

        assert control.prefill("prefill-0", prompt) == ([(0, BLOCKS * BLOCK)], [])
        wrong = control.places(prompt)
        assert up.ask(prompt).cached_tokens == BLOCKS * BLOCK  # decode has it now, too
        computed, missing = control.prefill("prefill-1", longer)
        assert (computed, missing) == ([(BLOCKS * BLOCK, (BLOCKS + 4) * BLOCK)], [])
        up.until(
            lambda: up.metric("prefill-1", "kvass_audit_barred_total") == 1,
            "the writer is barred",
            within_s=SUSPICION_S,
        )
        # What he wrote and what was computed upon it: in the store, and in pools.
        up.until(lambda: not control.stored(longer), "nothing of it is stored")
        up.until(lambda: not cached_blocks(up), "nothing of it is in a pool")
        assert any("prefill-0 computes wrong" in line for line in members.seats["prefill-1"].lines)

        answer = up.ask(prompt)
        assert answer.cached_tokens == 0
        control.until_stored(prompt)
        right = control.places(prompt)
        assert [index for index in right if right[index].checksum != wrong[index].checksum] == [
            BLOCKS - 1
        ]
        _, missing = control.prefill("prefill-0", control.prompt(3 * BLOCK, seed=3))
        assert missing == [(0, 3)], "it is barred"

        control.forget()
        control.drop(control.chain(prompt).keys)
        cold, computed = control.generate("decode-0", prompt, 16)
        assert computed == [(0, len(prompt))]
        assert control.tokenizer.decode(cold) == answer.text
        control.until_stored(prompt)
        assert [each.checksum for each in control.places(prompt).values()] == [
            each.checksum for each in right.values()
        ]
        up.until_idle()


def cached_blocks(up: Cluster) -> dict[str, int]:
    """Return how many blocks workers have that nobody uses, those that have any."""
    loads = {each["id"]: each["load"] for each in up.members("prefill", "decode")}
    return {name: load["cached_blocks"] for name, load in loads.items() if load["cached_blocks"]}
