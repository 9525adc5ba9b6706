"""A GGUF file as the model: read as the `gguf` package reads it, computed as its converted copy is,
refused where it is broken."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvass.common import config
from kvass.common.block import BlockLayout
from kvass.common.config import ClusterConfig
from kvass.common.errors import Invalid
from kvass.common.kernels import packed
from kvass.common.kernels.numerics import WeightFormat
from kvass.common.kernels.paged import paged_kv
from kvass.common.model import engine
from kvass.common.model.checkpoint import executed_as, open_checkpoint, weights_digest
from kvass.common.model.convert import convert
from kvass.common.model.fetch import resolve_model
from kvass.common.model.gguf_file import Bad, Cursor, GgufFile
from kvass.common.model.identity import cluster_fields
from kvass.common.model.known_answer import dense_pass, prompt
from kvass.common.model.llama import Llama
from kvass.common.model.load import Reader, load_model
from kvass.common.model.products import Products
from kvass.common.model.runner import Rows, Runner, uses
from kvass.common.model.spec import load_spec
from kvass.common.model.tokenizer import Tokenizer
from kvass.common.pool.memory import SlotMemory
from tiny_gguf import write_gguf

BLOCK = 16


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASS_CACHE", str(tmp_path / "cache"))


def logits_of(folder: Path, weights: WeightFormat) -> torch.Tensor:
    """Prefill two chunks and step once more."""
    spec = load_spec(folder)
    products = Products(uses(), executed_as(folder, weights))
    model = load_model(folder, spec, projection_of=products.projection)
    layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK, "fp8")
    memory = SlotMemory(layout, 4)
    runner = Runner(model, paged_kv(memory, layout, spec.heads, None), BLOCK)
    tokens = [7 * index % spec.vocab_size for index in range(50)]
    slots = [0, 1, 2, 3]
    found = [
        runner.run([Rows(tokens[first:stop], first, slots, logits=True)])
        for first, stop in ((0, 40), (40, 49), (49, 50))
    ]
    return torch.cat([each for each in found if each is not None])


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("level", ["", "none"])
def test_a_file_computes_what_its_converted_copy_does(
    tmp_path: Path, head: bool, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, whatever its values are: both multiply by them rounded to bf16."""
    if level == "none":
        monkeypatch.setattr(packed, "available", lambda: False)
    source = tmp_path / "tiny-llama.gguf"
    write_gguf(source, head=head)
    copy = tmp_path / "copy"
    copy.mkdir()
    convert(source, copy)
    folder = resolve_model(str(source), progress=False)
    assert folder.name == "tiny-llama" and resolve_model(str(source), progress=False) == folder
    assert resolve_model(str(folder), progress=False) == folder
    assert not list(folder.glob("*.safetensors"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (copy / name).read_bytes()
    assert Tokenizer.load(folder).encode("hello") == Tokenizer.load(copy).encode("hello")
    tokens = prompt(load_spec(copy))
    kv, same_kv = (
        torch.stack(dense_pass(each, load_spec(each), tokens).stored) for each in (folder, copy)
    )
    assert torch.equal(kv, same_kv), "else K's offsets differ"
    expected = logits_of(copy, "native")
    assert bool(expected.isfinite().all()) and float(expected.std()) > 0
    for weights in ("native", "bf16"):
        found = logits_of(folder, weights)
        # torch's products may be other ones where rows are multiplied in parts
        assert torch.equal(found, expected) or (level == "none" and weights == "native")
        assert torch.allclose(found, expected, rtol=0.05, atol=0.05 * float(expected.std()))


@pytest.mark.skipif(not packed.available(), reason="this process has no bf16 dot products")
def test_q_k_and_v_of_several_kinds_run_in_one_call_too(tmp_path: Path) -> None:
    """As llama-quantize's mixes have them; that the bits are the same is shown above."""
    write_gguf(tmp_path / "a.gguf")
    folder = resolve_model(str(tmp_path / "a.gguf"), progress=False)
    spec = load_spec(folder)
    model = load_model(folder, spec, projection_of=Products(uses(), "native").projection)
    assert isinstance(model, Llama) and model.runs_in_one_call


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    found, reader = GgufFile.open(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "a.gguf")
    for tensor in reader.tensors:
        ours = found.tensors[tensor.name]
        assert ours.offset == tensor.data_offset and ours.size == tensor.n_bytes
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.dtype == tensor.tensor_type.name
    assert len(found.tensors) == len(reader.tensors)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert found.metadata[name] == field.contents()


def test_the_identity_says_what_is_executed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    folder = resolve_model(str(tmp_path / "a.gguf"), progress=False)
    spec = load_spec(folder)
    native = cluster_fields(folder, spec, ClusterConfig())
    assert native["weights"] == "as the GGUF file has them"
    assert cluster_fields(folder, spec, ClusterConfig(weights="bf16"))["weights"] == "bf16"
    digest = weights_digest(folder, spec)
    write_gguf(tmp_path / "a.gguf")  # other numbers
    again = resolve_model(str(tmp_path / "a.gguf"), progress=False)
    assert again != folder and weights_digest(again, spec) != digest


def refused(path: Path, data: bytes, words: str) -> None:
    path.write_bytes(data)
    with pytest.raises(Invalid, match=words):
        folder = resolve_model(str(path), progress=False)
        spec = load_spec(folder)
        read = Reader(folder, spec, torch.bfloat16)
        for name in open_checkpoint(folder, spec):
            read(name)


def test_broken_files_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    refused(path, b"", "it is empty")
    refused(path, b"GGML" + whole[4:], "does not begin with GGUF")
    refused(path, whole[:4] + struct.pack("<I", 1) + whole[8:], "version 1")
    refused(path, whole[:-1000], "it is cut off")
    for length in (5, 20, 30, 100, 3000):
        refused(path, whole[:length], "not a readable GGUF file")
    many = struct.pack("<Q", 1 << 60)
    refused(path, whole[:8] + many + whole[16:], "tensors; at most")
    refused(path, whole[:16] + many + whole[24:], "metadata values; at most")
    refused(path, whole[:24] + many + whole[32:], "bytes of a text; at most")
    at = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    refused(path, whole[:at] + many + whole[at + 8 :], "texts of an array; at most")
    at = whole.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type") + 8
    refused(path, whole[:at] + many + whole[at + 8 :], "numbers of an array; at most")
    at = whole.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight")
    shape = at + 4
    refused(path, whole[:at] + struct.pack("<I", 9) + whole[at + 4 :], "9 dimensions")
    kind = shape + 16
    refused(path, whole[:kind] + struct.pack("<I", 10) + whole[kind + 4 :], "type Q2_K")
    refused(path, whole[:kind] + struct.pack("<I", 777) + whole[kind + 4 :], "type number 777")
    refused(path, whole[:shape] + many + whole[shape + 8 :], "cut off|no multiple")
    refused(path, whole[:shape] + struct.pack("<Q", 100) + whole[shape + 8 :], "no multiple of 256")
    refused(path, whole[: shape + 8] + struct.pack("<Q", 252) + whole[shape + 16 :], "begin at")
    up = whole.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4
    turned = struct.pack("<QQ", 512, 256)
    refused(path, whole[:up] + turned + whole[up + 16 :], "has shape .256, 512.; config.json asks")
    offset = kind + 4
    refused(path, whole[:offset] + many + whole[offset + 8 :], "said to begin at")
    refused(
        path,
        whole.replace(b"llama.block_count", b"llama.block_kount"),
        "llama.block_kount is 2, which is not supported",
    )
    refused(path, whole.replace(b"ggml.merges", b"ggml.murges"), "metadata lack")
    refused(path, whole.replace(b"\0llama", b"\0qlama"), "architecture 'qlama' is not supported")
    refused(path, whole.replace(b"blk.1.ffn_up", b"blk.1.ffn_ab"), "not part of a llama model")


# What metadata say instead, and what the error says of it.
LIES: list[tuple[dict[str, object], str]] = [
    ({"llama.block_count": np.uint32(1)}, "llama.block_count is 1, and it has tensors of 2 layers"),
    ({"llama.block_count": np.uint32(1 << 30)}, "and it has tensors of 2 layers"),
    ({"llama.block_count": None}, "no usable llama.block_count: None"),
    ({"llama.block_count": np.float32(2)}, r"no usable llama.block_count: 2\.0"),
    ({"llama.attention.head_count": np.uint32(3)}, "is no multiple of 3 heads"),
    ({"llama.attention.head_count_kv": [2, 2]}, r"no usable llama.attention.head_count_kv: \[2, 2"),
    ({"llama.attention.layer_norm_rms_epsilon": "1"}, "no usable .*epsilon: '1'"),
    ({"llama.rope.scaling.factor": 4.0}, r"llama.rope.scaling.factor is 4\.0, which is not supp"),
    ({"llama.rope.scale_linear": 4.0}, r"llama.rope.scale_linear is 4\.0, which is not supported"),
    ({"llama.rope.scaling.type": "linear"}, "scaled rope is not supported"),
    ({"llama.attention.scale": 0.5}, "llama.attention.scale is 0.5, which is not supported"),
    ({"llama.attention.causal": False}, "llama.attention.causal is False, which is not supported"),
    ({"llama.attention.sliding_window": np.uint32(64)}, "sliding_window is 64, which is not supp"),
    ({"llama.expert_count": np.uint32(8)}, "llama.expert_count is 8, which is not supported"),
    ({"llama.vocab_size": np.uint32(7)}, "llama.vocab_size is 7; its tokenizer has 260 tokens"),
    ({"split.count": np.uint16(3)}, "one of 3 parts of a model; join them with llama-gguf-split"),
    ({"general.alignment": np.uint32(48)}, "general.alignment is 48, no power of two"),
    ({"general.architecture": "qwen2"}, "'qwen2' is not supported; .* taken as directories"),
    ({"tokenizer.ggml.tokens": None}, "it has no tokenizer .tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.model": None}, "it has no tokenizer .tokenizer.ggml.model"),
    ({"tokenizer.ggml.pre": "llama-bpe"}, "'llama-bpe' is not supported; supported: 'gpt2' with"),
    ({"tokenizer.ggml.tokens": [1] * 260}, "lack a usable tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.token_type": [1] * 259}, "260 tokens, and types of 259"),
    ({"tokenizer.ggml.merges": ["zq qz"]}, "GGUF tokenizer: .*out of vocabulary"),
    ({"tokenizer.ggml.eos_token_id": np.int32(-1)}, "eos_token_id is -1; its tokenizer has 260"),
    ({"tokenizer.ggml.padding_token_id": np.uint32(260)}, "padding_token_id is 260; its tokenizer"),
    ({"tokenizer.chat_template": np.uint32(7)}, "tokenizer.chat_template is no text: 7"),
]


