"""How does the store grow: what does a prompt touch among 1 to 1,000 nodes, and how evenly?

Simulated, with the code that places blocks (`kvstore/placement.py`, `router.py`) and that spreads
the readers of hot segments (`heat.py`); nothing is sent. A prompt's segments (512 tokens each) have
names of their own, nodes are of one size, four to a host. Beside each figure stands what no
placement could better: every segment on its own node, keys that move only to or from the node that
joined or left, and the spread that chance alone gives equal shares.

Reads are replayed from a trace of requests (`--trace`; see `rig_trace.py`), or
from one made here: every request begins with the same segment, as behind one system prompt, and
has 13 others, half of them read again by a later request.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

import rig
import rig_trace
from kvass.kvstore.node.copies.heat import Heat
from kvass.kvstore.placement import Placement, StoreNode
from rig import Figure
from rig_trace import prompts_of

NODES = (1, 10, 100, 1_000)
SEGMENT_TOKENS = 512
PROMPTS = {"4k": 4_096 // SEGMENT_TOKENS, "128k": 131_072 // SEGMENT_TOKENS}
# Calls to each node that a prompt touches: lookup, get_begin, get_end when all is there; lookup,
# claim, put_begin, put_commit when nothing is (renewals and waits come on top when they take long).
HIT_CALLS, COLD_CALLS = 3, 4
READ_NODES = 10


def node(number: int) -> StoreNode:
    return StoreNode(f"store-{number}", f"10.0.0.1:{number}", 1 << 36, host_id=f"h{number // 4}")


def segment(name: object) -> bytes:
    return blake2b(repr(name).encode(), digest_size=32).digest()


def touched(place: Placement, segments: int, prompts: int) -> list[int]:
    """Return how many nodes each of some prompts has to do with."""
    return [
        len({place.homes(segment((p, s)), 1)[0].member_id for s in range(segments)})
        for p in range(prompts)
    ]


def expected_touched(nodes: int, segments: int) -> float:
    """Return how many of `nodes` equal bins so many balls hit, on average."""
    return float(nodes * (1 - (1 - 1 / nodes) ** segments))


def moved(before: Placement, after: Placement, keys: Sequence[bytes]) -> float:
    """Return the share of segments whose home is another one now."""
    return statistics.fmean(before.homes(k, 1) != after.homes(k, 1) for k in keys)


def imbalance(place: Placement, keys: Sequence[bytes]) -> float:
    """Return the fullest node's segments, as a multiple of the mean."""
    held = Counter(place.homes(key, 1)[0].member_id for key in keys)
    return max(held.values()) * len(place.nodes) / len(keys)


def chance_imbalance(nodes: int, count: int) -> float:
    """Return what so many throws at equal bins give, on average."""
    rng = np.random.default_rng(1)
    counts = rng.multinomial(count, [1 / nodes] * nodes, size=20)
    return float(counts.max(axis=1).mean() * nodes / count)


def growth(nodes: int, quick: bool) -> list[Figure]:
    place = Placement(node(number) for number in range(nodes))
    joined = Placement([*place.nodes, node(nodes)])
    count = 100 if quick else 200  # segments a node
    keys = [segment(number) for number in range(min(count * nodes, 100_000))]
    some = keys[: 2_000 if quick else 20_000]
    made = []
    for name, segments in PROMPTS.items():
        homes = statistics.fmean(touched(place, segments, 4 if quick else 20))
        best = expected_touched(nodes, segments)
        made += [
            Figure(
                f"{nodes:,} nodes: nodes a {name} prompt touches", homes, "", "equal bins", best
            ),
            Figure(f"{nodes:,} nodes: calls of a {name} prompt, all there", homes * HIT_CALLS, ""),
            Figure(f"{nodes:,} nodes: calls of a {name} prompt, cold", homes * COLD_CALLS, ""),
        ]
    made += [
        Figure(
            f"{nodes:,} nodes: keys that move when one joins", 100 * moved(place, joined, some),
            "%", "its share", 100 / (nodes + 1),
        ),
        Figure(
            f"{nodes:,} nodes: fullest node ÷ mean", imbalance(place, keys), "",
            "chance alone", chance_imbalance(nodes, len(keys)),
        ),
        Figure(f"{nodes:,} nodes: placing one segment", 1e6 * placing_s(place, some[:500]), "µs"),
    ]  # fmt: skip
    if nodes > 1:
        left = Placement(place.nodes[1:])
        made.insert(
            -2,
            Figure(
                f"{nodes:,} nodes: keys that move when one leaves", 100 * moved(place, left, some),
                "%", "its share", 100 / nodes,
            ),
        )  # fmt: skip
    return made


def placing_s(place: Placement, keys: Sequence[bytes]) -> float:
    started_s = time.perf_counter()
    for key in keys:
        place.looked_at(key, 1, 1)
    return (time.perf_counter() - started_s) / len(keys)


