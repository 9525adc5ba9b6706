"""A worker's known answer: before it may commit blocks, it computes some whose content is known.

The answer is K and V of a fixed prompt, computed once a model in float32 by a dense pass that
shares no kernel, no quantisation of KV and no pool with the worker's own path, and kept beside the
cached models. Weights that are executed as codes have the codes' values there too: what they lose
is the operator's choice and no fault. The worker prefills the same prompt through everything it
will use (weights as it keeps them, kernels, its pool's memory) and reads the stored bytes back by
`BlockLayout`'s offsets. Bad memory, a bad kernel or wrong weights are far outside the bound;
rounding is far inside.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvass.common.block import BlockLayout, KvDtype
from kvass.common.errors import Unavailable
from kvass.common.kernels.formats import CODE_DTYPES, decode
from kvass.common.kernels.gguf_blocks import Matrix, bf16_of
from kvass.common.kernels.numerics import ROTATED, WeightFormat
from kvass.common.kernels.rotation import hadamard
from kvass.common.kernels.turn import Turn, turned
from kvass.common.kernels.weight_formats import executed
from kvass.common.model.load import load_model
from kvass.common.model.projection import Projection, ProjectionOf, of_any_count
from kvass.common.model.runner import Rows, Runner
from kvass.common.model.spec import ModelSpec
from kvass.common.pool.memory import SlotMemory

_log = logging.getLogger(__name__)

TOKENS = 64
# Largest relative L2 error of a layer's K or V. Measured for the default model: at most 0.014 with
# bf16 KV, 0.017 with int8, 0.048 with fp8, 0.14 with int4; with K's heads exchanged at least 0.91.
ERROR_MAX: dict[KvDtype, float] = {"fp8": 0.2, "int8": 0.2, "int4": 0.4, "bf16": 0.2}


def prompt(spec: ModelSpec, count: int = TOKENS) -> list[int]:
    """Return the fixed prompt: ids spread over the vocabulary, none of them repeated."""
    return [(7919 * index + 101) % spec.vocab_size for index in range(count)]


def known_answer(
    model_dir: Path, spec: ModelSpec, file: Path, weights: WeightFormat = "bf16"
) -> torch.Tensor:
    """Return K and V float32 [layers, 2, tokens, heads, head_dim], from `file` or computed now."""
    if file.is_file():
        return load_file(file)["kv"]

    def projection_of(
        weight: Matrix, bias: torch.Tensor | None, *, is_head: bool = False
    ) -> Projection:
        if weights not in ("bf16", "native"):
            weight = executed(bf16_of(weight).to(torch.bfloat16), weights).float()
        return of_any_count(weight, bias)

    answer = torch.stack(dense_pass(model_dir, spec, prompt(spec), projection_of).stored)
    keep({"kv": answer}, file)
    return answer


def dense_pass(
    model_dir: Path,
    spec: ModelSpec,
    tokens: list[int],
    projection_of: ProjectionOf = of_any_count,
    *,
    with_queries: bool = False,
) -> DenseKv:
    """Compute a prompt in float32; of the last layer queries only where they are asked for."""
    kv = DenseKv(spec)
    positions = torch.arange(len(tokens))
    model = load_model(model_dir, spec, dtype=torch.float32, projection_of=projection_of)
    last = positions[-1:] if with_queries else None
    model.forward(torch.tensor(tokens), positions, kv, None, None, positions, positions, last)
    return kv


def keep(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Save what takes seconds to compute. A full disk costs the next start those, and no more."""
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial)
        partial.rename(file)  # workers that start together compute the same; the last one stays
    except (OSError, SafetensorError) as error:
        _log.warning("%s is not kept: %s", file, error)
        with contextlib.suppress(OSError):
            partial.unlink()


def check(
    answer: torch.Tensor,
    spec: ModelSpec,
    runner: Runner,
    memory: SlotMemory,
    offsets: torch.Tensor | None = None,
) -> None:
    """Prefill the prompt in the pool's first slots and compare; raises Unavailable when it is
    wrong.

    The pool must be unused. `offsets` [layers, heads, head_dim] were taken off K (`key_terms`).
    """
    layout = memory.layout
    slots = list(range(-(-TOKENS // layout.block_tokens)))
    runner.run([Rows(prompt(spec), 0, slots)])
    for layer in range(layout.layers):
        for value in (False, True):
            stored = read_back(memory, layout, slots, layer, value)[:TOKENS]
            if offsets is not None and not value:
                stored = stored + offsets[layer]
            expected = answer[layer, int(value)]
            error = float((stored - expected).norm() / expected.norm())
            most = ERROR_MAX[layout.kv_dtype]
            if not error <= most:  # also when it is NaN
                name = f"{'V' if value else 'K'} of layer {layer}"
                raise Unavailable(
                    f"the known-answer prefill is wrong: {name} is off by {error:.3g}, at most "
                    f"{most} is expected. This worker must not commit blocks; check its "
                    "memory, device and kernels"
                )


def read_back(
    memory: SlotMemory, layout: BlockLayout, slots: list[int], layer: int, value: bool
) -> torch.Tensor:
    """Return a record's numbers float32 [tokens, heads, head_dim], unrotated, by plain offsets."""
    heads = []
    for group in range(layout.head_groups):
        start = layout.record_offset(group, layer, value)
        raw = memory.tensor[slots, start : start + layout.record_size]
        shape = (len(slots), layout.group_heads, layout.block_tokens)
        codes = raw[:, : layout.codes_size].contiguous().view(CODE_DTYPES[layout.kv_dtype])
        scales = None
        if layout.has_scales:
            end = layout.codes_size + layout.scales_size
            scales = raw[:, layout.codes_size : end].contiguous().view(torch.bfloat16)
            scales = scales.view(*shape[:2], -1, shape[2]).transpose(2, 3)
        heads.append(decode(codes.view(*shape, -1), scales))
    numbers = torch.cat(heads, 1).transpose(1, 2).flatten(0, 1)
    rotated = ("v" if value else "k") in ROTATED[layout.kv_dtype]
    return numbers @ hadamard(layout.head_dim) if rotated else numbers


class DenseKv:
    """A PagedKv without pages: keeps K and V in float32 and attends by the textbook formula.

    Mutable fields: `stored`, K (turned) and V, one [2, tokens, heads, head_dim] a layer, and
    `queries`, turned, one [tokens, query heads, head_dim] a layer.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._repeat = spec.heads // spec.kv_heads
        self.stored: list[torch.Tensor] = []
        self.queries: list[torch.Tensor] = []

    def plan(
        self, tables: torch.Tensor, row_table: torch.Tensor, row_position: torch.Tensor
    ) -> None:
        return None

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        turn: Turn | None = None,
    ) -> None:
        assert layer == len(self.stored)
        self.stored.append(torch.stack([turned(k, turn), v.float()]))

    def attend(
        self, layer: int, q: torch.Tensor, plan: None, turn: Turn | None = None
    ) -> torch.Tensor:
        q = turned(q, turn)
        self.queries.append(q)
        k, v = self.stored[layer].repeat_interleave(self._repeat, dim=2).unbind(0)
        scores = torch.einsum("nqd,mqd->qnm", q, k) * q.shape[-1] ** -0.5
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("qnm,mqd->nqd", weights, v)
