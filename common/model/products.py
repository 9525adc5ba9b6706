"""How the model's matrix products give a row the same bits in any company.

Where the machine has bf16 dot products, bf16 weights are packed (`kernels/packed.py`): those sums
have one order. Elsewhere torch multiplies, with row counts that agree: found out, not assumed. A
matrix library picks its kernel, and how threads share the rows, by the number of rows; one kernel
may sum in another order than the next. So `Products.counts_of` compares every count of a short list
with the largest in which a row's place changes nothing, on this machine, with the thread counts
that the runner uses, and `layers.linear` computes with the counts that agree and with no other.

The compared rows are made to tell: each is x ‖ x times w ‖ -w, shuffled, so that the exact result
is zero and what comes out is nothing but the rounding of one order of summation. With ordinary
numbers bf16 hides another order but once in some thousand values. For the same reason a hash of
these results tells machines apart (`digest`), those of packed weights too; so the numbers are made
by exact operations only.

Measured with torch 2.13, two threads. bf16 with AVX512-BF16: 1 row differs from more rows for some
shapes (48 inputs, 1,536, 4,096), 2 and more never; without it (AVX-512 alone) every odd count
differs, and with three threads all but multiples of 6; with AVX2 none. float32 (MKL): 1, 2, 3, 5,
6, 7, 9, 10 and 11. Where tensors lie in memory changes nothing. A search costs the default model
about a second, most of it kernels that steps would have to build later.

It refuses to know what a product is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvass.common.kernels import packed
from kvass.common.kernels.gguf_blocks import Matrix, Stack, bf16_of
from kvass.common.kernels.numerics import WeightFormat
from kvass.common.kernels.packed import HugePages, PackedWeight
from kvass.common.kernels.weight_formats import executed
from kvass.common.model.projection import Projection, StackedProjection, TorchProjection

# A step's rows are padded to one of these, so a step computes at most a fifth more than it needs,
# and a kernel is built for few sizes. More rows are computed in pieces of the last: by then a
# product is bound by arithmetic, and reading the weights again costs nothing.
COUNTS = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128),
    *(160, 192, 224, 256, 320, 384, 448, 512),
)
# With no safe count up to this one every token of a stream would cost a chunk of a prompt.
LEAST_MAX = 64
# The kernels of wide outputs (the logits) see this many rows at most: a row a request, and a step's
# requests are few. More are computed in pieces.
WIDE, WIDE_ROWS = 16_384, 32
_TABLE_ROWS = 256  # random rows of a weight, repeated: a kernel doesn't look at values


class Use(NamedTuple):
    """The runner computes products of at most `rows` rows with so many threads."""

    threads: int
    rows: int


class Kind(NamedTuple):
    """What a library picks a kernel by, beside the row count."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    has_bias: bool

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Kind:
        return cls(weight.shape[0], weight.shape[1], weight.dtype, bias is not None)

    def __str__(self) -> str:
        bias = ", bias" if self.has_bias else ""
        return f"{self.outputs}x{self.inputs} {str(self.dtype).removeprefix('torch.')}{bias}"


