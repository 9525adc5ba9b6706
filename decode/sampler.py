"""From a row of logits to a token. Pure: no clock, no random state, no device of its own.

A row's choice depends on its logits, its request's settings and history, and one number drawn
from (seed, choice, position); never on the batch around it. So another worker with the same logits
goes on with the same tokens, and a batch may be put together in any order.

The order is vLLM's, checked against its source: logit_bias and the ban of stop tokens
(`min_tokens`), repetition, frequency and presence penalties; then, unless greedy, temperature,
min_p, top_k, top_p. Tokens are ranked by descending logit, equal ones by id. Every filter keeps a
prefix of that ranking, so little more of it is sorted than the draw needs; weights and sums are in
double precision.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from kvass.common.wire import Sampling, Stop

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

GREEDY_BELOW = 1e-5  # vLLM's bound: a smaller temperature means the likeliest token
# A ranking first leaves out what is lighter than so many times the weight that cannot be drawn
# (`_draw`). Measured, prompts of random tokens: 16 nearly always do, and leave a third to sort; 0,
# all tokens, is for what rounding makes of a draw just below 1.
TAIL_FACTORS = (16.0, 1.0, 0.0)
_COLUMNS = 16  # maxima per ranked token: few share a column, so few extra tokens pass the threshold
_COUNTER = struct.Struct("<QIQ")
_PERSON = b"kvass-sample-1"


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) that draws token `position` (from 0) of answer `choice`.

    BLAKE2b with an 8-byte digest and person "kvass-sample-1", over seed (64 bits, two's
    complement), choice (uint32) and position (uint64), all little-endian; the upper 53 bits of the
    digest, little-endian too, over 2**53. Published vectors are in the tests.
    """
    counter = _COUNTER.pack(seed % 2**64, choice, position)
    digest = blake2b(counter, digest_size=8, person=_PERSON).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


class _Counts:
    """How often each of a growing set of tokens has appeared, as arrays to index logits with.

    Mutable fields: `_place` (token -> index), `_ids` and `_counts` (their first `_size` entries).
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        ids, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
        self._size = len(ids)
        self._place = {token: place for place, token in enumerate(ids.tolist())}
        self._ids = np.concatenate([ids, np.zeros(16, np.int64)])
        self._counts = np.concatenate([counts, np.zeros(16)]).astype(np.float32)

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1

    @property
    def ids(self) -> Ids:
        return self._ids[: self._size]

    @property
    def counts(self) -> Floats:
        return self._counts[: self._size]


class RowState:
    """What one answer's next token depends on beside its logits.

    Mutable fields: `position` (tokens generated so far), `_seen` (prompt and output tokens, for the
    repetition penalty), `_output` (output tokens, for the other two); both only where needed.
    """

    def __init__(
        self,
        sampling: Sampling,
        stop: Stop,
        *,
        prompt: Sequence[int],
        eos_token_ids: Iterable[int],
        generated: Sequence[int] = (),
    ) -> None:
        """`generated`: tokens that this answer has already, after a resume."""
        self.sampling = sampling
        self.position = len(generated)
        self.is_greedy = sampling.temperature < GREEDY_BELOW
        self._banned_until = stop.min_tokens
        banned = set(stop.token_ids) | (set() if stop.ignore_eos else set(eos_token_ids))
        self._banned = np.array(sorted(banned), np.int64)
        self._biased = np.array(sorted(sampling.logit_bias), np.int64)
        self._bias = np.array([sampling.logit_bias[i] for i in self._biased.tolist()], np.float32)
        repeats = sampling.repetition_penalty != 1.0
        self._seen = _Counts([*prompt, *generated]) if repeats else None
        adds = sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0
        self._output = _Counts(generated) if adds else None

    def append(self, token: int) -> None:
        """Account for the token chosen at `position`."""
        self.position += 1
        if self._seen is not None:
            self._seen.add(token)
        if self._output is not None:
            self._output.add(token)

    @property
    def is_plain(self) -> bool:
        """Whether the next row's logits are used as they are."""
        return (
            self._seen is None
            and self._output is None
            and not len(self._biased)
            and self.position >= self._banned_until
        )

    def adjust(self, row: Floats) -> None:
        """Apply bias, bans and penalties to one row of logits, in place."""
        # Ids are in order; those beyond the model's vocabulary can be neither chosen nor banned.
        biased = self._biased[: np.searchsorted(self._biased, len(row))]
        row[biased] += self._bias[: len(biased)]
        if self.position < self._banned_until:
            row[self._banned[: np.searchsorted(self._banned, len(row))]] = -np.inf
        if self._seen is not None:
            values = row[self._seen.ids]
            penalty = np.float32(self.sampling.repetition_penalty)
            row[self._seen.ids] = np.where(values > 0, values / penalty, values * penalty)
        if self._output is not None:
            frequency = np.float32(self.sampling.frequency_penalty)
            presence = np.float32(self.sampling.presence_penalty)
            row[self._output.ids] -= frequency * self._output.counts + presence


