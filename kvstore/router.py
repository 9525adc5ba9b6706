"""Which nodes a call goes to: the homes of each segment, then the next in order; or all of them.

Readers look at a segment's homes in order, then further; of a segment that is hot they begin at one
of its copies, by chance. Writers and claimants go to the first home that takes anything new.

It joins placement (pure) with the links, and knows nothing of what is asked.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.abc

from kvass.common.errors import Invalid, KvassError
from kvass.common.keys import SEGMENT_BLOCKS
from kvass.common.transport.endpoints import Endpoints
from kvass.common.wire import Message, Request
from kvass.kvstore.links import CLEAN_UP_S, Dialer, NodeLink
from kvass.kvstore.messages import Named
from kvass.kvstore.placement import Placement, StoreNode

R = TypeVar("R", bound=Message)
Ask = Callable[[NodeLink, list[int]], Coroutine[Any, Any, None]]
Tried = set[tuple[bytes, str]]  # (segment key, member id)

# Beyond its copies, one node more is looked at: where one was before the last node came or went.
NODES_BEYOND = 1
HOT_S = 10.0  # how long a node's word that a segment is hot is good for; it repeats it at each read
HOT_MAX = 4096  # segments


class Router:
    """Mutable fields: `_links` by member id, `_readable` and `_writable` nodes, `_hot` (copies, and
    until when, by segment), `_chance`. Connections live in `tasks`."""

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        dialer: Dialer,
        endpoints: Endpoints | None,
        counts: Counter[str],
        now_s: Callable[[], float],
    ) -> None:
        self._tasks = tasks
        self._dialer = dialer
        self._endpoints = endpoints
        self._counts = counts
        self._now_s = now_s
        self._links: dict[str, NodeLink] = {}
        self._readable = self._writable = Placement([])
        self._hot: dict[bytes, tuple[int, float]] = {}
        self._chance = random.Random(0)  # not turns: a lookup and its pull would fall into step

    def set_nodes(self, nodes: Sequence[StoreNode]) -> None:
        """Use these nodes from now on; what is in flight to others goes on."""
        before = self._links
        self._readable = Placement(nodes)
        self._writable = Placement(node for node in nodes if not node.draining)
        self._links = {}
        for node in nodes:
            link = before.get(node.member_id)
            if link is None or link.node.address != node.address:
                link = NodeLink(node, self._dialer, self._endpoints, self._counts, self._now_s)
            link.node = node
            self._links[node.member_id] = link
        for address in {k.node.address for k in before.values()} - {n.address for n in nodes}:
            self._tasks.start_soon(self._dialer.hang_up, address)

    def link(self, member_id: str) -> NodeLink:
        """Return one node in use; raises Invalid."""
        if member_id not in self._links:
            raise Invalid(f"no store node is called {member_id!r}; in use: {sorted(self._links)}")
        return self._links[member_id]

    def links(self) -> list[NodeLink]:
        """Return the nodes in use."""
        return list(self._links.values())

    def note_hot(self, hot: Iterable[tuple[bytes, int]]) -> None:
        """A node says over how many nodes the readers of segments shall spread."""
        for segment, copies in hot:
            self._hot.pop(segment, None)
            self._hot[segment] = (copies, self._now_s() + HOT_S)
        while len(self._hot) > HOT_MAX:
            del self._hot[next(iter(self._hot))]

    def plan(
        self, chain: Named, indices: Iterable[int], tried: Tried, *, writing: bool = False
    ) -> dict[NodeLink, list[int]]:
        """Give each block to the first node of its segment's order that is usable and was not
        tried."""
        plan: dict[NodeLink, list[int]] = {}
        left, begin = sorted(indices), 0
        while begin < len(left):
            beyond = (left[begin] // SEGMENT_BLOCKS + 1) * SEGMENT_BLOCKS
            end = bisect_left(left, beyond, begin)
            part, begin = left[begin:end], end
            segment = chain.segment_key(part[0])
            link = self.first(segment, tried, writing=writing)
            if link is not None:
                plan.setdefault(link, []).extend(part)
                tried.add((segment, link.node.member_id))
        return plan

    def first(self, segment: bytes, tried: Tried, *, writing: bool = False) -> NodeLink | None:
        """Return the node to go to for a segment; None when there is none left."""
        spread = not writing and all(segment != other for other, _ in tried)
        for node in self._looked_at(segment, writing=writing, spread=spread):
            link = self._links[node.member_id]
            if link.usable and (segment, node.member_id) not in tried:
                return link
        return None

    def _looked_at(self, segment: bytes, *, writing: bool, spread: bool) -> list[StoreNode]:
        place = self._writable if writing else self._readable
        nodes = place.looked_at(segment, place.copies, NODES_BEYOND)
        if not writing and len(self._writable.nodes) < len(place.nodes):
            # In the place of one that drains another one is written to, which may be further on.
            homes = self._writable.homes(segment, place.copies)
            nodes += [node for node in homes if node not in nodes]
        copies, ends_s = self._hot.get(segment, (1, 0.0))
        if spread and copies > 1 and self._now_s() < ends_s:
            begun = self._chance.choice(place.homes(segment, copies))
            nodes = [begun, *(node for node in nodes if node is not begun)]
        return nodes

    async def everywhere(
        self,
        chain: Named,
        wanted: set[int],
        ask: Callable[[NodeLink, list[int], float], Awaitable[set[int]]],
        deadline_s: float,
        *,
        writing: bool = False,
    ) -> set[int]:
        """Ask all blocks' nodes at once, then the next ones for what was not answered.

        `ask` returns the indices that are settled; its errors are misses. Returns what is settled.
        """
        ends_s = self._now_s() + deadline_s
        settled: set[int] = set()
        tried: Tried = set()

        async def one(link: NodeLink, indices: list[int]) -> None:
            try:
                settled.update(await ask(link, indices, ends_s - self._now_s()))
            except KvassError:
                self._counts["unanswered"] += len(indices)

        for _ in range(2 * self._readable.copies + NODES_BEYOND):
            left = wanted - settled
            plan = self.plan(chain, left, tried, writing=writing) if left else {}
            if not plan or self._now_s() >= ends_s:
                break
            await _together(one, plan)
        return settled

    async def ask_all(
        self, request: Request[R], deadline_s: float
    ) -> tuple[dict[str, R], dict[str, KvassError]]:
        replies: dict[str, R] = {}
        failures: dict[str, KvassError] = {}

        async def one(link: NodeLink) -> None:
            try:
                reply = await link.call(request, deadline_s=deadline_s, limit_s=deadline_s)
                replies[link.node.member_id] = reply
            except KvassError as error:
                failures[link.node.member_id] = error

        async with anyio.create_task_group() as tasks:
            for link in self.links():
                tasks.start_soon(one, link)
        return replies, failures

    def tell_later(self, link: NodeLink, request: Request[R]) -> None:
        """Tell a node something that nobody waits for."""
        self._tasks.start_soon(link.tell, request)

    async def tell_all(self, request: Request[R]) -> None:
        """Tell every usable node; shielded and short, since this is how callers clean up."""
        with anyio.move_on_after(2 * CLEAN_UP_S, shield=True):
            async with anyio.create_task_group() as tasks:
                for link in self.links():
                    if link.usable:
                        tasks.start_soon(link.tell, request)


async def _together(one: Ask, plan: dict[NodeLink, list[int]]) -> None:
    """Ask all nodes of a plan at once; the usual single one without a task of its own."""
    if len(plan) == 1:
        await one(*next(iter(plan.items())))
        return
    async with anyio.create_task_group() as tasks:
        for link, indices in plan.items():
            tasks.start_soon(one, link, indices)
