"""A store node's side of a get: leases and places, or bytes written into the reader's loan."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from kvass.common.errors import Invalid, KvassError
from kvass.common.pacing import Pacing
from kvass.common.rpc.server import Answer, Call, Handler
from kvass.common.wire import Message
from kvass.kvstore import messages as m
from kvass.kvstore.index.leases import Lease
from kvass.kvstore.node.state import NodeState, check_own, request_of
from kvass.kvstore.words import packed

_log = logging.getLogger(__name__)

# A write whose time is over has its agent torn down; the lease must outlast that.
WRITE_GRACE_S = 5.0


class GetCalls:
    """Owns no state but the index's, and `_pacing` (of lines about corrupt blocks)."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._pacing = Pacing()

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Return what an RPC server answers."""
        return {
            m.GetBegin: self._begin,
            m.GetWrite: self._write,
            m.GetEnd: self._end,
            m.GetRenew: self._renew,
        }

    def _named(self, request: m.GetBegin | m.GetWrite) -> dict[bytes, int]:
        """Return the indices of what is asked for by its keys."""
        first, stop = request.groups
        if not 0 <= first < stop <= request.head_groups:
            raise Invalid(f"get: head groups {first} to {stop} of {request.head_groups}")
        named = m.named(request.spans)
        if len(named) > m.BLOCKS_MAX:
            raise Invalid(f"get: {len(named)} blocks in one call; at most {m.BLOCKS_MAX}")
        return dict(zip(named.values(), named, strict=True))

    def _lease(
        self,
        call: Call,
        request: m.GetBegin | m.GetWrite,
        indices: Mapping[bytes, int],
        length_s: float | None,
    ) -> Lease | None:
        lease = self._state.index.get_begin(
            list(indices), request.block_size, request.head_groups, self._state.now_s(), length_s
        )
        self._state.notify()
        if lease is not None:
            call.later(partial(self._note_asked, lease.keys))
        return lease

    def _note_asked(self, keys: Sequence[bytes]) -> None:
        """What was asked for stays longer, here and below; nobody waits for that to be noted."""
        self._state.index.catch_up()
        self._state.on_asked(keys)

    def _places(
        self, lease: Lease, groups: tuple[int, int], indices: Mapping[bytes, int]
    ) -> m.Places:
        first, stop = groups
        checksums = [entry.header.checksums[first:stop] for entry in lease.entries]
        return m.Places(
            lease_id=lease.lease_id,
            lease_s=lease.length_s,
            indices=tuple([indices[key] for key in lease.keys]),
            addresses=packed(self._state.deliveries.addresses(lease.entries, first)),
            checksums=packed(chain.from_iterable(checksums)),
        )

    def _begin(self, call: Call) -> m.Places | Answer:
        request = request_of(call, m.GetBegin)
        indices = self._named(request)
        if self._state.may_rise(indices):
            return self._begin_risen(call, request, indices)
        return self._leased(call, request, indices)

    async def _begin_risen(
        self, call: Call, request: m.GetBegin, indices: Mapping[bytes, int]
    ) -> m.Places:
        async with self._state.risen(indices):
            return self._leased(call, request, indices)

    def _leased(self, call: Call, request: m.GetBegin, indices: Mapping[bytes, int]) -> m.Places:
        lease = self._lease(call, request, indices, None)
        return _NOTHING if lease is None else self._places(lease, request.groups, indices)

    async def _write(self, call: Call) -> m.Places:
        request = request_of(call, m.GetWrite)
        check_own(call, request.loan.card.start_id, "a loan")
        ends_s = self._state.now_s() + request.deadline_s
        indices = self._named(request)
        async with self._state.risen(indices):
            left_s = max(ends_s - self._state.now_s(), 1e-3)
            lease = self._lease(call, request, indices, left_s + WRITE_GRACE_S)
        if lease is None:
            return _NOTHING
        try:
            groups = range(*request.groups)
            await self._state.deliveries.write(lease, groups, request.loan, deadline_s=left_s)
            self._tell_moved(lease)
            return self._places(lease, request.groups, indices)
        except KvassError as error:
            self._state.faults["get_failed"] += len(lease.entries)
            _log.warning("get of %s: %s", call.peer.member_id, error)
            raise
        finally:
            self._state.index.get_end(lease.lease_id, self._state.now_s())
            self._state.notify()

    def _tell_moved(self, lease: Lease) -> None:
        """A reader has what was leased; on the same host it took it itself, in the lease's time."""
        self._state.on_moved("get", lease.size_bytes, self._state.now_s() - lease.begun_s)

    def _end(self, call: Call) -> m.Held | Answer:
        request = request_of(call, m.GetEnd)
        lease = self._state.index.leases.find(request.lease_id)
        if lease is not None:
            self._tell_moved(lease)
        held = self._state.index.get_end(request.lease_id, self._state.now_s())
        self._state.notify()
        if request.corrupt:
            return self._look_at(request.corrupt, m.Held(held=held))
        return m.Held(held=held)

    async def _look_at(self, keys: Sequence[bytes], reply: m.Held) -> m.Held:
        """A reader got other bytes than it should have: check ours, and drop them if they are
        wrong."""
        index = self._state.index
        for key in keys:
            entry = index.ledger.visible(key)
            if entry is None:
                continue
            index.ledger.lease([entry])
            try:
                right = await self._state.deliveries.is_right(entry)
            finally:
                index.ledger.unlease(entry)
            if right:
                self._state.faults["get_suspect"] += 1
            else:
                more = self._pacing.more(self._state.now_s())
                if more is not None:
                    _log.error("block %s is corrupt here; dropped%s", key.hex(), more)
                index.found_corrupt(entry, self._state.now_s())
        self._state.notify()
        return reply

    def _renew(self, call: Call) -> m.Held:
        request = request_of(call, m.GetRenew)
        held = self._state.index.get_renew(request.lease_id, self._state.now_s())
        self._state.notify()
        return m.Held(held=held)


_NOTHING = m.Places(lease_id="", lease_s=0.0, indices=(), addresses=b"", checksums=b"")
