"""A request's KV bytes and logits are the same bits, whoever computes them, how, and with whom.

Each example takes some requests through a pool of its own: prompts cut into any pieces, pieces of
all requests in any order and any company, blocks in any slots, leading blocks copied from another
pool as the store would bring them, single rows as decode computes them. What comes out is compared
with each request computed alone, in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bit_models import BLOCK, SPECS, Bench, blocks_of, model_of
from kvass.common.block import KV_DTYPES, BlockLayout, KvDtype
from kvass.common.config import DEFAULT_MODEL
from kvass.common.kernels.paged import paged_kv
from kvass.common.model.fetch import resolve_model
from kvass.common.model.llama import Llama
from kvass.common.model.load import load_model
from kvass.common.model.products import Products
from kvass.common.model.runner import FEW_ROWS, Rows, Runner, uses
from kvass.common.model.spec import load_spec
from kvass.common.pool.memory import SlotMemory

LENGTHS = (1, 15, 16, 17, 49, 70, 131, 300)
SLOTS = 64


@cache
def tokens_of(request: int, vocabulary: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(100 + request)
    return tuple(torch.randint(0, vocabulary, (LENGTHS[request],), generator=generator).tolist())


@dataclass(frozen=True)
class Alone:
    """A request computed by itself: the bytes of its blocks, and the logits of its last row."""

    blocks: torch.Tensor
    logits: torch.Tensor


@cache
def built(name: str) -> Llama:
    return model_of(name)


@cache
def bench(name: str, kv_dtype: KvDtype, slots: int) -> Bench:
    return Bench(built(name), kv_dtype, slots)


@cache
def alone(name: str, kv_dtype: KvDtype, request: int) -> Alone:
    """Prefill in one piece."""
    pool = bench(name, kv_dtype, blocks_of(max(LENGTHS)))
    pool.forget()
    tokens = tokens_of(request, pool.model.spec.vocab_size)
    slots = list(range(blocks_of(len(tokens))))
    logits = pool.run([Rows(tokens, 0, slots, logits=True)])
    assert logits is not None
    return Alone(pool.stored(slots), logits[0])


@st.composite
def journeys(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]], list[int]]:
    """Draw requests, for each the pieces [start, stop) after what is copied, and block counts to
    copy."""
    requests = draw(st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=6, unique=True))
    cuts, copies = [], []
    for request in requests:
        length = LENGTHS[request]
        copied = draw(st.integers(0, length // BLOCK))
        start = copied * BLOCK
        edges = draw(st.lists(st.integers(start, length), max_size=5))
        if draw(st.booleans()):  # its last rows one by one, as decode computes what it generates
            edges += range(max(start, length - 3), length)
        bounds = sorted({start, length, *edges})
        cuts.append(list(pairwise(bounds)))
        copies.append(copied)
    return requests, cuts, copies


def steps(data: st.DataObject, cuts: list[list[tuple[int, int]]]) -> Iterator[list[int]]:
    """Yield which requests go on in each step, in the order of their rows."""
    left = [len(pieces) for pieces in cuts]
    while any(left):
        open_ones = [index for index, count in enumerate(left) if count]
        chosen = data.draw(
            st.lists(st.sampled_from(open_ones), min_size=1, max_size=len(open_ones), unique=True)
        )
        for index in chosen:
            left[index] -= 1
        yield chosen


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", SPECS)
@given(st.data(), journeys())
@settings(max_examples=15)
def test_bits_depend_on_the_request_alone(
    name: str,
    kv_dtype: KvDtype,
    data: st.DataObject,
    journey: tuple[list[int], list[list[tuple[int, int]]], list[int]],
) -> None:
    requests, cuts, copies = journey
    known = [alone(name, kv_dtype, request) for request in requests]
    pool = bench(name, kv_dtype, SLOTS)
    pool.forget()
    free = data.draw(st.randoms()).sample(range(SLOTS), SLOTS)
    tables = []
    for there, copied in zip(known, copies, strict=True):
        tables.append([free.pop() for _ in there.blocks])
        pool.memory.tensor[tables[-1][:copied]] = there.blocks[:copied]
    done = [0] * len(requests)
    for chosen in steps(data, cuts):
        pieces = []
        for index in chosen:
            start, stop = cuts[index][done[index]]
            done[index] += 1
            tokens = tokens_of(requests[index], pool.model.spec.vocab_size)[start:stop]
            is_last = done[index] == len(cuts[index])
            pieces.append(Rows(tokens, start, tables[index], logits=is_last))
        logits = pool.run(pieces)
        ends = [index for index, piece in zip(chosen, pieces, strict=True) if piece.logits]
        for row, index in enumerate(ends):
            assert logits is not None
            assert torch.equal(logits[row], known[index].logits), f"request {requests[index]}"
    for request, table, there in zip(requests, tables, known, strict=True):
        assert torch.equal(pool.stored(table), there.blocks), f"blocks of request {request}"


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_a_full_hit_has_the_logits_of_a_prefill(name: str, kv_dtype: KvDtype) -> None:
    """All blocks come from another pool; one row is computed, nothing is written."""
    request = LENGTHS.index(16)
    there = alone(name, kv_dtype, request)
    pool = bench(name, kv_dtype, SLOTS)
    pool.forget()
    pool.memory.tensor[2] = there.blocks[0]
    last = tokens_of(request, pool.model.spec.vocab_size)[-1:]
    logits = pool.run([Rows(last, 15, [2], write=False, logits=True)])
    assert logits is not None and torch.equal(logits[0], there.logits)
    assert torch.equal(pool.stored([2]), there.blocks)


@pytest.mark.model
def test_the_default_model_gives_the_same_bits_in_any_company_on_any_thread_count() -> None:
    """Prompts prefilled together in pieces, or alone, then streams that step together, or alone."""
    folder = resolve_model(DEFAULT_MODEL, progress=False)
    spec = load_spec(folder)
    products = Products(uses())
    model = load_model(folder, spec, projection_of=products.projection)
    assert not products.failures
    layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK, "fp8")
    memory = SlotMemory(layout, 128)
    memory.array.fill(0xFF)
    runner = Runner(model, paged_kv(memory, layout, spec.heads), BLOCK)
    prompts = [
        [(977 * index + 31 * number + 5) % spec.vocab_size for index in range(70 + 9 * number)]
        for number in range(5)
    ]
    near = [list(range(number * 12, number * 12 + 12)) for number in range(5)]
    far = [[127 - slot for slot in slots] for slots in near]
    for tokens, slots in zip(prompts, near, strict=True):
        runner.run([Rows(tokens[:-1], 0, slots)])
    for first, stop in ((0, 33), (33, 64)):
        runner.run([Rows(t[first:stop], first, s) for t, s in zip(prompts, far, strict=True)])
    runner.run([Rows(t[64:-1], 64, s) for t, s in zip(prompts, far, strict=True)])
    here, there = list(chain(*near)), list(chain(*far))
    assert torch.equal(memory.tensor[here], memory.tensor[there])

    def last(number: int, tables: list[list[int]]) -> Rows:
        tokens = prompts[number]
        return Rows(tokens[-1:], len(tokens) - 1, tables[number], logits=True)

    assert len(prompts) > FEW_ROWS
    together = runner.run([last(number, far) for number in range(5)])
    pair = runner.run([last(number, near) for number in (3, 1)])
    assert together is not None and pair is not None
    assert torch.equal(pair, together[[3, 1]])
    for number in range(5):
        one = runner.run([last(number, near)])
        assert one is not None and torch.equal(one[0], together[number])
