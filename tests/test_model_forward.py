"""The forward pass against `transformers`, family by family, on tiny random configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dense_kv import DenseKv
from kvass.common.block import BlockLayout
from kvass.common.kernels.torch_paged import TorchPagedKv
from kvass.common.model.load import MODELS, Model, load_model
from kvass.common.model.spec import ARCHITECTURES, load_spec
from kvass.common.pool.memory import SlotMemory

BLOCK_TOKENS = 4
TOKENS = 37

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "smollm": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 3,
                         "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 4}),
}  # fmt: skip


def build(name: str, directory: Path) -> Any:
    """Save a random model of a family as transformers does; return transformers' own."""
    import transformers

    family, changes = FAMILIES[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # norms of ones and biases of zeros would prove nothing
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.7, std=0.3)
    model.save_pretrained(directory)
    return model


def pool(model: Model, table: torch.Tensor) -> DenseKv:
    spec = model.spec
    slots = int(table.max()) + 1
    return DenseKv(
        spec.layers, spec.kv_heads, spec.head_dim, slots=slots, block_tokens=BLOCK_TOKENS
    )


def step(
    model: Model,
    kv: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    logits_rows: torch.Tensor | None,
    write_rows: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Run one request's rows at `positions` of `tokens`."""
    plan = kv.plan(table[None], torch.zeros_like(positions), positions)
    written = positions if write_rows is None else positions[write_rows]
    slots, offsets = table[written // BLOCK_TOKENS], written % BLOCK_TOKENS
    return model.forward(
        tokens[positions], positions, kv, plan, write_rows, slots, offsets, logits_rows
    )


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A family's (model in float32, transformers' logits, tokens, directory)."""
    directory = tmp_path_factory.mktemp(request.param)
    reference = build(request.param, directory)
    tokens = torch.randint(0, SIZES["vocab_size"], (TOKENS,))
    with torch.inference_mode():
        logits = reference(tokens[None]).logits[0]
    model = load_model(directory, load_spec(directory), dtype=torch.float32)
    return model, logits, tokens, directory


TABLE = torch.tensor([3, 9, 0, 7, 1, 5, 8, 2, 4, 6])


def test_every_row_has_the_logits_of_transformers(pair: Any) -> None:
    model, expected, tokens, _ = pair
    rows = torch.arange(TOKENS)
    logits = step(model, pool(model, TABLE), tokens, rows, TABLE, logits_rows=rows)
    assert logits is not None and logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 1e-4


def test_prefill_in_chunks_then_decode_is_the_same(pair: Any) -> None:
    model, expected, tokens, _ = pair
    kv = pool(model, TABLE)
    for low, high in ((0, 9), (9, 30)):
        assert step(model, kv, tokens, torch.arange(low, high), TABLE, logits_rows=None) is None
    first = torch.tensor([0])
    for position in range(30, TOKENS):
        logits = step(model, kv, tokens, torch.tensor([position]), TABLE, logits_rows=first)
        assert logits is not None
        assert (logits[0] - expected[position]).abs().max() < 1e-4


def test_a_fully_cached_prompt_computes_one_row_and_writes_nothing(pair: Any) -> None:
    model, expected, tokens, _ = pair
    kv = pool(model, TABLE)
    step(model, kv, tokens, torch.arange(TOKENS), TABLE, logits_rows=None)
    before = kv.memory.clone()
    none = torch.zeros(0, dtype=torch.int64)
    last = torch.tensor([TOKENS - 1])
    logits = step(
        model, kv, tokens, last, TABLE, logits_rows=torch.tensor([0]), write_rows=none
    )  # fmt: skip
    assert logits is not None
    assert (logits[0] - expected[-1]).abs().max() < 1e-4
    assert torch.equal(kv.memory, before) or torch.equal(
        kv.memory.nan_to_num(), before.nan_to_num()
    )


def test_two_requests_in_one_step_do_not_mix(pair: Any) -> None:
    model, expected, tokens, _ = pair
    tables = torch.stack([TABLE, TABLE + 10])
    kv = pool(model, tables)
    count = 20
    positions = torch.arange(count).repeat(2)
    row_table = torch.arange(2).repeat_interleave(count)
    plan = kv.plan(tables, row_table, positions)
    slots = tables[row_table, positions // BLOCK_TOKENS]
    other = tokens.flip(0)
    chosen = torch.tensor([count - 1, 2 * count - 1])
    logits = model.forward(
        torch.cat([tokens[:count], other[:count]]),
        *(positions, kv, plan, None, slots, positions % BLOCK_TOKENS, chosen),
    )
    assert logits is not None and logits.shape == (2, SIZES["vocab_size"])
    assert (logits[0] - expected[count - 1]).abs().max() < 1e-4
    assert (logits[1] - expected[count - 1]).abs().max() > 1e-2


def test_the_bf16_pool_and_weights_stay_near(pair: Any) -> None:
    """Through the real paged pool: float32 weights lose KV's rounding only, bf16 weights more."""
    model, expected, tokens, directory = pair
    spec = model.spec
    rows = torch.arange(TOKENS)
    layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_TOKENS, "bf16")
    spread = expected.std()
    for dtype, bound in ((torch.float32, 0.02), (torch.bfloat16, 0.1)):
        memory = SlotMemory(layout, 10)
        kv = TorchPagedKv(memory, layout, spec.heads)
        real = load_model(directory, spec, dtype=dtype)
        logits = step(real, kv, tokens, rows, TABLE, logits_rows=rows)
        assert logits is not None and logits.dtype == torch.float32
        assert (logits - expected).square().mean().sqrt() < bound * spread
        del kv
        memory.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_stores_the_same_bits_as_a_step_with_logits(pair: Any, dtype: torch.dtype) -> None:
    *_, tokens, directory = pair
    model = load_model(directory, load_spec(directory), dtype=dtype)
    rows = torch.arange(TOKENS)
    without, with_logits = pool(model, TABLE), pool(model, TABLE)
    step(model, without, tokens, rows, TABLE, logits_rows=None)
    step(model, with_logits, tokens, rows, TABLE, logits_rows=rows)
    assert torch.equal(without.memory.nan_to_num(), with_logits.memory.nan_to_num())


def test_both_tables_of_architectures_have_the_same_names() -> None:
    assert ARCHITECTURES.keys() == MODELS.keys()
