"""The `kvass` program: options become settings, settings become a config, a config is run.

Roles are imported when they run (`role.py`), so no command loads what it does not need.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console

from kvass.common import config as configuration
from kvass.common.config import Config
from kvass.common.errors import Invalid, KvassError
from kvass.common.membership import Role
from kvass.common.native import library
from kvass.kvstore.messages import DrainHow
from kvass.launch.broker import serve_broker
from kvass.launch.drain import drain as drain_node
from kvass.launch.drop import chosen
from kvass.launch.drop import drop as drop_blocks
from kvass.launch.look import show_store
from kvass.launch.options import (
    AsJson,
    Broker,
    ChunkTokens,
    ConfigFile,
    GatewayHost,
    KvDtype,
    MaxModelLen,
    MemberHost,
    MemberId,
    Model,
    NodePort,
    PoolShare,
    Port,
    PrefixReuse,
    Settings,
    SlabBytes,
    Standalone,
    Url,
)
from kvass.launch.role import run_role
from kvass.launch.status import forget as forget_member
from kvass.launch.status import show_status
from kvass.launch.up import Counts, run_up, setting

app = typer.Typer(
    name="kvass",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"kvass {version('kvass')}, torch {version('torch')}, compiled {library.in_use()}")
        raise typer.Exit


@app.callback()
def kvass(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_show_version,
            help="Show the versions that answers depend on.",
        ),
    ] = False,
) -> None:
    """Serve language models with prefill and decode on separate workers and the KV cache as a
    shared store. Start with `kvass up`: a whole cluster on this machine."""


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


def _run_member(role: Role, member_id: str | None, file: Path | None, overrides: list[str]) -> None:
    config = configuration.load(file, overrides)
    name = member_id or f"{role}-{socket.gethostname().split('.')[0]}-{os.getpid()}"
    sys.exit(run_role(role, config, name))


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
    _run_member("gateway", member_id, config, overrides)


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
    _run_member("prefill", member_id, config, overrides)


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
    _run_member("decode", member_id, config, overrides)


@app.command()
def store(
    slab_bytes: SlabBytes = None,
    host: MemberHost = None,
    port: NodePort = None,
    standalone: Standalone = None,
    broker: Broker = None,
    member_id: MemberId = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run a store node: memory for KV blocks of any model, or for anybody's tensors."""
    overrides = _overrides(
        settings,
        cluster__broker=broker,
        store__slab_bytes=slab_bytes,
        store__port=port,
        store__standalone=standalone,
        host=host,
    )
    _run_member("store", member_id, config, overrides)


@app.command()
def broker(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Where to listen.")
    ] = "127.0.0.1:1883",
) -> None:
    """Run the MQTT broker of a cluster on several hosts; members name it with `--broker`."""
    anyio.run(serve_broker, address)


@app.command()
def status(
    url: Url = None,
    port: Port = None,
    store: Annotated[
        bool,
        typer.Option(
            "--store",
            help="Show whether each store node is well, and if not, what to do. Exits with 1 when "
            "one is not.",
        ),
    ] = False,
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            metavar="HOST:PORT",
            help="With --store: ask these store nodes themselves, without a gateway; may be "
            "repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Show the members of a running cluster, as its gateway sees them."""
    if node and url:
        raise Invalid("status: give --node, which asks no gateway, or --url, not both")
    loaded = configuration.load(config, _overrides(settings, gateway__port=port))
    asked = url or f"127.0.0.1:{loaded.gateway.port}"
    if store or node:
        sys.exit(show_store(asked, node or [], loaded, Console(), as_json=as_json))
    sys.exit(show_status(asked, Console(), as_json=as_json))


@app.command()
def drain(
    store_node: Annotated[str, typer.Argument(metavar="MEMBER", help="Such as store-0.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Leave also with blocks that nobody else takes: they are lost with it."
        ),
    ] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Put a node back that drains, or is drained.")
    ] = False,
    url: Url = None,
    port: Port = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Let a store node hand over what it alone holds; then it may be stopped without loss.

    Others take its blocks into free room and evict nothing for them. Where blocks would be lost,
    the node takes nothing new, still answers, and waits: for room, for --force or for --cancel.
    Exits with 0 when it may be stopped, with 1 when it may not, and with 130 after Ctrl-C, which
    the drain outlives.
    """
    if force and cancel:
        raise Invalid("drain: give --force or --cancel, not both")
    loaded = configuration.load(config, _overrides(settings, gateway__port=port))
    asked = url or f"127.0.0.1:{loaded.gateway.port}"
    how: DrainHow = "force" if force else "cancel" if cancel else "begin"
    sys.exit(drain_node(loaded, asked, store_node, how, Console()))


@app.command()
def forget(
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="Such as store-0.")],
    url: Url = None,
    port: Port = None,
) -> None:
    """Let the gateway speak no more of a member that was lost and shall not come back.

    It would forget it by itself, a quarter of an hour after it was lost.
    """
    asked = url or f"127.0.0.1:{port or Config().gateway.port}"
    sys.exit(forget_member(asked, member, Console()))


@app.command()
def drop(
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Its blocks.")] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="HEX", help="Blocks of one model and format.")
    ] = None,
    writer: Annotated[
        str | None, typer.Option(metavar="MEMBER", help="What this worker has written.")
    ] = None,
    pools: Annotated[
        bool,
        typer.Option(
            "--pools",
            help="Empty workers' pools also where no store node had anything of the name.",
        ),
    ] = False,
    url: Url = None,
    port: Port = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Erase stored blocks that match all that is given, on every node; it cannot be undone.

    Workers' pools cannot tell whose a block is: they are emptied of all that no request uses,
    unless no node had anything of the name. Exits with 0 when all is erased, and with 1 when
    nothing had the name, or when somebody could not be told.
    """
    which = chosen(tenant, namespace, writer)
    loaded = configuration.load(config, _overrides(settings, gateway__port=port))
    asked = url or f"127.0.0.1:{loaded.gateway.port}"
    erase = partial(drop_blocks, loaded, asked, which, Console(), pools=pools)
    sys.exit(anyio.run(erase))


def main() -> None:
    """Run the program; an error of ours is one line, not a trace."""
    try:
        app()
    except KvassError as error:
        print(f"kvass: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
