"""What tells a worker that computes wrong from one that only rounds otherwise?

    honest      the same blocks computed again: in other chunks, beside another request; with the
                products' sums in another order (kernels for AVX2, for AVX-512 without BF16, in
                processes of their own); with weights in float32
    bound       what the audit takes for rounding where a worker is not deterministic: a largest
                error of one head's K, and one of its V, in one layer (`block_error`). All errors
                are shares of it
    faults      one bit; one token's, head's or layer's numbers in the place of others; a position
                off by one in the last layer; another token at a block's end. Of int4 the last two
                are no larger than rounding: equality alone finds them

Between workers that are deterministic the audit allows no other bit; each fault is looked for in
both ways. For honest work the largest error counts, for faults the least.

    python benchmarks/audit.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file

import rig
from kvass.common.block import SCALE_BYTES, BlockLayout, KvDtype
from kvass.common.kernels.paged import paged_kv
from kvass.common.kernels.seam import PagedKv
from kvass.common.kernels.turn import Turn
from kvass.common.model.block_error import BOUNDS, block_error, block_errors
from kvass.common.model.key_terms import KeyTerms, key_terms
from kvass.common.model.known_answer import keep
from kvass.common.model.load import Model, load_model
from kvass.common.model.products import Products
from kvass.common.model.rope import angles, inverse_frequencies
from kvass.common.model.runner import Rows, Runner, uses
from kvass.common.model.spec import ModelSpec, load_spec
from kvass.common.pool.memory import SlotMemory
from rig import Figure

FORMATS: tuple[KvDtype, ...] = get_args(KvDtype)
BLOCK, CHUNK, OTHER_CHUNK = 16, 512, 112
TOKENS = 512
TEXTS, QUICK_TEXTS = 4, 1
TRIALS, QUICK_TRIALS = 100, 20
PROBE = "--probe"  # what this program is called with to compute in another environment
OTHER_KERNELS = {
    "kernels for AVX2": {
        "KVASS_NATIVE_LEVEL": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
    "kernels for AVX-512 without BF16": {
        "KVASS_NATIVE_LEVEL": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    },
    "torch's kernels alone": {"KVASS_NATIVE_LEVEL": "none"},
}


@dataclass(slots=True)
class Work:
    """One text's KV in one format, by `terms`; the last slot is free. `error` compares a block
    with it."""

    spec: ModelSpec
    layout: BlockLayout
    memory: SlotMemory
    tokens: Sequence[int]
    terms: KeyTerms

    @classmethod
    def of(cls, spec: ModelSpec, kv_dtype: KvDtype, tokens: Sequence[int], terms: KeyTerms) -> Work:
        layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK, kv_dtype)
        return cls(spec, layout, SlotMemory(layout, len(tokens) // BLOCK + 1), tokens, terms)

    def again(self, tokens: Sequence[int]) -> Work:
        """Return room for a text in the same format."""
        return Work.of(self.spec, self.layout.kv_dtype, tokens, self.terms)

    def kernels(self) -> PagedKv[Any]:
        terms = self.terms if self.layout.has_scales else ()
        return paged_kv(self.memory, self.layout, self.spec.heads, *terms)

    @property
    def blocks(self) -> int:
        return len(self.tokens) // BLOCK

    def error(self, block: int) -> float:
        return block_error(self.memory, self.layout, block, self.blocks)

    def compute(self, model: Model, chunk: int = CHUNK) -> Work:
        runner = Runner(model, self.kernels(), BLOCK)
        for start in range(0, len(self.tokens), chunk):
            slots = list(range(self.blocks))
            runner.run([Rows(self.tokens[start : start + chunk], start, slots)])
        return self

    def compute_block(self, model: Model, kv: PagedKv[Any], block: int, tokens: list[int]) -> None:
        """Compute one block upon those before it, into the free slot."""
        slots = [*range(block), self.blocks]
        Runner(model, kv, BLOCK).run([Rows(tokens, block * BLOCK, slots)])

    def largest(self, others: torch.Tensor) -> float:
        """Return the largest error of another computation's blocks."""
        count = self.blocks
        both = SlotMemory(self.layout, 2 * count)
        both.tensor[:count], both.tensor[count:] = self.memory.tensor[:count], others[:count]
        slots = list(range(2 * count))
        return float(block_errors(both, self.layout, slots[:count], slots[count:]).max())


