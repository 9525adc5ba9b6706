"""What fuzz tests share: real messages and ways to spoil them, and a peer that says anything.

The peer proves who it is, since nobody else is listened to; then it sends what a script says, good
calls and bad ones on one connection, and hears what comes back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import anyio
import anyio.abc
import anyio.lowlevel
import hypothesis
import msgpack
import trio.testing
from hypothesis import strategies as st

from kvass.common import errors, wire
from kvass.common.rpc import frames, hello
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Server
from trust import CREDENTIALS
from wires import wire_pair

# Seconds of each test: `make test` gives it some, KVASS_FUZZ_S an hour.
SECONDS = float(os.environ.get("KVASS_FUZZ_S", "7"))
ROUND_EXAMPLES = 50
ANSWERS_MAX = 4096  # heard of one script; a script asks a dozen times
TAXONOMY = {
    *("Invalid", "Overloaded", "Unavailable", "DeadlineExceeded", "TransferFailed", "Incompatible"),
    *("Unauthorized", "KvassError"),
}
STEPS_MAX = 12
RUN = 5  # calls of a `run`: attach to commit, in the order of the examples

NASTY: tuple[object, ...] = (
    *(None, True, False, 0, 1, -1, 31, 32, 33, 1 << 16, (1 << 31) - 1, 1 << 40, (1 << 53) + 1),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.0, -0.0, 1e-320, 1e308, 86_400.0),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "\x00", "t", "é" * 300, "x" * 70_000),
    *(
        b"",
        b"k" * 31,
        b"k" * 32,
        b"k" * 33,
        b"k" * 1024,
        b"x" * 70_000,
        [],
        [[]],
        {},
        {"t": "done"},
    ),
    *([0, 0], [5, 2], [-1, 4], [0, 1 << 24], [0, 1 << 63], [[0, 1 << 24]], [0] * 2000),
    *([[[[[[[[]]]]]]]], {"a": {"b": {"c": 1}}}, {str(i): i for i in range(300)}),
)


class Mutation(NamedTuple):
    """One change of one place in a message: `where` picks the place, `what` the value."""

    how: str
    where: int
    what: int


class Step(NamedTuple):
    """One thing that the peer does: a call of example `number`, spoilt; or what `verb` says."""

    verb: str
    number: int
    mutations: tuple[Mutation, ...]
    data: bytes


ANY = st.sampled_from(range(256))  # as likely the one as the other; shrinks to the first
MUTATIONS = st.builds(
    Mutation,
    st.sampled_from(("replace", "drop", "double", "nudge", "rename", "add", "borrow")),
    ANY,
    st.sampled_from(range(len(NASTY))),
)
STEPS = st.builds(
    Step,
    st.sampled_from(
        (
            *(*("call",) * 6, *("good",) * 3, *("run",) * 3),
            *("follow", "cancel", "frame", "bytes", "dial"),
        )
    ),
    ANY,
    st.one_of(st.tuples(MUTATIONS), st.lists(MUTATIONS, min_size=2, max_size=4).map(tuple)),
    st.binary(max_size=60),
)
SCRIPTS = st.lists(STEPS, min_size=1, max_size=STEPS_MAX)


def plain(message: wire.Message) -> dict[str, Any]:
    value: dict[str, Any] = wire.unpack(wire.pack(message))
    return value


def spoilt(value: Any, mutations: Sequence[Mutation], others: Sequence[Any]) -> Any:
    """Return a message's plain value with changes; `others` lend their parts."""
    for mutation in mutations:
        value = _spoil(value, mutation, others)
    return value


def _spoil(value: Any, mutation: Mutation, others: Sequence[Any]) -> Any:
    places = list(_places(value))
    how, nasty = mutation.how, deepcopy(NASTY[mutation.what])  # so that no change changes both
    if not places:
        return nasty
    container, key = places[mutation.where % len(places)]
    if how == "replace":
        container[key] = nasty
    elif how == "drop":
        del container[key]
    elif how == "double" and isinstance(container, list):
        container.insert(key, container[key])
    elif how == "nudge":
        container[key] = _nudged(container[key], mutation.what)
    elif how in ("rename", "double") and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key) if how == "rename" else container[key]
    elif how == "add" and isinstance(container, dict):
        container["more"] = nasty
    elif how == "borrow":
        lent = list(_places(others[mutation.what % len(others)]))
        if lent:
            other, other_key = lent[mutation.where % len(lent)]
            container[key] = deepcopy(other[other_key])
    return value


def _nudged(value: Any, by: int) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + (by - 8)
    if isinstance(value, bytes) and value:
        at = by % len(value)
        return value[:at] + bytes([value[at] ^ (1 << by % 8)]) + value[at + 1 :]
    if isinstance(value, str | bytes | list):
        return value * (by % 3)
    return value


def _places(value: Any) -> Any:
    """Yield every (container, key) below a value, outer ones first."""
    if not isinstance(value, dict | list):
        return
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        yield from _places(value[key])