def sample(logits: torch.Tensor, rows: Sequence[RowState]) -> list[int | None]:
    """Choose one token for each row of `logits` (float32 [R, V]) and append it to the row's state.

    `logits` is the caller's scratch: rows with penalties or biases are changed in place. None for a
    row whose logits are not finite where it matters (the model itself went wrong): the others must
    not suffer for it.
    """
    assert logits.dtype == torch.float32 and logits.shape[0] == len(rows)
    if logits.is_cuda and all(row.is_greedy and row.is_plain for row in rows):
        tokens: list[int | None] = torch.argmax(logits, dim=1).tolist()  # the first, as documented
    else:
        tokens = _choose_all(logits.numpy(force=True), rows)
    for row, token in zip(rows, tokens, strict=True):
        if token is not None:
            row.append(token)
    return tokens


def _choose_all(logits: Floats, rows: Sequence[RowState]) -> list[int | None]:
    for row, values in zip(rows, logits, strict=True):
        if not row.is_plain:
            row.adjust(values)
    # The first maximum; NaN counts as one. numpy, for a torch operation over a batch waits for
    # threads that a shared machine may not have: measured 9 ms for 8 rows, against 0.1.
    likeliest = logits.argmax(axis=1)
    tops = logits[np.arange(len(rows)), likeliest]
    tokens: list[int | None] = likeliest.tolist()
    for place, row in enumerate(rows):
        if not np.isfinite(tops[place]):
            tokens[place] = None
        elif not row.is_greedy:
            draw = uniform(row.sampling.seed, row.sampling.choice, row.position)
            tokens[place] = _draw(logits[place], float(tops[place]), row.sampling, draw)
    return tokens


def _draw(row: Floats, top: float, sampling: Sampling, draw: float) -> int:
    """Invert the cumulative distribution of the kept tokens at `draw`."""
    temperature, top_p, min_p = sampling.temperature, sampling.top_p, sampling.min_p
    limit = min(sampling.top_k, len(row)) if sampling.top_k > 0 else len(row)
    if limit < len(row) or min_p > 0.0:
        floor = _floor(top, temperature, min_p)
        if limit < len(row):
            floor = max(floor, _threshold(row, limit))
        ranked = _ranked(row, floor)[:limit]
        weights = _weights(ranked, top, temperature)
        sums = np.cumsum(weights[: np.count_nonzero(weights >= min_p)])
        place = _place(sums, float(sums[-1]), top_p, draw, is_whole=True)
        assert place is not None
        return _token(row, ranked, place)
    mass = float(_weights(row, top, temperature).sum())
    # Together, all tokens lighter than this weigh less than what the draw leaves over.
    tail = (1 - (top_p if top_p < 1.0 else draw)) * mass / len(row)
    for factor in TAIL_FACTORS:
        ranked = _ranked(row, _floor(top, temperature, min(1.0, factor * tail)))
        sums = np.cumsum(_weights(ranked, top, temperature))
        place = _place(sums, mass, top_p, draw, is_whole=len(ranked) == len(row))
        if place is not None:
            return _token(row, ranked, place)
    raise AssertionError("the last ranking is of all tokens")


def _floor(top: float, temperature: float, weight: float) -> np.float32:
    """Return a logit that every token of at least this weight reaches."""
    if weight <= 0.0:
        return np.float32(-np.inf)
    floor: np.float32 = np.nextafter(
        np.float32(top + temperature * math.log(weight)), np.float32(-np.inf)
    )
    return floor


def _weights(values: Floats, top: float, temperature: float) -> Doubles:
    """Probabilities over that of the likeliest token, whose logit is `top`."""
    weights: Doubles = np.exp((values.astype(np.float64) - top) / temperature)
    return weights


def _place(sums: Doubles, mass: float, top_p: float, draw: float, *, is_whole: bool) -> int | None:
    """Find the drawn token's rank, or None if the ranking so far (`sums`) does not reach it.

    `mass`: of all tokens that may be drawn, before top_p. `is_whole`: nothing follows `sums`.
    """
    last = int(np.searchsorted(sums, sums[-1]))  # the last one of any weight
    if top_p < 1.0:
        nucleus = int(np.searchsorted(sums, top_p * mass))
        if nucleus > last and not is_whole:
            return None
        last = min(nucleus, last)
        mass = float(sums[last])
        is_whole = True
    place = int(np.searchsorted(sums, draw * mass, side="right"))
    return min(place, last) if place <= last or is_whole else None


def _ranked(row: Floats, floor: np.float32) -> Floats:
    """Return all logits that reach `floor`, in descending order."""
    reaching = row[np.flatnonzero(row >= floor)]
    return -np.sort(-reaching)


def _token(row: Floats, ranked: Floats, place: int) -> int:
    """Return the id of a rank: of equal logits, the lower id comes first."""
    first = int(np.argmax(ranked == ranked[place]))
    return int(np.flatnonzero(row == ranked[place])[place - first])


def _threshold(row: Floats, size: int) -> np.float32:
    """Return a logit that at least `size` others reach, and not many more."""
    columns = _COLUMNS * size
    if len(row) >= 2 * columns:
        # The maxima of disjoint columns are so many different tokens' logits.
        height = len(row) // columns
        row = row[: height * columns].reshape(height, columns).max(axis=0)
    threshold: np.float32 = np.partition(row, len(row) - size)[len(row) - size]
    return threshold
