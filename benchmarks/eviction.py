"""Which blocks are worth their room: how much does each eviction policy reuse of a real hour?

A trace of a chat service's requests, each the chain of its prompt's blocks, runs through the
store's own ledger (no parent goes before its children; a request's blocks are held while it runs)
with the store's policy and with others, at several sizes of the store. A block is a hit when it and
all before it are there. Saved time weighs each hit by what its prefill takes, which grows with its
depth as attention does: 1 + tokens before it / 30,720, an 8B model's. Belady knows the future: no
policy can hit more blocks; for saved time it is a reference only. Also printed: what the store's
policy costs, in time and memory. `rig_trace.py` says where the trace is from.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

import rig
import rig_trace
from kvass.common.block import BlockHeader
from kvass.kvstore.eviction.policy import ChainLru, Eviction
from kvass.kvstore.eviction.reuse import DOUBLE_TOKENS, ReuseEviction
from kvass.kvstore.index.extents import Extents
from kvass.kvstore.index.ledger import Ledger
from kvass.kvstore.index.shares import Allotments, Shares
from rig import Figure
from rig_policies import Belady, Lfu, S3Fifo, Sieve
from rig_trace import PIECE, Prompt, prompts_of

SHARES = (0.01, 0.03, 0.1, 0.3)  # of the trace's distinct blocks
SLOT_BYTES = 64  # a slot's least: the ledger counts bytes, no one writes any
QUICK_REQUESTS = 2_000
COST_BLOCKS = 100_000
CHAIN_BLOCKS = 32
SPACE = b"t" * 32

Requests = list[list[BlockHeader]]


def chains_of(prompts: Iterable[Prompt]) -> Requests:
    """Return each request's chain; equal blocks are the same object."""
    headers: dict[int, BlockHeader] = {}
    requests: Requests = []
    for prompt in prompts:
        chain: list[BlockHeader] = []
        for number in prompt.pieces:
            parent = chain[-1].key if chain else SPACE
            if number not in headers:
                headers[number] = block(number, parent, len(chain))
            chain.append(headers[number])
        requests.append(chain)
    return requests


def block(number: int, parent: bytes, index: int) -> BlockHeader:
    return BlockHeader(
        key=hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest(),
        parent=parent, segment_key=SPACE, index=index, namespace=SPACE, tenant="", writer="",
        token_count=PIECE, length=SLOT_BYTES, checksums=(0,),
    )  # fmt: skip


def seconds(header: BlockHeader) -> float:
    """Return what a block's prefill takes, as a multiple of a first block's."""
    return 1 + header.index * PIECE / DOUBLE_TOKENS


# --- a run ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of all blocks asked for, and of all time that their prefill takes."""

    hits: float
    saved: float


def replay(requests: Requests, blocks: int, policy: Eviction) -> Score:
    """Run a trace through a store of so many blocks."""
    running: set[bytes] = set()
    shares = Shares(Allotments(), lambda: policy)
    ledger = Ledger(Extents(blocks * SLOT_BYTES), shares, running.__contains__)
    hits = asked = 0
    saved_s = asked_s = 0.0
    for number, chain in enumerate(requests):
        if isinstance(policy, Belady):
            policy.number = number
        else:
            running.update(header.key for header in chain)
        found = 0
        while found < len(chain) and ledger.visible(chain[found].key) is not None:
            found += 1
        ledger.touch([header.key for header in chain[:found]])
        hits, asked = hits + found, asked + len(chain)
        saved_s += sum(map(seconds, chain[:found]))
        asked_s += sum(map(seconds, chain))
        _fill(ledger, policy, chain[found:])
        running.clear()
        for header in chain:
            ledger.offer_key(header.key)
        shares.catch_up()
        ledger.news.clear()
    return Score(hits / asked, saved_s / asked_s)


def _fill(ledger: Ledger, policy: Eviction, missing: Sequence[BlockHeader]) -> None:
    for header in missing:
        if isinstance(policy, Belady):
            policy.coming = header
        entry = ledger.open(header, 1, math.inf)
        if entry is None:
            return  # nor is there room for its children
        ledger.publish([entry], [header])


def policies(requests: Requests) -> dict[str, Callable[[int], Eviction]]:
    """Return what makes each policy, for a number of blocks."""
    return {
        "LRU": lambda blocks: ChainLru(),
        "LFU": lambda blocks: Lfu(),
        "S3-FIFO": S3Fifo,
        "SIEVE": lambda blocks: Sieve(),
        "Kvass": lambda blocks: ReuseEviction(),
        "Belady": lambda blocks: Belady(requests),
    }


