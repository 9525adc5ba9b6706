"""`kvass drain`: let a store node leave without losing what it alone holds, and watch it do so.

As `kubectl drain`, it stops where going on would lose something, says what, and leaves the node as
it is: it takes nothing new, and still answers. `--force` goes on, `--cancel` puts the node back.
The drain is the node's own: this command only starts it and looks on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
from rich.console import Console

from kvass.common.config import Config
from kvass.common.errors import KvassError
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.messages import DrainHow
from kvass.launch.operator import operator
from kvass.launch.status import TIMEOUT_S, cluster_at

LOOK_S = 0.5
LOST_LOOKS = 6  # answers that may fail to come before the node counts as gone
INTERRUPTED = 130  # as shells call what Ctrl-C ended


class Drain:
    """One run of the command. Mutable fields: `is_told`, whether the node may know of it, and
    `_end`, what stops the node's process."""

    def __init__(self, member_id: str, how: DrainHow, console: Console) -> None:
        self._member_id = member_id
        self._how = how
        self._console = console
        self._end = ""
        self.is_told = False

    async def run(self, config: Config, url: str) -> int:
        """Tell the node, and wait until it has handed over what it could; return the exit code: 0
        when nothing is lost, or may be."""
        cluster = cluster_at(url, self._console)
        if cluster is None:
            return 1
        stores = [m for m in cluster["members"] if m.get("role") == "store" and m.get("address")]
        there = {each["id"]: each for each in stores}
        found = there.get(self._member_id)
        other = next((m for m in cluster["members"] if m.get("id") == self._member_id), None)
        if found is None and other is not None:
            self._say(
                f"{self._member_id} is no store node, and only those are drained. "
                f"{_end_of(other)} lets it end its work, or leave it to others.",
                "red",
            )
            return 1
        if found is None or found["state"] == "lost":
            names = ", ".join(sorted(n for n, m in there.items() if m["state"] != "lost"))
            why = "is lost, and cannot be told" if found else "is not known"
            self._say(f"{self._member_id!r} {why}; store nodes: {names or 'none'}.", "red")
            return 1
        self._end = _end_of(found)
        async with operator(config, "drain") as who:
            store = who.store([found])
            try:
                self.is_told = True
                await store.drain(self._member_id, self._how, deadline_s=TIMEOUT_S)
            except KvassError as error:
                self._say(f"{self._member_id} did not take it: {error}", "red")
                return 1
            if self._how == "cancel":
                self._say(f"{self._member_id} takes blocks again; what others took they keep.")
                return 0
            return await self._watch(store)

    def interrupted(self) -> int:
        """Say what goes on without this command; return the exit code."""
        name = self._member_id
        if not self.is_told:
            self._say(f"Interrupted before {name} was told: nothing has changed.", "yellow")
        elif self._how == "cancel":
            self._say(f"Interrupted: `kvass status --store` shows whether {name} drains.", "yellow")
        else:
            self._say(
                f"Interrupted, and {name} goes on draining by itself: it takes no new blocks, and "
                f"others take its own. `kvass drain {name}` looks on again, `kvass drain {name} "
                "--cancel` puts it back.",
                "yellow",
            )
        return INTERRUPTED

    async def _watch(self, store: StoreClient) -> int:
        """Show what is left until the node says that it is done, or held up."""
        shown: int | None = None
        lost = 0
        while lost < LOST_LOOKS:
            found = await store.stats(deadline_s=TIMEOUT_S)
            if not found:
                lost += 1
            else:
                lost = 0
                counts = {name: int(n) for name, n in found[0].items() if name != "id"}
                if counts["drained"]:
                    return self._done(counts)
                if counts["drain_held"] and self._how != "force":
                    return self._held(counts)
                if not counts["draining"]:
                    self._say(
                        f"{self._member_id} drains no more: somebody has cancelled it.", "red"
                    )
                    return 1
                if counts["handover_left"] != shown:
                    shown = counts["handover_left"]
                    self._say(f"{self._member_id}: {shown} copies are still to be taken")
            await anyio.sleep(LOOK_S)
        self._say(f"{self._member_id} answers no more, and did not say that it was done.", "red")
        return 1

    def _done(self, counts: Mapping[str, int]) -> int:
        left = counts["handover_left"]
        self._say(_tally(self._member_id, counts))
        if left:
            self._say(
                f"{self._member_id} is drained, with a loss: {left} blocks go with it, and are "
                f"computed again when somebody asks for them. It may be stopped: {self._end}. "
                f"Until then, `kvass drain {self._member_id} --cancel` puts it back.",
                "yellow",
            )
        else:
            self._say(
                f"{self._member_id} is drained: others have all. It may be stopped: {self._end}."
            )
        return 0

    def _held(self, counts: Mapping[str, int]) -> int:
        name, left, full = self._member_id, counts["handover_left"], counts["handover_refused"]
        self._say(_tally(name, counts))
        why = f"{full} of them since the others have no room" if full else "nobody took them"
        self._say(
            f"{name} is not drained: {left} blocks are nowhere else, {why}. It takes no new "
            f"blocks, and still answers. Now do one of these:\n"
            f"  add a store node: the drain goes on by itself (`kvass drain {name}` looks on)\n"
            f"  kvass drain {name} --force     leave all the same: they are computed again\n"
            f"  kvass drain {name} --cancel    let it stay",
            "yellow",
        )
        return 1

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, highlight=False, markup=False)


def _end_of(member: Mapping[str, Any]) -> str:
    """Return what ends a member, where it runs."""
    return f"`kill -TERM {member.get('pid', 'PID')}` on its host ({member.get('address', '?')})"


def _tally(member_id: str, counts: Mapping[str, int]) -> str:
    return (
        f"{member_id}: {counts['handover_handed']} blocks were handed over, "
        f"{counts['handover_elsewhere']} were elsewhere already, {counts['handover_refused']} were "
        f"refused for want of room, {counts['handover_left']} are nowhere else."
    )


def drain(config: Config, url: str, member_id: str, how: DrainHow, console: Console) -> int:
    """Run the command to its end, or to Ctrl-C; return the exit code."""
    one = Drain(member_id, how, console)
    try:
        return anyio.run(one.run, config, url)
    except KeyboardInterrupt:
        return one.interrupted()