def reused_after_a_death(prompts: int) -> list[float]:
    """Return the share of each 128k prompt's tokens that nine of ten nodes still have."""
    place = Placement(node(number) for number in range(READ_NODES))
    shares = []
    for prompt in range(prompts):
        dead = place.nodes[prompt % READ_NODES].member_id
        homes = [place.homes(segment((prompt, s)), 1)[0].member_id for s in range(PROMPTS["128k"])]
        shares.append(sum(home != dead for home in homes) / len(homes))
    return shares


# --- reads ----------------------------------------------------------------------------------------

Request = tuple[float, list[bytes]]  # when, in seconds, and the segments that it reads


def from_trace(path: Path) -> Iterator[Request]:
    for prompt in prompts_of(path):
        yield prompt.sent_s, [segment(name) for name in prompt.pieces]


def made_here(requests: int) -> Iterator[Request]:
    chance = random.Random(1)
    for number in range(requests):
        seen = chance.randrange(max(number, 1))
        own = [segment((seen if chance.random() < 0.5 else number, s)) for s in range(13)]
        yield number * 0.3, [segment("system prompt"), *own]


def reads(requests: Iterator[Request], *, spread: bool) -> Counter[str]:
    """Return how often each of ten nodes is read, each segment of a request once."""
    place = Placement(node(number) for number in range(READ_NODES))
    heats = {each.member_id: Heat() for each in place.nodes}
    hot: dict[bytes, int] = {}
    chance, counts = random.Random(1), Counter[str]()
    for now_s, segments in requests:
        for name in segments:
            home = place.homes(name, 1)[0]
            copies = hot.get(name, 1) if spread else 1
            read = chance.choice(place.homes(name, copies))
            counts[read.member_id] += 1
            if read == home:  # which says how hot it is
                hot[name] = heats[home.member_id].read(name, now_s, most=READ_NODES)
    return counts


def imbalance_of_reads(requests: Callable[[], Iterator[Request]], *, spread: bool) -> float:
    counts = reads(requests(), spread=spread)
    return max(counts.values()) * READ_NODES / counts.total()


def figures(trace: Path | None, quick: bool) -> list[Figure]:
    made = [figure for nodes in NODES for figure in growth(nodes, quick)]
    shares = reused_after_a_death(50 if quick else 500)
    made.append(
        Figure(
            "128k prompts, 1 of 10 nodes died: tokens reused", statistics.fmean(shares), "",
            "what nine nodes hold", 0.9, least_ratio=0.85 / 0.9,
        )
    )  # fmt: skip
    made.append(Figure("… of the unluckiest prompt", min(shares), ""))

    def requests() -> Iterator[Request]:
        return from_trace(trace) if trace else made_here(1_000 if quick else 12_000)

    with_copies = imbalance_of_reads(requests, spread=True)
    without = imbalance_of_reads(requests, spread=False)
    made.append(
        Figure(
            "10 nodes: most read node ÷ mean, hot segments spread", with_copies, "",
            "not spread", without,
        )
    )  # fmt: skip
    return made


PANELS = {
    "nodes that a prompt touches": {
        "4k": "nodes a 4k prompt touches", "128k": "nodes a 128k prompt touches",
    },
    "calls of a prompt": {
        "4k, cold": "calls of a 4k prompt, cold", "128k, cold": "calls of a 128k prompt, cold",
        "128k, all there": "calls of a 128k prompt, all there",
    },
    "% of keys that move": {
        "one joins": "keys that move when one joins",
        "one leaves": "keys that move when one leaves",
    },
    "fullest node ÷ mean": {"here": "fullest node ÷ mean"},
}  # fmt: skip


def plot(made: Sequence[Figure], path: Path) -> None:
    """Draw the figures by number of nodes; a line of dashes is what they are compared with."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    known = {figure.name: figure for figure in made}
    drawn, axes = pyplot.subplots(1, len(PANELS), figsize=(15, 3.6), layout="constrained")
    for axis, (title, lines) in zip(axes, PANELS.items(), strict=True):
        for label, name in lines.items():
            at = [n for n in NODES if f"{n:,} nodes: {name}" in known]
            figures_ = [known[f"{n:,} nodes: {name}"] for n in at]
            (line,) = axis.plot(at, [f.value for f in figures_], marker="o", label=label)
            if figures_[0].reference_value is not None:
                best = [f.reference_value for f in figures_]
                axis.plot(at, best, "--", color=line.get_color(), alpha=0.5)
        axis.set_xscale("log")
        if title != "fullest node ÷ mean":
            axis.set_yscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("store nodes")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    drawn.savefig(path)


def main() -> int:
    parser = rig.parser((__doc__ or "").splitlines()[0])
    rig_trace.add_option(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them there")
    given = parser.parse_args()
    if given.trace is not None and not given.trace.is_file():
        parser.error(f"--trace {given.trace}: no such file")
    made = figures(given.trace, given.quick)
    if given.plot is not None:
        plot(made, given.plot)
    rig.report("the store by number of nodes, simulated", made, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