class OffByOne:
    """Stores the last layer's K as if each token stood one position further."""

    def __init__(self, work: Work) -> None:
        self._kv = work.kernels()
        self.plan, self.attend = self._kv.plan, self._kv.attend
        self._last_layer = work.spec.layers - 1
        self._one = angles(torch.tensor([1]), inverse_frequencies(work.spec))

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        turn: Turn | None = None,
    ) -> None:
        assert turn is not None
        if layer == self._last_layer:
            (cosine, sine), (of_one, sine_of_one) = turn, self._one
            turn = Turn(cosine * of_one - sine * sine_of_one, sine * of_one + cosine * sine_of_one)
        self._kv.append(layer, k, v, slots, offsets, turn)


# --- honest work ----------------------------------------------------------------------------------


def texts(served: rig.Served, count: int) -> list[list[int]]:
    """Return pieces of Python's own documentation, and as many tokens by chance."""
    longest = sorted(topics.values(), key=len, reverse=True)
    tokens = served.tokenizer.encode("\n\n".join(longest)[: 8 * count * TOKENS])
    pieces = [tokens[start : start + TOKENS] for start in range(0, count * TOKENS, TOKENS)]
    rng = random.Random(1)
    return [*pieces, [rng.choice(tokens) for _ in range(TOKENS)]]


def in_company(model: Model, work: Work) -> Work:
    """Compute the text in other chunks, each beside another request, in other slots."""
    again = work.again([*work.tokens, *work.tokens])
    slots = list(range(2 * work.blocks))
    turned = slots[work.blocks :][::-1]
    runner = Runner(model, again.kernels(), BLOCK)
    for start in range(0, len(work.tokens), OTHER_CHUNK):
        piece = work.tokens[start : start + OTHER_CHUNK]
        beside = Rows([token ^ 1 for token in piece], start, slots[: work.blocks])
        runner.run([beside, Rows(piece, start, turned)])
    again.memory.tensor[: work.blocks] = again.memory.tensor[turned]
    return again


def probe(file: Path, terms_file: Path, count: int) -> None:
    """Compute every text in every format here, and leave it in a file: `other_kernels` asks."""
    torch.set_num_threads(1)
    served = rig.Served.load()
    spec = load_spec(served.folder)
    model = load_model(served.folder, spec)
    terms = key_terms(served.folder, spec, terms_file)
    found = {}
    for number, text in enumerate(texts(served, count)):
        for kv_dtype in FORMATS:
            work = Work.of(spec, kv_dtype, text, terms).compute(model, OTHER_CHUNK)
            found[f"{kv_dtype} {number}"] = work.memory.tensor.clone()
    save_file(found, file)


