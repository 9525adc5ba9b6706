"""A worker that computes right until it may commit blocks, and wrong from then on: `python
wrong_member.py PORT prefill …`. As `member_at.py`, but for the port, which is not taken.

Of the last token of each piece it stores one bit of one code otherwise, as bad memory would.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvass.common import worker
from kvass.common.config import Config, WorkerConfig
from kvass.common.model.engine import Engine, open_engine
from kvass.common.model.runner import Rows, Runner
from supervised import supervised_main

LOW_BIT = 1  # of a code: far within what rounding can do


class WrongRunner(Runner):
    """Computes as the runner of a right engine, and spoils what that has stored."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, pieces: Sequence[Rows]) -> torch.Tensor | None:
        logits = self._engine.runner.run(pieces)
        layout, pool = self._engine.layout, self._engine.memory.tensor
        for piece in pieces:
            block, token = divmod(piece.start + len(piece.tokens) - 1, layout.block_tokens)
            pool[piece.slots[block], layout.code_offset(0, 0, False, token)] ^= LOW_BIT
        return logits


def open_wrong(config: Config, settings: WorkerConfig, role: str) -> Engine:
    """Open an engine, whose known answer is right, and let it go wrong."""
    engine = open_engine(config, settings, role)
    return replace(engine, runner=WrongRunner(engine))


if __name__ == "__main__":
    del sys.argv[1]
    setattr(worker, "open_engine", open_wrong)  # noqa: B010
    supervised_main()
