"""How much of the default model's answers is lost by storing KV in fewer bits?

For each format the same texts are computed in the same steps, teacher-forced, beside KV that is
kept in float32. Every position's distribution of the next token is compared:

    divergence    mean Kullback-Leibler divergence from what float32 KV predicts, in millinats
    perplexity    of the text itself, beside float32 KV's
    best token    share of positions where it is the same one

    unscaled e4m3    K (after rope) and V cast to e4m3 as they are: what others do by default

Weights are executed in float32 (they are exact in it), so that nothing but the format differs: with
bf16 products the rounding of sums hides int8's error. Texts are the longest of Python's own
documentation (`pydoc_data.topics`), each from its beginning. The last table is README's.

    python benchmarks/quality.py [--quick] [--json FILE]
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F

import rig
from kvass.common.block import KV_DTYPES, BlockLayout
from kvass.common.kernels.formats import E4M3_MAX
from kvass.common.kernels.paged import paged_kv
from kvass.common.kernels.seam import PagedKv
from kvass.common.kernels.turn import Turn, turned
from kvass.common.model.key_terms import KeyTerms, key_terms
from kvass.common.model.load import Model, load_model
from kvass.common.model.spec import ModelSpec, load_spec
from kvass.common.pool.memory import SlotMemory
from rig import Figure

BLOCK, CHUNK = 16, 512
# Tokens of context, and how many texts of them.
CONTEXTS: dict[int, int] = {512: 8, 2048: 2, 8192: 1}
QUICK_CONTEXTS: dict[int, int] = {512: 3}
EXACT, UNSCALED = "float32", "unscaled e4m3"
# fp8 loses at most a third of what unscaled e4m3 does, int8 a tenth of that.
FP8_SHARE, INT8_SHARE = 1 / 3, 1 / 10

Rounded = Callable[[torch.Tensor], torch.Tensor]


class WholeKv:
    """One request's K and V as float32, each rounded first; attention by definition.

    Mutable field: `_stored` [layers, K|V, H, tokens, D].
    """

    def __init__(self, spec: ModelSpec, tokens: int, rounded: Rounded) -> None:
        self._stored = torch.zeros(spec.layers, 2, spec.kv_heads, tokens, spec.head_dim)
        self._rounded = rounded

    def plan(
        self, tables: torch.Tensor, row_table: torch.Tensor, row_position: torch.Tensor
    ) -> torch.Tensor:
        """Return which of the positions so far a row sees."""
        return torch.arange(int(row_position.max()) + 1) <= row_position[:, None]

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        turn: Turn | None = None,
    ) -> None:
        both = torch.stack([turned(k, turn), v.float()])
        self._stored[layer, :, :, slots * BLOCK + offsets] = self._rounded(both).transpose(1, 2)

    def attend(
        self, layer: int, q: torch.Tensor, plan: torch.Tensor, turn: Turn | None = None
    ) -> torch.Tensor:
        k, v = self._stored[layer, :, None, :, : plan.shape[1]]
        heads = turned(q, turn).transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(heads, k, v, attn_mask=plan, enable_gqa=True)
        return out[0].transpose(0, 1)


def unscaled(rows: torch.Tensor) -> torch.Tensor:
    return rows.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def ways_of(spec: ModelSpec, tokens: int, terms: KeyTerms) -> dict[str, PagedKv[Any]]:
    """Return the ways of storing one request's KV, the exact one first, as workers store it."""
    ways: dict[str, PagedKv[Any]] = {
        EXACT: WholeKv(spec, tokens, lambda rows: rows),
        UNSCALED: WholeKv(spec, tokens, unscaled),
    }
    for kv_dtype in KV_DTYPES:
        layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK, kv_dtype)
        memory = SlotMemory(layout, -(-tokens // BLOCK))
        stored_by = terms if layout.has_scales else ()
        ways[kv_dtype] = paged_kv(memory, layout, spec.heads, *stored_by)
    return ways


def log_probabilities(model: Model, kv: PagedKv[Any], ids: Sequence[int]) -> Iterator[torch.Tensor]:
    """Predict each token's successor: float32 [rows, vocab], a chunk at a time."""
    table = torch.arange(-(-len(ids) // BLOCK))[None]
    for start in range(0, len(ids), CHUNK):
        rows = torch.arange(start, min(start + CHUNK, len(ids)))
        plan = kv.plan(table, torch.zeros_like(rows), rows)
        places = (rows // BLOCK, rows % BLOCK)
        every = torch.arange(len(rows))
        tokens = torch.tensor(ids[start : start + CHUNK])
        logits = model.forward(tokens, rows, kv, plan, None, *places, every)
        assert logits is not None
        yield logits.log_softmax(-1)


@dataclass(slots=True)
class Loss:
    """Sums over positions of one way of storing KV."""

    divergence: float = 0.0
    surprise: float = (
        0.0  # nats of the texts' own next tokens, of which the last chunk has one less
    )
    agreed: int = 0
    rows: int = 0
    known: int = 0

    def add(self, ours: torch.Tensor, exact: torch.Tensor, following: torch.Tensor) -> None:
        """Add rows of log-probabilities [N, vocab]; `following` are the next tokens of the first
        of them."""
        self.divergence += float(F.kl_div(ours, exact, reduction="sum", log_target=True))
        self.surprise += float(F.nll_loss(ours[: len(following)], following, reduction="sum"))
        self.agreed += int((ours.argmax(-1) == exact.argmax(-1)).sum())
        self.rows += len(ours)
        self.known += len(following)


def losses_of(model: Model, texts: Sequence[Sequence[int]], terms: KeyTerms) -> dict[str, Loss]:
    """Compute every text in every way, the ways side by side."""
    losses: dict[str, Loss] = {}
    for text in texts:
        ways = ways_of(model.spec, len(text), terms)
        chunks = [log_probabilities(model, kv, text) for kv in ways.values()]
        for start, step in enumerate(zip(*chunks, strict=True)):
            following = torch.tensor(text[start * CHUNK + 1 : (start + 1) * CHUNK + 1])
            for name, ours in zip(ways, step, strict=True):
                losses.setdefault(name, Loss()).add(ours, step[0], following)
    return losses


def texts_of(served: rig.Served, context: int, count: int) -> list[list[int]]:
    """Return the beginnings of the longest texts of Python's own documentation."""
    longest = sorted(topics.values(), key=len, reverse=True)[:count]
    texts = [served.tokenizer.encode(text)[:context] for text in longest]
    assert all(len(text) == context for text in texts), [len(text) for text in texts]
    return texts


def figures_of(context: int, losses: dict[str, Loss]) -> list[Figure]:
    """Return divergences with what they are to be below, then perplexities and agreement."""
    mean = {name: 1000 * loss.divergence / loss.rows for name, loss in losses.items()}
    bound = {"fp8": (UNSCALED, FP8_SHARE), "int8": ("fp8", INT8_SHARE)}
    figures = []
    for name in losses:
        if name == EXACT:
            continue
        beside, share = bound.get(name, (None, 0.0))
        reference = (beside, mean[beside], share * mean[beside]) if beside else ("", None, None)
        figures.append(Figure(f"{context}, {name}: divergence", mean[name], "mnat", *reference))
    for name, loss in losses.items():
        if name == EXACT:
            continue
        exact = losses[EXACT]
        perplexities = [math.exp(each.surprise / each.known) for each in (loss, exact)]
        what = f"{context}, {name}"
        figures.append(Figure(f"{what}: perplexity", perplexities[0], "", EXACT, perplexities[1]))
        share = 100 * loss.agreed / loss.rows
        figures.append(Figure(f"{what}: same best token", share, "%", EXACT, 100.0))
    return figures


def stored_bits(name: str, spec: ModelSpec) -> float:
    """Return how many bits a way of storing KV has for a number, scales included."""
    if name not in KV_DTYPES:
        return 32 if name == EXACT else 8
    kv_dtype = next(each for each in KV_DTYPES if each == name)
    layout = BlockLayout(1, 1, spec.head_dim, BLOCK, kv_dtype)
    return 8 * (layout.codes_size + layout.scales_size) / (BLOCK * spec.head_dim)


def table_of(results: dict[int, dict[str, Loss]], spec: ModelSpec) -> str:
    """Return all that was measured as Markdown: a row a format, three columns a context."""
    columns = ["KV as", "bits a number"]
    for context in results:
        columns += [f"{context:,} tokens: divergence, millinats", "perplexity", "same best token"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name in next(iter(results.values())):
        cells = [name, f"{stored_bits(name, spec):g}"]
        for losses in results.values():
            loss = losses[name]
            cells += [
                f"{1000 * loss.divergence / loss.rows:.2f}",
                f"{math.exp(loss.surprise / loss.known):.3f}",
                f"{100 * loss.agreed / loss.rows:.2f} %",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@torch.inference_mode()
def measure(contexts: dict[int, int]) -> tuple[dict[int, dict[str, Loss]], ModelSpec]:
    """Return what every way loses at each context, and the model's spec."""
    served = rig.Served.load()
    spec = load_spec(served.folder)
    model = load_model(served.folder, spec, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        terms = key_terms(served.folder, spec, Path(folder, "terms.safetensors"))
    results = {}
    for context, count in contexts.items():
        started_s = time.monotonic()
        results[context] = losses_of(model, texts_of(served, context, count), terms)
        took_s = time.monotonic() - started_s
        print(f"context of {context}: {count} texts, {took_s:.0f} s", file=sys.stderr)
    return results, spec


def main() -> None:
    given = rig.options((__doc__ or "").splitlines()[0])
    results, spec = measure(QUICK_CONTEXTS if given.quick else CONTEXTS)
    figures = [each for context, losses in results.items() for each in figures_of(context, losses)]
    rig.report("What formats of KV lose, beside KV in float32", figures, given.json)
    print(table_of(results, spec))


if __name__ == "__main__":
    main()
