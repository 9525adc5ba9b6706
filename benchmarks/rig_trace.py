"""A trace of a chat service's requests: how benchmarks read it, and where it is from.

It names its prompts' pieces of 512 tokens: equal names are equal tokens from the prompt's beginning
on. It refuses to know what a benchmark makes of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

PIECE = 512  # tokens; the last one of a prompt may have fewer
WHERE = """\
The trace is not part of this repository: give `--trace FILE`. It is conversation_trace.jsonl of
Mooncake (FAST'25), in FAST25-release/traces of the GitHub repository kvcache-ai/Mooncake."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request of the trace: its tokens, those of its answer, its pieces' names, and when."""

    tokens: int
    answer: int
    pieces: tuple[int, ...]
    sent_s: float = 0.0

    @property
    def last_whole(self) -> int | None:
        """Its last piece that is whole."""
        whole = self.tokens // PIECE
        return self.pieces[whole - 1] if whole else None


def prompts_of(path: Path, count: int | None = None) -> Iterator[Prompt]:
    """Read a trace's requests, the first `count` of them or all."""
    with path.open() as lines:
        for line in islice(lines, count):
            given = json.loads(line)
            yield Prompt(
                given["input_length"],
                given["output_length"],
                tuple(given["hash_ids"]),
                given["timestamp"] / 1e3,
            )


def add_option(parser: argparse.ArgumentParser) -> None:
    """Let a benchmark be given a trace."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help="conversation_trace.jsonl")


def is_there(path: Path | None) -> bool:
    """Whether there is a trace to read; where not, say what to do."""
    if path is not None and path.is_file():
        return True
    asked = "no --trace was given" if path is None else f"{path} is no file"
    print(f"{asked}\n\n{WHERE}", file=sys.stderr)
    return False
