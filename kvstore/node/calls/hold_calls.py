"""A store node's side of holds and pins: what is kept from eviction, for whom, until when."""

from __future__ import annotations

from collections.abc import Mapping

from kvass.common.rpc.server import Call, Handler
from kvass.common.wire import Done, Message
from kvass.kvstore import messages as m
from kvass.kvstore.node.state import NodeState, ranges, request_of


class HoldCalls:
    """Owns no state but the index's."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Return what an RPC server answers."""
        return {m.ReleaseHold: self._release, m.Pin: self._pin, m.Unpin: self._unpin}

    def _release(self, call: Call) -> Done:
        request, index = request_of(call, m.ReleaseHold), self._state.index
        if request.spans:
            keys = m.named(request.spans).values()
            index.unhold(request.owner, keys, self._state.now_s())
        else:
            index.release_hold(request.owner, self._state.now_s())
        self._state.notify()
        return Done()

    def _pin(self, call: Call) -> m.Blocks:
        request = request_of(call, m.Pin)
        keys = m.named(request.spans)
        now_s = self._state.now_s()
        ends_s, wanted = now_s + request.duration_s, list(keys.values())
        pinned = self._state.index.pin(request.owner, wanted, ends_s, now_s)
        self._state.notify()
        return m.Blocks(visible=ranges(i for i, done in zip(keys, pinned, strict=True) if done))

    def _unpin(self, call: Call) -> Done:
        self._state.index.unpin(request_of(call, m.Unpin).owner, self._state.now_s())
        self._state.notify()
        return Done()
