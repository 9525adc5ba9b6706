"""The `kvass` program, with a member's RPC port named: `python member_at.py PORT decode …`.

So a member that is started again has the address of the one before it, as it may by chance.
"""

from __future__ import annotations

import sys
from typing import Any

from kvass.common.rpc import server
from supervised import supervised_main

if __name__ == "__main__":
    port, listen = int(sys.argv.pop(1)), server.listen

    async def listen_there(host: str, _port: int = 0) -> tuple[Any, str]:
        return await listen(host, port)

    # Before any role is imported, so that all of them take this one.
    setattr(server, "listen", listen_there)  # noqa: B010
    supervised_main()
