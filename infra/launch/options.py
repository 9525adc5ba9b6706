"""The options of the `kvass` program: names, help, and what they are when they are not given.

What an option means is the setting's business: `common/config.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvass.common import config as configuration

_MODEL = "What to serve"
_MEMORY = "Memory and speed"
_PLACE = "Where"
_OTHER = "Configuration"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|DIR|FILE",
        help=f"{configuration.DEFAULT_MODEL} (fetched once), or a directory with config.json, "
        "safetensors and tokenizer files, or a GGUF file.",
        rich_help_panel=_MODEL,
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        metavar="fp8|int8|int4|bf16",
        help="How K and V are stored. Beside fp8 and int8, bf16 is exact and takes twice the "
        "memory; int4 takes three fifths and loses the most.",
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
NodePort = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        metavar="PORT",
        help="The port that this node is reached at (default: 0, a free one, which it says).",
        rich_help_panel=_PLACE,
    ),
]
Standalone = Annotated[
    bool | None,
    typer.Option(
        "--standalone",
        help="Run by itself: no broker and no other members. Clients name its address. --broker "
        "and copies on other nodes (store.replicas) are refused beside it.",
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
        "(default: 127.0.0.1; not 0.0.0.0, which nobody can reach). RPC takes only "
        "who has the cluster's secret; metrics and UCX's data ports ask nobody: name a private "
        "network's.",
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
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The gateway to ask (default: the one on this machine). Where it asks for keys, "
        "KVASS_OPERATOR_KEY holds an operator's.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
