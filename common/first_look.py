"""What keeps a member out of its cluster, found before it reads its model. Torch-free.

    look   connect, hear who is there, compare, go: seen by nobody
    load   the model, which may take minutes
    join   compare again, with what the model had to be read for; announce

The look spares the minutes; what decides is said at the end. Somebody else may come meanwhile: two
that load under one id both pass here, and one of them is refused when it has loaded.

It refuses to know what is compared and how (`member.py`, `namesakes.py`).
"""

from __future__ import annotations

from pathlib import Path

import anyio
from anyio import to_thread

from kvass.common import namesakes
from kvass.common.config import ClusterConfig, Config
from kvass.common.member import Member
from kvass.common.membership import Role
from kvass.common.model.identity import known_fields
from kvass.common.model.spec import load_spec

# A broker that is not there now may be when the model is loaded: nobody waits for it twice.
BROKER_S = 2.0


async def look(config: Config, role: Role, member_id: str) -> None:
    """Raise now what joining will: Invalid for a namesake, Incompatible, Unauthorized. The model is
    a directory by now; raises Invalid for one whose facts are wrong."""
    fields = await to_thread.run_sync(_fields, config.cluster)
    member = Member(config, role=role, member_id=member_id, cluster_fields=fields, load=dict)
    async with member.linked():
        with anyio.move_on_after(BROKER_S) as waiting:
            await member.told.wait()
        if not waiting.cancelled_caught:
            await member.compare()
            await namesakes.refuse(member)


def _fields(cluster: ClusterConfig) -> dict[str, str | int]:
    model_dir = Path(cluster.model)
    return known_fields(model_dir, load_spec(model_dir), cluster)
