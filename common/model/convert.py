"""Convert a GGUF file to a model directory: `python -m kvass.common.model.convert FILE DIRECTORY`.

Torch-free: tensors are dequantised with the `gguf` package, rounded to bf16 (to nearest, ties to
even) and written as one safetensors file with config.json and the tokenizer's files beside it. What
the file is made of, gguf_model.py knows.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kvass.common.errors import Invalid
from kvass.common.model.gguf_model import (
    checkpoint_name,
    config_of,
    permuted_heads,
    write_json,
)
from kvass.common.model.gguf_tokenizer import build_tokenizer, build_tokenizer_config


def convert(source: Path, directory: Path) -> None:
    """Write the model directory's files into an existing directory; raises Invalid."""
    reader = gguf.GGUFReader(source)

    def field(name: str) -> Any:
        found = reader.get_field(name)
        return None if found is None else found.contents()

    config = config_of(
        field, tied="output.weight" not in {tensor.name for tensor in reader.tensors}
    )
    build_tokenizer(field).save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", build_tokenizer_config(field))
    write_json(directory / "config.json", config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = [(checkpoint_name(tensor.name), tensor) for tensor in reader.tensors]
    shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in tensors}

    def values() -> Iterator[npt.NDArray[np.uint16]]:
        for name, tensor in tensors:
            value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if permuted := permuted_heads(name, heads, kv_heads):
                value = unpermute(value, permuted)
            yield to_bf16(value)

    write_bf16(directory / "model.safetensors", shapes, values())


def unpermute(value: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo GGUF's order of q's and k's rows, which interleaves the two halves of each head."""
    rows, columns = value.shape
    pairs = value.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def to_bf16(value: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bf16's bits, to nearest with ties to even; values must be finite."""
    if not np.isfinite(value).all():
        raise Invalid("GGUF: a tensor holds values that are not finite")
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_bf16(
    path: Path, shapes: dict[str, tuple[int, ...]], values: Iterator[npt.NDArray[np.uint16]]
) -> None:
    """Write one safetensors file, tensor by tensor, in the order of `shapes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format's alignment
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape, value in zip(shapes.values(), values, strict=True):
            assert value.size == int(np.prod(shape)), (shape, value.shape)
            file.write(value.astype("<u2", copy=False).data)


def main(arguments: list[str]) -> int:
    """Run as a process of its own, so that the caller never holds the tensors."""
    source, directory = arguments
    try:
        convert(Path(source), Path(directory))
    except (Invalid, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