@pytest.mark.parametrize(("metadata", "words"), LIES)
def test_metadata_that_cannot_be_meant_are_refused(
    tmp_path: Path, metadata: dict[str, object], words: str
) -> None:
    """Each would else compute something else than llama.cpp does, or end in a trace."""
    write_gguf(tmp_path / "a.gguf", metadata=metadata)
    with pytest.raises(Invalid, match=words):
        resolve_model(str(tmp_path / "a.gguf"), progress=False)


def test_metadata_that_change_nothing_are_taken(tmp_path: Path) -> None:
    usual = {"llama.vocab_size": np.uint32(260), "llama.expert_count": np.uint32(0)}
    factor = {"llama.rope.scaling.factor": 1.0, "split.count": np.uint16(1)}
    write_gguf(tmp_path / "a.gguf", metadata=usual | factor)
    load_spec(resolve_model(str(tmp_path / "a.gguf"), progress=False))


def test_tensors_lie_one_after_the_other(tmp_path: Path) -> None:
    """Or one would be another's bytes, which look as good."""
    path = tmp_path / "bad.gguf"
    write_gguf(path)
    whole = path.read_bytes()

    def offset_at(name: str) -> int:
        return whole.index(name.encode()) + len(name) + 4 + 2 * 8 + 4

    q, k = offset_at("blk.0.attn_q.weight"), offset_at("blk.1.attn_q.weight")
    refused(path, whole[:q] + whole[k : k + 8] + whole[q + 8 :], "the one before it ends at")
    refused(path, whole[:4] + struct.pack(">I", 3) + whole[8:], "it is big-endian")
    refused(path, whole.replace(b"llama.rope.freq_base", b"llama.context_length"), "two metadata")
    refused(path, whole[:-4] + struct.pack("<f", float("nan")), "norm.weight holds values that are")


