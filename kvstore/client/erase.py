"""Erasing all over the store, and what an operator or an auditor asks of all its nodes.

An erasure is told to every node at once, under one id, and is done when all have answered. Nodes
that are away are told by those that heard it, when they come back (`node/copies/exchange.py`). It
refuses to know why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvass.common.errors import Unavailable
from kvass.common.keys import Chain, ranges_of
from kvass.common.wire import KEYS_MAX, Request
from kvass.kvstore import messages as m
from kvass.kvstore.erasure import new_id
from kvass.kvstore.links import NodeLink
from kvass.kvstore.router import Router

ROUNDS_MAX = 512  # segments of a chain that a bar follows: 262,144 tokens


async def drop(router: Router, request: Request[m.Dropped], deadline_s: float) -> int:
    """Return how many blocks went; raises when a node could not be told, or could not erase its
    disk."""
    replies = await _told(router, request, deadline_s)
    count = sum(reply.blocks for reply in replies.values())
    _check(replies, count)
    return count


async def bar(router: Router, writer: str, deadline_s: float) -> int:
    """Let no node take anything of a writer for a while; erase what he wrote and all that was
    computed upon it, node after node. Returns how many blocks went; raises as `drop`."""
    count = 0
    after: tuple[bytes, ...] = ()
    seen: set[bytes] = set()
    unerased: dict[str, m.Dropped] = {}
    for _ in range(ROUNDS_MAX):
        request = m.Bar(writer=writer, after=after, id=new_id())
        replies = await _told(router, request, deadline_s)
        unerased |= {name: reply for name, reply in replies.items() if reply.unerased}
        count += sum(reply.blocks for reply in replies.values())
        ends = {key for reply in replies.values() for key in reply.ends} - seen
        if not ends:
            break
        seen |= ends
        after = tuple(ends)[:KEYS_MAX]
    _check(unerased, count)
    return count


def _check(replies: Mapping[str, m.Dropped], count: int) -> None:
    why = "; ".join(
        f"{name}: {reply.unerased}" for name, reply in replies.items() if reply.unerased
    )
    if why:
        raise Unavailable(
            f"{count} blocks were erased, but not those on every disk ({why}). Mend it, start the "
            "node anew and drop again, or erase its folder"
        )


async def _told(
    router: Router, request: Request[m.Dropped], deadline_s: float
) -> dict[str, m.Dropped]:
    replies, failures = await router.ask_all(request, deadline_s)
    if failures:
        raise next(iter(failures.values()))
    return replies


async def tenants(router: Router, deadline_s: float) -> list[m.TenantUse]:
    """Return what the largest tenants have, of all nodes that answer together, in order of name."""
    replies, _ = await router.ask_all(m.Stats(), deadline_s)
    total: dict[str, m.TenantUse] = {}
    for use in (use for reply in replies.values() for use in reply.tenants):
        so_far = total.get(use.tenant, m.TenantUse(use.tenant, 0, 0, 0))
        total[use.tenant] = m.TenantUse(
            use.tenant,
            so_far.size_bytes + use.size_bytes,
            so_far.blocks + use.blocks,
            so_far.quota_bytes + use.quota_bytes,
        )
    return [total[name] for name in sorted(total)]


async def writers(
    router: Router, chain: Chain, indices: Iterable[int], deadline_s: float
) -> dict[int, str]:
    """Return who wrote these blocks, those that are in the store."""
    found: dict[int, str] = {}

    async def ask(link: NodeLink, asked: list[int], left_s: float) -> set[int]:
        spans = tuple(m.spans_of(chain, ranges_of(asked)))
        reply = await link.call(m.Describe(spans=spans), deadline_s=left_s)
        said = {shape.index: shape.writer for shape in reply.shapes if shape.index in asked}
        found.update(said)
        return set(said)

    await router.everywhere(chain, set(indices), ask, deadline_s)
    return found
