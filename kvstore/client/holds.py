"""Giving back, while a job goes on, what it has of its held blocks.

A prompt may be longer than what all jobs together may hold on a node. Its blocks get through all
the same, since each is held only until decode has it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvass.common.keys import Chain, ranges_of
from kvass.kvstore import messages as m
from kvass.kvstore.router import Router


def unhold(router: Router, owner: str, chain: Chain, indices: Iterable[int]) -> None:
    """Let these blocks of a job be evicted again, where they were put. Nobody waits for that: what
    a node does not hear of is held until the job is over."""
    for link, own in router.plan(chain, indices, set(), writing=True).items():
        spans = tuple(m.spans_of(chain, ranges_of(own)))
        router.tell_later(link, m.ReleaseHold(owner=owner, spans=spans))
