"""How long does `kvass up` take until a completion can be asked for, and where does the time go?

Everything is installed and the model is in the cache. Members start side by side, so their times
overlap: the slowest one and what is before and after it make up the whole. `import torch` alone, in
the same run, is what no worker can be quicker than.

    python benchmarks/startup.py [--quick] [--json FILE]
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import anyio
import httpx

import rig
from rig import Figure

REPETITIONS, QUICK_REPETITIONS = 5, 2
# kvass: started in 9.1 s; seconds: model 0.1, decode-0 8.2 (imports 3.0, model 1.0), …
STARTED = re.compile(r"kvass: started in ([\d.]+) s; seconds: (.*)")
PART = re.compile(r"([\w-]+) ([\d.]+)(?: \(([^)]*)\))?")
WHOLE, REQUEST, TORCH = "kvass up to ready", "first completion after that", "import torch alone"


def parts_of(lines: Sequence[str], whole_s: float) -> dict[str, float]:
    """Read where the time went from what `kvass up` prints."""
    found = next(filter(None, map(STARTED.search, lines)), None)
    if found is None:
        raise RuntimeError("kvass up did not say where its time went")
    parts = {"command line, imported": whole_s - float(found[1])}
    for name, seconds, inner in PART.findall(found[2]):
        parts[name if inner else f"{name}, found"] = float(seconds)
        for part, part_s, _ in PART.findall(inner):
            parts[f"{name}, of it {part}"] = float(part_s)
    return parts


async def one_start(served: rig.Served) -> dict[str, float]:
    """Start and stop a cluster once; return seconds by what they were spent on."""
    async with (
        rig.cluster() as cluster,
        httpx.AsyncClient(trust_env=False, base_url=cluster.url) as client,
    ):
        started_s = time.perf_counter()
        await rig.complete(client, served.name, served.tokenizer.encode("Hello"), max_tokens=1)
        request_s = time.perf_counter() - started_s
        parts = parts_of(cluster.lines, cluster.start_s)
        return {WHOLE: cluster.start_s, **parts, REQUEST: request_s}


def import_torch_s() -> float:
    """Return the seconds that a Python process takes to import torch and end."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started_s


async def measure(repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of every repetition by what they were spent on."""
    served = rig.Served.load()  # fetches the model, should it be missing
    times_s: dict[str, list[float]] = defaultdict(list)
    for _ in range(repetitions):
        times_s[TORCH].append(import_torch_s())
        for name, seconds in (await one_start(served)).items():
            times_s[name].append(seconds)
    return times_s


def figures(times_s: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Medians; the whole and the workers' imports beside `import torch`."""
    torch_s = median(times_s[TORCH])
    made = []
    for name, values in times_s.items():
        uses_torch = name.endswith("imports") and name.startswith(("prefill", "decode"))
        uses_torch = uses_torch or name == WHOLE
        made.append(
            Figure(name, median(values), "s", TORCH, torch_s)
            if uses_torch
            else Figure(name, median(values), "s")
        )
    return made


def main() -> int:
    given = rig.options((__doc__ or "").splitlines()[0])
    repetitions = QUICK_REPETITIONS if given.quick else REPETITIONS
    times_s = anyio.run(measure, repetitions)
    rig.report(f"Start, median of {repetitions}", figures(times_s), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
