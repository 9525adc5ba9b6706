"""A cluster whose members do nothing: the real `kvass up`, supervisor and roles without a model.

Run as `python fake_cluster.py up …`. What a member does wrong is in KVASS_FAKE, as `id:what`:
`refuse` (it may not start), `hang` (it does not leave), `chatter` (it floods its output).
"""

from __future__ import annotations

import os
import sys
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel

from kvass.common.config import Config
from kvass.common.errors import Unavailable
from kvass.launch import cli, member, role, up

HEALTHY = b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\nConnection: close\r\n\r\n{"degraded":[]}'


async def serve(config: Config, *, member_id: str, task_status: anyio.abc.TaskStatus[Any]) -> None:
    wrong = dict(each.split(":") for each in os.environ.get("KVASS_FAKE", "").split())
    what = wrong.get(member_id)
    print(f"here is {member_id}", flush=True)
    if what == "refuse":
        raise Unavailable("it may not start")
    async with anyio.create_task_group() as tasks:
        if member_id.startswith("gateway"):
            gateway = config.gateway
            listener = await anyio.create_tcp_listener(
                local_host=gateway.host, local_port=gateway.port
            )
            tasks.start_soon(listener.serve, _answer)
        task_status.started()
        if what == "chatter":
            while True:
                print("x" * 1000, flush=True)
                await anyio.lowlevel.checkpoint()
        with anyio.CancelScope(shield=what == "hang"):
            await anyio.sleep_forever()


async def _answer(stream: anyio.abc.SocketStream) -> None:
    async with stream:
        await stream.receive()
        await stream.send(HEALTHY)


if __name__ == "__main__":
    for name in role._MODULES:
        role._MODULES[name] = "fake_cluster"
    setattr(role, "with_model", lambda config, *, progress: config)  # noqa: B010
    setattr(up, "with_model", lambda config, *, progress: config)  # noqa: B010
    setattr(up, "require_roles", lambda config, roles: None)  # noqa: B010
    up.PROGRAM = (sys.executable, __file__)
    if sys.argv[1] != "up":
        sys.exit(member.main())
    cli.main()
