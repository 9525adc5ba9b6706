"""A member in a process of its own: `python member_process.py BROKER ROLE ID FIELDS-JSON`.

It prints one JSON object a line: {"start_id"} once it has joined, {"refused"} if it may not, and
{"command"} for each command.
"""

from __future__ import annotations

import json
import sys

import anyio

from kvass.common import config
from kvass.common.errors import Incompatible, Unauthorized
from kvass.common.member import Member
from kvass.common.membership import Role
from kvass.common.seal import Command


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


async def obey(command: Command) -> None:
    say(command=command.verb, arguments=command.arguments)


async def run(broker: str, role: Role, member_id: str, fields: dict[str, str | int]) -> None:
    settings = config.load(None, [f"cluster.broker={broker!r}"])
    try:
        async with Member(
            settings,
            role=role,
            member_id=member_id,
            cluster_fields=fields,
            load=lambda: {"running": 1},
            on_command=obey,
        ) as member:
            await member.announce("127.0.0.1:9", details={"capacity_bytes": 1})
            say(start_id=member.hello.start_id)
            await anyio.sleep_forever()
    except Unauthorized as error:
        say(refused="secret", message=str(error))
    except Incompatible as error:
        say(refused=error.field, message=str(error))


if __name__ == "__main__":
    role: Role = sys.argv[2]  # type: ignore[assignment]
    anyio.run(run, sys.argv[1], role, sys.argv[3], json.loads(sys.argv[4]))
