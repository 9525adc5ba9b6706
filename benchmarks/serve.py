"""How fast is the default model served over HTTP, beside other servers on the same machine?

    first token   of a 1,024-token prompt: cold, again with its KV in the server's own cache, and
                  again with its KV in the store alone, which no other server has
    one stream    tokens a second after the first, weights in bf16; ours with 8 and 4 bits too
    8 streams     24 requests, eight at a time, 512 prompt tokens and 128 out each
    shared        the same with 832 prompt tokens, of which all have the first 768 in common, which
                  no server has seen before

Greedy, the end token ignored, fresh token ids in every row, streamed to one client; every process
is on this machine. Ours and each peer that is there (`rig_servers.py` says how they are found) run
one after the other, alone, warmed up once. Values are medians of quiet rows: one in which other
processes took more than 5 % of a core is measured again. Limits are measured in the same run: one
stream reads all weights for each token, and a cold prompt's products take what torch's bf16
products take.

    python benchmarks/serve.py [--quick] [--json FILE] [--only SCENARIO ...] [--rows N]
                               [--vllm PYTHON] [--llama-server PATH --gguf FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import anyio
import httpx

import rig
import rig_machine
import rig_servers
from kvass.common.model.spec import load_spec
from rig import Figure
from rig_servers import OURS, Answer, Server

ROWS_WANTED = 5
FIRST_TOKENS = 1024
ONE_TOKENS = 128  # the one stream's prompt
MANY_TOKENS, SHARED_TOKENS, OWN_TOKENS = 512, 768, 64
TOGETHER = 8
WARM_TOKENS = 8
# Bits a weight in layers and in the logits' matrix, with what 32 of them share.
CODED_BITS = {"int8": (8.5, 8.5), "int4": (5.0, 8.5)}
Values = dict[str, float]  # by measure


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a measure of a scenario, and its target where it has one."""

    scenario: str
    measure: str
    unit: str
    most: float | None = None
    least: float | None = None
    scale: float = 1.0  # from seconds

    @property
    def name(self) -> str:
        return f"{self.scenario}: {self.measure}"


