"""What the serving benchmark makes for llama.cpp, and how it counts the time of others."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

import rig_machine
import rig_servers
from rig_machine import Moment

TICKS_PER_S = round(1 / rig_machine.TICK_S)


def test_weights_become_bf16_and_the_rest_is_kept(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    matrix = random.standard_normal((4, 64), dtype=np.float32)
    vector = random.standard_normal(64, dtype=np.float32)
    packed = gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(tmp_path / "packed.gguf", "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_context_length(8192)
    writer.add_token_list(["a", "b", "ĠÄ"])
    writer.add_tensor("matrix.weight", gguf.quants.quantize(matrix, packed), raw_dtype=packed)
    writer.add_tensor("norm.weight", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    rig_servers.write_bf16(tmp_path / "packed.gguf", tmp_path / "bf16.gguf")

    source = gguf.GGUFReader(tmp_path / "packed.gguf")
    made = gguf.GGUFReader(tmp_path / "bf16.gguf")
    for name in ("general.architecture", "llama.context_length", "tokenizer.ggml.tokens"):
        one, other = made.get_field(name), source.get_field(name)
        assert one is not None and other is not None
        assert one.types == other.types and one.contents() == other.contents()
    kind = made.get_field("general.file_type")
    assert kind is not None and kind.contents() == gguf.LlamaFileType.MOSTLY_BF16
    for before, after in zip(source.tensors, made.tensors, strict=True):
        assert (before.name, list(before.shape)) == (after.name, list(after.shape))
        values = gguf.quants.dequantize(before.data, before.tensor_type)
        again = gguf.quants.dequantize(after.data, after.tensor_type)
        assert np.allclose(again, values, rtol=2**-8, atol=0)
    assert [t.tensor_type.name for t in made.tensors] == ["BF16", "F32"]


@pytest.mark.parametrize(
    ("busy_ticks", "our_ticks", "cores"),
    [(4, 4, 0.0), (9, 4, 0.0), (2 * TICKS_PER_S, TICKS_PER_S, 0.5), (TICKS_PER_S, 0, 0.5)],
)
def test_others_are_what_was_busy_and_is_not_ours(
    busy_ticks: int, our_ticks: int, cores: float
) -> None:
    earlier = Moment(at_s=1.0, busy=100, ours=Counter({1: 7, 2: 5}))
    # One that was not there before counts with all its time; one that has ended, with none.
    later = Moment(at_s=3.0, busy=100 + busy_ticks, ours=Counter({1: 7, 3: our_ticks}))
    assert later.others_since(earlier) == pytest.approx(cores)


def test_this_process_and_its_children_are_ours() -> None:
    now = Moment.now()
    assert os.getpid() in now.ours
    assert os.getppid() not in now.ours
