"""Which way bytes go between two processes. Pure.

`read`: the reader copies out of its peer's memory, on one host. `write`: the holder writes into a
landing buffer over TCP. Whether the kernel really allows the first shows at `attach`.
"""

from __future__ import annotations

from typing import Literal

from kvass.common.errors import Unavailable

Way = Literal["read", "write"]
Setting = Literal["auto", "local", "tcp"]


def choose(setting: Setting, *, same_host: bool, refused: bool) -> Way:
    """Return the way to a peer. `refused`: attach was tried and failed.

    Raises Unavailable when the setting forbids the only way that is left.
    """
    if setting == "tcp":
        return "write"
    if same_host and not refused:
        return "read"
    if setting == "local":
        why = "the kernel refuses it" if same_host else "the peer is on another host"
        raise Unavailable(f"transport.kind is 'local', but {why}; set it to 'auto' or 'tcp'")
    return "write"
