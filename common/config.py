"""The configuration tree: defaults, one TOML file, `--set a.b=c`, validation, fingerprint.

`cluster` holds what all members must agree on; its resolved values are exchanged on every
connection and a difference is refused with the field named. The rest is per process. Environment
variables carry secrets only (`KVASS_SALT_SECRET`, `KVASS_CLUSTER_SECRET`; and KVASS_PORT, which the
program turns into an option). Nobody writes to a config; derived values are properties.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    SecretStr,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from kvass.common.block import KvDtype
from kvass.common.errors import Invalid
from kvass.common.kernels.numerics import WeightFormat

_STRICT = ConfigDict(extra="forbid")
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_BROKER = "127.0.0.1:1883"  # where members look when none is named
WEIGHT_MIN, WEIGHT_MAX = 1e-6, 1e6  # of a tenant, beside another one's 1
SLAB_MIN = 1 << 20  # five blocks of the default model; other models' blocks are larger
THREADS_MAX = 1024  # more cores than any machine has; a typo, and torch would start them all
_BYTE_SIZE = TypeAdapter(ByteSize)
# The name of an object takes 610 bytes besides, of the 1,024 that S3 allows.
BUCKET_CHARACTERS_MAX = 300
_BUCKET = re.compile(
    rf"(?=.{{0,{BUCKET_CHARACTERS_MAX}}}$)"
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/(?!\.+(/|$))[\w.-]+)*/?",
    re.ASCII,
)


def _size(value: object) -> object:
    """Read `512MiB` and the like; what is no text is the field's own to judge."""
    return int(_BYTE_SIZE.validate_python(value)) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_size)]
# After `=` no shell expands `~`, and in a file nobody does.
File = Annotated[str, AfterValidator(os.path.expanduser)]


@dataclass(frozen=True, slots=True, config=_STRICT)
class ClusterConfig:
    """What all members must agree on."""

    name: str = "local"
    model: str = DEFAULT_MODEL  # the default's name, a directory, or a GGUF file
    served_model_name: str = ""  # empty: the default's name, or the directory's
    kv_dtype: KvDtype = "fp8"
    # What the layers' matrices and the logits' are kept as. native: as the model's file has them
    weights: WeightFormat = "native"
    block_tokens: int = 16
    head_groups: int = 1  # the largest tensor-parallel degree that is served
    max_model_len: int = 0  # tokens; 0: what the model was made for
    broker: str = ""  # host:port; empty: DEFAULT_BROKER, or `kvass up`'s own
    # What a member proves to know before it is listened to; see secret.py for where else it is
    # looked for. In a file only: a command line is everybody's to read.
    secret: SecretStr = SecretStr("")
    secret_file: File = ""
    # PEM files; all three or none. TLS on every RPC connection, each side showing its certificate,
    # which `tls_ca` must have signed: a CA that signs for nobody else, since any it signs may join.
    tls_cert: File = ""
    tls_key: File = ""
    tls_ca: File = ""


@dataclass(frozen=True, slots=True, config=_STRICT)
class TransportConfig:
    """How this process moves blocks."""

    # auto: reads of the other's memory on one host where the kernel allows it, else TCP
    kind: Literal["auto", "local", "tcp"] = "auto"
    interface: str = "lo"  # the one interface that UCX's data ports are bound to
    landing_bytes: Size = 64 << 20  # memory that peers may write into over TCP