def test_a_file_that_is_cut_while_it_is_read_is_an_answer(tmp_path: Path) -> None:
    """A mapped one would end the process."""
    path = tmp_path / "bad.gguf"
    write_gguf(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        cursor = Cursor(file)
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(Bad, match="cut off at byte 100 while it was read"):
            cursor.take(size)


def test_weights_that_change_while_they_are_loaded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or blocks would be named after weights that did not compute them."""
    write_gguf(tmp_path / "a.gguf")
    folder = resolve_model(str(tmp_path / "a.gguf"), progress=False)

    def load(*arguments: Any, **named: Any) -> Any:
        model = load_model(*arguments, **named)
        write_gguf(tmp_path / "a.gguf")
        return model

    monkeypatch.setattr(engine, "load_model", load)
    words = (f"cluster.model={str(folder)!r}", "decode.pool_blocks=40", "decode.threads=2")
    settings = config.load(None, [*words])
    with pytest.raises(Invalid, match="the weights were changed while they were loaded"):
        engine.open_engine(settings, settings.decode, "decode")


def test_a_link_gives_the_model_its_name(tmp_path: Path) -> None:
    """A hub's cache keeps files under their digests, with links of the names that people know."""
    write_gguf(tmp_path / "e3b0c442")
    (tmp_path / "tiny-Q4_K_M.gguf").symlink_to("e3b0c442")
    folder = resolve_model(str(tmp_path / "tiny-Q4_K_M.gguf"), progress=False)
    assert folder.name == "tiny-Q4_K_M" and load_spec(folder).layers == 2
    assert resolve_model(str(tmp_path / "e3b0c442"), progress=False).name == "e3b0c442"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", without="blk.1.ffn_up.weight")
    folder = resolve_model(str(tmp_path / "a.gguf"), progress=False)
    with pytest.raises(Invalid, match=r"lack the tensor model.layers.1.mlp.up_proj.weight"):
        open_checkpoint(folder, load_spec(folder))
    (tmp_path / "a.gguf").unlink()
    with pytest.raises(Invalid, match=r"the file of model.gguf is gone"):
        resolve_model(str(folder), progress=False)


def test_every_cut_and_every_changed_byte_of_a_header_is_an_answer(tmp_path: Path) -> None:
    """No hang, no other error than Invalid."""
    path = tmp_path / "bad.gguf"
    write_gguf(path)
    whole = bytearray(path.read_bytes())
    end = whole.index(b"tokenizer.ggml.tokens") + 400
    for place in range(0, end, 3):
        changed = bytearray(whole)
        changed[place] ^= 0x80 | place % 128
        path.write_bytes(changed)
        try:
            GgufFile.open(path)
        except Invalid:
            pass
