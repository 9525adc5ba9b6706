"""A model directory's weights: which tensors are where, are they all there, what is their digest.

They are safetensors files or a link to a GGUF file; tensors have a safetensors checkpoint's names.

Torch-free: it reads headers and raw bytes only. The digest names the values that the model
executes (dtype, shape and bytes of every tensor in `spec.tensor_shapes`), not files, their names or
tensors that nobody uses. It is cached beside the weights, keyed by each file's size and time of
modification.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvass.common.errors import Invalid
from kvass.common.kernels.numerics import WeightFormat
from kvass.common.model import gguf_model
from kvass.common.model.gguf_file import GgufFile
from kvass.common.model.spec import ModelSpec, read_json, tensor_shapes

FLOAT_DTYPES = ("BF16", "F16", "F32")
_HEADER_BYTES_MAX = 100 << 20  # the safetensors format's own limit
_READ_BYTES = 8 << 20
_DIGEST_FILE = ".kvass-digest.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor's bytes are: `size` bytes at `offset` of `path`.

    Of a GGUF file: `in_blocks` if they are blocks of `dtype`; and of how many heads, if of any, the
    rows are in GGUF's order (`gguf_model.permuted_heads`).
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    in_blocks: bool = False
    permuted_heads: int = 0


def open_checkpoint(model_dir: Path, spec: ModelSpec) -> dict[str, TensorEntry]:
    """Return the entries of exactly the tensors that `spec` executes; raises Invalid if one is
    missing, has another shape or no float dtype."""
    found: dict[str, TensorEntry] = {}
    if is_gguf(model_dir):
        found = _read_gguf(model_dir / gguf_model.LINK, spec)
    else:
        for path in weight_files(model_dir):
            found.update(_read_header(path))
    wanted = tensor_shapes(spec)
    for name, shape in wanted.items():
        entry = found.get(name)
        if entry is None:
            raise Invalid(f"{model_dir}: the weights lack the tensor {name}")
        if entry.shape != shape:
            raise Invalid(
                f"{entry.path}: {name} has shape {entry.shape}; config.json asks for {shape}"
            )
        if entry.dtype not in FLOAT_DTYPES and not (entry.in_blocks and len(shape) > 1):
            raise Invalid(
                f"{entry.path}: {name} is {entry.dtype}; supported: {', '.join(FLOAT_DTYPES)}"
            )
    return {name: found[name] for name in wanted}


def is_gguf(model_dir: Path) -> bool:
    """Say whether a model directory's weights are a GGUF file."""
    return (model_dir / gguf_model.LINK).is_symlink()


def executed_as(model_dir: Path, weights: WeightFormat) -> WeightFormat:
    """Return what a setting means for this model: a checkpoint has all in bf16, or makes it so."""
    return "bf16" if weights == "native" and not is_gguf(model_dir) else weights


def _read_gguf(path: Path, spec: ModelSpec) -> dict[str, TensorEntry]:
    entries = {}
    for gguf_name, tensor in GgufFile.open(path).tensors.items():
        name = gguf_model.checkpoint_name(gguf_name)
        entries[name] = TensorEntry(
            *(path, tensor.dtype, tensor.shape, tensor.offset, tensor.size),
            in_blocks=tensor.dtype not in FLOAT_DTYPES,
            permuted_heads=gguf_model.permuted_heads(name, spec.heads, spec.kv_heads),
        )
    return entries


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files that the directory's index names, or all of them."""
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [model_dir / Path(name).name for name in names]
    else:
        files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise Invalid(f"{model_dir}: no *.safetensors file")
    return files


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _HEADER_BYTES_MAX:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
        start = 8 + length
        entries = {}
        for name, item in header.items():
            if name != "__metadata__":
                low, high = item["data_offsets"]
                shape = tuple(item["shape"])
                entries[name] = TensorEntry(path, item["dtype"], shape, start + low, high - low)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise Invalid(f"{path}: not a readable safetensors file: {error}") from None
    return entries


def weights_digest(model_dir: Path, spec: ModelSpec) -> str:
    """Return the hex digest of the executed weights, cached beside them."""
    kept = kept_digest(model_dir, spec)
    if kept is not None:
        return kept
    entries = open_checkpoint(model_dir, spec)
    key, digest = _key(entries, spec), _digest(entries)
    _save(model_dir / _DIGEST_FILE, {"key": key, "digest": digest})
    return digest


def kept_digest(model_dir: Path, spec: ModelSpec) -> str | None:
    """Return what `weights_digest` does if it is cached; None if the weights have to be read."""
    key, cache = _key(open_checkpoint(model_dir, spec), spec), model_dir / _DIGEST_FILE
    cached = read_json(cache) if cache.exists() else {}
    return str(cached["digest"]) if cached.get("key") == key else None


def _key(entries: Mapping[str, TensorEntry], spec: ModelSpec) -> list[object]:
    # The same files hold other executed tensors under another spec (tied or not): key by both.
    return [spec.architecture, len(entries), *_file_key(entry.path for entry in entries.values())]


def _file_key(paths: Iterable[Path]) -> list[list[object]]:
    stats = [(path.name, path.stat()) for path in sorted(set(paths))]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _digest(entries: dict[str, TensorEntry]) -> str:
    """Digest of the tensors' digests, in name order; hashing releases the GIL, hence threads."""
    total = blake2b(digest_size=32, person=b"kvass-weights")
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        names = sorted(entries)
        for name, digest in zip(
            names, pool.map(_tensor_digest, map(entries.get, names)), strict=True
        ):
            entry = entries[name]
            order = f"\0gguf {entry.permuted_heads}" if entry.permuted_heads else ""
            total.update(f"{name}\0{entry.dtype}{order}\0{entry.shape}\0".encode() + digest)
    return total.hexdigest()


def _tensor_digest(entry: TensorEntry | None) -> bytes:
    assert entry is not None
    digest = blake2b(digest_size=32)
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        left = entry.size
        while left:
            piece = file.read(min(left, _READ_BYTES))
            if not piece:
                raise Invalid(f"{entry.path}: ends {left} bytes too early")
            digest.update(piece)
            left -= len(piece)
    return digest.digest()


def _save(path: Path, value: object) -> None:
    """Write atomically; where that is not possible the next start hashes again."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        _log.info("the weights' digest is not cached: %s", error)
