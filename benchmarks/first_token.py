"""What does the first token of a 1,024-token prompt cost: cold, and with its KV in various places?

    cold        nobody has computed any of it
    own pool    the decode worker has all its blocks
    store only  the workers' pools have none of them, the store has all
    gap         16 of the 64 blocks, from the middle, are gone from everywhere; the rest is where it
                was: in the pool, or (gap, rest in the store) in the store alone

Each repetition takes a prompt of its own through all states and then through `transformers`: the
forward pass of the same prompt with the same weights and as many threads, with its two ways of
attention: `eager` is what cold is held to, the fused `sdpa` is printed beside it. So what else the
machine does meets all alike, and every value is a median. The answers must not differ between
states.

    python benchmarks/first_token.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import httpx
import torch

import rig
from rig import Answer, Figure

PROMPT_TOKENS = 1024
GAP_BLOCKS = 16
REPETITIONS, QUICK_REPETITIONS = 9, 3
# Targets, as shares of the reference, and one allowance in seconds.
COLD_SHARE, POOL_SHARE, GAP_SHARE = 1.5, 0.10, 0.45
STORE_EXTRA_S = 0.060
COLD, POOL, STORE = "cold", "own pool", "store only"
GAP, GAP_STORE = "gap", "gap, rest in the store"
STATES = (COLD, POOL, STORE, GAP, GAP_STORE)


ATTENTIONS = ("eager", "sdpa")


class Reference:
    """`transformers` on the same prompt: one forward pass, not compiled, logits of the last row."""

    def __init__(self, folder: Path, attention: str) -> None:
        theirs = rig.required("transformers").AutoModelForCausalLM
        self._model: Any = theirs.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation=attention
        )

    def first_token_s(self, prompt: Sequence[int]) -> float:
        ids = torch.tensor([list(prompt)])
        started_s = time.perf_counter()
        with torch.inference_mode():
            self._model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()
        return time.perf_counter() - started_s


async def repetition(
    client: httpx.AsyncClient, control: rig.Control, served: rig.Served, prompt: Sequence[int]
) -> dict[str, Answer]:
    """Take one fresh prompt through all states."""
    chain = control.chain(prompt)
    first = (len(chain.keys) - GAP_BLOCKS) // 2
    middle = chain.keys[first : first + GAP_BLOCKS]
    answers = {}
    for state in STATES:
        if state == STORE:
            await control.forget(chain.keys)
        elif state == GAP:
            await control.forget(middle)
            await control.drop(middle)
        elif state == GAP_STORE:
            await control.drop(middle)
            await control.forget(chain.keys)
        answers[state] = await rig.complete(client, served.name, prompt, max_tokens=1)
        await control.until_stored(chain)
    return answers


async def measure(
    served: rig.Served, repetitions: int
) -> tuple[dict[str, list[Answer]], dict[str, list[float]]]:
    """Return every state's answers and the references' times; the first round is thrown away."""
    torch.set_num_threads(os.cpu_count() or 1)  # what a worker uses by default
    references = {attention: Reference(served.folder, attention) for attention in ATTENTIONS}
    answers: dict[str, list[Answer]] = defaultdict(list)
    forward_s: dict[str, list[float]] = defaultdict(list)
    seed = time.time_ns()
    async with (
        rig.cluster() as cluster,
        httpx.AsyncClient(trust_env=False, base_url=cluster.url) as client,
        rig.control(client) as control,
    ):
        for number in range(repetitions + 1):
            prompt = served.prompt(PROMPT_TOKENS, seed + number)
            measured = await repetition(client, control, served, prompt)
            times_s = {name: each.first_token_s(prompt) for name, each in references.items()}
            if number:
                for name, time_s in times_s.items():
                    forward_s[name].append(time_s)
                for state, answer in measured.items():
                    answers[state].append(answer)
    return answers, forward_s


def figures(answers: dict[str, list[Answer]], references_s: dict[str, list[float]]) -> list[Figure]:
    """Medians, each beside what it is compared with."""
    time_s = {state: median(each.first_s for each in answers[state]) for state in STATES}
    cold_s, pool_s = time_s[COLD], time_s[POOL]
    eager_s, fused_s = (median(references_s[name]) for name in ATTENTIONS)
    gap_s = GAP_SHARE * cold_s
    return [
        Figure(COLD, cold_s, "s", "transformers, eager attention", eager_s, COLD_SHARE * eager_s),
        Figure(f"{COLD} (fused)", cold_s, "s", "transformers, sdpa attention", fused_s),
        Figure(POOL, pool_s, "s", COLD, cold_s, POOL_SHARE * cold_s),
        Figure(STORE, time_s[STORE], "s", POOL, pool_s, pool_s + STORE_EXTRA_S),
        Figure(GAP, time_s[GAP], "s", COLD, cold_s, gap_s),
        Figure(GAP_STORE, time_s[GAP_STORE], "s", COLD, cold_s, gap_s),
    ]


def complaints(answers: dict[str, list[Answer]], block_tokens: int) -> list[str]:
    """Return what shows that something else was measured than what the table says."""
    whole, gap = PROMPT_TOKENS - 1, GAP_BLOCKS * block_tokens
    expected = {COLD: 0, POOL: whole, STORE: whole, GAP: whole - gap, GAP_STORE: whole - gap}
    found = []
    for state, tokens in expected.items():
        cached = median(each.cached_tokens for each in answers[state])
        # The last token's row is computed in any case; whether it counts depends on its block.
        if abs(cached - tokens) > 1:
            found.append(f"{state}: {cached:g} tokens were cached, where {tokens} should have been")
        different = sum(
            one.text != cold.text for one, cold in zip(answers[state], answers[COLD], strict=True)
        )
        if different:
            found.append(f"{state}: {different} answers differ from the cold ones")
    return found


def main() -> int:
    given = rig.options((__doc__ or "").splitlines()[0])
    repetitions = QUICK_REPETITIONS if given.quick else REPETITIONS
    served = rig.Served.load()
    answers, references_s = anyio.run(measure, served, repetitions)
    title = f"First token of {PROMPT_TOKENS} tokens, median of {repetitions}"
    rig.report(title, figures(answers, references_s), given.json)
    found = complaints(answers, served.block_tokens)
    for line in found:
        print(f"not what it should be: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
