"""Reading configurations: what is refused, and by which name; identity and digests."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from kvass.common.config import ClusterConfig, difference
from kvass.common.errors import Incompatible, Invalid
from kvass.common.model.checkpoint import open_checkpoint, weights_digest
from kvass.common.model.fetch import resolve_model
from kvass.common.model.identity import (
    cluster_fields,
    known_fields,
    layout_of,
    max_model_len,
    namespace_in,
    worker_fields,
)
from kvass.common.model.spec import ModelSpec, load_spec, tensor_shapes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(directory: Path, *, fill: int = 1, **changes: Any) -> ModelSpec:
    """Write a model directory whose weights are all the byte `fill`."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    (directory / "tokenizer.json").write_text("{}")
    spec = load_spec(directory)
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in tensor_shapes(spec).items():
        size = 2
        for width in shape:
            size *= width
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes([fill]) * offset
    (directory / "model.safetensors").write_bytes(data)
    return spec


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*LlamaForCausalLM, Qwen2For"),
        ({"architectures": None}, r"\(none\)"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 4}, "is 3, no multiple"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"vocab_size": 0}, "at least 1"),
        ({"hidden_size": None}, "TypeError"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(Invalid, match=words):
        load_spec(tmp_path)


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    write_model(tmp_path, eos_token_id=5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert load_spec(tmp_path).eos_token_ids == (7, 5)


def test_both_spellings_of_rope_are_read(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 16
    old = write_model(tmp_path, rope_theta=5e5, rope_scaling=rope)
    new = write_model(tmp_path, rope_theta=None, rope_parameters=rope | {"rope_theta": 5e5})
    assert old == new and old.rope_theta == 5e5 and old.rope_scaling is not None


def test_a_checkpoint_must_hold_what_the_config_asks_for(tmp_path: Path) -> None:
    spec = write_model(tmp_path)
    assert open_checkpoint(tmp_path, spec).keys() == tensor_shapes(spec).keys()
    wider = {**CONFIG, "intermediate_size": 13}
    (tmp_path / "config.json").write_text(json.dumps(wider))
    with pytest.raises(Invalid, match=r"gate_proj.weight has shape \(12, 8\)"):
        open_checkpoint(tmp_path, load_spec(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    with pytest.raises(Invalid, match=r"lack the tensor lm_head.weight"):
        open_checkpoint(tmp_path, load_spec(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 5)
    with pytest.raises(Invalid, match="not a readable safetensors file"):
        open_checkpoint(tmp_path, spec)


def test_the_digest_is_of_values_and_is_cached_until_a_file_changes(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    spec = write_model(one)
    write_model(two)
    (two / "model.safetensors").rename(two / "another-name.safetensors")
    digest = weights_digest(one, spec)
    assert digest == weights_digest(two, spec) == weights_digest(one, spec)
    write_model(one, fill=2)
    assert weights_digest(one, spec) != digest


def test_every_difference_is_named_and_changes_the_namespace(tmp_path: Path) -> None:
    spec, cluster = write_model(tmp_path / "a"), ClusterConfig()
    ours = worker_fields(tmp_path / "a", spec, cluster, "cpu")
    assert difference(ours, worker_fields(tmp_path / "a", spec, cluster, "cpu")) is None
    cases: list[tuple[str, ClusterConfig, dict[str, Any]]] = [
        ("kv_dtype", ClusterConfig(kv_dtype="int8"), {}),
        ("weights", ClusterConfig(weights="int8"), {}),
        ("block_tokens", ClusterConfig(block_tokens=32), {}),
        ("model_weights", cluster, {"fill": 3}),
        ("model_rope", cluster, {"rope_theta": 1.0}),
        ("model_norm", cluster, {"rms_norm_eps": 1e-6}),
    ]
    for index, (field, theirs, changes) in enumerate(cases):
        directory = tmp_path / str(index)
        fields = worker_fields(directory, write_model(directory, **changes), theirs, "cpu")
        assert difference(ours, fields) == field
        assert fields["namespace"] != ours["namespace"]


def test_another_kind_of_device_is_named_and_has_other_keys(tmp_path: Path) -> None:
    spec, cluster = write_model(tmp_path), ClusterConfig()
    ours = worker_fields(tmp_path, spec, cluster, "cpu AVX512, bits 1")
    other = worker_fields(tmp_path, spec, cluster, "cpu AVX2, bits 2")
    assert difference(ours, other) == "device_kind"
    assert namespace_in(ours) != namespace_in(other)
    named = Incompatible("device_kind", ours["device_kind"], other["device_kind"], who="decode-0")
    assert "'cpu AVX2, bits 2'; run the workers of a cluster on one kind of machine" in str(named)


def test_a_gateway_agrees_with_workers_on_any_device_and_learns_the_namespace(
    tmp_path: Path,
) -> None:
    spec, cluster = write_model(tmp_path), ClusterConfig()
    gateway = cluster_fields(tmp_path, spec, cluster)
    worker = worker_fields(tmp_path, spec, cluster, "cpu AVX2, bits 2")
    assert difference(gateway, worker) is None and difference(worker, gateway) is None
    theirs = worker_fields(tmp_path, spec, ClusterConfig(kv_dtype="int8"), "cpu AVX2, bits 2")
    assert difference(gateway, theirs) == difference(theirs, gateway) == "kv_dtype"
    assert namespace_in(gateway) is None
    assert namespace_in(worker) == bytes.fromhex(str(worker["namespace"]))
    assert namespace_in({"namespace": "zz"}) is namespace_in({"namespace": "00"}) is None


def test_before_the_weights_are_read_all_but_their_digest_is_known(tmp_path: Path) -> None:
    spec, cluster = write_model(tmp_path), ClusterConfig()
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    os.truncate(weights, len(whole) - 1)
    known = known_fields(tmp_path, spec, cluster)
    with pytest.raises(Invalid, match="ends 1 bytes too early"):
        cluster_fields(tmp_path, spec, cluster)
    weights.write_bytes(whole)
    fields = cluster_fields(tmp_path, spec, cluster)
    assert known == {name: value for name, value in fields.items() if name != "model_weights"}
    assert difference(known, fields) is None and difference(fields, known) is None
    other = known_fields(tmp_path, spec, ClusterConfig(kv_dtype="int8"))
    assert difference(other, fields) == "kv_dtype"
    assert other["model_weights"] == fields["model_weights"], "it is kept by now"


def test_a_shorter_context_must_be_agreed_on_but_shares_blocks(tmp_path: Path) -> None:
    spec = write_model(tmp_path)
    whole = worker_fields(tmp_path, spec, ClusterConfig(), "cpu")
    short = worker_fields(tmp_path, spec, ClusterConfig(max_model_len=32), "cpu")
    assert difference(whole, short) == "max_model_len"
    assert whole["namespace"] == short["namespace"]
    assert max_model_len(spec, ClusterConfig()) == 64
    with pytest.raises(Invalid, match="at most 64"):
        max_model_len(spec, ClusterConfig(max_model_len=65))


def test_head_groups_must_divide_the_heads(tmp_path: Path) -> None:
    spec = write_model(tmp_path)
    assert layout_of(spec, ClusterConfig()).kv_heads == 1
    with pytest.raises(Invalid, match="head_groups is 2"):
        layout_of(spec, ClusterConfig(head_groups=2))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/name", "hub ids are not supported yet.*hf download org/name"),
        ("weights.gguf", "no such directory; expected .* a GGUF file"),
        ("smollm3", "expected smollm2-135m-instruct, a GGUF file, or a directory"),
        ("./org/name", "no such directory"),
    ],
)
def test_other_models_are_refused_with_what_to_do(name: str, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        resolve_model(name, progress=False)


def test_a_directory_is_taken_if_it_is_whole(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert resolve_model(str(tmp_path), progress=False) == tmp_path.resolve()
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(Invalid, match=r"tokenizer.json is missing"):
        resolve_model(str(tmp_path), progress=False)