@dataclass(frozen=True, slots=True, config=_STRICT)
class StoreConfig:
    """One store node."""

    slab_bytes: Size = 1 << 30
    port: int = 0  # of its RPC listener; 0: a free one
    standalone: bool = False  # no broker, no membership: whoever knows the address uses the node
    # A background check reads the whole slab once in this time; 0: none. In a day that is 0.8 MB/s
    # for a slab of 64 GiB, which one core hashes in a fraction of a millisecond.
    scrub_s: float = 86_400.0
    cpus: str = ""  # the cores that it may use, such as 0-7,16; empty: those that it was given
    flash_dir: File = ""  # on a local disk; nodes of one host may share it. Empty: no second tier
    flash_bytes: Size = 16 << 30
    flash_segment_bytes: Size = 64 << 20  # of each of its files
    flash_unsynced_bytes: Size = 256 << 20  # what a power cut may cost, at most
    # s3://bucket/prefix, which the cluster's store nodes share. Empty: no third tier. Where it is
    # reached and with which keys: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and so on, or a role.
    bucket: str = ""
    bucket_bytes: Size = 1 << 40  # of the whole cluster's blocks in it
    replicas: int = 1  # copies of each segment, on hosts apart where there are several
    # reuse: what is least worth its room goes first, learned from use; lru: the oldest chain
    eviction: Literal["reuse", "lru"] = "reuse"
    hold_share: float = 0.5  # of the slab that held and pinned blocks may take together
    claim_s: float = 2.0  # how long a claim lasts without progress
    hold_s: float = 60.0  # how long a committed block waits for the worker that asked for it
    quarantine_share: float = 0.125  # of the slab; at this cap a put is answered `full`
    # By tenant, of each node's slab; the tenant of public blocks, and of all while the gateway has
    # no API keys, has an empty name.
    tenant_quotas: dict[str, Size] = field(default_factory=dict)
    tenant_quota: Size = 0  # of tenants that are not named there; 0: as much as there is
    # Shares of a full slab; 1 for who is not named. Who has the most for his weight loses first.
    tenant_weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, config=_STRICT)
class WorkerConfig:
    """What prefill and decode workers share."""

    pool_share: float = 0.1  # of the host's (or container's) memory, for the paged KV pool
    pool_blocks: int = 0  # overrides pool_share when not 0
    chunk_tokens: int = 512  # most prompt tokens in one step
    batch_requests: int = 32  # most requests or jobs in flight; more wait, then get 429
    queue_requests: int = 128  # most that wait
    threads: int = 0  # that compute; 0: one a core that this process may use
    cpus: str = ""  # the cores that it may use, such as 0-7,16; empty: those that it was given


@dataclass(frozen=True, slots=True, config=_STRICT)
class PrefillConfig(WorkerConfig):
    """A prefill worker."""

    # Of its time, at most and only when idle, for computing anew what other workers have stored.
    audit_share: float = 0.01


@dataclass(frozen=True, slots=True, config=_STRICT)
class GatewayConfig:
    """The OpenAI-compatible front."""

    host: str = "127.0.0.1"
    port: int = 8000
    request_timeout_s: float = 600.0
    body_bytes_max: Size = 8 << 20
    # off: every request gets a salt of its own, so nothing that another one computed is found
    prefix_reuse: bool = True
    prefill_tokens_min: int = 64  # a missing suffix shorter than this is left to decode
    # A prompt's blocks that are on flash are brought up from its lookup on, for a pull that comes
    # within this time unless the worker has a queue; 0: from their pull on (benchmarks/stage.py).
    stage_s: float = 2.0
    # TOML: each tenant's name and its keys, or their SHA-256 (api_keys.py). Empty: no key is asked
    # for, and all requests are one tenant's.
    api_keys_file: File = ""


