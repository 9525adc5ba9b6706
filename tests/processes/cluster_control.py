"""Members' own protocol, for tests: bring about that blocks are gone, and ask one worker.

It knows how the default model's blocks are named, as any client of the store does.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import anyio

from cluster import Cluster
from kvass.common import config as configuration
from kvass.common.keys import Chain, Namespace, ranges_of, salt_of
from kvass.common.model.fetch import resolve_model
from kvass.common.model.identity import layout_of
from kvass.common.model.spec import load_spec
from kvass.common.model.tokenizer import Tokenizer
from kvass.common.rpc.credentials import credentials_of
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.hello import Hello
from kvass.common.wire import (
    WORKER_REPLIES,
    Forget,
    Generate,
    Message,
    Prefill,
    Range,
    Request,
    Sampling,
    Stop,
    Tags,
)
from kvass.kvstore import messages as m
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.placement import StoreNode
from kvass.kvstore.words import unpacked

R = TypeVar("R", bound=Message)

BLOCK = 16
CALL_S = 20.0
WORDS = (
    "time river stone question answer light machine garden winter theory signal paper ocean "
    "number forest music letter window history engine market silver pattern bridge moves holds "
    "under between slowly because every second another without measures carries follows small "
    "early open bright the a of and to in with from"
).split()


class Place(NamedTuple):
    """Where a block lies in a store node's memory, and the checksum that it was stored with."""

    pid: int
    address: int
    checksum: int