class Peer:
    """Does what scripts say to one server; `first` is called on each connection, and `follows` is
    what follows a good request, by its tag.

    Mutable fields: `heard` (frames), `_frames`, `_next_id`.
    """

    def __init__(
        self,
        server: Server,
        who: Hello,
        tasks: anyio.abc.TaskGroup,
        first: Mapping[str, Any] | None = None,
        follows: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._first = first
        self._follows = follows or {}
        self._server = server
        self._who = who
        self._tasks = tasks
        self._next_id = 1
        self._frames: frames.Frames | None = None
        self.heard: list[tuple[int, int, object]] = []

    async def dial(self) -> frames.Frames:
        """Hang up, connect again, and prove who we are."""
        await self.hang_up()
        near, far = wire_pair(self._who.member_id, "server")
        self._tasks.start_soon(self._server.serve_connection, far)
        self._frames = frames.Frames(near)
        await hello.ask(self._frames, self._who, CREDENTIALS.secret)
        if self._first is not None:
            await self._frames.send(frames.CALL, 1, self._first)
        self._tasks.start_soon(self._hear, self._frames)
        return self._frames

    async def hang_up(self) -> None:
        if self._frames is not None:
            await self._frames.stream.aclose()
        self._frames = None

    async def say(self, step: Step, examples: Sequence[Mapping[str, Any]]) -> None:
        """Do one step; a connection that the server has ended is opened again."""
        if self._frames is None or step.verb == "dial":
            await self.dial()
        assert self._frames is not None
        example = wire.unpack(wire.pack(examples[step.number % len(examples)]))
        self._next_id += 1
        try:
            match step.verb:
                case "good":
                    await self._ask_well(example)
                case "call":
                    body = spoilt(example, step.mutations, examples)
                    await self._send(frames.CALL, self._next_id, body)
                case "follow" if self._follows:  # a good request, and what should not follow it
                    follow = sorted(self._follows)[step.number % len(self._follows)]
                    asked = next(each for each in examples if each["t"] == follow)
                    await self._frames.send(frames.CALL, self._next_id, asked)
                    body = spoilt(deepcopy(self._follows[follow]), step.mutations, examples)
                    await self._send(frames.ITEM, self._next_id, body)
                case "run":  # as a peer that is well does, one after the other
                    for number in range(RUN):
                        body = examples[(step.number + number) % len(examples)]
                        self._next_id += 1
                        await self._ask_well(body)
                        await anyio.lowlevel.checkpoint()
                case "cancel":
                    await self._frames.send(frames.CANCEL, self._next_id - 1, None)
                case "frame":
                    frame = [step.number % 10, self._next_id - step.number % 3, example]
                    await self._send_raw(msgpack.packb(spoilt(frame, step.mutations, examples)))
                case "bytes":
                    await self._frames.stream.send(step.data)
            await anyio.sleep(step.number / 100)
        except frames.LOST:
            self._frames = None

    async def _ask_well(self, request: Mapping[str, Any]) -> None:
        assert self._frames is not None
        await self._frames.send(frames.CALL, self._next_id, request)
        if request["t"] in self._follows:
            await self._frames.send(frames.ITEM, self._next_id, self._follows[request["t"]])

    async def _send(self, kind: int, call_id: int, body: object) -> None:
        try:
            packed = msgpack.packb([kind, call_id, body])
        except (OverflowError, ValueError):
            return  # no msgpack has such a number
        await self._send_raw(packed)

    async def _send_raw(self, packed: bytes) -> None:
        assert self._frames is not None
        await self._frames.stream.send(len(packed).to_bytes(4, "little") + packed)

    async def _hear(self, talk: frames.Frames) -> None:
        try:
            while True:
                self.heard.append(await talk.receive())
                assert len(self.heard) < ANSWERS_MAX
        except frames.LOST:
            if self._frames is talk:
                self._frames = None

    def check(self) -> None:
        """Assert that all that came back is of the protocol, and no error is a bug."""
        for kind, _, body in self.heard:
            assert kind in (frames.REPLY, frames.ITEM, frames.END, frames.ERROR)
            if kind == frames.ERROR:
                assert isinstance(body, dict) and body["name"] in TAXONOMY, body
                assert "met a bug" not in body["message"], body["message"]
                assert not isinstance(frames.unpack_error(body), errors.Incompatible)


def fuzz(run: Callable[[list[Step]], Awaitable[None]], seconds: float = SECONDS) -> None:
    """Run scripts, each in a loop of its own in virtual time, until the time is over; the first
    that fails is shrunk and printed."""
    ends_s = time.monotonic() + seconds
    first = time.time_ns() if "KVASS_FUZZ_S" in os.environ else 0
    seed = first
    while seed == first or time.monotonic() < ends_s:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=ROUND_EXAMPLES, database=None, deadline=None, report_multiple_bugs=False
        )
        @hypothesis.given(SCRIPTS)
        def play(script: list[Step]) -> None:
            clock = trio.testing.MockClock(autojump_threshold=0)
            anyio.run(run, script, backend="trio", backend_options={"clock": clock})

        play()
        seed += 1
    print(f"{(seed - first) * ROUND_EXAMPLES} scripts, seeds {first} to {seed - 1}")