def other_kernels(count: int, terms: KeyTerms) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Compute every text in processes whose libraries use other instructions."""
    with tempfile.TemporaryDirectory() as folder:
        same = Path(folder, "terms.safetensors")
        keep(terms._asdict(), same)
        for name, variables in OTHER_KERNELS.items():
            file = Path(folder, f"{len(name)}.safetensors")
            command = [sys.executable, __file__, PROBE, str(file), str(same), str(count)]
            subprocess.run(command, env=os.environ | variables, check=True)
            yield name, load_file(file)


# --- faults ---------------------------------------------------------------------------------------

Fault = Callable[[Work, Model, int, random.Random], None]


def code_bit(work: Work, model: Model, block: int, rng: random.Random) -> None:
    start = _record(work, rng)
    place = start + rng.randrange(work.layout.codes_size)
    work.memory.tensor[work.blocks, place] ^= 1 << rng.randrange(8)


def scale_bit(work: Work, model: Model, block: int, rng: random.Random) -> None:
    start = _record(work, rng) + work.layout.codes_size
    place = start + rng.randrange(work.layout.scales_size)
    work.memory.tensor[work.blocks, place] ^= 1 << rng.randrange(8)


def _record(work: Work, rng: random.Random) -> int:
    return work.layout.record_offset(0, rng.randrange(work.layout.layers), rng.random() < 0.5)


def one_tokens_row(work: Work, model: Model, block: int, rng: random.Random) -> None:
    """One head of one token has the numbers of the token before it."""
    layer, head, token = (
        rng.randrange(most) for most in (work.layout.layers, work.layout.kv_heads, BLOCK - 1)
    )
    _copy(work, (layer, head, token), (layer, head, token + 1), 1)


def one_head(work: Work, model: Model, block: int, rng: random.Random) -> None:
    """One head has the numbers of the next one."""
    layer, head = rng.randrange(work.layout.layers), rng.randrange(work.layout.kv_heads)
    _copy(work, (layer, (head + 1) % work.layout.kv_heads, 0), (layer, head, 0), BLOCK)


def one_layer(work: Work, model: Model, block: int, rng: random.Random) -> None:
    """One layer has the numbers of the layer before it."""
    layer = rng.randrange(work.layout.layers - 1)
    for head in range(work.layout.kv_heads):
        _copy(work, (layer, head, 0), (layer + 1, head, 0), BLOCK)


def _copy(
    work: Work, source: tuple[int, int, int], target: tuple[int, int, int], tokens: int
) -> None:
    """Copy K of some tokens from one (layer, head, token) of the free slot to another."""
    layout, slot = work.layout, work.memory.tensor[work.blocks]
    parts = range(layout.scale_parts)
    places = [(layout.code_offset, layout.row_size)]
    places += [(partial(layout.scale_offset, part=part), SCALE_BYTES) for part in parts]
    for offset, size in places:
        first, second = (offset(head, layer, False, at) for layer, head, at in (source, target))
        slot[second : second + tokens * size] = slot[first : first + tokens * size].clone()


def position_off_by_one(work: Work, model: Model, block: int, rng: random.Random) -> None:
    tokens = list(work.tokens[block * BLOCK :][:BLOCK])
    work.compute_block(model, OffByOne(work), block, tokens)


def another_token(work: Work, model: Model, block: int, rng: random.Random) -> None:
    tokens = list(work.tokens[block * BLOCK :][:BLOCK])
    tokens[-1] = (tokens[-1] + 1 + rng.randrange(1000)) % work.spec.vocab_size
    work.compute_block(model, work.kernels(), block, tokens)


# Each with its name, and whether the bound alone must find it too.
FAULTS: list[tuple[Fault, str, bool]] = [
    (code_bit, "a bit of a code", False),
    (scale_bit, "a bit of a scale", False),
    (one_tokens_row, "one token's K of one head is its neighbour's", False),
    (one_head, "one head's K is another's", True),
    (one_layer, "one layer's K is the layer's before", True),
    (position_off_by_one, "last layer: positions off by one", True),
    (another_token, "a block's last token is another", True),
]
# What of int4 is among the errors of honest workers.
FINE: list[tuple[KvDtype, Fault]] = [("int4", position_off_by_one), ("int4", another_token)]


def errors_of(fault: Fault, work: Work, model: Model, trials: int) -> list[float]:
    """Do one fault to blocks that are picked by chance; return the errors that the audit sees."""
    rng, errors = random.Random(1), []
    for _ in range(trials):
        block = rng.randrange(work.blocks)
        work.memory.tensor[work.blocks] = work.memory.tensor[block]
        before = work.memory.tensor[work.blocks].clone()
        fault(work, model, block, rng)
        assert not torch.equal(before, work.memory.tensor[work.blocks]), "a fault that is none"
        errors.append(work.error(block))
    return errors


# --- the whole ------------------------------------------------------------------------------------


def honest_errors(
    served: rig.Served, spec: ModelSpec, works: dict[str, Work], model: Model
) -> dict[tuple[KvDtype, str], float]:
    """Return the largest error of each way of computing the same, by format and way."""
    most: dict[tuple[KvDtype, str], float] = {}

    def seen(kv_dtype: KvDtype, way: str, error: float) -> None:
        most[kv_dtype, way] = max(most.get((kv_dtype, way), 0.0), error)

    for work in works.values():
        again = in_company(model, work)
        seen(work.layout.kv_dtype, "other chunks and company", work.largest(again.memory.tensor))
    terms = next(iter(works.values())).terms
    for way, found in other_kernels(len(works) // len(FORMATS) - 1, terms):
        for name, work in works.items():
            seen(work.layout.kv_dtype, way, work.largest(found[name]))
    full = load_model(served.folder, spec, dtype=torch.float32)
    for work in works.values():
        other = work.again(work.tokens).compute(full)
        seen(work.layout.kv_dtype, "weights in float32", work.largest(other.memory.tensor))
    return most


def measure(quick: bool) -> tuple[list[Figure], list[str]]:
    """Return the figures, and what is not as the audit takes it to be."""
    served = rig.Served.load()
    spec = load_spec(served.folder)
    torch.set_num_threads(1)  # the bits are asked for, and threads wait for each other
    model = load_model(served.folder, spec, projection_of=Products(uses()).projection)
    with tempfile.TemporaryDirectory() as folder:
        terms = key_terms(served.folder, spec, Path(folder, "terms.safetensors"))
    works = {
        f"{kv_dtype} {number}": Work.of(spec, kv_dtype, text, terms).compute(model)
        for number, text in enumerate(texts(served, QUICK_TEXTS if quick else TEXTS))
        for kv_dtype in FORMATS
    }
    figures, wrong = [], []
    for (kv_dtype, way), error in honest_errors(served, spec, works, model).items():
        same = way not in OTHER_KERNELS and not way.startswith("weights")
        limit = 0.0 if same else 1.0
        bound = "K {}, V {}".format(*BOUNDS[kv_dtype])
        reference = "equality" if same else f"bound: {bound}"
        figures.append(Figure(f"{kv_dtype}: {way}", error, "", reference, limit, limit))
        if error > limit:
            wrong.append(f"{kv_dtype}: {way}: an honest error of {error:.3f} bounds")
    for kv_dtype in FORMATS:
        work = works[f"{kv_dtype} 0"]
        for fault, name, coarse in FAULTS:
            if fault is scale_bit and not work.layout.has_scales:
                continue
            errors = errors_of(fault, work, model, QUICK_TRIALS if quick else TRIALS)
            exact, found = (sum(error > limit for error in errors) for limit in (0.0, 1.0))
            seen = f"bound finds {found} of {len(errors)}, equality {exact}"
            figures.append(Figure(f"{kv_dtype}: {name}", min(errors), "", seen, 1.0))
            coarse = coarse and (kv_dtype, fault) not in FINE
            if exact < len(errors) or (coarse and found < len(errors)):
                wrong.append(f"{kv_dtype}: {name}: {seen}")
    return sorted(figures, key=lambda figure: FORMATS.index(_format(figure))), wrong


def _format(figure: Figure) -> KvDtype:
    return next(each for each in FORMATS if figure.name.startswith(each))


def main() -> int:
    if PROBE in sys.argv:
        probe(Path(sys.argv[-3]), Path(sys.argv[-2]), int(sys.argv[-1]))
        return 0
    given = rig.options((__doc__ or "").splitlines()[0])
    figures, wrong = measure(given.quick)
    rig.report("Errors of blocks: honest, the largest; faults, the least", figures, given.json)
    for line in wrong:
        print(f"not what it should be: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
