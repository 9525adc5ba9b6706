"""Faults between requests: how one ends, and who computes beside it, changes nothing for another.

Endings are brought about by workers' own protocol, where a call's deadline, its caller's leaving,
its last token and the end of its connection can be made to meet.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import anyio
import pytest

from cluster import Cluster, cluster
from cluster_control import BLOCK, Control
from kvass.common.errors import KvassError
from kvass.common.rpc.client import Client
from kvass.common.wire import Generate, Message, Prefill, PrefillOver, Request, Sampling, Stop

R = TypeVar("R", bound=Message)

pytestmark = [pytest.mark.process, pytest.mark.model]

CALLS = 40
AT_ONCE = 4
WITHIN_MAX_S = 2.0  # after which a call is over in some way


@pytest.fixture(scope="module")
def up() -> Iterator[Cluster]:
    with cluster("--max-model-len", "2048", "--set", "gateway.prefill_tokens_min=16") as running:
        yield running


@pytest.fixture(scope="module")
def control(up: Cluster) -> Control:
    return Control(up, ("cluster.max_model_len=2048",))


@pytest.fixture(autouse=True)
def nothing_is_left(up: Cluster) -> Iterator[None]:
    yield
    up.until_idle()
    assert {each["id"] for each in up.members()} >= {"prefill-0", "decode-0", "store-0"}


# --- endings --------------------------------------------------------------------------------------


class Caller:
    """Makes calls whose ends meet, from one seed. Mutable: `ended`, how many ended how."""

    def __init__(self, seed: int, prompt: list[int], within_s: float) -> None:
        self.random = random.Random(seed)
        self.prompt = prompt
        self.within_s = within_s
        self.ended = dict.fromkeys(("answered", "refused", "left"), 0)

    def tokens(self) -> tuple[int, ...]:
        """Return a prompt that shares its first blocks with all others, or all of them."""
        shared = self.random.choice((len(self.prompt), 3 * BLOCK, 2 * BLOCK + 5))
        own = [self.random.randrange(1000, 9000) for _ in range(len(self.prompt) - shared)]
        return (*self.prompt[:shared], *own)

    async def call(self, client: Client, number: int) -> None:
        """One call to a worker; whatever ends it first, something else follows close behind."""
        chance = self.random
        leave_s, deadline_s = (chance.uniform(0.01, self.within_s) for _ in range(2))
        if client.peer.role == "prefill":
            job = Prefill(f"job-{number}", self.tokens(), hold_owner="", deadline_s=deadline_s)
            await self._follow(client, job, leave_s)
            return
        request = Generate(
            request_id=f"call-{number}",
            tokens=self.tokens(),
            prompt_length=len(self.prompt),
            sampling=Sampling(temperature=0),
            stop=Stop(max_tokens=chance.randint(1, 12), ignore_eos=True),
            deadline_s=deadline_s,
            prefill_pending=chance.random() < 0.5,
        )
        over_s = [chance.uniform(0, self.within_s) for _ in range(chance.randint(0, 2))]
        async with anyio.create_task_group() as tasks:
            for each in over_s:
                tasks.start_soon(self._tell_over, client, request.request_id, each)
            await self._follow(client, request, leave_s)

    async def _follow(self, client: Client, request: Request[R], leave_s: float) -> None:
        how = "left"
        with anyio.move_on_after(leave_s):
            try:
                async with client.stream(request, deadline_s=10) as answer:
                    async for _ in answer:
                        pass
                how = "answered"
            except KvassError:
                how = "refused"
        self.ended[how] += 1

    async def _tell_over(self, client: Client, request_id: str, after_s: float) -> None:
        await anyio.sleep(after_s)
        try:
            await client.call(PrefillOver(request_id), deadline_s=5)
        except KvassError:
            pass  # the connection has been cut


async def calls(control: Control, caller: Caller, roles: tuple[str, ...]) -> None:
    """Make all calls, a few at a time; then cut the connections under the last of them."""
    async with control._dialer() as (dialer, _):
        clients = [await dialer.client(each["address"]) for each in control.cluster.members(*roles)]
        room = anyio.CapacityLimiter(AT_ONCE)

        async def one(number: int) -> None:
            async with room:
                await caller.call(caller.random.choice(clients), number)

        async with anyio.create_task_group() as tasks:
            for number in range(CALLS):
                tasks.start_soon(one, number)
        async with anyio.create_task_group() as tasks:
            for number in range(AT_ONCE):
                tasks.start_soon(caller.call, clients[0], CALLS + number)
            await anyio.sleep(0.2)
            for each in control.cluster.members(*roles):
                await dialer.hang_up(each["address"])


@pytest.mark.fault(number=4)
@pytest.mark.parametrize("roles", [("decode",), ("prefill",)])
def test_ends_of_one_request_that_meet_release_once(
    up: Cluster, control: Control, roles: tuple[str, ...]
) -> None:
    seed = len(roles) * 100 + len(roles[0])
    prompt = control.prompt(5 * BLOCK + 3, seed=seed)
    cold = up.ask(prompt, cache_salt="cold")
    begun_s = time.monotonic()
    up.ask(prompt, cache_salt="how long one takes")
    within_s = min(AT_ONCE * (time.monotonic() - begun_s), WITHIN_MAX_S)
    caller = Caller(seed, prompt, within_s)
    anyio.run(calls, control, caller, roles)
    print(f"seed {seed}: {caller.ended}")
    assert min(caller.ended.values()) >= 1, "each way to end, or nothing has met"
    up.until_idle()
    assert up.ask(prompt).said == cold.said
    control.forget()
    assert up.ask(prompt).said == cold.said


# --- neighbours -----------------------------------------------------------------------------------


@pytest.mark.fault(number=19)
def test_a_long_neighbour_changes_no_bit_of_a_short_prompt(up: Cluster, control: Control) -> None:
    """KV that prefill and decode store, compared by its checksums: alone, and beside longer ones
    that are computed and decoded in the same steps."""
    prompt = control.prompt(5 * BLOCK, seed=2)
    alone, sums = stored_by_both(up, control, prompt)
    control.forget()
    control.drop(control.chain([*prompt, *alone]).keys)
    decoding, computing = control.prompt(300, seed=3), control.prompt(1100, seed=4)
    with ThreadPoolExecutor(2) as threads:
        begun: list[str] = []
        stream = threads.submit(up.stream, decoding, max_tokens=150, seen=begun.append)
        up.until(lambda: len(begun) > 2, "the neighbour decodes")
        other = threads.submit(up.ask, computing, max_tokens=30)
        up.until(lambda: bool(control.stored(computing)), "the other one is in prefill")
        beside, its_sums = stored_by_both(up, control, prompt)
        assert not stream.done(), "they were neighbours to the end"
        assert (beside, its_sums) == (alone, sums)
        stream.result()
        other.result()


@pytest.mark.fault(number=19)
def test_contexts_that_reach_the_end_of_a_key_tile_beside_shorter_ones(
    up: Cluster, control: Control
) -> None:
    """Attention goes by tiles of 256 keys: one context fills its first while the others do not."""
    prompts = [control.prompt(size, seed=60 + size) for size in (246, 20, 50, 100)]
    cold = [up.ask(prompt, max_tokens=14, cache_salt="cold") for prompt in prompts]
    for _ in range(2):
        with ThreadPoolExecutor(len(prompts)) as threads:
            beside = list(threads.map(lambda prompt: up.stream(prompt, max_tokens=14), prompts))
        assert [answer.said for answer in beside] == [answer.said for answer in cold]


def stored_by_both(up: Cluster, control: Control, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Let prefill compute a prompt and decode go on; return the answer and all blocks' sums."""
    up.ask(prompt, max_tokens=1)
    answer, computed = control.generate("decode-0", prompt, 2 * BLOCK + 1)
    assert not computed or computed[0][0] >= len(prompt) - BLOCK
    text = [*prompt, *answer][: len(prompt) + 2 * BLOCK]
    control.until_stored(text)
    places = control.places(text)
    return answer, [places[index].checksum for index in range(len(text) // BLOCK)]


# --- a worker that stops in between ---------------------------------------------------------------


@pytest.mark.fault(number=1)
@pytest.mark.fault(number=3)
def test_a_decode_worker_that_stops_while_it_pulls_answers_as_if_cold(
    up: Cluster, control: Control
) -> None:
    """Beyond every lease; what its blocks' slots hold meanwhile is other prompts'."""
    prompt = control.prompt(800, seed=5)
    cold = up.ask(prompt, cache_salt="cold")
    up.ask(prompt)
    control.until_stored(prompt)
    control.forget(roles=("decode",))
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(up.ask, prompt)
        up.until(lambda: up.in_use().get("store-0 leases", 0) > 0 or asking.done(), "a lease")
        up.kill("decode-0", signal.SIGSTOP)
        try:
            up.until(lambda: not up.overview()["store"][0]["leases"], "the lease has ended")
            control.drop(control.chain(prompt).keys)
        finally:
            up.kill("decode-0", signal.SIGCONT)
        assert asking.result().said == cold.said
