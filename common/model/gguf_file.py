"""A GGUF file's header: its metadata, and where its tensors are. Torch-free.

Nothing in a header is believed: every count, length and offset is checked against the file before
anything is read or kept for it, so a broken or hostile file costs an error and no more. (The
`gguf` package's reader counts to whatever an array's length says; convert.py uses it for the one
file whose digest is pinned.) Tensors must lie as ggml asks, one after the other: so none is another
one's bytes. Types that nothing here multiplies by are refused by name. A header is read, not
mapped: a file that somebody cuts meanwhile would end the process.

The format: version 2 and 3, little-endian, as ggml's gguf.md says.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvass.common.errors import Invalid

MAGIC = b"GGUF"
# Inputs that share a block, and its bytes, by ggml's number of the type.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# What files hold that are otherwise fine, for the error.
_OTHER_TYPES = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS"},
    **{19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16"},
    **{26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}
_COUNT_MAX = 1 << 20  # tensors, and metadata values; models have some thousand tensors at most
_DIMENSIONS_MAX = 4  # ggml's own
_ALIGNMENT_MAX = 1 << 16
_READ_BYTES = 1 << 20  # at first; a header has some megabytes, most of them the vocabulary
_length_at = struct.Struct("<Q").unpack_from
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`size` bytes at `offset` of the file: rows of `shape`'s last dimension, block after block."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """What a header says, checked against the file's length."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read a header; raises Invalid with the file named."""
        try:
            with path.open("rb") as file:
                return _read(path, Cursor(file))
        except Bad as error:
            raise Invalid(f"{path}: not a readable GGUF file: {error}") from None
        except (Unsupported, OSError) as error:
            raise Invalid(f"{path}: {error}") from None


class Unsupported(Exception):
    """What a header asks for that is not here, in words."""


class Bad(Exception):
    """What is wrong with a header, in words."""


class Cursor:
    """Reads a header from its first byte on. Mutable fields: `at`, `data` (what is read so far)."""

    def __init__(self, file: BinaryIO) -> None:
        self.size = os.fstat(file.fileno()).st_size
        self.data = bytearray()
        self.at = 0
        self._file = file
        if not self.size:
            raise Bad("it is empty")

    def take(self, count: int) -> bytearray:
        """Return the next bytes."""
        if count > self.left:
            raise Bad(f"at byte {self.at} it says {count} more, and has {self.left}")
        self.at += count
        if self.at > len(self.data):
            self._read_on()
        return self.data[self.at - count : self.at]

    def _read_on(self) -> None:
        wanted = max(self.at, 2 * len(self.data), _READ_BYTES)
        self.data += self._file.read(min(wanted, self.size) - len(self.data))
        if len(self.data) < self.at:
            raise Bad(f"it was cut off at byte {len(self.data)} while it was read")

    @property
    def left(self) -> int:
        return self.size - self.at

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def count(self, what: str, most: int) -> int:
        """Read a count of 64 bits that must not exceed `most`."""
        found: int = self.number("Q")
        if found > most:
            raise Bad(f"{found} {what}; at most {most} can be")
        return found

    def text(self) -> str:
        start = self.at + 8
        if start > len(self.data):  # vocabularies are long: where it may be, no call for a number
            self.take(8)
            self.at = start - 8
        (size,) = _length_at(self.data, self.at)
        self.at = start
        if size > self.left:
            raise Bad(f"{size} bytes of a text; at most {self.left} can be")
        raw = self.take(size)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise Bad(f"a text before byte {self.at} is not UTF-8: {error.reason}") from None

    def value(self, kind: int) -> Any:
        """Read one metadata value; arrays hold no arrays."""
        if kind == _STRING:
            return self.text()
        if kind == _BOOL:
            return self.number("B") != 0
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise Bad(f"a metadata value of the unknown type {kind}")
        inner: int = self.number("I")
        if inner in _NUMBERS or inner == _BOOL:
            form = _NUMBERS.get(inner, "?")
            count = self.count("numbers of an array", self.left // struct.calcsize(f"<{form}"))
            raw = self.take(count * struct.calcsize(f"<{form}"))
            return list(struct.unpack(f"<{count}{form}", raw))
        if inner != _STRING:
            raise Bad(f"an array of the type {inner}")
        return [self.text() for _ in range(self.count("texts of an array", self.left // 8))]


def _read(path: Path, cursor: Cursor) -> GgufFile:
    if cursor.take(4) != MAGIC:
        raise Bad("it does not begin with GGUF")
    version = cursor.number("I")
    if version in (2 << 24, 3 << 24):
        raise Bad("it is big-endian; supported: little-endian")
    if version not in (2, 3):
        raise Bad(f"version {version}; supported: 2 and 3")
    tensor_count = cursor.count("tensors", _COUNT_MAX)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("metadata values", _COUNT_MAX)):
        name = cursor.text()
        if name in metadata:
            raise Bad(f"two metadata values have the name {name}")
        metadata[name] = cursor.value(cursor.number("I"))
    found = [_read_tensor(cursor) for _ in range(tensor_count)]
    return GgufFile(path, metadata, _placed(found, cursor, metadata.get("general.alignment", 32)))


def _placed(
    found: list[tuple[str, GgufTensor]], cursor: Cursor, alignment: object
) -> dict[str, GgufTensor]:
    """Return tensors with their offsets in the file; each must begin where ggml would put it."""
    if type(alignment) is not int or not 1 <= alignment <= _ALIGNMENT_MAX:
        raise Bad(f"general.alignment is {alignment!r}")
    if alignment & (alignment - 1):
        raise Bad(f"general.alignment is {alignment}, no power of two")
    start = cursor.at + -cursor.at % alignment
    tensors, expected = {}, 0
    for name, tensor in found:
        if tensor.offset != expected:
            raise Bad(
                f"{name} is said to begin at {tensor.offset}; the one before it ends at {expected}"
            )
        end = start + tensor.offset + tensor.size
        if end > cursor.size:
            raise Bad(f"{name} ends at byte {end}, the file at {cursor.size}: it is cut off")
        if name in tensors:
            raise Bad(f"two tensors have the name {name}")
        tensors[name] = GgufTensor(tensor.dtype, tensor.shape, start + tensor.offset, tensor.size)
        expected += tensor.size + -tensor.size % alignment
    return tensors


def _read_tensor(cursor: Cursor) -> tuple[str, GgufTensor]:
    """Read a name and an entry; its offset is from the first tensor's on."""
    name = cursor.text()
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= _DIMENSIONS_MAX:
        raise Bad(f"{name} has {dimensions} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(dimensions)]))
    number = cursor.number("I")
    if number not in TYPES:
        other = _OTHER_TYPES.get(number, f"number {number}")
        known = ", ".join(name for name, _, _ in TYPES.values())
        raise Unsupported(
            f"{name} is of the type {other}, which is not supported; supported: {known}. "
            "Quantise the original anew, llama-quantize ORIGINAL NEW Q4_K_M (or Q5_K_M, Q8_0)"
        )
    dtype, values, size = TYPES[number]
    if shape[-1] % values:
        raise Bad(f"{name} is {dtype} with rows of {shape[-1]}, no multiple of {values}")
    total = size * (shape[-1] // values)
    for length in shape[:-1]:
        total *= length
    return name, GgufTensor(dtype, shape, cursor.number("Q"), total)
