"""What blocks are named after, and what all members of a cluster must agree on. Torch-free.

`cluster_fields` is the readable form: exchanged on connect, a difference is refused with the field
named. The namespace is its hash, the root of every key. What changes a bit of stored KV is in both.
That includes the kind of device and K's terms, which only workers know: they add them, and with
them the namespace; others compare the rest (`config.difference`), and learn the namespace from the
workers.

No supported rope depends on the total length (spec.py refuses those that do), so `max_model_len` is
agreed on but does not enter the namespace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from kvass.common.block import BlockLayout
from kvass.common.config import ClusterConfig
from kvass.common.errors import Invalid
from kvass.common.kernels.numerics import NUMERICS, ROTATED, WEIGHTS
from kvass.common.keys import KEY_BYTES, Canonical, Namespace, namespace_of
from kvass.common.model.checkpoint import executed_as, kept_digest, weights_digest
from kvass.common.model.spec import ModelSpec

# What is computed in; `weights` says what a weight's values are, whatever the checkpoint holds.
EXECUTED_DTYPE = "bf16"


def layout_of(spec: ModelSpec, cluster: ClusterConfig) -> BlockLayout:
    """Return the layout of this model's blocks; raises Invalid if head_groups does not fit it."""
    return BlockLayout(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_tokens=cluster.block_tokens,
        kv_dtype=cluster.kv_dtype,
        head_groups=cluster.head_groups,
    )


def max_model_len(spec: ModelSpec, cluster: ClusterConfig) -> int:
    """Return the most tokens of prompt and answer together; raises Invalid beyond the model's."""
    asked, most = cluster.max_model_len, spec.max_position_embeddings
    if not 0 <= asked <= most:
        raise Invalid(
            f"cluster.max_model_len is {asked}; this model has positions for at most {most} tokens"
        )
    return asked or most


def cluster_fields(
    model_dir: Path, spec: ModelSpec, cluster: ClusterConfig
) -> dict[str, str | int]:
    """Return what all members must agree on, in words that an operator can act on."""
    fields = _identity(model_dir, spec, cluster, weights_digest(model_dir, spec))
    fields["max_model_len"] = max_model_len(spec, cluster)
    return fields


def known_fields(model_dir: Path, spec: ModelSpec, cluster: ClusterConfig) -> dict[str, str | int]:
    """Return `cluster_fields` as far as they are known before the weights are read: without the
    weights' digest, if none is kept beside them."""
    digest = kept_digest(model_dir, spec)
    fields = _identity(model_dir, spec, cluster, digest or "")
    fields["max_model_len"] = max_model_len(spec, cluster)
    if digest is None:
        del fields["model_weights"]
    return fields


def worker_fields(
    model_dir: Path,
    spec: ModelSpec,
    cluster: ClusterConfig,
    device_kind: str,
    key_terms: str = "none",
) -> dict[str, str | int]:
    """Return `cluster_fields` with what all workers must agree on, their namespace included.

    `key_terms` is the digest of what K is stored by (`model/key_terms.py`).
    """
    identity = _identity(model_dir, spec, cluster, weights_digest(model_dir, spec))
    identity |= {"device_kind": device_kind, "model_weights_key_terms": key_terms}
    namespace = namespace_of(dict[str, Canonical](identity))
    return {
        **identity,
        "max_model_len": max_model_len(spec, cluster),
        "namespace": namespace.hex(),
    }


def namespace_in(fields: Mapping[str, str | int]) -> Namespace | None:
    """Return the root of every key of the worker that says this of itself; None if it says none."""
    try:
        found = bytes.fromhex(str(fields.get("namespace", "")))
    except ValueError:
        return None
    return Namespace(found) if len(found) == KEY_BYTES else None


def _identity(
    model_dir: Path, spec: ModelSpec, cluster: ClusterConfig, weights: str
) -> dict[str, str | int]:
    """Everything that changes a bit of stored KV, each under a name of its own."""
    rotated = ROTATED[cluster.kv_dtype]
    return {
        **layout_of(spec, cluster).identity(),
        "kv_rotation": " ".join(("hadamard", *rotated)) if rotated else "none",
        "model_adapter": "none",
        "model_architecture": spec.architecture,
        "model_attention": f"{spec.heads} heads on {spec.kv_heads}, scale 1/sqrt({spec.head_dim})",
        "model_dtype": EXECUTED_DTYPE,
        "model_norm": f"rms {spec.rms_norm_eps!r}",
        "model_rope": _rope(spec),
        "model_tokenizer": _file_digest(model_dir / "tokenizer.json"),
        "model_weights": weights,
        "kernels_numerics": NUMERICS,
        "weights": WEIGHTS[executed_as(model_dir, cluster.weights)],
    }


def _rope(spec: ModelSpec) -> str:
    words = [f"theta {spec.rope_theta!r}"]
    if spec.rope_scaling is not None:
        words.append("llama3")
        words += [f"{name} {value!r}" for name, value in asdict(spec.rope_scaling).items()]
    return ", ".join(words)


def _file_digest(path: Path) -> str:
    try:
        return blake2b(path.read_bytes(), digest_size=32).hexdigest()
    except OSError as error:
        raise Invalid(f"{path}: {error}") from None
