"""What K is stored by: by both implementations alike, unseen by attention, known to the check."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kvass.common.block import BlockLayout, KvDtype
from kvass.common.config import ClusterConfig, difference
from kvass.common.errors import Invalid, Unavailable
from kvass.common.kernels.native_paged import NativePagedKv
from kvass.common.kernels.paged import paged_kv
from kvass.common.kernels.rotation import hadamard
from kvass.common.kernels.torch_paged import TorchPagedKv
from kvass.common.kernels.turn import Turn, turned
from kvass.common.model.identity import cluster_fields, worker_fields
from kvass.common.model.key_terms import key_terms
from kvass.common.model.known_answer import check, known_answer, read_back
from kvass.common.model.load import load_model
from kvass.common.model.runner import Runner
from kvass.common.model.spec import load_spec
from kvass.common.native import library
from kvass.common.pool.memory import SlotMemory
from test_known_answer import Worker, model_dir

__all__ = ["model_dir"]
SCALED: tuple[KvDtype, ...] = ("fp8", "int8", "int4")
IMPLEMENTATIONS = [None, *library.levels()]  # torch's, then the compiled one's levels
COUNT, HEADS, DEPTH = 45, 2, 64


def kernels_of(
    memory: SlotMemory, level: str | None, offsets: torch.Tensor | None
) -> NativePagedKv | TorchPagedKv:
    if level is None:
        return TorchPagedKv(memory, memory.layout, 2 * HEADS, offsets)
    return NativePagedKv(memory, memory.layout, 2 * HEADS, offsets, level=level)


@pytest.mark.parametrize("level", IMPLEMENTATIONS)
@pytest.mark.parametrize("kv_dtype", SCALED)
def test_stored_k_is_k_less_its_layers_and_heads_offsets(
    kv_dtype: KvDtype, level: str | None
) -> None:
    """Bit for bit what is stored of rows that have lost them already; V is as it was."""
    generator = torch.Generator().manual_seed(2)
    layout = BlockLayout(2, HEADS, DEPTH, 16, kv_dtype, head_groups=2)
    offsets = 8 * torch.randn(2, HEADS, DEPTH, generator=generator)
    k, v = torch.randn(2, COUNT, HEADS, DEPTH, generator=generator)
    angle = torch.randn(COUNT, DEPTH // 2, generator=generator)
    turn, rows = Turn(angle.cos(), angle.sin()), torch.arange(COUNT)
    memories = [SlotMemory(layout, 3) for _ in range(2)]
    kernels_of(memories[0], level, offsets).append(1, k, v, rows // 16, rows % 16, turn)
    less = turned(k, turn) - offsets[1]
    kernels_of(memories[1], level, None).append(1, less, v, rows // 16, rows % 16)
    assert torch.equal(memories[0].tensor, memories[1].tensor)


@pytest.mark.parametrize("level", IMPLEMENTATIONS)
def test_attention_does_not_see_them_and_is_nearer_to_the_truth(level: str | None) -> None:
    generator = torch.Generator().manual_seed(3)
    layout = BlockLayout(1, HEADS, DEPTH, 16, "fp8")
    offsets = 3 * torch.randn(1, HEADS, DEPTH, generator=generator)
    k, v = torch.randn(2, COUNT, HEADS, DEPTH, generator=generator)
    q = torch.randn(COUNT, 2 * HEADS, DEPTH, generator=generator)
    k, rows = k + offsets[0], torch.arange(COUNT)
    errors = []
    heads = [each.transpose(0, 1)[None] for each in (q, k, v)]
    found = F.scaled_dot_product_attention(
        heads[0], heads[1], heads[2], is_causal=True, enable_gqa=True
    )
    exact = found[0].transpose(0, 1)
    for taken_off in (None, offsets):
        kv = kernels_of(SlotMemory(layout, 3), level, taken_off)
        kv.append(0, k, v, rows // 16, rows % 16)
        plan = kv.plan(rows[None, :3], torch.zeros_like(rows), rows)
        found = kv.attend(0, q, plan)  # type: ignore[arg-type]
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[1] < 0.05 and errors[1] < 0.6 * errors[0], errors


@pytest.mark.parametrize("level", IMPLEMENTATIONS)
@pytest.mark.parametrize("kv_dtype", SCALED)
def test_rounding_in_turn_brings_scores_nearer_where_queries_have_few_large_directions(
    kv_dtype: KvDtype, level: str | None
) -> None:
    """Beside the nearest codes: keys are further off, what queries see of it is less."""
    generator = torch.Generator().manual_seed(4)
    layout = BlockLayout(1, HEADS, DEPTH, 16, kv_dtype)
    seen = torch.randn(HEADS, 6, DEPTH, generator=generator)
    q = torch.randn(COUNT, HEADS, 6, generator=generator)
    q = torch.einsum("nhr,hrd->nhd", q, seen) + 0.1 * torch.randn(COUNT, HEADS, DEPTH)
    k, v = torch.randn(2, COUNT, HEADS, DEPTH, generator=generator)
    carry = torch.stack([carry_of(q[:, head]) for head in range(HEADS)])[None]
    rows, found = torch.arange(COUNT), []
    for given in (None, carry):
        memory = SlotMemory(layout, 3)
        kv = (
            TorchPagedKv(memory, layout, 2 * HEADS, None, given)
            if level is None
            else NativePagedKv(memory, layout, 2 * HEADS, None, given, level=level)
        )
        kv.append(0, k, v, rows // 16, rows % 16)
        lost = read_back(memory, layout, [0, 1, 2], 0, False)[:COUNT] - k
        seen_of = torch.einsum("qhd,khd->hqk", q, lost)
        found.append((float(lost.norm()), float(seen_of.norm())))
    (near, seen_near), (far, seen_far) = found
    assert far > near and seen_far < 0.5 * seen_near, found


def carry_of(q: torch.Tensor) -> torch.Tensor:
    """What `key_terms` makes of queries [rows, D], damped less, in other words: the carry of number
    i is the regression of what queries see of it on what they see of the numbers after it."""
    rows = (q @ hadamard(DEPTH)).double()
    moments = rows.t() @ rows / len(rows) + 1e-2 * torch.eye(DEPTH, dtype=torch.float64)
    carry = torch.zeros(DEPTH, DEPTH, dtype=torch.float64)
    for i in range(DEPTH - 1):
        after = moments[i + 1 :, i + 1 :]
        carry[i, i + 1 :] = -torch.linalg.solve(after, moments[i + 1 :, i])
    return carry.float()


@pytest.mark.skipif(library.level() is None, reason="there is no compiled library")
def test_a_soft_cap_would_see_them() -> None:
    layout = BlockLayout(1, 1, 64, 16, "fp8")
    with pytest.raises(Invalid, match="soft-cap"):
        NativePagedKv(SlotMemory(layout, 1), layout, 1, torch.zeros(1, 1, 64), soft_cap=50.0)


def test_they_are_the_models_kept_and_the_same_on_any_number_of_threads(
    model_dir: Path, tmp_path: Path
) -> None:
    spec, threads = load_spec(model_dir), torch.get_num_threads()
    terms, size = key_terms(model_dir, spec, tmp_path / "one"), spec.head_dim
    assert terms.offsets.shape == (spec.layers, spec.kv_heads, size)
    assert terms.carry.shape == (spec.layers, spec.kv_heads, size, size)
    torch.set_num_threads(3)
    try:
        assert key_terms(model_dir, spec, tmp_path / "two").digest() == terms.digest()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    again = key_terms(Path("no such model"), spec, tmp_path / "one")
    assert all(torch.equal(*pair) for pair in zip(again, terms, strict=True))


@pytest.mark.parametrize("kv_dtype", SCALED)
def test_a_worker_passes_with_its_offsets_and_with_no_others(
    model_dir: Path, tmp_path: Path, kv_dtype: KvDtype
) -> None:
    worker = Worker(model_dir, kv_dtype)
    terms = key_terms(model_dir, worker.spec, tmp_path / "terms")
    kv = paged_kv(worker.memory, worker.layout, worker.spec.heads, *terms)
    runner = Runner(load_model(model_dir, worker.spec), kv, 16)
    answer = known_answer(model_dir, worker.spec, tmp_path / "answer")
    check(answer, worker.spec, runner, worker.memory, terms.offsets)
    stored = read_back(worker.memory, worker.layout, [0, 1, 2, 3], 1, False)
    # Nearer to zero than K, whose mean over the prompt this is.
    if kv_dtype != "int4":  # its error is larger than what this small model's offsets are
        assert stored.norm() < answer[1, 0].norm()
    with pytest.raises(Unavailable, match="K of layer"):
        check(answer, worker.spec, runner, worker.memory, terms.offsets + 1)


def test_workers_must_agree_on_them_and_a_gateway_need_not_know(model_dir: Path) -> None:
    spec, cluster = load_spec(model_dir), ClusterConfig()
    (model_dir / "tokenizer.json").write_text("{}")
    ours, theirs = (worker_fields(model_dir, spec, cluster, "cpu", each) for each in ("a", "b"))
    assert difference(ours, theirs) == "model_weights_key_terms"
    assert ours["namespace"] != theirs["namespace"]
    assert difference(cluster_fields(model_dir, spec, cluster), ours) is None
