"""A worker says whether a row's bits depend on its company, and why: in log, load and status."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from kvass.common import config
from kvass.common.config import Config
from kvass.common.costs import Costs
from kvass.common.executor import ThreadExecutor
from kvass.common.kernels import packed
from kvass.common.model import products
from kvass.common.model.engine import Engine, open_engine
from kvass.common.model.spec import load_spec, tensor_shapes
from kvass.common.worker import Means, pool_load
from kvass.launch.status import doubts

SIZES = {
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


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Settings of a worker with a tiny model, and a cache folder of its own."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    (folder / "tokenizer.json").write_text("{}")
    torch.manual_seed(3)
    tensors = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.2).bfloat16()
        for name, shape in tensor_shapes(load_spec(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setenv("KVASS_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    return config.load(
        None,
        [
            f"cluster.model={str(folder)!r}",
            "decode.pool_blocks=40",
            "prefill.pool_blocks=40",
            f"decode.threads={threads}",
        ],
    )


def opened(settings: Config) -> Engine:
    return open_engine(settings, settings.decode, "decode")


def load_of(engine: Engine) -> dict[str, int | float | str]:
    return pool_load(Means(engine, cast(ThreadExecutor, None), Costs(engine.tokens_per_s)))


def test_a_worker_that_found_row_counts_says_which(
    settings: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "available", lambda: False)
    with caplog.at_level(logging.INFO):
        engine = opened(settings)
    load = load_of(engine)
    assert load["deterministic"] == "yes"
    reason = str(load["deterministic_reason"])
    assert "512 rows" in reason and "attention compiled for " in reason
    assert f"deterministic: yes ({reason})" in caplog.text
    assert not doubts([{"id": "decode-0", "load": load}])
    assert str(engine.fields["device_kind"]).startswith("cpu ")
    assert engine.namespace.hex() == engine.fields["namespace"]


def test_what_prefill_has_computed_is_read_by_others_without_the_kernel(settings: Config) -> None:
    assert open_engine(settings, settings.prefill, "prefill").memory.region.file >= 0
    assert opened(settings).memory.region.file == -1  # on huge pages instead


@pytest.mark.skipif(not packed.available(), reason="this machine has no bf16 dot products")
def test_a_worker_of_packed_weights_says_so(settings: Config) -> None:
    engine = opened(settings)
    assert engine.deterministic
    assert "products of packed weights, of any number of rows" in engine.deterministic_reason
    assert ", native avx512bf16, " in str(engine.fields["device_kind"])


def test_a_worker_without_safe_row_counts_serves_and_says_why(
    settings: Config, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = products._Trial.agrees

    def agrees(trial: products._Trial, count: int) -> bool:
        return trial.rows.shape[1] != 96 and real(trial, count)

    monkeypatch.setattr(packed, "available", lambda: False)
    monkeypatch.setattr(products._Trial, "agrees", agrees)
    with caplog.at_level(logging.INFO):
        engine = opened(settings)
    load = load_of(engine)
    assert load["deterministic"] == "no"
    reason = str(load["deterministic_reason"])
    assert "product 64x96 bfloat16: of 512 rows and fewer" in reason
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert reason in warning.getMessage() and "another number of threads" in warning.getMessage()
    [line] = doubts([{"id": "decode-0", "load": load}, {"id": "store-0", "load": {}}])
    assert line == f"decode-0 is not deterministic: {reason}"