# --- its cost -------------------------------------------------------------------------------------


def chains(count: int, first: int) -> Requests:
    """Return chains that share no block."""
    made = []
    for start in range(first, first + count * CHAIN_BLOCKS, CHAIN_BLOCKS):
        chain: list[BlockHeader] = []
        for index in range(CHAIN_BLOCKS):
            chain.append(block(start + index, chain[-1].key if chain else SPACE, index))
        made.append(chain)
    return made


def cost_figures(make: Callable[[], Eviction], name: str) -> list[Figure]:
    """Return what an operation takes on a full node, and the memory of a block, ghosts included."""
    count = COST_BLOCKS // CHAIN_BLOCKS
    first, second, third = (chains(count, turn * COST_BLOCKS) for turn in range(3))
    tracemalloc.start()
    policy, here = make(), set[bytes]()
    _insert(policy, here, first)
    _replace(policy, here, second)  # the ghosts' table is there
    size = tracemalloc.get_traced_memory()[0] - sys.getsizeof(here)
    tracemalloc.stop()
    keys = [[header.key for header in chain] for chain in second]
    touched_s = _timed(lambda: _touch(policy, keys))
    replaced_s = _timed(lambda: _replace(policy, here, third))
    blocks = count * CHAIN_BLOCKS
    return [
        Figure(f"{name}: touch, a block", touched_s / blocks * 1e6, "µs"),
        Figure(f"{name}: evict one, insert one", replaced_s / blocks * 1e6, "µs"),
        Figure(f"{name}: memory, a block", size / blocks, "bytes"),
    ]


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _touch(policy: Eviction, keys: list[list[bytes]]) -> None:
    for chain in keys:
        policy.touch(chain)


def _insert(policy: Eviction, here: set[bytes], made: Requests) -> None:
    for chain in made:
        policy.touch(())
        for header in chain:
            policy.insert(header)
            policy.offer(header.key)
            here.add(header.key)


def _replace(policy: Eviction, here: set[bytes], made: Requests) -> None:
    for chain in made:
        for _ in chain:
            victim = policy.victim(here.__contains__)
            assert victim is not None
            policy.remove(victim)
            here.remove(victim)
        _insert(policy, here, [chain])


# --- the report -----------------------------------------------------------------------------------


def report(scores: dict[str, list[Score]], title: str) -> None:
    """Print what each policy reuses at each size."""
    table = Table(title=title, header_style="bold", title_justify="left")
    table.add_column("policy")
    for what in ("hits", "saved"):
        for share in SHARES:
            table.add_column(f"{what} {share:.0%}", justify="right")
    for name, row in scores.items():
        values = [score.hits for score in row] + [score.saved for score in row]
        table.add_row(name, *(f"{value:.4f}" for value in values))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def figures(scores: dict[str, list[Score]]) -> list[Figure]:
    """Return every score beside Belady's."""
    made = []
    for name, row in scores.items():
        for share, score, best in zip(SHARES, row, scores["Belady"], strict=True):
            at = f"{name}, {share:.0%}"
            made.append(Figure(f"{at}: hits", score.hits, "of blocks", "Belady", best.hits))
            made.append(Figure(f"{at}: saved", score.saved, "of time", "Belady", best.saved))
    return made


def main() -> int:
    parser = rig.parser((__doc__ or "").splitlines()[0])
    rig_trace.add_option(parser)
    given = parser.parse_args()
    if not rig_trace.is_there(given.trace):
        return 2
    requests = chains_of(prompts_of(given.trace, QUICK_REQUESTS if given.quick else None))
    distinct = len({header.key for chain in requests for header in chain})
    sizes = [int(distinct * share) for share in SHARES]
    scores = {
        name: [replay(requests, blocks, make(blocks)) for blocks in sizes]
        for name, make in policies(requests).items()
    }
    asked_blocks = sum(map(len, requests))
    title = f"{len(requests):,} requests, {asked_blocks:,} blocks, {distinct:,} of them distinct"
    report(scores, f"{title}; shares of blocks hit and of prefill time saved, by the store's size")
    costs = [*cost_figures(ChainLru, "LRU"), *cost_figures(ReuseEviction, "Kvass")]
    rig.report(f"what it costs, {COST_BLOCKS:,} blocks", costs, None)
    if given.json is not None:
        found = [figure.as_json() for figure in (*figures(scores), *costs)]
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