@dataclass(frozen=True, slots=True, config=_STRICT)
class Config:
    """The whole tree."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: WorkerConfig = field(default_factory=WorkerConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    host: str = "127.0.0.1"  # the address that RPC and metrics ports are bound to


_ADAPTER = TypeAdapter(Config)


def load(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Build a config from defaults, a TOML file, then `a.b=value` overrides; raises Invalid."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise Invalid(f"config file {path}: {error}") from None
    for override in overrides:
        _apply(tree, override)
    try:
        config = _ADAPTER.validate_python(tree)
    except ValidationError as error:
        lines = [_complaint([str(part) for part in e["loc"]], e) for e in error.errors()]
        raise Invalid("config: " + "; ".join(lines)) from None
    _validate(config)
    return config


def _apply(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if name.strip() == "cluster.secret":
        raise Invalid(
            "--set cluster.secret: every user of a machine can read its command lines; put it into "
            "KVASS_CLUSTER_SECRET, or into a file named by cluster.secret_file"
        )
    if not equals:
        raise Invalid(f"--set {override!r}: expected section.name=value")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *sections, leaf = name.strip().split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise Invalid(f"--set {override!r}: {section} is a value, not a section")
    tree[leaf] = value


def _complaint(path: Sequence[str], error: Mapping[str, Any]) -> str:
    """Say what is wrong with one setting; of one that is not known, which ones are."""
    name = ".".join(path)
    if error["type"] == "unexpected_keyword_argument":
        section: object = Config()
        for part in path[:-1]:
            section = getattr(section, part)
        assert is_dataclass(section)
        known = ", ".join(each.name for each in fields(section))
        close = [each for each in _names() if each.rpartition(".")[2] == path[-1]]
        close = close or get_close_matches(name, _names(), n=1, cutoff=0.8)
        meant = f" (did you mean {' or '.join(close)}?)" if close else ""
        return f"no setting {name}{meant}; {'.'.join(path[:-1]) or 'the top level'} has {known}"
    if error["type"] == "dict_type":
        return f"{name} is {error['input']!r}; it has a value for each name: {name}.NAME=VALUE"
    if error["type"].startswith("byte_size"):
        return f"{name} is {error['input']!r}; expected bytes, such as 1073741824 or 1GiB"
    if error["type"] == "literal_error":
        return f"{name} is {error['input']!r}; expected {error['ctx']['expected']}"
    if error["type"] in ("float_parsing", "int_parsing"):
        return f"{name} is {error['input']!r}; expected a number, without a unit"
    return f"{name}: {error['msg']}"


def _names() -> list[str]:
    """Return every setting's name, with its section's."""
    names: list[str] = []
    for each in fields(Config):
        section = getattr(Config(), each.name)
        inner = fields(section) if is_dataclass(section) else ()
        names += [f"{each.name}.{leaf.name}" for leaf in inner] or [each.name]
    return names


REPLICAS_MAX = 16  # as many as a hot segment gets
SECONDS_MAX = 31_536_000.0  # a year


def _validate(config: Config) -> None:
    """Check relations across fields; each message gives both values."""
    cluster, store = config.cluster, config.store
    if config.host in ("0.0.0.0", "::", ""):
        raise Invalid(
            f"host is {config.host!r}, which is what members announce and others connect to: name "
            "the address of one interface"
        )
    if cluster.secret.get_secret_value() and cluster.secret_file:
        raise Invalid("cluster.secret and cluster.secret_file are both set: name one of them")
    tls = {"tls_cert": cluster.tls_cert, "tls_key": cluster.tls_key, "tls_ca": cluster.tls_ca}
    if any(tls.values()) and not all(tls.values()):
        absent = ", ".join(f"cluster.{name}" for name, path in tls.items() if not path)
        raise Invalid(f"{absent} not set: TLS takes tls_cert, tls_key and tls_ca together")
    if not 1 <= cluster.block_tokens <= 256:
        raise Invalid(f"cluster.block_tokens is {cluster.block_tokens}; expected 1 to 256")
    for name, worker in (("prefill", config.prefill), ("decode", config.decode)):
        if worker.chunk_tokens < cluster.block_tokens:
            raise Invalid(
                f"{name}.chunk_tokens is {worker.chunk_tokens}, less than cluster.block_tokens "
                f"({cluster.block_tokens}): a step could never fill a block"
            )
        if not 0 < worker.pool_share <= 0.9:
            raise Invalid(f"{name}.pool_share is {worker.pool_share}; expected over 0, up to 0.9")
        if worker.batch_requests < 1 or worker.queue_requests < 0 or worker.pool_blocks < 0:
            raise Invalid(f"{name}: batch_requests must be at least 1, counts must not be negative")
        if not 0 <= worker.threads <= THREADS_MAX:
            raise Invalid(f"{name}.threads is {worker.threads}; expected 0 to {THREADS_MAX}")
    for name, share in (("hold", store.hold_share), ("quarantine", store.quarantine_share)):
        if not 0 < share < 1:
            raise Invalid(f"store.{name}_share is {share}; expected between 0 and 1")
    for name, port in (("gateway", config.gateway.port), ("store", store.port)):
        if not 0 <= port <= 65535:
            raise Invalid(f"{name}.port is {port}; expected 0 to 65535")
    _validate_tenants(store)
    _validate_bucket(store)
    _validate_standalone(config)
    if not 0 <= config.prefill.audit_share <= 1:
        raise Invalid(f"prefill.audit_share is {config.prefill.audit_share}; expected 0 to 1")
    if not 1 <= store.replicas <= REPLICAS_MAX:
        raise Invalid(f"store.replicas is {store.replicas}; expected 1 to {REPLICAS_MAX}")
    for name, seconds, least in (
        ("store.claim_s", store.claim_s, 0.05),
        ("store.hold_s", store.hold_s, 0.05),
        ("store.scrub_s", store.scrub_s, 0.0),  # 0: no scrub
        ("gateway.request_timeout_s", config.gateway.request_timeout_s, 0.05),
        ("gateway.stage_s", config.gateway.stage_s, 0.0),
    ):
        if not least <= seconds <= SECONDS_MAX:
            raise Invalid(f"{name} is {seconds}; expected {least:g} to {SECONDS_MAX:g} seconds")
    if store.slab_bytes < SLAB_MIN:
        raise Invalid(
            f"store.slab_bytes is {store.slab_bytes}; expected at least {SLAB_MIN}: it must hold "
            "blocks, which take some hundred kilobytes each"
        )
    for name, size in (
        ("store.flash_bytes", store.flash_bytes),
        ("store.flash_unsynced_bytes", store.flash_unsynced_bytes),
        ("store.bucket_bytes", store.bucket_bytes),
        ("transport.landing_bytes", config.transport.landing_bytes),
        ("gateway.body_bytes_max", config.gateway.body_bytes_max),
    ):
        if size < 1:
            raise Invalid(f"{name} is {size}; expected at least 1")


def _validate_bucket(store: StoreConfig) -> None:
    if store.bucket and _BUCKET.fullmatch(store.bucket) is None:
        raise Invalid(
            f"store.bucket is {store.bucket!r}; expected s3://bucket or s3://bucket/prefix: "
            "the bucket's name has 3 to 63 lower-case letters, digits, '.' and '-'; the prefix "
            f"letters, digits, '.', '_' and '-'; {BUCKET_CHARACTERS_MAX} characters at most in all"
        )


def _validate_standalone(config: Config) -> None:
    """Refuse what a node by itself would pass over: it joins nobody, and nobody takes copies."""
    if not config.store.standalone:
        return
    for name, value, default in (
        ("cluster.broker", config.cluster.broker, ""),
        ("store.replicas", config.store.replicas, 1),
    ):
        if value != default:
            raise Invalid(
                f"store.standalone is set, and {name} is {value!r}, which a node by itself has no "
                f"use for: leave out one of them (--set {name}={default!r})"
            )


def _validate_tenants(store: StoreConfig) -> None:
    for tenant, weight in store.tenant_weights.items():
        if not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            raise Invalid(
                f"store.tenant_weights: {tenant!r} has {weight}; expected "
                f"{WEIGHT_MIN:g} to {WEIGHT_MAX:g}"
            )
    for name, quota in {"tenant_quota": store.tenant_quota, **store.tenant_quotas}.items():
        if quota < 0:
            raise Invalid(
                f"store.tenant_quotas: {name!r} has {quota}; expected bytes, or 0 for none"
            )


# See model/identity.py: the weights' digest is known once they were read, the others by workers
# only; "namespace" depends on all others.
_SOME_KNOW = frozenset({"device_kind", "model_weights", "model_weights_key_terms", "namespace"})


def difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """Return the first field, in name order, in which two members' cluster values differ.

    The namespace comes last: it differs because another one does. What not every member knows is
    compared where both say it.
    """
    names = ours.keys() | theirs.keys()
    compared = names - (_SOME_KNOW - (ours.keys() & theirs.keys()))
    for name in sorted(compared, key=lambda name: (name == "namespace", name)):
        if ours.get(name) != theirs.get(name):
            return name
    return None
