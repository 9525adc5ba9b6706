"""Is an answer the same wherever its KV comes from, and whatever happens meanwhile?

    cold           nobody has computed any of it
    own pool       the decode worker has the blocks
    store          the workers' pools have none: prefill's blocks and those that decode wrote
    killed         both prefill workers die (kill -9) with jobs in flight, one after the other
    suspended      a pool so small that streams give up their slots and come back

50 prompts from 5 to 640 tokens, 64 greedy tokens each, then a second turn on each: prompt, answer
and a follow-up. Sixteen at a time: that a row's bits don't depend on its company is part of what is
asked. Every answer is held to the cold one: its text, its number of tokens, why it ended. Where one
differs, the margin between the two best tokens of the cold computation is printed, in nats. For
`kv_dtype` fp8 and bf16, over HTTP (`--quick`: four prompts, 16 tokens, fp8 only).

    python benchmarks/same_answer.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import anyio
import httpx
import torch

import rig
from kvass.common import config as configuration
from kvass.common.model.engine import Engine, open_engine
from kvass.common.model.runner import Rows
from rig import Figure

KV_DTYPES: Sequence[str] = ("fp8", "bf16")
QUICK_KV_DTYPES: Sequence[str] = ("fp8",)
LENGTHS = (5, 15, 16, 17, 40, 63, 64, 65, 100, 160, 161, 255, 256, 257, 320, 400, 512, 513, 640, 33)
PROMPTS, ANSWER_TOKENS = 50, 64
# Any two of them take four blocks each and grow into a fifth: in a pool of nine, one gives way.
QUICK_LENGTHS, QUICK_ANSWER_TOKENS = (60, 61, 62, 63), 16
MODEL_LEN = 1024  # so that a pool that holds the longest request may still be small
TOGETHER = 16
SEED = 20261129  # the same prompts in every run
FOLLOW_UP = "\n\nThat is one side of it. Now tell the other side, and be brief.\n\n"
REQUEST_S = 300.0
OFFERED_S = 10.0  # for what decode wrote to reach the store
FILLER_TOKENS = 600  # two chunks: a second of a prefill worker
BUSY_S = 60.0
LOST_S = 3.0  # after this a dead worker's silence is noticed, whatever became of its connections
USED = re.compile(r"^kvass_kv_cache_used_blocks (\S+)$", re.MULTILINE)
COLD, POOL, STORE, KILLED, SUSPENDED = "cold", "own pool", "store", "killed", "suspended"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole completion. `said` is what must be the same."""

    said: tuple[str, str, int]  # text, finish reason, tokens
    cached_tokens: int


Turns = list[list[int]]  # prompts as token ids


