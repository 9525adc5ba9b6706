"""Steps of the default model: a row's bits depend neither on its company nor on the threads."""

from __future__ import annotations

import pytest
import torch

from kvass.common.block import BlockLayout
from kvass.common.config import DEFAULT_MODEL
from kvass.common.kernels.torch_paged import TorchPagedKv
from kvass.common.model.fetch import resolve_model
from kvass.common.model.load import load_model
from kvass.common.model.runner import FEW_ROWS, Rows, Runner
from kvass.common.model.spec import load_spec
from kvass.common.pool.memory import SlotMemory

pytestmark = pytest.mark.model
BLOCK = 16


def test_a_row_alone_on_one_thread_has_the_bits_of_a_row_among_others_on_all() -> None:
    folder = resolve_model(DEFAULT_MODEL, progress=False)
    spec = load_spec(folder)
    layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK, "fp8")
    memory = SlotMemory(layout, 64)
    kv = TorchPagedKv(memory, layout, spec.heads)
    runner = Runner(load_model(folder, spec), kv, BLOCK)
    requests = []
    for number in range(5):
        tokens = [(977 * index + 31 * number + 5) % spec.vocab_size for index in range(70 + number)]
        slots = list(range(number * 8, number * 8 + 8))
        runner.run([Rows(tokens[:-1], 0, slots)])
        requests.append(Rows(tokens[-1:], len(tokens) - 1, slots, logits=True))
    assert len(requests) > FEW_ROWS
    together = runner.run(requests)
    assert together is not None
    for number, request in enumerate(requests):
        alone = runner.run([request])
        assert alone is not None and torch.equal(alone[0], together[number])
