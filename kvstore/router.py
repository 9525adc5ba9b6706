"""Which nodes a call goes to: the home of each segment, then the next in order; or all of them.

It joins placement (pure) with the links, and knows nothing of what is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.abc

from kvass.common.errors import Invalid, KvassError
from kvass.common.keys import Chain
from kvass.common.transport.endpoints import Endpoints
from kvass.common.wire import Message, Request
from kvass.kvstore.links import CLEAN_UP_S, Dialer, NodeLink
from kvass.kvstore.placement import StoreNode, order

R = TypeVar("R", bound=Message)
Ask = Callable[[NodeLink, list[int]], Coroutine[Any, Any, None]]
Tried = set[tuple[bytes, str]]  # (segment key, member id)

NODES_TRIED = 2  # a segment's home and the next: where it was before the last node came or went


class Router:
    """Mutable fields: `_links` by member id, `_nodes`. Connections live in `tasks`."""

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
        self._nodes: list[StoreNode] = []

    def set_nodes(self, nodes: Sequence[StoreNode]) -> None:
        """Use these nodes from now on; what is in flight to others goes on."""
        before, self._nodes = self._links, list(nodes)
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

    def plan(self, chain: Chain, indices: Iterable[int], tried: Tried) -> dict[NodeLink, list[int]]:
        """Give each block to the first node of its segment's order that is usable and was not
        tried."""
        plan: dict[NodeLink, list[int]] = {}
        homes: dict[bytes, NodeLink | None] = {}
        for index in sorted(indices):
            segment = chain.segment_key(index)
            if segment not in homes:
                homes[segment] = self.home(segment, tried)
            link = homes[segment]
            if link is not None:
                tried.add((segment, link.node.member_id))
                plan.setdefault(link, []).append(index)
        return plan

    def home(self, segment: bytes, tried: Tried) -> NodeLink | None:
        for node in order(segment, self._nodes):
            link = self._links[node.member_id]
            if link.usable and (segment, node.member_id) not in tried:
                return link
        return None

    async def everywhere(
        self,
        chain: Chain,
        wanted: set[int],
        ask: Callable[[NodeLink, list[int], float], Awaitable[set[int]]],
        deadline_s: float,
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

        for _ in range(NODES_TRIED):
            plan = self.plan(chain, wanted - settled, tried)
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