@dataclass(slots=True)
class Run:
    """One cluster's and one `kv_dtype`'s state. Mutable: `answers` (by condition and turn)."""

    kv_dtype: str
    served: rig.Served
    answer_tokens: int
    turns: list[Turns]  # the second one is made of the first one's cold answers
    answers: dict[tuple[str, int], list[Answer]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    async def ask(self, client: httpx.AsyncClient, condition: str, turn: int, salt: str) -> None:
        """Ask one turn of everything, some at a time, in order."""
        found: dict[int, Answer] = {}
        limit = anyio.CapacityLimiter(TOGETHER)

        async def one(index: int, prompt: list[int]) -> None:
            async with limit:
                found[index] = await self.complete(client, prompt, salt)

        async with anyio.create_task_group() as tasks:
            for index, prompt in enumerate(self.turns[turn]):
                tasks.start_soon(one, index, prompt)
        self.answers[condition, turn] = [found[index] for index in range(len(found))]
        print(f"{self.kv_dtype}, {condition}, turn {turn + 1}: asked", file=sys.stderr)

    async def complete(self, client: httpx.AsyncClient, prompt: list[int], salt: str) -> Answer:
        body = {
            "model": self.served.name,
            "prompt": prompt,
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        body |= {"cache_salt": salt} if salt else {}
        response = await client.post("/v1/completions", json=body, timeout=REQUEST_S)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text}")
        whole: dict[str, Any] = response.json()
        choice, usage = whole["choices"][0], whole["usage"]
        said = choice["text"], choice["finish_reason"], usage["completion_tokens"]
        return Answer(said, usage["prompt_tokens_details"]["cached_tokens"])

    def second_turn(self) -> Turns:
        """Return the second turn's prompts; of the answers only the text is known."""
        encode = self.served.tokenizer.encode
        said = [answer.said[0] for answer in self.answers[COLD, 0]]
        follow_up = encode(FOLLOW_UP)
        return [
            [*prompt, *encode(text), *follow_up]
            for prompt, text in zip(self.turns[0], said, strict=True)
        ]

    def expect_cached(self, condition: str, turn: int, *, is_cached: bool) -> None:
        """Complain where KV was, or was not, where the condition says."""
        block = self.served.block_tokens
        for prompt, answer in zip(self.turns[turn], self.answers[condition, turn], strict=True):
            if (answer.cached_tokens > 0) != (is_cached and len(prompt) >= block):
                self.complaints.append(
                    f"{self.kv_dtype}, {condition}, turn {turn + 1}: {answer.cached_tokens} of "
                    f"{len(prompt)} tokens were cached"
                )

    def expect_decodes_blocks(self, condition: str) -> None:
        """Complain if no second turn found more than its first turn's prompt."""
        beyond = [
            answer.cached_tokens > len(first)
            for answer, first in zip(self.answers[condition, 1], self.turns[0], strict=True)
        ]
        if not any(beyond):
            self.complaints.append(f"{self.kv_dtype}, {condition}: no block that decode wrote")


async def warm_states(run: Run, client: httpx.AsyncClient, control: rig.Control) -> None:
    """Cold, own pool, store: both turns each."""
    await run.ask(client, COLD, 0, "")
    run.turns.append(run.second_turn())
    await run.ask(client, COLD, 1, "cold")
    for turn in (0, 1):
        run.expect_cached(COLD, turn, is_cached=False)
        await run.ask(client, POOL, turn, "")
        run.expect_cached(POOL, turn, is_cached=True)
    run.expect_decodes_blocks(POOL)
    await until_offered(run, control)
    for turn in (0, 1):
        await control.forget([])
        await run.ask(client, STORE, turn, "")
        run.expect_cached(STORE, turn, is_cached=True)
    run.expect_decodes_blocks(STORE)


async def until_offered(run: Run, control: rig.Control) -> None:
    """Wait until the store has all blocks; text that is cut into other tokens again never comes."""
    with anyio.move_on_after(OFFERED_S):
        async with anyio.create_task_group() as tasks:
            for turn in run.turns[1]:
                tasks.start_soon(control.until_stored, control.chain(turn))


async def killed(run: Run, client: httpx.AsyncClient, cluster: rig.Cluster) -> None:
    """Kill one prefill worker in each turn, while it has jobs; nothing is cached."""
    for turn in (0, 1):
        async with anyio.create_task_group() as tasks:
            # Keeps one worker busy for long enough to be met at work, whatever the prompts are.
            filler = run.served.prompt(FILLER_TOKENS, SEED - 1 - turn)
            tasks.start_soon(run.complete, client, filler, KILLED)
            tasks.start_soon(kill_a_busy_one, run, client, cluster)
            await run.ask(client, KILLED, turn, KILLED)


async def kill_a_busy_one(run: Run, client: httpx.AsyncClient, cluster: rig.Cluster) -> None:
    """Kill the first prefill worker that has blocks in use; complain if it had no job."""
    members = (await client.get("/v1/cluster")).json()["members"]
    alive = [each for each in members if each["role"] == "prefill" and each["state"] == "ready"]
    busy = None
    with anyio.fail_after(BUSY_S):
        while busy is None:
            for each in alive:
                metrics = (await client.get(f"http://{each['metrics_address']}/metrics")).text
                found = USED.search(metrics)
                busy = each if found and float(found[1]) else busy
    os.kill(busy["pid"], signal.SIGKILL)
    await anyio.sleep(LOST_S)
    if not any(f"on {busy['id']}: " in line for line in cluster.lines):
        run.complaints.append(f"{run.kv_dtype}: no job was in flight when {busy['id']} died")


async def suspended(run: Run, client: httpx.AsyncClient) -> None:
    """Ask both turns of a cluster whose pools hold little more than the longest of them."""
    for turn in (0, 1):
        await run.ask(client, SUSPENDED, turn, "")
    await anyio.sleep(1.0)  # the load that says so comes twice a second
    members = (await client.get("/v1/cluster")).json()["members"]
    count = sum(each["load"]["suspended"] for each in members if each["role"] == "decode")
    print(f"{run.kv_dtype}: requests were suspended {count} times", file=sys.stderr)
    if not count:
        run.complaints.append(f"{run.kv_dtype}: no request was suspended")


async def on_cluster(
    arguments: Sequence[str], work: Callable[[rig.Cluster, httpx.AsyncClient], Awaitable[None]]
) -> None:
    async with (
        rig.cluster(*arguments) as cluster,
        httpx.AsyncClient(trust_env=False, base_url=cluster.url) as client,
    ):
        await work(cluster, client)


async def measure(kv_dtype: str, lengths: Sequence[int], answer_tokens: int) -> Run:
    """Take all prompts through all conditions."""
    served = rig.Served.load()
    prompts = [served.prompt(length, SEED + index) for index, length in enumerate(lengths)]
    run = Run(kv_dtype, served, answer_tokens, [prompts])
    common = ("--kv-dtype", kv_dtype)

    async def with_room(cluster: rig.Cluster, client: httpx.AsyncClient) -> None:
        async with rig.control(client) as control:
            await warm_states(run, client, control)
        await killed(run, client, cluster)

    async def with_little(_: rig.Cluster, client: httpx.AsyncClient) -> None:
        await suspended(run, client)

    await on_cluster((*common, "--max-model-len", str(MODEL_LEN), "--prefill", "2"), with_room)
    longest = max(map(len, run.turns[1])) + answer_tokens
    blocks = -(-longest // served.block_tokens) + 1
    little = [f"{role}.pool_blocks={blocks}" for role in ("prefill", "decode")]
    sets = [word for each in little for word in ("--set", each)]
    await on_cluster((*common, "--max-model-len", str(longest), *sets), with_little)
    return run


# --- what differs ---------------------------------------------------------------------------------


def differences(run: Run) -> list[tuple[str, int, int]]:
    """Return (condition, turn, prompt) of every answer that is not the cold one."""
    return [
        (condition, turn, index)
        for (condition, turn), answers in run.answers.items()
        for index, answer in enumerate(answers)
        if answer.said != run.answers[COLD, turn][index].said
    ]


def explain(run: Run) -> None:
    """Print each difference with the cold computation's margin at its first token."""
    found = differences(run)
    if not found:
        return
    overrides = (
        f"cluster.kv_dtype={run.kv_dtype}",
        f"cluster.max_model_len={MODEL_LEN}",
        f"cluster.model={str(run.served.folder)!r}",
        f"decode.pool_blocks={MODEL_LEN // run.served.block_tokens + 1}",
    )
    config = configuration.load(None, overrides)
    engine = open_engine(config, config.decode, "decode")
    encode = run.served.tokenizer.encode
    for condition, turn, index in found:
        cold = run.answers[COLD, turn][index]
        other = run.answers[condition, turn][index]
        ours, theirs = encode(cold.said[0]), encode(other.said[0])
        same = len(
            list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
        )
        context = [*run.turns[turn][index], *ours[:same]]
        best, margin = top_two(engine, context, config.decode.chunk_tokens)
        print(
            f"{run.kv_dtype}, {condition}, turn {turn + 1}, prompt {index} "
            f"({len(run.turns[turn][index])} tokens): differs after {same} tokens: cold "
            f"{cold.said[0]!r}, here {other.said[0]!r}; the best two are "
            f"{[run.served.tokenizer.decode([token]) for token in best]}, {margin:.4f} nats apart"
        )


def top_two(engine: Engine, tokens: list[int], chunk: int) -> tuple[list[int], float]:
    """Return the two best next tokens, computed cold, and how far they are apart in nats."""
    slots = list(range(-(-len(tokens) // engine.layout.block_tokens)))
    logits: torch.Tensor | None = None
    for start in range(0, len(tokens), chunk):
        logits = engine.runner.run([Rows(tokens[start : start + chunk], start, slots, logits=True)])
    assert logits is not None
    values, ids = logits[0].log_softmax(-1).topk(2)
    return ids.tolist(), float(values[0] - values[1])


def figures(run: Run) -> list[Figure]:
    """How many answers are the cold ones, by condition and turn."""
    count = len(run.turns[0])
    wrong = [(condition, turn) for condition, turn, _ in differences(run)]
    return [
        Figure(
            f"{run.kv_dtype}, {condition}, turn {turn + 1}",
            count - wrong.count((condition, turn)),
            "same",
            "asked",
            count,
            least_ratio=1.0,
        )
        for condition, turn in run.answers
        if condition != COLD
    ]


def main() -> int:
    given = rig.options((__doc__ or "").splitlines()[0])
    lengths = [LENGTHS[index % len(LENGTHS)] for index in range(PROMPTS)]
    answer_tokens, kv_dtypes = ANSWER_TOKENS, KV_DTYPES
    if given.quick:
        lengths, answer_tokens = list(QUICK_LENGTHS), QUICK_ANSWER_TOKENS
        kv_dtypes = QUICK_KV_DTYPES
    runs = [anyio.run(measure, kv_dtype, lengths, answer_tokens) for kv_dtype in kv_dtypes]
    for run in runs:
        explain(run)
    title = f"Same answer: {len(lengths)} prompts, {answer_tokens} greedy tokens, held to cold"
    rig.report(title, [figure for run in runs for figure in figures(run)], given.json)
    complaints = [line for run in runs for line in run.complaints]
    for line in complaints:
        print(f"not what it should be: {line}", file=sys.stderr)
    return 1 if complaints or any(differences(run) for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