@dataclass(slots=True)
class Products:
    """One model's products, each kind of them tried when it is first met.

    bf16 weights are executed as `weights` says; the logits' are int8 where others are int4. Blocks
    of a GGUF file are kept as they are if it says `native`; else, and where torch multiplies, as
    bf16.

    Mutable fields: `packed` (kinds of packed weights), `found` (safe counts of torch's products by
    kind; empty: none were), `failures` (what was found in place of safe counts), `_bits` (of what
    the tried products gave), `_pages` (where packed weights are).
    """

    uses: Sequence[Use]
    weights: WeightFormat = "bf16"
    packed: set[Kind] = field(default_factory=set)
    found: dict[Kind, tuple[int, ...]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _bits: blake2b = field(default_factory=lambda: blake2b(digest_size=8))
    _pages: HugePages = field(default_factory=HugePages)

    def projection(
        self, weight: Matrix, bias: torch.Tensor | None, *, is_head: bool = False
    ) -> Projection:
        """Return what multiplies by this weight; it may keep a copy of its own instead."""
        if self.weights != "native":
            weight = bf16_of(weight)
        if isinstance(weight, Stack):
            sizes = [part.shape[0] for part in weight.parts]
            biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
            parts = zip(weight.parts, biases, strict=True)
            return StackedProjection([self.projection(part, own) for part, own in parts])
        weights: WeightFormat = "int8" if is_head and self.weights == "int4" else self.weights
        if not packed.available():
            weight = bf16_of(weight)
        if isinstance(weight, torch.Tensor) and (
            weight.dtype != torch.bfloat16 or not packed.available()
        ):
            if weight.dtype == torch.bfloat16:
                weight = executed(weight, weights)
            return TorchProjection(weight, bias, self.counts_of(weight, bias))
        outputs, inputs = weight.shape
        kind = Kind(outputs, inputs, torch.bfloat16, bias is not None)
        if kind not in self.packed:
            self.packed.add(kind)
            self._note_packed(kind)
        return PackedWeight.of(weight, bias, self._threads, self._pages, weights)

    def counts_of(self, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
        """Return the row counts for `layers.linear`; empty when none are safe."""
        kind = Kind.of(weight, bias)
        if kind not in self.found:
            self.found[kind] = self._search(kind)
        return self.found[kind]

    @property
    def reason(self) -> str:
        """Say what is used: packed weights, or row counts, or which products have none."""
        kinds = self.found.values()
        counts = [c for c in COUNTS if all(c in safe for safe in kinds if safe and c <= safe[-1])]
        packs = ["products of packed weights, of any number of rows"] if self.packed else []
        counted = [f"products of {_joined(counts)} rows"] if kinds or not packs else []
        return "; ".join(self.failures or [*packs, *counted])

    @property
    def digest(self) -> str:
        """Name the bits that these products give: equal on machines that compute the same."""
        return self._bits.hexdigest()

    @property
    def _threads(self) -> int:
        return max(use.threads for use in self.uses)

    def _note_packed(self, kind: Kind) -> None:
        """Note the bits that tell this order of sums: outputs and rows are alike, so a few do."""
        few = kind._replace(outputs=min(kind.outputs, _TABLE_ROWS))
        rows, weight, bias = _telling(few, WIDE_ROWS)
        product = PackedWeight.of(weight, bias, self._threads, HugePages(), self.weights)
        self._bits.update(product.logits(rows).view(torch.uint8).numpy().data)

    @torch.inference_mode()
    def _search(self, kind: Kind) -> tuple[int, ...]:
        threads = torch.get_num_threads()
        most = COUNTS[-1] if kind.outputs < WIDE else WIDE_ROWS
        whole = _Trial.of(kind, most)
        # Threads may share the most rows unevenly, and the odd row fall to another kernel.
        tops = (whole.cut(count) for count in reversed(COUNTS) if most // 2 <= count <= most)
        trial = next((top for top in tops if top.agrees(len(top.rows))), whole)
        self._bits.update(trial.expected[:WIDE_ROWS].view(torch.uint8).numpy().data)
        counts = [count for count in COUNTS if count <= len(trial.rows)]
        try:
            differ = {count for use in self.uses for count in _differing(trial, counts, use)}
        finally:
            torch.set_num_threads(threads)
        safe = tuple(count for count in counts if count not in differ)
        if safe and safe[0] <= LEAST_MAX and safe[-1] == counts[-1]:
            return safe
        self.failures.append(
            f"product {kind}: of {counts[-1]} rows and fewer, these counts give a row other bits: "
            + _joined(sorted(differ))
        )
        return ()


def _differing(trial: _Trial, counts: Sequence[int], use: Use) -> Iterable[int]:
    """Yield the counts that are not safe, among those that this use can come to."""
    torch.set_num_threads(use.threads)
    reached = 0  # a step of `rows` rows is padded to a safe count: no further one is looked at
    for count in counts:
        if reached >= use.rows:
            return
        if trial.agrees(count):
            reached = count
        else:
            yield count


@dataclass(frozen=True, slots=True)
class _Trial:
    """A product whose values tell the order of its sums. `expected` is that of all rows at once."""

    rows: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    expected: torch.Tensor

    @classmethod
    def of(cls, kind: Kind, count: int) -> _Trial:
        rows, weight, bias = _telling(kind, count)
        return cls(rows, weight, bias, F.linear(rows, weight, bias))

    def cut(self, count: int) -> _Trial:
        """Return the trial of the first `count` rows only."""
        rows = self.rows[:count]
        return _Trial(rows, self.weight, self.bias, F.linear(rows, self.weight, self.bias))

    def agrees(self, count: int) -> bool:
        """Compare the product of the last `count` rows with theirs among all rows."""
        if count == len(self.rows):  # Then: does a row's place among all rows change its bits?
            turned = F.linear(self.rows.roll(count // 3, 0), self.weight, self.bias)
            return torch.equal(turned.roll(-(count // 3), 0), self.expected)
        last = F.linear(self.rows[-count:], self.weight, self.bias)
        return torch.equal(last, self.expected[-count:])


def _telling(kind: Kind, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw rows, a weight and a bias whose product is the rounding of its sums."""
    generator = torch.Generator().manual_seed(1)
    half = kind.inputs // 2
    order = torch.randperm(kind.inputs, generator=generator)

    def twice(size: int, sign: int) -> torch.Tensor:
        part = torch.rand(size, half, generator=generator) * 2 - 1
        part = part * part * part  # Magnitudes far apart round more.
        rest = torch.zeros(size, kind.inputs - 2 * half)
        return torch.cat([part, sign * part, rest], 1)[:, order].to(kind.dtype)

    rows = twice(count, 1)
    table = twice(min(kind.outputs, _TABLE_ROWS), -1)
    weight = table.repeat(-(-kind.outputs // len(table)), 1)[: kind.outputs].contiguous()
    bias = None
    if kind.has_bias:  # as small as the results, or it would hide them
        bias = (2**-20 * torch.rand(kind.outputs, generator=generator)).to(kind.dtype)
    return rows, weight, bias


def _joined(counts: Sequence[int]) -> str:
    """Return counts as text, the middle of a long list left out."""
    words = [str(count) for count in counts]
    return ", ".join(words if len(words) <= 8 else [*words[:6], "…", words[-1]]) or "none"
