"""How much of the pool's memory in use holds no token, when the pool is kept full?

The lengths of a real chat service's prompts and answers, divided by 16, go through the decode
worker's own scheduler, block tables and pool, with as many requests as the pool admits. There is no
model: what a step would compute counts as computed, and any token will do as an answer. Counted at
every step while requests wait for slots, once as many have ended as fit at first: the slots in use,
and the tokens whose KV they hold. All prompts differ, so nothing is gained by sharing. Three ways
to get a prompt's KV:

    at once        its blocks come from the store within the step that admits it
    over N steps   they come one N-th a step, and slots are taken as they come
    computed here  the store has none, and steps of 512 tokens compute them

Beside it: the least that blocks of 16 can waste (half a last block a request, and the slot of the
token that was sampled last), and what one reservation of 8,192 positions a request would waste.

    python benchmarks/waste.py [--quick] [--json FILE] [--trace FILE]
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import rig
from kvass.common.keys import Chain, Namespace
from kvass.common.pool.pool import BlockPool
from kvass.common.pool.table import BlockTable
from kvass.common.wire import Generate, Sampling, Stop
from kvass.decode.schedule import Scheduler
from kvass.decode.schedule import Sequence as Request
from rig import Figure

LENGTHS = Path(__file__).parent / "data" / "conversation_lengths.csv"
DIVISOR = 16  # of the trace's lengths: its prompts are longer than the default model's window
BLOCK_TOKENS = 16
POOL_BLOCKS = 4096  # about 85 of these requests; the longest takes 500
CHUNK_TOKENS = 512
REQUESTS, QUICK_REQUESTS = 4000, 800
RESERVED_TOKENS = 8192  # the default model's longest sequence
LIMIT_PERCENT = 4.0
WAYS = {"at once": 1, "over 2 steps": 2, "over 8 steps": 8, "computed here": 0}


@dataclass(slots=True)
class Sample:
    """One moment: slots in use, tokens in them, requests that have slots, all slots with KV."""

    used: int
    tokens: int
    requests: int
    cached: int

    @property
    def waste(self) -> float:
        return 1 - self.tokens / (self.used * BLOCK_TOKENS)

    @property
    def pool_waste(self) -> float:
        return 1 - (self.tokens + self.cached * BLOCK_TOKENS) / (POOL_BLOCKS * BLOCK_TOKENS)


def lengths(path: Path) -> list[tuple[int, int]]:
    """Read (prompt, answer) lengths: of the reduced file, or of a trace with one object a line."""
    lines = path.read_text().splitlines()
    if path.suffix == ".csv":
        rows = (line.split(",") for line in lines if not line.startswith("#"))
        pairs = [(int(prompt), int(answer)) for prompt, answer in rows]
    else:
        objects = map(json.loads, lines)
        pairs = [(each["input_length"], each["output_length"]) for each in objects]
    return [(max(1, prompt // DIVISOR), max(1, answer // DIVISOR)) for prompt, answer in pairs]


@dataclass(slots=True)
class Worker:
    """A decode worker with nothing to compute. Mutable fields: `fetching` (missing blocks, and how
    many of them a step brings, by request)."""

    fetch_steps: int  # 0: the store has nothing
    pool: BlockPool = field(default_factory=lambda: BlockPool(POOL_BLOCKS))
    fetching: dict[Request, tuple[list[int], int]] = field(default_factory=dict)

    def run(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """Serve all requests; yields the moments at which some of them waited for slots."""
        scheduler = Scheduler(self.pool, chunk_tokens=CHUNK_TOKENS, batch_requests=POOL_BLOCKS)
        for request in requests:
            scheduler.add(request)
        ended = first = 0
        while scheduler.waiting or scheduler.admitted:
            entered = scheduler.admit()
            first = first or len(entered)
            for request in entered:
                missing = request.table.missing if self.fetch_steps else []
                self.fetching[request] = missing, -(-len(missing) // max(1, self.fetch_steps))
            self._fetch(scheduler)
            pieces = scheduler.next_step()
            if scheduler.waiting and ended >= first:
                yield self._sample(scheduler)
            for piece in pieces:
                scheduler.stepped(piece, 0 if piece.logits else None)
                request = piece.sequence
                answered = len(request.tokens) - request.request.prompt_length
                if answered >= request.request.stop.max_tokens:
                    scheduler.finish(request)
                    ended += 1

    def _fetch(self, scheduler: Scheduler) -> None:
        for request, (missing, portion) in list(self.fetching.items()):
            for index in missing[:portion]:
                assert request.table.grow((index + 1) * BLOCK_TOKENS)
                request.table.landed(index)
            del missing[:portion]
            if not missing:
                del self.fetching[request]
                scheduler.fetched(request)

    def _sample(self, scheduler: Scheduler) -> Sample:
        tokens = 0
        for request in scheduler.admitted:
            table = request.table
            tokens += sum(table.ready) * BLOCK_TOKENS + table.frontier % BLOCK_TOKENS
        counts = self.pool.counts()
        return Sample(self.pool.used, tokens, len(scheduler.admitted), counts["cached"])


def requests_of(pairs: Sequence[tuple[int, int]], pool: BlockPool) -> list[Request]:
    """Make requests of these lengths, with prompts that share nothing."""
    numbers = random.Random(1)
    made = []
    for index, (prompt_length, answer_length) in enumerate(pairs):
        prompt = (index, *numbers.choices(range(1 << 15), k=prompt_length - 1))
        chain = Chain(Namespace(bytes(32)), BLOCK_TOKENS)
        chain.extend(prompt)
        request = Generate(
            request_id=str(index),
            tokens=prompt,
            prompt_length=prompt_length,
            sampling=Sampling(),
            stop=Stop(max_tokens=answer_length),
            deadline_s=60.0,
        )
        made.append(Request(request, BlockTable(pool, chain), list(prompt)))
    return made


def figures(samples: dict[str, list[Sample]]) -> list[Figure]:
    """Means and worst moments, each beside what is possible and what a reservation would waste."""
    made = []
    for way, moments in samples.items():
        held = sum(each.tokens for each in moments)
        requests = sum(each.requests for each in moments)
        # Half of a last block, on average, and the sampled token that has no KV yet.
        least_tokens = (BLOCK_TOKENS - 1) / 2
        least = 100 * least_tokens / (held / requests + least_tokens)
        reserved = 100 * (1 - held / requests / RESERVED_TOKENS)
        waste = 100 * mean(each.waste for each in moments)
        worst = 100 * max(each.waste for each in moments)
        pool = 100 * mean(each.pool_waste for each in moments)
        # Where a step may compute only 512 tokens of all prompts, most requests have few yet.
        limit = LIMIT_PERCENT if WAYS[way] else None
        made += [
            Figure(f"{way}: mean", waste, "%", "least with blocks of 16", least, limit),
            Figure(f"{way}: worst moment", worst, "%", "8,192 reserved a request", reserved),
            Figure(f"{way}: mean, of the whole pool", pool, "%", limit=LIMIT_PERCENT),
        ]
    return made


def main() -> int:
    parser = rig.parser((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", default=LENGTHS,
        help="a trace with input_length and output_length in one JSON object a line",
    )  # fmt: skip
    given = parser.parse_args()
    pairs = list(
        itertools.islice(lengths(given.trace), QUICK_REQUESTS if given.quick else REQUESTS)
    )
    samples = {}
    for way, steps in WAYS.items():
        worker = Worker(steps)
        samples[way] = list(worker.run(requests_of(pairs, worker.pool)))
        if not samples[way]:
            print(f"{len(pairs)} requests don't fill the pool", file=sys.stderr)
            return 1
    rig.report(f"Waste, {len(pairs)} requests, a full pool", figures(samples), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
