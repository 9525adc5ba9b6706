"""A worker that computes, stores or reads wrong does not get as far as committing a block."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvass.common.block import KV_DTYPES, BlockLayout, KvDtype
from kvass.common.config import WorkerConfig
from kvass.common.errors import Invalid, Unavailable
from kvass.common.kernels.paged import paged_kv
from kvass.common.kernels.turn import Turn
from kvass.common.model.known_answer import check, known_answer
from kvass.common.model.load import load_model
from kvass.common.model.runner import Rows, Runner
from kvass.common.model.spec import ModelSpec, load_spec, tensor_shapes
from kvass.common.pool.memory import SlotMemory
from kvass.common.pool.size import pool_slots

BLOCK = 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "model_type": "llama",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose weights are bf16, as checkpoints' are."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(3)
    shapes = tensor_shapes(load_spec(directory))
    tensors = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.2).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


class Worker:
    """What `open_engine` puts together, with room for a fault."""

    def __init__(self, model_dir: Path, kv_dtype: KvDtype) -> None:
        self.spec: ModelSpec = load_spec(model_dir)
        self.layout = BlockLayout(2, 2, 16, BLOCK, kv_dtype)
        self.memory = SlotMemory(self.layout, 8)
        self.kv = paged_kv(self.memory, self.layout, self.spec.heads)
        self.runner = Runner(load_model(model_dir, self.spec), self.kv, BLOCK)
        self.answer = known_answer(model_dir, self.spec, model_dir / "answer.safetensors")

    def check(self) -> None:
        check(self.answer, self.spec, self.runner, self.memory)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_sound_worker_passes_and_the_answer_is_kept(model_dir: Path, kv_dtype: KvDtype) -> None:
    worker = Worker(model_dir, kv_dtype)
    worker.check()
    again = known_answer(Path("no such model"), worker.spec, model_dir / "answer.safetensors")
    assert torch.equal(again, worker.answer)


def stuck_bits(worker: Worker) -> None:
    run = worker.runner.run

    def faulty(pieces: list[Rows]) -> torch.Tensor | None:
        result = run(pieces)
        record = worker.layout.record_offset(0, 1, True)
        worker.memory.tensor[:, record : record + worker.layout.codes_size] |= 0x60
        return result

    worker.runner.run = faulty  # type: ignore[assignment, method-assign]


def a_scale_that_is_not_finite(worker: Worker) -> None:
    run = worker.runner.run

    def faulty(pieces: list[Rows]) -> torch.Tensor | None:
        result = run(pieces)
        place = worker.layout.scale_offset(1, 0, False, 3)
        worker.memory.tensor[1, place : place + 2] = torch.tensor([0xC0, 0x7F], dtype=torch.uint8)
        return result

    worker.runner.run = faulty  # type: ignore[assignment, method-assign]


def k_and_v_exchanged(worker: Worker) -> None:
    append = worker.kv.append

    def faulty(
        layer: int, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor | Turn | None
    ) -> None:
        append(layer, *((v, k) if layer == 1 else (k, v)), *rest)  # type: ignore[arg-type]

    worker.kv.append = faulty  # type: ignore[assignment, method-assign]


def attention_to_the_wrong_tokens(worker: Worker) -> None:
    plan = worker.kv.plan

    def faulty(tables: torch.Tensor, row_table: torch.Tensor, row_position: torch.Tensor) -> object:
        return plan(tables, row_table, row_position.clamp(max=3))

    worker.kv.plan = faulty  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "fault",
    [stuck_bits, a_scale_that_is_not_finite, k_and_v_exchanged, attention_to_the_wrong_tokens],
    ids=lambda fault: fault.__name__,
)
def test_a_faulty_worker_is_refused(model_dir: Path, fault: Callable[[Worker], None]) -> None:
    worker = Worker(model_dir, "fp8")
    fault(worker)
    with pytest.raises(Unavailable, match=r"known-answer prefill is wrong: [KV] of layer \d"):
        worker.check()


def test_a_pool_too_small_for_one_request_is_refused() -> None:
    layout = BlockLayout(2, 2, 16, BLOCK, "fp8")
    with pytest.raises(Invalid, match=r"decode\.pool_blocks.*max_model_len 1024 needs 65"):
        pool_slots(layout, WorkerConfig(pool_blocks=64), "decode", 1024)
    assert pool_slots(layout, WorkerConfig(pool_blocks=65), "decode", 1024) == 65