@dataclass(frozen=True)
class Control:
    """Calls to the members of one cluster, whose settings differ from the defaults by
    `overrides`."""

    cluster: Cluster
    overrides: tuple[str, ...] = ()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(resolve_model(configuration.DEFAULT_MODEL, progress=False))

    @cached_property
    def namespace(self) -> Namespace:
        return Namespace(bytes.fromhex(self.cluster.overview()["namespace"]))

    @cached_property
    def block_size(self) -> int:
        folder = resolve_model(configuration.DEFAULT_MODEL, progress=False)
        settings = configuration.load(None, self.overrides).cluster
        return layout_of(load_spec(folder), settings).block_size

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Return a prompt of so many tokens that shares no block with another seed's."""
        words = random.Random(seed)
        text = f"{uuid.UUID(int=words.getrandbits(128))}: "
        text += " ".join(words.choices(WORDS, k=tokens))
        return self.tokenizer.encode(text)[:tokens]

    def chain(self, tokens: Sequence[int], cache_salt: str = "") -> Chain:
        """Return a sequence's block names."""
        chain = Chain(self.namespace, BLOCK, salt=salt_of(b"", "", cache_salt))
        chain.extend(tokens)
        return chain

    def forget(self, keys: Iterable[bytes] = (), *, roles: Sequence[str] = ()) -> None:
        """Drop blocks (all, if none are named) from the workers' own pools, once nobody uses
        them."""
        self.cluster.until_idle()
        anyio.run(self._forget, tuple(keys), tuple(roles) or ("prefill", "decode"))

    def drop(self, keys: Sequence[bytes]) -> int:
        """Drop blocks from the store; return how many went."""
        return anyio.run(self._drop, keys)

    def until_stored(self, tokens: Sequence[int], cache_salt: str = "") -> None:
        """Wait until the store has all full blocks of a sequence."""
        anyio.run(self._until_stored, self.chain(tokens, cache_salt))

    def stored(self, tokens: Sequence[int]) -> list[Range]:
        """Return which blocks of a sequence the store has."""
        return anyio.run(self._stored, self.chain(tokens))

    def places(self, tokens: Sequence[int]) -> dict[int, Place]:
        """Return where the store has the blocks of a sequence, by chain index."""
        return anyio.run(self._places, self.chain(tokens))

    def prefill(
        self, member_id: str, tokens: Sequence[int], hold_owner: str = ""
    ) -> tuple[list[Range], list[Range]]:
        """Run a job on one prefill worker; return the tokens that it computed, and the blocks that
        are not in the store after it."""
        job = Prefill(uuid.uuid4().hex, tuple(tokens), hold_owner, deadline_s=CALL_S)
        last = anyio.run(self._stream, member_id, job)[-1]
        assert last.done
        return list(last.computed), list(last.missing)

    def generate(
        self, member_id: str, tokens: Sequence[int], max_tokens: int, hold_owner: str = ""
    ) -> tuple[list[int], list[Range]]:
        """Ask one decode worker, greedily; return its tokens and what it computed of the prompt."""
        request = Generate(
            request_id=uuid.uuid4().hex,
            tokens=tuple(tokens),
            prompt_length=len(tokens),
            sampling=Sampling(temperature=0),
            stop=Stop(max_tokens=max_tokens, ignore_eos=True),
            deadline_s=CALL_S,
            hold_owner=hold_owner,
        )
        deltas = anyio.run(self._stream, member_id, request)
        generated = [token for delta in deltas for token in delta.token_ids]
        return generated, [each for delta in deltas for each in delta.computed]

    @asynccontextmanager
    async def _dialer(self) -> AsyncIterator[tuple[Dialer, StoreClient]]:
        credentials = credentials_of(configuration.load(None, self.overrides).cluster)
        hello = Hello("gateway", "test", "test", uuid.uuid4().hex, os.getpid(), cluster={})
        nodes = [
            StoreNode(each["id"], each["address"], int(each["details"]["capacity_bytes"]))
            for each in self.cluster.members("store")
        ]
        async with anyio.create_task_group() as tasks:
            store = StoreClient(hello, tasks, credentials)
            store.set_nodes(nodes)
            yield Dialer(tasks, hello, Tags(WORKER_REPLIES), credentials), store
            tasks.cancel_scope.cancel()

    async def _forget(self, keys: tuple[bytes, ...], roles: tuple[str, ...]) -> None:
        async with self._dialer() as (dialer, _):
            for each in self.cluster.members(*roles):
                client = await dialer.client(each["address"])
                await client.call(Forget(keys), deadline_s=CALL_S)

    async def _drop(self, keys: Sequence[bytes]) -> int:
        async with self._dialer() as (_, store):
            return await store.drop(keys=keys)

    async def _stored(self, chain: Chain) -> list[Range]:
        async with self._dialer() as (_, store):
            return await store.lookup(chain, [(0, len(chain.keys))], deadline_s=CALL_S)

    async def _until_stored(self, chain: Chain) -> None:
        async with self._dialer() as (_, store):
            missing = set(range(len(chain.keys)))
            with anyio.fail_after(CALL_S):
                while missing:
                    there = await store.wait(
                        chain, ranges_of(sorted(missing)), until="visible", deadline_s=CALL_S
                    )
                    missing -= {i for first, stop in there.visible for i in range(first, stop)}

    async def _places(self, chain: Chain) -> dict[int, Place]:
        found: dict[int, Place] = {}
        spans = tuple(m.spans_of(chain, [(0, len(chain.keys))]))
        request = m.GetBegin(spans, self.block_size, head_groups=1, groups=(0, 1))
        async with self._dialer() as (_, store):
            for node in self.cluster.members("store"):
                link = store._router.link(node["id"])
                places = await link.call(request, deadline_s=CALL_S)
                there = zip(
                    places.indices,
                    unpacked(places.addresses, "addresses").tolist(),
                    unpacked(places.checksums, "checksums").tolist(),
                    strict=True,
                )
                found |= {i: Place(node["pid"], address, sum_) for i, address, sum_ in there}
                if places.lease_id:
                    await link.call(m.GetEnd(places.lease_id), deadline_s=CALL_S)
        return found

    async def _stream(self, member_id: str, request: Request[R]) -> list[R]:
        async with self._dialer() as (dialer, _):
            client = await dialer.client(self.cluster.member(member_id)["address"])
            async with client.stream(request, deadline_s=CALL_S) as stream:
                return [each async for each in stream]
