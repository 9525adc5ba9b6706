"""How store nodes tell each other of erasures, so that one that was away does not bring back what
was erased meanwhile.

    comes, or is seen again ─> met: each tells what the other has not heard, and both erase
    none to be met ─────────> what is on its flash may be served
    copies a block from X ──> X has heard of all that this node has heard of, else none is taken
    from time to time ──────> one other node is met again, in turn

It goes both ways in one meeting, whoever begins: a newcomer may know of erasures that others have
not heard. Who heard of none has nothing to tell, so a cluster without erasures meets once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import anyio

from kvass.common.errors import Invalid, KvassError, Unavailable
from kvass.common.rpc.server import Call, Handler
from kvass.common.wire import Message
from kvass.kvstore.erasure import Exchange, Exchanged
from kvass.kvstore.links import NodeLink
from kvass.kvstore.node.calls.erase_calls import EraseCalls
from kvass.kvstore.node.state import NodeState, request_of
from kvass.kvstore.placement import StoreNode
from kvass.kvstore.router import Router

_log = logging.getLogger(__name__)

MEET_S = 10.0  # of a meeting: the other node erases on its disk before it answers
AGAIN_S = 0.5  # between two tries to meet a node that did not answer
ROUND_S = 5.0  # between two meetings with nodes that were met before
# Then one that does not answer is no reason any more to serve nothing from flash, if another has
# answered: what one knows all have heard within a few rounds.
PATIENCE_S = 15.0
AGREE_TRIES = 4  # meetings until both know the same, where drops come without a pause
OWED_S = 30.0  # between two tries to erase what a disk would not


@dataclass(slots=True)
class _Met:
    """One other node: `address` as it was, `start_id` of the process, ids that it has heard of."""

    address: str
    start_id: str
    knows: set[bytes]
    said: tuple[bytes, float | None] = (b"", None)  # what it was told is kept no more


@dataclass(slots=True, eq=False)
class Meetings:
    """Mutable fields: `_others` (addresses by id; None before the nodes are known), `_known_s`
    (since when), `_met` by id, `_turn`, `_owed_s` (the last try), `_news`, `_told` (set when what
    others know is known here)."""

    member_id: str
    state: NodeState
    router: Router
    erasing: EraseCalls
    _others: dict[str, str] | None = None
    _known_s: float = 0.0
    _met: dict[str, _Met] = field(default_factory=dict)
    _turn: int = 0
    _owed_s: float = 0.0
    _news: anyio.Event = field(default_factory=anyio.Event)
    _told: anyio.Event = field(default_factory=anyio.Event)

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Return what an RPC server answers."""
        return {Exchange: self._exchange}

    def set_nodes(self, nodes: Sequence[StoreNode]) -> None:
        """Take in the cluster's nodes; one that was not seen before is met, or met again."""
        if self._others is None:
            self._known_s = self.state.now_s()
        self._others = {n.member_id: n.address for n in nodes if n.member_id != self.member_id}
        for member_id in [each for each in self._met if each not in self._others]:
            del self._met[member_id]
        self._open()
        self._news.set()

    async def all_told(self) -> None:
        """Wait until what others know is known here."""
        await self._told.wait()

    async def agree(self, link: NodeLink) -> int:
        """Return when a node has heard of all that this one has, with the number of the last
        erasure here that this is of (`Erasures.number`); raises KvassError."""
        heard = self.erasing.heard
        for _ in range(AGREE_TRIES):
            number = self.state.index.erasures.number
            ids, said = heard.ids(), (heard.past(), heard.forgotten_at_s)
            if not ids and not said[0]:
                return number
            met = self._met.get(link.node.member_id)
            if met is not None and met.said == said and met.knows.issuperset(ids):
                if met.start_id == await link.start_id(deadline_s=MEET_S):
                    return number
            await self._meet(link)  # which may tell this one of more
        return number  # it was told of all up to there in the last meeting

    async def run(self) -> None:
        """Meet others until cancelled."""
        while True:
            wait_s = AGAIN_S if self._unmet() else ROUND_S
            with anyio.move_on_after(wait_s):
                await self._news.wait()
            self._news = anyio.Event()
            unmet = self._unmet()
            async with anyio.create_task_group() as tasks:
                for member_id in unmet or self._next():
                    tasks.start_soon(self._try, member_id)
            self._open()
            await self._look_back()

    def _unmet(self) -> list[str]:
        others = self._others or {}
        return [
            member_id
            for member_id, address in others.items()
            if member_id not in self._met or self._met[member_id].address != address
        ]

    def _next(self) -> list[str]:
        """Return whose turn it is; nobody's when there is nothing to tell."""
        others = sorted(self._others or {})
        if not others or not (len(self.erasing.heard) or self.erasing.heard.past()):
            return []
        self._turn += 1
        return [others[self._turn % len(others)]]

    async def _try(self, member_id: str) -> None:
        try:
            await self._meet(self.router.link(member_id))
        except KvassError as error:
            _log.debug("%s was not told of erasures: %s", member_id, error)

    async def _meet(self, link: NodeLink) -> None:
        heard, name = self.erasing.heard, link.node.member_id
        start_id = await link.start_id(deadline_s=MEET_S)
        met, ids = self._met.get(name), heard.ids()
        said = heard.past(), heard.forgotten_at_s
        is_first = met is None or met.start_id != start_id or met.said != said
        reply = await self._ask(link, Exchange(ids, (), is_first, *self._behind(is_first)))
        if is_first:
            await self._hear_past(reply, name)
        await self.erasing.hear(reply.erasures, name)
        if reply.wanted:
            told = heard.told(reply.wanted, self.state.now_s())
            again = await self._ask(link, Exchange(ids, told))
            if set(again.wanted).intersection(each.id for each in told):
                raise Unavailable(f"{name} has not erased what it was told to")
        heard.touch(self.state.now_s())
        knows = {*ids, *(each.id for each in reply.erasures)}
        self._met[name] = _Met(link.node.address, start_id, knows, said)

    async def _ask(self, link: NodeLink, request: Exchange) -> Exchanged:
        return await link.call(request, deadline_s=MEET_S, limit_s=MEET_S)

    async def _exchange(self, call: Call) -> Exchanged:
        if call.peer.role != "store":
            raise Invalid(f"exchange: store nodes tell each other; a {call.peer.role} asks")
        request, heard = request_of(call, Exchange), self.erasing.heard
        if request.is_first:
            await self._hear_past(request, call.peer.member_id)
        await self.erasing.hear(request.erasures, call.peer.member_id)
        wanted = heard.unknown(request.ids)
        if not wanted:
            heard.touch(self.state.now_s())
        theirs = {*request.ids, *(each.id for each in request.erasures)}
        lacking = heard.lacking(theirs, self.state.now_s())
        return Exchanged(lacking, wanted, *self._behind(request.is_first))

    async def _hear_past(self, said: Exchange | Exchanged, by: str) -> None:
        """Learn what a node cannot tell any more, and discard what that may have erased."""
        heard, now_s = self.erasing.heard, self.state.now_s()
        missed = heard.may_have_missed(said.past, said.forgotten_s, now_s)
        heard.learn(said.past, said.forgotten_s, now_s)  # at once: `agree` tells others of it
        if missed:
            await self.erasing.discard(by)

    def _behind(self, is_first: bool) -> tuple[bytes, float | None]:
        heard = self.erasing.heard
        return (heard.past(), heard.forgotten_s(self.state.now_s())) if is_first else (b"", None)

    def _open(self) -> None:
        """Let what is below be served, once nobody is left who could tell that it was erased."""
        if self._others is None or self._told.is_set():
            return
        unmet = self._unmet()
        waited_s = self.state.now_s() - self._known_s
        if unmet and (not self._met or waited_s < PATIENCE_S):
            return
        if unmet:
            _log.warning("%s did not say what was erased; others did", ", ".join(unmet))
        self.erasing.all_told()
        self._told.set()

    async def _look_back(self) -> None:
        """Try again what a disk would not erase, and write down that this node is in touch."""
        now_s = self.state.now_s()
        if self.erasing.counts()["erasures_owed"] and now_s - self._owed_s >= OWED_S:
            self._owed_s = now_s
            await self.erasing.settle()
        await self.erasing.note()