FIRST, ONE, MANY, SHARED = "first token", "one stream", "8 streams", "shared prefix"
CODED = {f"int{bits}": f"one stream, {bits}-bit weights" for bits in (8, 4)}
COLD, AGAIN, REUSED, STORE = "cold", "again, own cache", "again, reused", "again, store alone"
RATE = "out"
FIRST_P50, FIRST_P95 = "first token p50", "first token p95"
GAP_P50, GAP_P95 = "between tokens p50", "between tokens p95"
ROWS = (
    Row(FIRST, COLD, "s", most=0.85),
    Row(FIRST, AGAIN, "s", most=0.023),
    Row(FIRST, REUSED, "tokens"),
    Row(FIRST, STORE, "s", most=0.070),
    Row(ONE, RATE, "tokens/s", least=110),
    Row(CODED["int8"], RATE, "tokens/s", least=180),
    Row(CODED["int4"], RATE, "tokens/s"),
    Row(MANY, RATE, "tokens/s", least=180),
    Row(MANY, GAP_P50, "ms", scale=1e3),
    Row(MANY, GAP_P95, "ms", scale=1e3),
    Row(SHARED, RATE, "tokens/s", least=300),
    Row(SHARED, FIRST_P50, "s"),
    Row(SHARED, FIRST_P95, "s"),
    Row(SHARED, GAP_P50, "ms", scale=1e3),
    Row(SHARED, GAP_P95, "ms", scale=1e3),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked for."""

    rows: int
    requests: int
    out_tokens: int


WHOLE, QUICK = Size(ROWS_WANTED, 24, 128), Size(1, 8, 32)


@dataclass(slots=True)
class Bench:
    """The one client and its prompts. Mutable: the complaints, which are `quiet`'s."""

    served: rig.Served
    client: httpx.AsyncClient
    size: Size
    quiet: rig_machine.Quiet = field(default_factory=lambda: rig_machine.Quiet([]))

    @property
    def complaints(self) -> list[str]:
        """What was other than it should be."""
        return self.quiet.complaints

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt that nobody has asked yet."""
        return self.served.prompt(tokens, time.time_ns())

    async def ask(self, server: Server, prompt: Sequence[int], tokens: int) -> Answer:
        answer = await rig_servers.ask(self.client, server, prompt, tokens)
        if answer.tokens != tokens:
            self.complaints.append(f"{server.name}: {answer.tokens} tokens came, not {tokens}")
        return answer

    async def ask_all(
        self, server: Server, prompts: Sequence[Sequence[int]], tokens: int
    ) -> list[Answer]:
        """Ask for all of them, TOGETHER at a time, in order."""
        waiting, answers = iter(prompts), list[Answer]()

        async def one_after_the_other() -> None:
            for prompt in waiting:
                answers.append(await self.ask(server, prompt, tokens))

        async with anyio.create_task_group() as tasks:
            for _ in range(TOGETHER):
                tasks.start_soon(one_after_the_other)
        return answers


# --- scenarios ------------------------------------------------------------------------------------


async def first_token(bench: Bench, server: Server) -> Values:
    """Cold, again, and from the store where there is one."""
    prompt = bench.prompt(FIRST_TOKENS)
    cold = await bench.ask(server, prompt, 1)
    control = server.control
    if control is not None:
        await control.until_stored(control.chain(prompt))
    again = await bench.ask(server, prompt, 1)
    values = {COLD: cold.first_s, AGAIN: again.first_s, REUSED: float(again.cached_tokens)}
    if cold.cached_tokens:
        bench.complaints.append(f"{server.name}: {cold.cached_tokens} tokens of a cold prompt")
    if control is not None:
        await control.forget(control.chain(prompt).keys)
        stored = await bench.ask(server, prompt, 1)
        values[STORE] = stored.first_s
        if min(again.cached_tokens, stored.cached_tokens) < FIRST_TOKENS - 1:
            bench.complaints.append(f"{server.name}: a prompt's KV was not found where it was")
    return values


async def one_stream(bench: Bench, server: Server) -> Values:
    """Count from the first token to the last."""
    answer = await bench.ask(server, bench.prompt(ONE_TOKENS), bench.size.out_tokens)
    return {RATE: (answer.tokens - 1) / (answer.seen_s[-1] - answer.seen_s[0])}


async def many_streams(bench: Bench, server: Server) -> Values:
    """Prompts that have nothing in common."""
    prompts = [bench.prompt(MANY_TOKENS) for _ in range(bench.size.requests)]
    return await _streams(bench, server, prompts)


async def shared_prefix(bench: Bench, server: Server) -> Values:
    """Prompts that begin alike; nobody has computed the beginning."""
    shared = bench.prompt(SHARED_TOKENS)
    prompts = [[*shared, *bench.prompt(OWN_TOKENS)] for _ in range(bench.size.requests)]
    return await _streams(bench, server, prompts)


async def _streams(bench: Bench, server: Server, prompts: Sequence[Sequence[int]]) -> Values:
    answers = await bench.ask_all(server, prompts, bench.size.out_tokens)
    began_s = min(each.sent_s for each in answers)
    ended_s = max(each.seen_s[-1] for each in answers)
    first_s = [each.first_s for each in answers]
    gaps_s = [gap for each in answers for gap in each.gaps_s]
    return {
        RATE: sum(each.tokens for each in answers) / (ended_s - began_s),
        FIRST_P50: median(first_s),
        FIRST_P95: _p95(first_s),
        GAP_P50: median(gaps_s),
        GAP_P95: _p95(gaps_s),
    }


def _p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1]


Scenario = Callable[[Bench, Server], Awaitable[Values]]
SCENARIOS: Mapping[str, tuple[str, Scenario]] = {  # by what `--only` takes
    "first": (FIRST, first_token),
    "one": (ONE, one_stream),
    **{weights: (name, one_stream) for weights, name in CODED.items()},
    "many": (MANY, many_streams),
    "shared": (SHARED, shared_prefix),
}


# --- the machine and all servers ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine does at most, and what follows from it for the default model."""

    read_bytes_per_s: float
    flop_per_s: float
    cold_s: float
    one_per_s: float
    coded_per_s: Mapping[str, float]  # by what weights are kept as

    @classmethod
    async def measure(cls, folder: Path) -> Limits:
        spec = load_spec(folder)
        read = rig_machine.read_bytes_per_s()
        rate = rig_machine.multiplied_flop_per_s(spec, FIRST_TOKENS)
        cold_s = rig_machine.prefill_flop(spec, FIRST_TOKENS) / rate
        whole, logits = _weights_bytes(folder), 2 * spec.vocab_size * spec.hidden_size
        coded = {
            name: read / ((whole - logits) * bits / 16 + logits * logits_bits / 16)
            for name, (bits, logits_bits) in CODED_BITS.items()
        }
        return cls(read, rate, cold_s, read / whole, coded)

    def figures(self) -> list[Figure]:
        return [
            Figure("read from memory, two threads", self.read_bytes_per_s / 1e9, "GB/s"),
            Figure("torch's bf16 products", self.flop_per_s / 1e9, "GFLOP/s"),
        ]

    def of(self, row: Row) -> list[tuple[str, float]]:
        known = {
            (FIRST, COLD): ("limit: torch's products", self.cold_s),
            (ONE, RATE): ("limit: reading the weights", self.one_per_s),
        }
        for name, rate in self.coded_per_s.items():
            known[CODED[name], RATE] = ("limit: reading the weights", rate)
        return [each for key, each in known.items() if key == (row.scenario, row.measure)]


def _weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


Measured = dict[tuple[str, str], float]  # by a row's name and a server's


async def measure_server(
    bench: Bench, server: Server, only: Sequence[str], found: Measured
) -> None:
    """Warm one server up, then take every scenario's medians."""
    warm = [bench.prompt(tokens) for tokens in (FIRST_TOKENS, *[MANY_TOKENS] * TOGETHER)]
    await bench.ask_all(server, warm, WARM_TOKENS)
    for key in only:
        name, scenario = SCENARIOS[key]
        what = f"{server.name}, {name}"
        once = partial(scenario, bench, server)
        rows = await bench.quiet.rows(what, bench.size.rows, once)
        for measure in rows[0]:
            found[f"{name}: {measure}", server.name] = median(row[measure] for row in rows)
        print(f"{what}: measured", file=sys.stderr)


async def measure(
    served: rig.Served, peers: Sequence[rig_servers.Peer], size: Size, only: Sequence[str]
) -> tuple[Measured, Limits, list[str]]:
    """Measure the machine, then every server alone; return what should not have been, too."""
    found: Measured = {}
    plain = [key for key in only if key not in CODED]
    async with httpx.AsyncClient(trust_env=False) as client:
        bench = Bench(served, client, size)
        (limits,) = await bench.quiet.rows("limits", 1, partial(Limits.measure, served.folder))
        async with rig_servers.ours() as server:
            await measure_server(bench, server, plain, found)
        for weights in (key for key in only if key in CODED):
            async with rig_servers.ours("--set", f"cluster.weights={weights}") as server:
                await measure_server(bench, server, [weights], found)
        for peer in peers:
            async with rig_servers.running(peer, client) as server:
                await measure_server(bench, server, plain, found)
    return found, limits, bench.complaints


def figures(found: Measured, limits: Limits, *, has_targets: bool) -> list[Figure]:
    """Put ours beside its limit and every peer; the target is in the first line of each row."""
    servers = list(dict.fromkeys(server for _, server in found if server != OURS))
    made = limits.figures()
    for row in ROWS:
        if (row.name, OURS) not in found:
            continue
        beside = limits.of(row)
        beside += [(s, row.scale * found[row.name, s]) for s in servers if (row.name, s) in found]
        value = row.scale * found[row.name, OURS]
        for number, (reference, other) in enumerate(beside or [("", None)]):
            target = (row.most, row.least) if has_targets and number == 0 else (None, None)
            made.append(
                Figure(
                    row.name, value, row.unit, reference, other, limit=target[0], least=target[1]
                )
            )
    return made


def parser() -> argparse.ArgumentParser:
    made = rig.parser((__doc__ or "").splitlines()[0])
    made.add_argument(
        "--rows", type=int, metavar="N", help=f"quiet rows of each scenario; default: {ROWS_WANTED}"
    )
    made.add_argument(
        "--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="default: all"
    )
    rig_servers.add_options(made)
    return made


def main() -> int:
    given = parser().parse_args()
    size = QUICK if given.quick else WHOLE
    if given.rows is not None:
        size = replace(size, rows=given.rows)
    served = rig.Served.load()
    with ExitStack() as made:
        peers, missing = ([], []) if given.quick else rig_servers.find(given, served.folder, made)
        for line in missing:
            print(f"not measured: {line}", file=sys.stderr)
        found, limits, complaints = anyio.run(measure, served, peers, size, given.only)
    title = f"Served over HTTP by {rig_servers.THREADS} cores, median of {size.rows}"
    if given.quick:
        title += "; targets are for the lengths of a whole run"
    rig.report(title, figures(found, limits, has_targets=not given.quick), given.json)
    for line in complaints:
        print(f"not what it should be: {line}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
