"""What a store node's hits and misses mean: each block of a prompt is one of them, once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import anyio
import pytest

import deterministic
from hash_model import BLOCK
from record import Record
from scenario import Conversation, Member, Scenario, Turn
from whole import Whole

BLOCKS = 12  # of a prompt, which ends with one token more
TOKENS = tuple(number % 16 for number in range(BLOCKS * BLOCK + 1))


def member(member_id: str) -> Member:
    return Member(member_id, 96, "auto", 1 << 17, host="host-0", step_s=0.02)


def conversation(name: str, start_s: float) -> Conversation:
    return Conversation(name, start_s, b"", (Turn(TOKENS, count=2),))


SCENARIO = Scenario(
    seed=1, window=320, claim_s=2.0, hold_s=5.0, prefill_tokens_min=BLOCK, replicas=1,
    stores=(member("store-0"),), prefills=(member("prefill-0"),), decodes=(member("decode-0"),),
    conversations=(conversation("cold", 0.0), conversation("warm", 20.0)),
    mishaps=(), weather="calm", answers_due=True, flash=False, audits=False,
)  # fmt: skip


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("prefills", [0, 1])
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_block_of_a_prompt_counts_once(nodes: int, prefills: int, replicas: int) -> None:
    """Whoever else looks for it: a prefill worker, decode, or the gateway at the next node."""
    totals: Counter[str] = Counter()
    scenario = replace(
        SCENARIO,
        stores=tuple(member(f"store-{number}") for number in range(nodes)),
        prefills=SCENARIO.prefills[:prefills],
        replicas=replicas,
    )

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            whole = Whole(scenario, Record(), tasks)
            await whole.run()
            for node in whole.members.sim.nodes.values():
                counts = node.node.counts()
                totals.update({name: counts[name] for name in ("hits", "misses", "stored")})
            tasks.cancel_scope.cancel()

    deterministic.run(1, run)
    assert (totals["misses"], totals["hits"]) == (BLOCKS, BLOCKS), totals
