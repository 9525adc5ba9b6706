"""The `kvass` program: options become settings, settings become a config, a config is run.

Roles are imported when they run (`role.py`), so no command loads what it does not need.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console

from kvass.common import config as configuration
from kvass.common.config import Config
from kvass.common.errors import KvassError
from kvass.common.membership import Role
from kvass.launch.role import run_role
from kvass.launch.status import show_status
from kvass.launch.up import Counts, run_up, setting

app = typer.Typer(
    name="kvass",
    help="Serve language models with prefill and decode on separate workers and the KV cache as a "
    "shared store. Start with `kvass up`: a whole cluster on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_MODEL = "What to serve"
_MEMORY = "Memory and speed"
_PLACE = "Where"
_OTHER = "Configuration"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|DIR",
        help=f"{configuration.DEFAULT_MODEL} (fetched once), or a directory with config.json, "
        "safetensors and tokenizer files.",
        rich_help_panel=_MODEL,
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        metavar="fp8|int8|bf16",
        help="How K and V are stored. bf16 is exact and takes twice the memory of the others.",
        rich_help_panel=_MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        min=0,
        metavar="TOKENS",
        help="Longest prompt and answer together; 0: what the model was made for.",
        rich_help_panel=_MODEL,
    ),
]
PrefixReuse = Annotated[
    bool | None,
    typer.Option(
        "--prefix-reuse/--no-prefix-reuse",
        help="Whether a request may use KV that an earlier one computed (default: yes).",
        rich_help_panel=_MODEL,
    ),
]
PoolShare = Annotated[
    float | None,
    typer.Option(
        "--pool-share",
        min=0.0,
        max=0.9,
        metavar="SHARE",
        help="Share of this machine's memory for each worker's KV pool (default: 0.1).",
        rich_help_panel=_MEMORY,
    ),
]
ChunkTokens = Annotated[
    int | None,
    typer.Option(
        "--chunk-tokens",
        min=1,
        metavar="TOKENS",
        help="Most prompt tokens that one step computes: more is faster for prompts, less keeps "
        "the time between tokens short (default: 512).",
        rich_help_panel=_MEMORY,
    ),
]
SlabBytes = Annotated[
    str | None,
    typer.Option(
        "--slab-bytes",
        metavar="BYTES",
        help="Memory of each store node, such as 8GiB (default: 1GiB).",
        rich_help_panel=_MEMORY,
    ),
]
GatewayHost = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Address that the gateway's HTTP port is bound to (default: 127.0.0.1).",
        rich_help_panel=_PLACE,
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        envvar="KVASS_PORT",
        min=1,
        max=65535,
        metavar="PORT",
        help="The gateway's HTTP port (default: 8000).",
        rich_help_panel=_PLACE,
    ),
]
Broker = Annotated[
    str | None,
    typer.Option(
        "--broker",
        metavar="HOST:PORT",
        help=f"The MQTT broker of the cluster (default: {configuration.DEFAULT_BROKER}; `kvass up` "
        "runs one of its own unless this is given).",
        rich_help_panel=_PLACE,
    ),
]
MemberHost = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Address that this member's ports are bound to, and that others reach it by "
        "(default: 127.0.0.1; not 0.0.0.0, which nobody can reach). Whoever reaches them can use "
        "them: name a private network's.",
        rich_help_panel=_PLACE,
    ),
]
MemberId = Annotated[
    str | None,
    typer.Option(
        "--id",
        metavar="NAME",
        help="This member's name in the cluster (default: made of role, host and process).",
        rich_help_panel=_PLACE,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="A TOML file of settings.", rich_help_panel=_OTHER
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="a.b=VALUE",
        help="Any one setting, such as store.hold_s=30; may be repeated, and wins over the file "
        "and the other options.",
        rich_help_panel=_OTHER,
    ),
]
Supervised = Annotated[bool, typer.Option("--supervised", hidden=True)]


def _overrides(settings: list[str] | None, **options: object) -> list[str]:
    """Return `--set` texts: one for each option that was given, then those given as such.

    An option's name is the setting's, with `__` for the dot. What is given as `--set` comes last
    and wins: members of `kvass up` get everything so, and have KVASS_PORT in their environment too.
    """
    texts: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        dotted = name.replace("__", ".")
        if isinstance(value, bool):
            texts.append(f"{dotted}={str(value).lower()}")
        else:
            texts.append(setting(dotted, value) if isinstance(value, str) else f"{dotted}={value}")
    return [*texts, *(settings or ())]


def _run_member(
    role: Role, member_id: str | None, file: Path | None, overrides: list[str], supervised: bool
) -> None:
    config = configuration.load(file, overrides)
    name = member_id or f"{role}-{socket.gethostname().split('.')[0]}-{os.getpid()}"
    sys.exit(run_role(role, config, name, supervised=supervised))


@app.command()
def up(
    model: Model = None,
    kv_dtype: KvDtype = None,
    max_model_len: MaxModelLen = None,
    prefix_reuse: PrefixReuse = None,
    prefill: Annotated[int, typer.Option(min=0, metavar="N", help="Prefill workers to start.")] = 1,
    decode: Annotated[int, typer.Option(min=1, metavar="N", help="Decode workers to start.")] = 1,
    store: Annotated[int, typer.Option(min=0, metavar="N", help="Store nodes to start.")] = 1,
    pool_share: PoolShare = None,
    chunk_tokens: ChunkTokens = None,
    slab_bytes: SlabBytes = None,
    host: GatewayHost = None,
    port: Port = None,
    broker: Broker = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run a whole cluster on this machine, each member in a process of its own.

    Prints `kvass ready: URL` when a completion can be asked for; Ctrl-C stops all of it.
    """
    overrides = _overrides(
        settings,
        cluster__model=model,
        cluster__kv_dtype=kv_dtype,
        cluster__max_model_len=max_model_len,
        cluster__broker=broker,
        gateway__prefix_reuse=prefix_reuse,
        gateway__host=host,
        gateway__port=port,
        prefill__pool_share=pool_share,
        decode__pool_share=pool_share,
        prefill__chunk_tokens=chunk_tokens,
        decode__chunk_tokens=chunk_tokens,
        store__slab_bytes=slab_bytes,
    )
    loaded: Config = configuration.load(config, overrides)
    arguments = ["--config", str(config)] if config is not None else []
    for text in overrides:
        arguments += ["--set", text]
    sys.exit(anyio.run(run_up, loaded, Counts(prefill, decode, store), arguments))


@app.command()
def gateway(
    model: Model = None,
    kv_dtype: KvDtype = None,
    max_model_len: MaxModelLen = None,
    prefix_reuse: PrefixReuse = None,
    host: GatewayHost = None,
    port: Port = None,
    broker: Broker = None,
    member_id: MemberId = None,
    config: ConfigFile = None,
    settings: Settings = None,
    supervised: Supervised = False,
) -> None:
    """Run a gateway: the OpenAI-compatible HTTP API in front of the workers."""
    overrides = _overrides(
        settings,
        cluster__model=model,
        cluster__kv_dtype=kv_dtype,
        cluster__max_model_len=max_model_len,
        cluster__broker=broker,
        gateway__prefix_reuse=prefix_reuse,
        gateway__host=host,
        gateway__port=port,
    )
    _run_member("gateway", member_id, config, overrides, supervised)


@app.command()
def prefill(
    model: Model = None,
    kv_dtype: KvDtype = None,
    max_model_len: MaxModelLen = None,
    pool_share: PoolShare = None,
    chunk_tokens: ChunkTokens = None,
    host: MemberHost = None,
    broker: Broker = None,
    member_id: MemberId = None,
    config: ConfigFile = None,
    settings: Settings = None,
    supervised: Supervised = False,
) -> None:
    """Run a prefill worker: it computes prompts' KV and puts it into the store."""
    overrides = _overrides(
        settings,
        cluster__model=model,
        cluster__kv_dtype=kv_dtype,
        cluster__max_model_len=max_model_len,
        cluster__broker=broker,
        prefill__pool_share=pool_share,
        prefill__chunk_tokens=chunk_tokens,
        host=host,
    )
    _run_member("prefill", member_id, config, overrides, supervised)


@app.command()
def decode(
    model: Model = None,
    kv_dtype: KvDtype = None,
    max_model_len: MaxModelLen = None,
    pool_share: PoolShare = None,
    chunk_tokens: ChunkTokens = None,
    host: MemberHost = None,
    broker: Broker = None,
    member_id: MemberId = None,
    config: ConfigFile = None,
    settings: Settings = None,
    supervised: Supervised = False,
) -> None:
    """Run a decode worker: it takes prompts' KV from the store and generates tokens."""
    overrides = _overrides(
        settings,
        cluster__model=model,
        cluster__kv_dtype=kv_dtype,
        cluster__max_model_len=max_model_len,
        cluster__broker=broker,
        decode__pool_share=pool_share,
        decode__chunk_tokens=chunk_tokens,
        host=host,
    )
    _run_member("decode", member_id, config, overrides, supervised)


@app.command()
def store(
    slab_bytes: SlabBytes = None,
    host: MemberHost = None,
    broker: Broker = None,
    member_id: MemberId = None,
    config: ConfigFile = None,
    settings: Settings = None,
    supervised: Supervised = False,
) -> None:
    """Run a store node: memory for KV blocks of any model."""
    overrides = _overrides(
        settings, cluster__broker=broker, store__slab_bytes=slab_bytes, host=host
    )
    _run_member("store", member_id, config, overrides, supervised)


@app.command()
def status(
    url: Annotated[
        str | None,
        typer.Option(
            "--url", metavar="URL", help="The gateway to ask (default: the one on this machine)."
        ),
    ] = None,
    port: Port = None,
) -> None:
    """Show the members of a running cluster, as its gateway sees them."""
    sys.exit(show_status(url or f"127.0.0.1:{port or Config().gateway.port}", Console()))


def main() -> None:
    """Run the program; an error of ours is one line, not a trace."""
    try:
        app()
    except KvassError as error:
        print(f"kvass: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
